"""The fused kernel against Shaw et al. 2018 by index in float64, in Triton's interpreter; and that it compiles.

The interpreter must be chosen before triton is imported, which some other test of this process may have done: the checks
run in a process of their own, started by `test_in_the_interpreter`. To run some, on a GPU without the variable:

    TRITON_INTERPRET=1 pytest -n 0 -o python_functions="check_*" tests/test_relative_triton.py -k padded
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import run_checks
from test_relative_attention import by_index, inputs

from hf_posswap.errors import PosswapError

DEVICE = "cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not to be had here")


def load(monkeypatch, interpret: bool):
    """A copy of the module that decides again whether triton is there, and interpreted."""
    monkeypatch.setenv("TRITON_INTERPRET", str(int(interpret)))
    spec = importlib.util.find_spec("hf_posswap.functional.relative_triton")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_triton
def test_in_the_interpreter():
    """Run every check below in a process with Triton's interpreter; all pass, none is skipped."""
    said = run_checks(Path(__file__), TRITON_INTERPRET="1")
    counts = {outcome: int(count) for count, outcome in re.findall(r"(\d+) (passed|skipped)", said)}
    assert counts == {"passed": len(SITUATIONS) + 3}  # the interpreter has one low precision


def test_without_triton(monkeypatch):
    """The module can be imported, and says what is missing."""
    monkeypatch.setitem(sys.modules, "triton", None)
    assert load(monkeypatch, interpret=False).why_not(torch.zeros(4)) == "triton is not installed"


@needs_triton
def test_without_gpu(monkeypatch):
    """Compiled kernels do not run on the CPU."""
    assert "CUDA" in load(monkeypatch, interpret=False).why_not(torch.zeros(4))


@needs_triton
@pytest.mark.parametrize(
    "kernel, dtype, head_dim, causal, absent",
    [
        ("_forward", "bf16", 64, False, ()),
        ("_forward", "fp32", 16, True, ("key_mask", "masses")),
        ("_backward_queries", "fp32", 64, True, ()),
        ("_backward_keys", "bf16", 16, False, ("key_mask",)),
    ],
)
def test_compiles(kernel, dtype, head_dim, causal, absent, monkeypatch, tmp_path):
    """The compiler for CUDA, which needs no GPU, accepts what the interpreter runs, and it fits any GPU's shared memory."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module = load(monkeypatch, interpret=False)
    query = torch.empty(1, 1, 1, head_dim, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    constants = module._constants(query) | {"CAUSAL": causal} | dict.fromkeys(absent)
    options = {name: constants.pop(name) for name in ("num_warps", "enable_fp_fusion")}
    kernel = getattr(module, kernel)
    types = {"query_length": "i32", "key_length": "i32", "clip": "i32", "scale": "fp32", "key_mask": "*i1"}
    types |= {"log_sums": "*fp32", "deltas": "*fp32"} | dict.fromkeys(constants, "constexpr")
    signature = {name: types.get(name, f"*{dtype}") for name in kernel.arg_names}
    compiled = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 80, 32), options=options)
    assert 0 < compiled.metadata.shared <= 99 * 1024


# Tiles are small, so that short sequences have some on every side of the band; None are those that _tiles chooses.
DEFAULTS = dict(batch=1, heads=1, head_dim=16, clip=5, values=True, share_heads=False, mask=None, tiles=(32, 16), causal=False)
SITUATIONS = {
    "batch and heads, clip 1": dict(length=20, key_length=20, batch=2, heads=2, clip=1, tiles=(16, 16)),
    "causal": dict(length=50, key_length=50, causal=True),
    "keys alone": dict(length=50, key_length=50, values=False),
    "causal, keys alone, shared tables": dict(length=40, key_length=40, values=False, share_heads=True, causal=True),
    "shared tables": dict(length=40, key_length=40, heads=2, share_heads=True, tiles=(16, 32)),
    "padded": dict(length=20, key_length=20, batch=3, clip=1, mask=[(0, 17), (9, 20), (0, 20)], tiles=(16, 16)),
    "causal, padded, fewer queries": dict(length=21, key_length=60, batch=2, mask=[(0, 46), (33, 60)], causal=True),
    "one query": dict(length=1, key_length=40, clip=3, causal=True),
    "causal, clip over the length": dict(length=18, key_length=20, clip=40, causal=True),
    "head_dim 20": dict(length=45, key_length=45, head_dim=20),
    "shipped tiles": dict(length=66, key_length=72, head_dim=64, tiles=None, causal=True),
}
NAMES = ("query", "key", "value", "key_table", "value_table")
LOW_PRECISION = [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")  # `why_not` says why


def compare(module, monkeypatch, dtype, situation):
    """Yield name, our error, the error by index in `dtype`: each relative to the largest number of the truth."""
    case = DEFAULTS | situation
    if case["tiles"]:
        monkeypatch.setattr(module, "_tiles", lambda block_d, dtype: (*case["tiles"], 4))
    torch.manual_seed(0)
    shape = [case[size] for size in ("batch", "heads", "length", "key_length", "clip")]
    drawn = inputs(shape, case["share_heads"], case["values"], head_dim=case["head_dim"])
    start = {name: x.detach().to(DEVICE, dtype) for name, x in zip(NAMES, drawn, strict=False)}
    gradient = torch.randn(start["query"].shape).to(DEVICE, dtype)
    key_mask = None
    if case["mask"]:
        key_mask = torch.ones(case["batch"], case["key_length"], dtype=torch.bool, device=DEVICE)
        for row, (first, last) in zip(key_mask, case["mask"], strict=True):
            row[first:last] = False
    settings = dict(clip=case["clip"], causal=case["causal"], key_mask=key_mask, scale=0.7 * case["head_dim"] ** -0.5)

    def run(function, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in start.values()]
        output = function(*leaves, *([] if case["values"] else [None]), **settings)
        assert output.shape == gradient.shape and output.dtype == dtype
        output.backward(gradient.to(dtype))
        return {"output": output.detach(), **{name: x.grad for name, x in zip(start, leaves, strict=True)}}

    truth, ours, naive = run(by_index, torch.float64), run(module.fused_relative_attention, dtype), run(by_index, dtype)
    for name, expected in truth.items():
        if key_mask is not None and name in ("output", "query"):
            nobody = ~key_mask.any(-1)
            assert not ours[name][nobody].any()  # exact zeros
        largest = expected.abs().max()
        # A lone key takes all attention whatever the scores: queries, keys and key tables then have no gradient.
        yield name, *((tensors[name].double() - expected).abs().max() / largest.clamp(min=1e-3) for tensors in (ours, naive))


@pytest.fixture
def module():
    """The module with kernels that run here."""
    from hf_posswap.functional import relative_triton

    assert relative_triton.why_not(torch.zeros(4, device=DEVICE)) is None
    return relative_triton


@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def check_equals_attention_by_index(situation, module, monkeypatch):
    """Output and all gradients in float32, to rounding."""
    for name, error, naive in compare(module, monkeypatch, torch.float32, situation):
        print(f"{name}: {error:.1e}, by index {naive:.1e}")
        assert error < 1e-5, name


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def check_low_precision(dtype, module, monkeypatch):
    """Output and all gradients in 16 bits: hardly worse than what is rounded at every step."""
    for name, error, naive in compare(module, monkeypatch, dtype, dict(length=44, key_length=44, clip=4)):
        print(f"{name}: {error:.1e}, by index {naive:.1e}")
        assert error < 2 * naive + torch.finfo(dtype).eps / 2, name


def check_why_not(module):
    """What the kernels cannot do is named."""
    assert "head_dim" in module.why_not(torch.zeros(1, 257, device=DEVICE))
    assert "float64" in module.why_not(torch.zeros(1, dtype=torch.float64, device=DEVICE))
    if DEVICE == "cpu":
        assert "bfloat16" in module.why_not(torch.zeros(1, dtype=torch.bfloat16))


def check_band_too_large(module):
    """A band that 32 bits cannot index is refused."""
    vectors = torch.zeros(1, 1, 1).expand(1, 1, 2**16, 1)
    table = torch.zeros(1).expand(2**16 + 1, 1)
    with pytest.raises(PosswapError, match="32 bits"):
        options = {"clip": 2**15, "causal": True, "key_mask": None, "scale": 1.0}
        module.fused_relative_attention(vectors, vectors, vectors, table, None, **options)
