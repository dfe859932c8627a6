"""Caches, relative attention, schemes as text and changed files, drawn: few and fixed here, many by `make fuzz`."""

import copy
import dataclasses
import json
import math
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, target
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from test_relative_attention import written_out
from transformers import AutoModelForCausalLM, DynamicCache

import hf_posswap as posswap
from hf_posswap.contract.subject import move, position_parameters, tiny_model
from hf_posswap.functional import relative_attention as module
from hf_posswap.functional.relative_attention import relative_attention
from hf_posswap.schemes import SCHEMES, parse_scheme, scheme_from_dict
from hf_posswap.sharing.delta import ABOUT, WEIGHTS
from hf_posswap.sharing.record import RESULTS_FILE, check

FUZZ = int(os.environ.get("FUZZ", "0"))  # how many times as many examples, all of them new


def examples(few: int, **options) -> settings:
    """Return how many examples a machine tries: few that are always the same, or many new ones."""
    options |= {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=few * (FUZZ or 1), derandomize=not FUZZ, **options)


# -- caches --------------------------------------------------------------------------------------------------------

MODELS = [
    ("gpt2", "relative:clip=4", None), ("gpt2", "rotary", None), ("gpt2", "learned", None), ("bert-decoder", "none", 5),
    ("gpt2", "rotary", 7), ("bert-decoder", "relative:clip=3", 6), ("gpt2", "relative:clip=5,share_heads=true", 8),
]  # fmt: skip


class Caches(RuleBasedStateMachine):
    """Whatever is done to a cache: what the model says next is what it says without one, in float64."""

    @initialize(which=st.sampled_from(MODELS), rows=st.integers(1, 3), length=st.integers(1, 9), data=st.data())
    def start(self, which, rows, length, data):
        family, scheme, span = which
        self.model = posswap.swap(tiny_model(family, "sdpa").double(), scheme, span=span, **({"first": 2} if span else {}))
        move(position_parameters(self.model), 0.3)
        self.run, self.cache = self.model, DynamicCache(config=self.model.config)
        self.ids = self.mask = self.begins = torch.zeros(rows, 0, dtype=torch.long)
        pads = [data.draw(st.integers(0, length - 1), label="padding") for _ in range(rows)]
        self.read(length, torch.tensor([[place >= pad for place in range(length)] for pad in pads]).long())

    def read(self, count: int, mask: torch.Tensor, *, packed: bool = False):
        begins = self.begins[:, -1:] if self.begins.shape[1] and not packed else self.mask.sum(-1, keepdim=True)
        begins = torch.cat([self.begins, begins.expand(-1, count)], dim=1)  # tokens of earlier texts in the row
        new = torch.randint(2, 98, mask.shape, generator=torch.Generator().manual_seed(self.ids.numel()))
        ids, mask = torch.cat([self.ids, new], dim=1), torch.cat([self.mask, mask], dim=1)
        positions = (mask.cumsum(-1) - 1 - begins).clamp(min=0)
        with torch.no_grad():
            whole = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -count:]
            given = {"attention_mask": mask, "position_ids": positions[:, -count:], "past_key_values": self.cache}
            logits = self.run(new, **given).logits
        self.ids, self.mask, self.begins, seen = ids, mask, begins, mask[:, -count:].bool()
        torch.testing.assert_close(logits[seen], whole[seen], rtol=1e-8, atol=1e-8)

    @rule(count=st.integers(1, 6), packed=st.booleans())
    def append(self, count, packed):
        assume(self.ids.shape[1] + count <= 32)
        mask = torch.ones(len(self.ids), count, dtype=torch.long)
        refused = packed and posswap.describe(self.model).span is not None and self.mask.any()
        with pytest.raises(posswap.PosswapError, match="position_ids go back") if refused else nullcontext():
            self.read(count, mask, packed=packed)

    @rule(data=st.data())
    def crop(self, data):
        count = data.draw(st.integers(0, self.ids.shape[1] - 1))
        before = copy.deepcopy(self.cache)
        try:
            self.cache.crop(-count)
        except posswap.PosswapError:  # a span has forgotten what would be needed
            assert any(one.keys.shape[-2] < one.get_seq_length() for one in before.layers)
            self.cache = before
            return
        length = self.ids.shape[1] - count
        self.ids, self.mask, self.begins = (one[:, :length] for one in (self.ids, self.mask, self.begins))

    @rule(data=st.data(), reorder=st.booleans())
    def select(self, data, reorder):
        rows = range(len(self.ids))
        drawn = st.permutations(rows) if reorder else st.lists(st.sampled_from(rows), min_size=1, max_size=4)
        rows = torch.tensor(data.draw(drawn))
        (self.cache.reorder_cache if reorder else self.cache.batch_select_indices)(rows)
        self.ids, self.mask, self.begins = (one[rows] for one in (self.ids, self.mask, self.begins))

    @precondition(lambda self: len(self.ids) < 4)
    @rule(times=st.integers(1, 2))
    def repeat(self, times):
        self.cache.batch_repeat_interleave(times)
        self.ids, self.mask, self.begins = (one.repeat_interleave(times, 0) for one in (self.ids, self.mask, self.begins))

    @rule()
    def copied_and_offloaded(self):
        self.cache = copy.deepcopy(self.cache)
        for layer in self.cache.layers:
            layer.offload()
            layer.prefetch()

    @rule()
    def rebuilt(self):
        if all(one.keys.shape[-2] == one.get_seq_length() for one in self.cache.layers):
            self.cache = DynamicCache([(one.keys, one.values) for one in self.cache.layers])

    @precondition(lambda self: FUZZ)
    @rule()
    def compiled(self):
        torch.compiler.reset()
        self.run = torch.compile(self.model, backend="eager", dynamic=True)


TestCaches = pytest.mark.filterwarnings("ignore::UserWarning")(Caches.TestCase)
TestCaches.settings = examples(10, stateful_step_count=8)


# -- relative attention --------------------------------------------------------------------------------------------


@examples(40)
@given(
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 12), st.integers(0, 6), st.integers(1, 14), st.sampled_from([2, 4, 8]),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["auto", "window", "fused"]), st.floats(0.1, 6), st.integers(2, 7), st.data(),
)  # fmt: skip
def test_relative_attention(
    batch, heads, queries, past, clip, dim, causal, shared, values, dtype, implementation, size, block, data
):
    """Any shape, mask and dtype: as near to the loop in float64 as rounding in that dtype may be."""
    keys, rows = queries + past, 2 * clip + 1
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31), label="seed"))
    table = (rows, dim) if shared else (heads, rows, dim)
    shapes = [(batch, heads, n, dim) for n in (queries, keys, keys)] + [table] * (1 + values)
    tensors = [(size * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]
    seen = data.draw(st.none() | st.lists(st.booleans(), min_size=batch * keys, max_size=batch * keys), label="mask")
    mask = None if seen is None else torch.tensor(seen).view(batch, keys)
    options = {"clip": clip, "causal": causal, "key_mask": mask, "scale": dim**-0.5}
    exact = [states.double() for states in tensors] + [None] * (not values)
    expected = written_out(*exact, **options)
    plan = module._plan
    with pytest.MonkeyPatch.context() as patch:  # several blocks, as long inputs have
        patch.setattr(module, "_plan", lambda *arguments: dataclasses.replace(plan(*arguments), block=block))
        output = relative_attention(*tensors, implementation=implementation, **options).double()
    largest = [states.abs().max().item() for states in exact if states is not None]
    scores = dim**0.5 * largest[0] * (largest[1] + 2 * largest[3])  # the sum of absolute products, at most
    error = (output - expected).abs().max().item()
    bound = torch.finfo(dtype).eps * (4 + scores) * (largest[2] + 2 * values * largest[-1])
    target(math.log(error / bound + 1e-9))
    assert error <= bound


# -- schemes as text -----------------------------------------------------------------------------------------------

WORDS = sorted({*SCHEMES, *(option for scheme in SCHEMES.values() for option in scheme.__dataclass_fields__)})
VALUES = "true false null 1e4 0.5 -1 0 64 auto half linear {} nan {rope_type=linear,factor=2}".split()
ATOMS = st.sampled_from([*WORDS, *VALUES, *":=,{}[]'\" #&*!|>%@-\n"]) | st.text(max_size=4)
VALUE = st.sampled_from(VALUES) | st.floats().map(str) | st.integers().map(str)
OPTION = st.tuples(st.sampled_from(WORDS), VALUE).map("=".join)
ENTRY = st.tuples(st.sampled_from(sorted(SCHEMES)), st.lists(OPTION, max_size=3).map(",".join)).map(":".join)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
)


@examples(80)
@given(st.lists(ATOMS, max_size=8).map("".join) | ENTRY)
def test_schemes_as_text(text):
    """What can be read prints, and is read back as itself, from text and from JSON; what cannot is one error."""
    try:
        scheme = parse_scheme(text)
    except posswap.PosswapError as error:
        assert len(str(error)) < 400
        return
    assert parse_scheme(str(scheme)) == scheme
    assert scheme_from_dict(json.loads(json.dumps(scheme.to_dict(), allow_nan=False))) == scheme


@examples(60)
@given(st.sampled_from(sorted(SCHEMES)), st.dictionaries(st.sampled_from(WORDS), JUNK, max_size=2))
def test_config_entries(name, options):
    """A config's entry is a scheme or one error, whatever is in it."""
    try:
        scheme = scheme_from_dict({"name": name, **options})
    except posswap.PosswapError:
        return
    assert parse_scheme(str(scheme)) == scheme


# -- files that were changed ---------------------------------------------------------------------------------------

TOKENS = torch.arange(2, 22)[None]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A saved model and a delta of the same, and its logits."""
    folder = tmp_path_factory.mktemp("changed")
    model = posswap.swap(tiny_model("gpt2"), "relative:clip=4", max_positions=48)
    move(position_parameters(model), 0.3)
    posswap.save_delta(model, folder / "delta")
    model.save_pretrained(folder / "model")
    return folder, model(TOKENS).logits


def changed(content: dict, data) -> dict:
    """Return JSON with one field, wherever it is, taken away or replaced by something else."""
    content = copy.deepcopy(content)
    here = content
    while True:
        key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else list(range(len(here)))), label="field")
        inner = here[key]
        if not (isinstance(inner, (dict, list)) and inner and data.draw(st.booleans(), label="deeper")):
            break
        here = inner
    if isinstance(here, dict) and data.draw(st.booleans(), label="taken away"):
        del here[key]
    else:
        here[key] = data.draw(JUNK.filter(lambda value: value != inner) | st.integers(0, 9), label="value")
    return content


@contextmanager
def instead(path: Path, content: bytes):
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


@examples(12)
@given(data=st.data())
def test_a_changed_scheme_of_a_checkpoint(files, data):
    """Any field of the scheme in config.json: an error, or the same model."""
    folder, expected = files
    path = folder / "model" / "config.json"
    content = json.loads(path.read_text())
    content["position_scheme"] = changed(content["position_scheme"], data)
    with instead(path, json.dumps(content).encode()):
        try:
            model = AutoModelForCausalLM.from_pretrained(path.parent, attn_implementation="eager").eval()
        except (posswap.PosswapError, RuntimeError):  # transformers' own words for weights of another shape
            return
    assert torch.equal(model(TOKENS).logits, expected)


@examples(25)
@given(data=st.data(), of_weights=st.booleans())
def test_a_changed_delta(files, data, of_weights):
    """Any field, any byte before its numbers: an error, or the same model; and never a half-swapped one."""
    folder, expected = files
    path = folder / "delta" / (WEIGHTS if of_weights else ABOUT)
    content, base = bytearray(path.read_bytes()), tiny_model("gpt2")
    if of_weights:
        place = data.draw(st.integers(0, 7 + int.from_bytes(content[:8], "little")), label="place")
        content[place] ^= data.draw(st.integers(1, 255), label="bits")
    else:
        content = json.dumps(changed(json.loads(content), data)).encode()
    with instead(path, content):
        try:
            posswap.load_delta(base, path.parent)
        except posswap.PosswapError:
            assert not posswap.describe(base).swapped
            return
    assert torch.equal(base(TOKENS).logits, expected)


@examples(25)
@given(data=st.data())
def test_changed_results(data):
    """Results that a card would be written from: one error, or they fit."""
    content = json.loads((Path(__file__).parents[1] / "recipes" / "results" / "card" / RESULTS_FILE).read_text())
    try:
        check(changed(content, data), "a file")
    except posswap.PosswapError as error:
        assert len(str(error)) < 600
