"""`hf-posswap check` on schemes that keep the contract, and on one for each way to break it, named after its fault."""

import re
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from conftest import refused
from torch import nn
from transformers.utils.logging import is_progress_bar_enabled

import hf_posswap as posswap
from hf_posswap.architectures import Architecture, Roberta
from hf_posswap.contract.checks import CHECKS
from hf_posswap.contract.report import check_scheme, name_of
from hf_posswap.contract.subject import FAMILIES
from hf_posswap.schemes.base import AttentionPositions, PositionEmbedding, Scheme

ONE = [("gpt2", "eager")]  # for what does not depend on the model


class Sines(PositionEmbedding):
    """Sines of positions, each with a learned size, which a module inside holds."""

    size = property(lambda self: self.inner.size)

    def __init__(self, geometry):
        super().__init__(geometry)
        self.geometry, self.inner = geometry, nn.ParameterDict({"size": torch.zeros(geometry.hidden_size)})

    def code(self, position_ids):
        steps = torch.arange(self.geometry.hidden_size, dtype=torch.float64)
        return (position_ids[..., None] * 100.0 ** (-steps / len(steps))).sin().to(self.size.dtype)

    def forward(self, position_ids):
        return self.code(position_ids) * (1 + self.size)


@dataclass(frozen=True, kw_only=True)
class Waves(Scheme):
    label: str = "plain"

    name: ClassVar[str] = "waves"
    summary: ClassVar[str] = "sines with a learned size"
    module: ClassVar[type] = Sines

    def embedding_module(self, geometry):
        return self.module(geometry)


class Slope(AttentionPositions):
    """Scores sink with the distance of positions, by a learned slope a head."""

    needs_key_positions = True

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.zeros(2, 1, 1))

    def prepare(self, position_ids, slots, length, key_positions, attention_mask=None):
        return position_ids, key_positions, slots

    def distances(self, shared, queries, keys):
        """Distances (B or 1, 1, Q, K), 0 for keys that a static cache has not got yet."""
        position_ids, key_positions, _ = shared
        key_positions = nn.functional.pad(key_positions, (0, keys - key_positions.shape[-1]))
        return (key_positions[:, None, None, :] - position_ids[:, None, :, None]).abs()

    def masked(self, scores, mask, shared, causal):
        """Apply the mask; without one sdpa means that all keys count, or those up to the query's slot."""
        if mask is None and causal:
            mask = torch.arange(scores.shape[-1]) <= shared[2][..., None]
        if mask is None:
            return scores
        return scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask

    def attend(self, query, key, value, mask, shared, *, scaling, dropout, causal, return_probabilities):
        scores = query @ key.mT * scaling - self.slope * self.distances(shared, query.shape[-2], key.shape[-2])
        probabilities = self.masked(scores, mask, shared, causal).softmax(-1).to(value.dtype)
        return nn.functional.dropout(probabilities, dropout) @ value, probabilities


@dataclass(frozen=True, kw_only=True)
class Sinking(Scheme):
    name: ClassVar[str] = "sinking"
    summary: ClassVar[str] = "scores sink with distance"
    shift_invariant: ClassVar[bool] = True
    module: ClassVar[type] = Slope

    def attention_module(self, geometry):
        return self.module()


def scheme(base: type[Scheme], **members) -> type[Scheme]:
    """A dataclass like the base, with other class members."""
    return dataclass(frozen=True, kw_only=True)(type("Broken", (base,), {"__annotations__": {}, **members}))


class OfTheFirstRow(Sines):
    def forward(self, position_ids):
        return super().forward(position_ids[:1]).expand(*position_ids.shape, -1)


class TrainedLengthOnly(Sines):
    def code(self, position_ids):
        return super().code(torch.arange(self.geometry.trained_positions))[position_ids]


class HalfPrecisionPhase(Sines):
    def code(self, position_ids):
        steps = torch.arange(self.geometry.hidden_size).to(self.size)
        return (position_ids[..., None].to(self.size) * 100.0 ** (-steps / len(steps))).sin()


class UnusedParameter(Sines):
    def __init__(self, geometry):
        super().__init__(geometry)
        self.forgotten = nn.Parameter(torch.zeros(3))


class IdleParameter(Sines):
    def forward(self, position_ids):
        return self.code(position_ids) + 0 * self.size


class LearnsWhatIsNotSaved(Sines):
    learned = 0.0

    def fit_table(self, table):
        self.learned = table[3]

    def forward(self, position_ids):
        return (super().forward(position_ids) + self.learned).to(self.size.dtype)


class RowsOfItsOwn(Sines):
    def __init__(self, geometry):
        super().__init__(geometry)
        self.rows = nn.Parameter(torch.zeros(geometry.max_positions, geometry.hidden_size))

    def forward(self, position_ids):
        return super().forward(position_ids) + self.rows[position_ids]


class SharedByCopies(Sines):
    def __deepcopy__(self, memo):
        return self


class WritesToPositions(Sines):
    def forward(self, position_ids):
        code = super().forward(position_ids)
        position_ids += 1
        return code


class OnlyScales(AttentionPositions):
    def rotate(self, states, shared):
        return 1.5 * states


class ByPlace(Slope):
    def distances(self, shared, queries, keys):
        return (torch.arange(keys) - shared[2][..., None]).abs()[:, None]


class IgnoresTheMask(Slope):
    def masked(self, scores, mask, shared, causal):
        return super().masked(scores, None, shared, causal)


class OneMaskForAllQueries(Slope):
    def masked(self, scores, mask, shared, causal):
        if causal:
            scores = super().masked(scores, None, shared, causal)
        return scores if mask is None else super().masked(scores, mask[..., -1:, :], shared, False)


class CausalFromTheCorner(Slope):
    def masked(self, scores, mask, shared, causal):
        scores = super().masked(scores, mask, shared, causal)
        return scores.masked_fill(~torch.ones_like(scores[0, 0]).bool().tril(), -1e9) if causal else scores


class ScalesIfAskedForProbabilities(Slope):
    def attend(self, *arguments, scaling, return_probabilities, **others):
        scaling = scaling * (2 if return_probabilities else 1)
        return super().attend(*arguments, scaling=scaling, return_probabilities=return_probabilities, **others)


class OwnScale(Slope):
    def attend(self, query, *arguments, scaling, **others):
        return super().attend(query, *arguments, scaling=query.shape[-1] ** -0.5, **others)


class NoDropout(Slope):
    def attend(self, *arguments, dropout, **others):
        return super().attend(*arguments, dropout=0.0, **others)


class SameBlocks(Slope):
    def prepare(self, *arguments):
        shared = super().prepare(*arguments)
        return type("Shared", (tuple,), {"block": lambda self, queries, keys: self})(shared)

    def distances(self, shared, queries, keys):
        return super().distances(shared, queries, keys)[..., :queries, :keys]


class BiasOfItsOwn(AttentionPositions):
    def prepare(self, position_ids, slots, *others):
        return slots

    def bias(self, shared, key_length):
        return torch.zeros(1, 1, shared.shape[-1], key_length)


class WithoutKeys(AttentionPositions):
    def bias(self, shared, key_length):
        return -shared.distances(key_length)[:, None].abs()


class UsesUpWhatIsShared(AttentionPositions):
    def prepare(self, position_ids, *others):
        return [position_ids[:, None, :, None].cos()] * 4  # of two layers, for queries and keys

    def rotate(self, states, shared):
        return states * (2 + shared.pop()).to(states.dtype)


def refuse(self, geometry):
    raise posswap.PosswapError("this model is too small for it")


UNPATCHED = nn.LayerNorm.forward


def patch_the_library(self, geometry):
    nn.LayerNorm.forward = lambda self, states: 1.01 * UNPATCHED(self, states)
    return Sines(geometry)


NOT_FROZEN = dataclass(type("NotFrozen", (Scheme,), {"__annotations__": {}, "name": "melting", "summary": "melts"}))
LISTED = scheme(Waves, __annotations__={"steps": tuple}, steps=(1, 2))
MISSPELT = scheme(Waves, embedding_module=Scheme.embedding_module, embeding_module=Waves.embedding_module)

WHERE = {"cache": ("bert-decoder", "gpt2"), "order matters": ("bert",)}  # the kinds of models that a check looks at, if not all
BROKEN = {  # scheme, or its module; the checks that fail; what one of the reasons says
    "refuses": (scheme(Waves, check=refuse), "builds", "this model is too small for it"),
    "leaves": (scheme(Waves, embedding_module=lambda self, geometry: sys.exit(0)), "builds", "SystemExit: 0"),
    "not frozen": (NOT_FROZEN, "builds", "NotFrozen is not frozen"),
    "without a name": (scheme(Waves, name=None), "builds", "Broken has no name"),
    "unknown backend": (scheme(Waves, implementations=("flex",)), "builds", "run with attention impl"),
    "tuple": (LISTED, "options, save and reload", r"comes back from config.json .*\[1, 2\]"),
    "not to be registered": (type("Inherited", (Waves,), {"name": "heir"}), "builds", "must be a dataclass"),
    "read as another": (Waves(label="no"), "options", "comes back from the string 'waves:label=no' as .*label=False"),
    "patch": (scheme(Waves, embedding_module=patch_the_library), "restores", "outputs: the largest difference"),
    "never switched on": (MISSPELT, "switched on, order matters, position ids", "without positions: .* difference is 0,"),
    "no order": (OnlyScales, "order matters, position ids", "tokens in another order"),
    "place": (ByPlace, "position ids, attention span", "position_ids 1, 1, 2, 2"),
    "written positions": (WritesToPositions, "position ids", "changed in place"),
    "no mask": (IgnoresTheMask, "padding, packing, cache, attention span", "7 of padding on the (right|left), and alone: the"),
    "one mask": (OneMaskForAllQueries, "packing, attention span", "documents of 12 and 8 tokens"),
    "first row": (OfTheFirstRow, "padding, batch independence, cache", "row 1 of a batch"),
    "false claim": (scheme(Waves, shift_invariant=True), "shift invariance", "positions from 12 and from 1"),
    "corner": (CausalFromTheCorner, "cache, attention span", "in parts of 1, 1, 8"),
    "probabilities": (ScalesIfAskedForProbabilities, "backends agree, attention span", "outputs: the"),
    "blocks": (SameBlocks, "attention span", "eager attention and sdpa|in parts of 9, 1, 1"),
    "own scale": (OwnScale, "scale and dropout", "scores of twice the size"),
    "no dropout": (NoDropout, "scale and dropout", "two forwards with dropout"),
    "own places": (BiasOfItsOwn, "builds", "BiasOfItsOwn has a `bias`, so its `prepare` must return Places"),
    "without keys": (WithoutKeys, "builds", "set `needs_key_positions = True`"),
    "unused": (UnusedParameter, "gradients", r"forgotten: the gradient is none, .* DDP"),
    "idle": (IdleParameter, "gradients", r"size: the gradient is zero everywhere"),
    "used up": (scheme(Sinking, module=UsesUpWhatIsShared, shift_invariant=False), "gradient checkpointing", "pop from empty"),
    "not saved": (LearnsWhatIsNotSaved, "save and reload", "outputs of the loaded model"),
    "shared copies": (SharedByCopies, "deepcopy", "after its copy was changed"),
    "short": (
        TrainedLengthOnly,
        "longer than trained, phase precision, shift invariance",
        "IndexError: index 32 is out of bounds",
    ),
    "rows": (RowsOfItsOwn, "longer than trained", "rows has another shape .*: say `resizable"),
    "half precision": (HalfPrecisionPhase, "phase precision", "off by .* at position 4000"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_scheme_fails_where_it_is_broken(name, monkeypatch):
    """A broken scheme fails the checks that are named for it, and no others, and the report says why."""
    monkeypatch.setattr(nn.LayerNorm, "forward", UNPATCHED)  # so that it is put back
    broken, checks, says = BROKEN[name]
    if isinstance(broken, type) and issubclass(broken, nn.Module):
        broken = scheme(Waves if issubclass(broken, Sines) else Sinking, module=broken)
    expected, turn = checks.split(", "), list(BROKEN).index(name)
    families = WHERE.get(expected[0], FAMILIES)  # a failure in one kind of model alone is looked for there
    family = families[turn % len(families)]
    found = check_scheme(broken, models=[(family, ("eager", "sdpa")[turn // 3 % 2])])
    failed = {result.check for result in found.results if result.passed is False}
    assert failed == {check for check in expected if family in WHERE.get(check, FAMILIES)}, str(found)
    assert re.search(says, " ".join(result.detail for result in found.results)), str(found)
    assert not found.passed
    others = [result.passed for result in found.results if result.check not in expected]
    assert set(others) == {None} if "builds" in expected else True in others


def test_every_check_can_fail():
    """There is a broken scheme for each of the checks, or a family."""
    assert {*", ".join(checks for _, checks, _ in BROKEN.values()).split(", "), "table kept"} == set(map(name_of, CHECKS))


def test_a_broken_family(monkeypatch):
    """A family that counts positions otherwise than its own forward fails with the table as it is."""
    learned = {"scheme": "learned", "models": [("roberta", "sdpa")]}
    found = check_scheme(**learned)
    assert found.passed and str(found).splitlines()[1].split() == ["check", "roberta", "what", "it", "means"]
    monkeypatch.setattr(Roberta, "position_ids", Architecture.position_ids)  # padding would be counted
    found = check_scheme(**learned)
    assert [result.check for result in found.results if result.passed is False] == ["table kept"]
    assert "before and after the swap, padding before: the largest difference" in str(found)


@pytest.mark.parametrize(("scheme", "family"), [(Waves(label=None), "bert"), (Sinking, "bert-decoder"), (Sinking, "gpt2")])
def test_own_schemes_pass(scheme, family, monkeypatch):
    """Schemes, registered or not, pass; what does not apply says why; randomness and registry are left alone."""
    monkeypatch.setitem(posswap.SCHEMES, "waves", Waves)
    known, generator, bars = dict(posswap.SCHEMES), torch.get_rng_state(), is_progress_bar_enabled()
    found = check_scheme(scheme, models=[(family, "eager"), (family, "sdpa")])
    assert found.passed, str(found)
    assert [(result.check, result.family) for result in found.results] == [(name_of(check), family) for check in CHECKS]
    assert all(bool(result.detail) == (result.passed is None) for result in found.results)
    assert posswap.SCHEMES == known and torch.equal(torch.get_rng_state(), generator)
    assert is_progress_bar_enabled() == bars


def test_one_backend():
    """A scheme that runs with eager attention alone is checked with that, and not compared with sdpa."""
    eager = scheme(Sinking, module=ScalesIfAskedForProbabilities, implementations=("eager",))
    found = check_scheme(eager, models=[("bert", "eager"), ("bert", "sdpa")])
    assert found.passed and "- backends agree: it runs with eager alone" in str(found)
    for models in ([("bert", "sdpa")], []):
        refused("sinking runs with eager: name models", check_scheme, eager, models=models)


@pytest.mark.parametrize(
    ("unasked", "says"),
    [
        (posswap.Mixed(layers=["rotary:span=false"]), "- attention span: a span holds in none of its layers"),
        (scheme(Sinking, shift_invariant=False), "- shift invariance: it is not claimed, but holds"),
        ("self-extend", "it is not claimed, and does not hold"),  # which shows beyond the trained length alone
        ("rotary:scaling={rope_type=dynamic,factor=2}", "it is not claimed, and does not hold"),
    ],
)
def test_what_is_not_asked(unasked, says):
    """A span that no layer takes, and a shift invariance that is not claimed: pointed out, and no failure."""
    found = check_scheme(unasked, models=ONE)
    assert found.passed and says in str(found)


def test_the_table():
    """The report has a row for each check, a column for each family, and beneath them numbers and advice."""
    text = str(check_scheme(scheme(Waves, shift_invariant=True), models=[(family, "eager") for family in FAMILIES]))
    lines = text.splitlines()
    assert lines[0] == "Broken(label='plain') FAILS"
    assert lines[1].split()[:4] == ["check", *FAMILIES] and len(lines) > 2 + len(CHECKS)
    row = next(line for line in lines if line.startswith("shift invariance"))
    assert row.split()[2:5] == ["FAILS"] * 3 and row.endswith("A shift of all positions changes nothing, if so claimed.")
    found = r"shift invariance, gpt2: with eager, .* difference is [\d.]+, tolerance 0\.000\d+, at token \d+ "
    assert re.search(found, " ".join(text.split())) and "    Only differences of positions may count" in text
    assert "- cache: an encoder has no cache" in lines and all(len(line) <= 120 for line in lines)


def test_not_a_scheme():
    """Objects that are no schemes are refused, the base class too."""
    for other in (5, int, Scheme):
        refused("is no scheme: pass a subclass of posswap.Scheme", check_scheme, other)
    refused("no family 'xlm_roberta'; there are albert, bert", check_scheme, "learned", models=[("xlm_roberta", "sdpa")])


@pytest.mark.parametrize("mode", [torch.inference_mode, lambda: torch.device("meta")])
def test_inside_a_mode(mode):
    """A check passes inside the caller's inference mode, and where another device is the default."""
    with mode():
        assert check_scheme("learned", models=ONE).passed
