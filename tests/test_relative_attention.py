"""`relative_attention` against the formula as a float64 loop; blocks are of a few queries, whole and cut at both ends."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from conftest import Operations, refused
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap.functional import relative_attention as module
from hf_posswap.functional.relative_attention import relative_attention
from hf_posswap.schemes.relative import attend_by_index

HEAD_DIM = 4
# batch, heads, queries, keys, clip
SHAPES = {
    "square": (2, 2, 11, 11, 3),
    "clip 1": (1, 2, 9, 9, 1),
    "clip beyond the length": (1, 2, 6, 6, 9),
    "chunk after a cache": (2, 1, 4, 13, 2),
    "one query": (2, 2, 1, 9, 3),
    "one query, short": (2, 1, 1, 2, 5),
    "one token": (1, 1, 1, 1, 2),
}
WAYS = {
    "window": ("window", 4, 1),
    "window, all heads": ("window", 3, 99),
    "fused": ("fused", 4, 2),
    "fused, one head": ("fused", 5, 1),
}


def written_out(query, key, value, key_table, value_table, *, clip, causal, key_mask, scale, kept=None):
    """The definition, one pair of query and key at a time; rows without keys are zeros."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    tables = [None if table is None else table.expand(heads, -1, -1) for table in (key_table, value_table)]
    rows = []
    for i in range(queries):
        place = i + keys - queries
        scores, values = [], []
        for j in range(keys):
            r = min(max(j - place, -clip), clip) + clip
            allowed = torch.ones(batch, 1, dtype=torch.bool) if key_mask is None else key_mask[:, j : j + 1]
            allowed = allowed & (not causal or j <= place)
            score = scale * (query[:, :, i] * (key[:, :, j] + tables[0][:, r])).sum(-1)
            scores.append(torch.where(allowed, score, -torch.inf))
            values.append(value[:, :, j] if tables[1] is None else value[:, :, j] + tables[1][:, r])
        scores = torch.stack(scores, dim=-1)  # (B, H, K)
        dead = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.where(dead, 0.0, torch.where(dead, 0.0, scores).softmax(-1))
        if kept is not None:
            weights = weights * kept[:, :, i]
        rows.append((weights[..., None] * torch.stack(values, dim=2)).sum(2))
    return torch.stack(rows, dim=2)


def by_index(query, key, *others, clip, causal, key_mask, scale):
    """What layers compute for positions of any kind, with tensors of every query and key; rows without keys are zeros."""
    places = torch.arange(key.shape[2], device=key.device)
    distances = places - places[-query.shape[2] :, None]
    seen = (distances <= 0) | (not causal)
    seen = seen[None, None] if key_mask is None else seen & key_mask[:, None, None]
    index = (distances.clamp(-clip, clip) + clip)[None]
    return attend_by_index(query, key, *others, index, seen, scale, 0.0)[0].masked_fill(~seen.any(-1, keepdim=True), 0)


def inputs(shape, shared: bool = False, values: bool = True, dtype=torch.float64, head_dim: int = HEAD_DIM):
    batch, heads, queries, keys, clip = shape
    table = (2 * clip + 1, head_dim) if shared else (heads, 2 * clip + 1, head_dim)
    shapes = [(batch, heads, n, head_dim) for n in (queries, keys, keys)] + [table, table][: 1 + values]
    return [torch.randn(s, dtype=dtype, requires_grad=True) for s in shapes]


def padding(kind: str, batch: int, keys: int) -> torch.Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(batch, keys, dtype=torch.bool)
    third = (keys + 2) // 3
    if kind == "left":
        mask[0, :third] = False
    elif kind == "right":
        mask[-1, keys - third :] = False
    else:
        mask[0] = False
    return mask


@pytest.fixture
def cut(monkeypatch):
    plan = module._plan

    def set_plan(far: str, block: int, heads: int):
        replaced = {"far": far, "block": block, "heads": heads}
        monkeypatch.setattr(module, "_plan", lambda *arguments: dataclasses.replace(plan(*arguments), **replaced))

    return set_plan


GRID = list(itertools.product((False, True), ("none", "left", "right", "all"), ((False, True), (True, True), (False, False))))


def assert_equals_the_loop(tensors, *, kept=None, dropout=0.0, implementation="auto", **options) -> torch.Tensor:
    """Output and all gradients to 1e-12, and the output by index; without a value table there are four tensors."""
    output = relative_attention(*tensors, dropout=dropout, implementation=implementation, **options)
    given = [*tensors, None][:5]
    expected = written_out(*given, kept=kept, **options)
    if kept is None:
        assert_close(by_index(*given, **options), expected, rtol=0, atol=1e-12)
    grad = torch.randn(output.mT.shape, dtype=output.dtype).mT  # not contiguous either
    ours, theirs = ([one, *torch.autograd.grad(one, tensors, grad)] for one in (output, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=0, atol=1e-12)
    return output


ONE_QUERY = [name for name, shape in SHAPES.items() if shape[2] == 1]


@pytest.mark.parametrize(("shape", "way"), [*itertools.product(SHAPES, WAYS), *itertools.product(ONE_QUERY, ["slices"])])
def test_equals_the_loop(cut, shape, way):
    """Every shape in every way: 12 cases each, with each kind of padding and of tables once, causal or not in turn."""
    torch.manual_seed(0)
    batch, heads, queries, keys, clip = SHAPES[shape]
    if way != "slices":  # which is what "auto" does with single queries, as in generation
        cut(*WAYS[way])
    implementation = "auto" if way == "slices" else WAYS[way][0]
    turn = list(SHAPES).index(shape) + [*WAYS, "slices"].index(way)
    cases = [case for number, case in enumerate(GRID, turn) if (number + case[0]) % 2]
    assert len(cases) == 12 == len({case[1:] for case in cases})
    for causal, kind, (shared, values) in cases:
        options = {"clip": clip, "causal": causal, "key_mask": padding(kind, batch, keys), "scale": 0.7}
        assert_equals_the_loop(inputs(SHAPES[shape], shared, values), implementation=implementation, **options)


@pytest.mark.parametrize(("causal", "kind", "values"), list(itertools.product((False, True), ("none", "left"), (False, True))))
def test_dropout_equals_the_loop_with_the_same_mask(cut, causal, kind, values):
    """With dropout, output and gradients are those of the loop with the same entries dropped."""
    torch.manual_seed(0)
    keys = 12
    cut("window", 5, 2)
    tensors = inputs((2, 2, keys, keys, 3), values=values, head_dim=keys)
    options = {"clip": 3, "causal": causal, "key_mask": padding(kind, 2, keys), "scale": 0.3}
    unit = torch.eye(keys, dtype=torch.float64).expand(2, 2, -1, -1)
    torch.manual_seed(7)
    dropped = relative_attention(*tensors[:2], unit, tensors[3], dropout=0.4, **options)
    whole = relative_attention(*tensors[:2], unit, tensors[3], **options)
    kept = torch.where(whole > 0, dropped / whole, 0.0).detach()
    assert_close(kept[whole > 0].unique().round(decimals=9).unique(), torch.tensor([0.0, 1 / 0.6], dtype=torch.float64))
    torch.manual_seed(7)
    output = assert_equals_the_loop(tensors, kept=kept, dropout=0.4, **options)
    torch.manual_seed(8)
    assert not torch.equal(relative_attention(*tensors, dropout=0.4, **options), output)


@pytest.mark.parametrize(
    ("shape", "causal"), [((1, 2, 600, 600, 16), False), ((1, 2, 600, 600, 16), True), ((1, 2, 300, 1100, 64), True)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_real_blocks_in_every_dtype(dtype, shape, causal):
    """Sequences of several blocks as they are cut by default, as near to float64 as plain attention in that dtype is."""
    torch.manual_seed(0)
    batch, heads, queries, keys, clip = shape
    exact = inputs(shape, head_dim=16)
    rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in exact]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    mask = padding("left", batch, keys)
    options = {"clip": clip, "causal": causal, "key_mask": mask, "scale": 0.25}
    grad = torch.randn(batch, heads, queries, 16, dtype=torch.float64)
    grad[:, :, : max(0, keys // 3 + 1 - (keys - queries))] = 0  # of padding, as in training
    expected, ours, theirs = (
        [output.double(), *(g.double() for g in torch.autograd.grad(output, tensors, grad.to(output.dtype)))]
        for tensors, output in (
            (exact, by_index(*exact, **options)),
            (rounded, relative_attention(*rounded, **options)),
            (rounded, by_index(*rounded, **options)),
        )
    )
    for states in zip(expected, ours, theirs, strict=True):
        right, new, old = (tensor.detach() for tensor in states)
        # Float32 is at the rounding of sums. The far left's gradients are what is left of all others', so a little less exact;
        # and attention by index sums in float32.
        assert (new - right).norm() / right.norm() <= max(3e-6, 4 * float((old - right).norm() / right.norm()))


def test_long_sequences_need_no_square():
    """Forward and backward at 1,024 tokens allocate nothing of the size of L x L, with either way of cutting."""
    sizes = []
    tensors = inputs((1, 4, 1024, 1024, 64), dtype=torch.float32, head_dim=8)
    mask = padding("right", 1, 1024)
    for implementation in ("fused", "window"):
        sizes.clear()
        with Operations(lambda name, taken, made: sizes.extend(one.untyped_storage().nbytes() for one in made)):
            output = relative_attention(*tensors, clip=64, key_mask=mask, implementation=implementation)
            torch.autograd.grad(output.sum(), tensors)
        assert max(sizes) < 4 * 1024 * 1024 * 4 / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_in_half_precision(dtype):
    """Scores of a hundred are sums in float32: what rounding them to half precision would cost is many times this."""
    torch.manual_seed(0)
    tensors = [states.detach().to(dtype) for states in inputs((1, 2, 300, 300, 16), head_dim=48)]
    tensors[:3] = [4 * states for states in tensors[:3]]
    exact = relative_attention(*(states.double() for states in tensors), clip=16)
    for implementation in ("window", "fused"):
        rounded = relative_attention(*tensors, clip=16, implementation=implementation).double()
        assert (rounded - exact).norm() / exact.norm() < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"clip": 4}, r"with clip=4 tables must be \(heads, 9, head_dim\) or .* are \(2, 2, 5, 4\), .* \(2, 7, 4\)"),
        ({"value_table": torch.zeros(9, 4)}, r"tables must be .* \(9, 4\)"),
        ({"key_table": torch.zeros(3, 7, 4)}, r"tables must be \(heads, .* \(3, 7, 4\)"),
        ({"value": torch.zeros(2, 2, 6, 4)}, "values as many as keys"),
        ({"key_mask": torch.ones(1, 5).bool()}, r"a mask \(batch, keys\)"),
        ({"query": torch.zeros(2, 2, 7, 4)}, "no more than keys"),
        ({"dropout": 1.0}, r"dropout=1.0 must lie in \[0, 1\)"),
        ({"dropout": 0.1, "implementation": "fused"}, "has no dropout"),
        ({"implementation": "flash"}, "'auto', 'fused', 'window', 'triton'"),
    ],
    ids=str,
)
def test_bad_input(change, says):
    """What would be a wrong number is refused; torch itself refuses other shapes, dtypes and devices."""
    names = ("query", "key", "value", "key_table", "value_table")
    arguments = dict(zip(names, inputs((2, 2, 5, 5, 3), dtype=torch.float32), strict=True), clip=3) | change
    refused(says, relative_attention, **arguments)


def test_no_query():
    """Of no queries there is no result."""
    query, *others = inputs((2, 2, 5, 5, 3))
    assert relative_attention(query[:, :, :0], *others, clip=3).shape == (2, 2, 0, HEAD_DIM)


def test_implementation_of_a_model(make_model, make_swapped, tokens):
    """The implementation is set for all layers, changes no number and is not saved; a wrong name is refused."""
    refused("no relative positions", posswap.set_relative_implementation, make_model("bert"), "window")
    model = make_swapped("bert", posswap.Relative(clip=3), "sdpa")
    outputs = []
    for name in ("auto", "fused", "window"):
        posswap.set_relative_implementation(model, name)
        outputs.append(model(tokens)[0])
    assert_close(outputs[0], outputs[1])
    assert_close(outputs[0], outputs[2])
    assert "implementation" not in model.config.to_json_string()
    posswap.set_relative_implementation(model, "fused")
    for layer in model.bert.encoder.layer:
        layer.attention.self.dropout.p = 0.1
    refused("has no dropout", model.train(), tokens)
    refused("'auto', 'fused'", posswap.set_relative_implementation, model, "flash")


def test_sums_by_distance_are_in_float32():
    """Of bfloat16, too, forward and backward: CUDA would add in that dtype, where a CPU does not."""
    sums = []
    tensors = [tensor.detach().bfloat16().requires_grad_() for tensor in inputs((1, 2, 6, 6, 2))]
    with Operations(lambda name, taken, made: sums.extend(one.dtype for one in taken[:1] if "scatter_add" in name)):
        by_index(*tensors, clip=2, causal=True, key_mask=None, scale=0.5).sum().backward()
    assert sums == 2 * [torch.float32]


def test_what_auto_takes_on_a_gpu(monkeypatch):
    """The kernel, where it runs, without dropout, unless its table of scores by distance would be too large."""
    from hf_posswap.functional import relative_triton
    from hf_posswap.functional.relative_attention import _takes_kernel

    on_gpu = SimpleNamespace(shape=(1, 12, 8192, 64), device=torch.device("cuda"))
    reasons = {64: None}
    monkeypatch.setattr(relative_triton, "why_not", lambda query: reasons.get(query.shape[-1], "head_dim"))
    assert _takes_kernel(on_gpu, 64, 0.0)
    assert not _takes_kernel(on_gpu, 64, 0.1) and not _takes_kernel(on_gpu, 4096, 0.0)
    assert not _takes_kernel(SimpleNamespace(**vars(on_gpu) | {"shape": (1, 12, 8192, 300)}), 64, 0.0)
    assert not _takes_kernel(SimpleNamespace(**vars(on_gpu) | {"device": torch.device("cpu")}), 64, 0.0)


def test_strides_of_all_kinds(cut):
    """Queries, keys and values may lie in memory in any way; the fused kernel takes for granted that the last stride is 1."""
    torch.manual_seed(0)
    cut("fused", 4, 2)
    query, key, value, *tables = (states.detach() for states in inputs((1, 2, 12, 12, 2)))
    laid = query.mT.contiguous().mT, key.repeat_interleave(2, dim=-1)[..., ::2], value[..., :1].expand(-1, -1, -1, HEAD_DIM)
    tensors = [states.requires_grad_() for states in (*laid, *tables)]
    assert_equals_the_loop(tensors, implementation="fused", clip=2, causal=False, key_mask=None, scale=0.5)


def test_dropout_does_not_depend_on_threads():
    """A seed says what is dropped, however many threads there are."""
    tensors = inputs((1, 12, 512, 512, 3), dtype=torch.float32)
    outputs = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        outputs.append(relative_attention(*tensors, clip=3, dropout=0.1))
    torch.set_num_threads(1)
    assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("implementation", ["fused", "window"])
def test_float16_scores_are_scaled_first(implementation):
    """Float16 scores are scaled before they are summed, so large ones stay finite."""
    torch.manual_seed(0)
    tensors = [(40 + torch.randn(1, 1, 40, 64)).half().requires_grad_() for _ in range(2)]
    value, table = torch.randn(1, 1, 40, 64).half(), torch.zeros(7, 64).half()
    output = relative_attention(*tensors, value, table, clip=3, implementation=implementation)
    assert output.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.sum(), tensors))
