"""Four machines that look for what nobody thought of: caches, relative attention, schemes as text, files that were changed.

Few and fixed examples here; `make fuzz` draws anew, and many.
"""

import copy
import dataclasses
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings, target
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
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    if not FUZZ:
        quiet["phases"] = [Phase.explicit, Phase.generate]
    return settings(max_examples=few * (FUZZ or 1), derandomize=not FUZZ, **quiet, **options)


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
        self.model = posswap.swap(tiny_model(family, "sdpa").double(), scheme, span=span, first=2)
        move(position_parameters(self.model), 0.3)
        self.run, self.cache = self.model, DynamicCache(config=self.model.config)
        self.ids = torch.zeros(rows, 0, dtype=torch.long)
        self.mask = torch.zeros(rows, 0, dtype=torch.long)
        pads = [data.draw(st.integers(0, length - 1), label="padding") for _ in range(rows)]
        self.read(length, torch.tensor([[place >= pad for place in range(length)] for pad in pads]).long())

    def read(self, count: int, mask: torch.Tensor):
        new = torch.randint(2, 98, mask.shape, generator=torch.Generator().manual_seed(self.ids.numel()))
        ids, mask = torch.cat([self.ids, new], dim=1), torch.cat([self.mask, mask], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            whole = self.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -count:]
            given = {"attention_mask": mask, "position_ids": positions[:, -count:], "past_key_values": self.cache}
            logits = self.run(new, **given).logits
        self.ids, self.mask, seen = ids, mask, mask[:, -count:].bool()
        torch.testing.assert_close(logits[seen], whole[seen], rtol=1e-8, atol=1e-8)

    @rule(count=st.integers(1, 6))
    def append(self, count):
        assume(self.ids.shape[1] + count <= 32)
        self.read(count, torch.ones(len(self.ids), count, dtype=torch.long))

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
        self.ids, self.mask = self.ids[:, :length], self.mask[:, :length]

    @rule(data=st.data())
    def reorder(self, data):
        rows = torch.tensor(data.draw(st.permutations(range(len(self.ids)))))
        self.cache.reorder_cache(rows)
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    @rule(data=st.data())
    def select(self, data):
        rows = torch.tensor(data.draw(st.lists(st.integers(0, len(self.ids) - 1), min_size=1, max_size=4)))
        self.cache.batch_select_indices(rows)
        self.ids, self.mask = self.ids[rows], self.mask[rows]

    @precondition(lambda self: len(self.ids) < 4)
    @rule(times=st.integers(1, 2))
    def repeat(self, times):
        self.cache.batch_repeat_interleave(times)
        self.ids, self.mask = (one.repeat_interleave(times, dim=0) for one in (self.ids, self.mask))

    @rule()
    def copied(self):
        self.cache = copy.deepcopy(self.cache)

    @rule()
    def offloaded(self):
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
TestCaches.settings = examples(15, stateful_step_count=10)


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
VALUES = [
    "true",
    "false",
    "null",
    "1e4",
    "0.5",
    "-1",
    "0",
    "64",
    "auto",
    "half",
    "linear",
    "{}",
    "{rope_type=linear,factor=2}",
    "nan",
]
ATOMS = st.sampled_from([*WORDS, *VALUES, *":=,{}[]'\" #&*!|>%@-\n"]) | st.text(max_size=4)
OPTION = st.tuples(st.sampled_from(WORDS), st.sampled_from(VALUES) | st.floats().map(str) | st.integers().map(str)).map(
    "=".join
)
ENTRY = st.tuples(st.sampled_from(sorted(SCHEMES)), st.lists(OPTION, max_size=3).map(",".join)).map(":".join)
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
)


@examples(150)
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


@examples(100)
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
def files():
    """A saved model and a delta of the same, and its logits."""
    folder = Path(tempfile.mkdtemp())
    model = posswap.swap(tiny_model("gpt2"), "relative:clip=4", max_positions=48)
    move(position_parameters(model), 0.3)
    posswap.save_delta(model, folder / "delta")
    model.save_pretrained(folder / "model")
    yield folder, model(TOKENS).logits
    shutil.rmtree(folder)


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


@examples(12)
@given(data=st.data())
def test_a_changed_scheme_of_a_checkpoint(files, data):
    """Any field of the scheme in config.json: an error, or the same model."""
    folder, expected = files
    before = (folder / "model" / "config.json").read_text()
    content = json.loads(before)
    content["position_scheme"] = changed(content["position_scheme"], data)
    try:
        (folder / "model" / "config.json").write_text(json.dumps(content))
        model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager")
    except (posswap.PosswapError, RuntimeError):  # transformers' own words for weights of another shape
        return
    finally:
        (folder / "model" / "config.json").write_text(before)
    assert torch.equal(model.eval()(TOKENS).logits, expected)


@examples(25)
@given(data=st.data())
def test_a_changed_delta(files, data):
    """Any field, any byte of its weights but their values: an error, or the same model; and never a half-swapped one."""
    folder, expected = files
    about, weights = ((folder / "delta" / name).read_bytes() for name in (ABOUT, WEIGHTS))
    base = tiny_model("gpt2")
    try:
        if data.draw(st.booleans(), label="bytes"):
            head = 8 + int.from_bytes(weights[:8], "little")
            place = data.draw(st.integers(0, head - 1), label="place")
            broken = bytearray(weights)
            broken[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != weights[place]), label="byte")
            (folder / "delta" / WEIGHTS).write_bytes(broken)
        else:
            (folder / "delta" / ABOUT).write_text(json.dumps(changed(json.loads(about), data)))
        posswap.load_delta(base, folder / "delta")
    except posswap.PosswapError:
        assert not posswap.describe(base).swapped
        return
    finally:
        (folder / "delta" / ABOUT).write_bytes(about)
        (folder / "delta" / WEIGHTS).write_bytes(weights)
    assert torch.equal(base(TOKENS).logits, expected)


@examples(60)
@given(data=st.data())
def test_changed_results(data):
    """Results that a card would be written from: one error, or they fit."""
    content = json.loads((Path(__file__).parents[1] / "recipes" / "results" / "card" / RESULTS_FILE).read_text())
    try:
        check(changed(content, data), "a file")
    except posswap.PosswapError as error:
        assert len(str(error)) < 600
