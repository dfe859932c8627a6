"""The ladder of absolute codes against its formulas written out, and sinusoids at signed distances."""

import math
from dataclasses import replace

import pytest
import torch
from conftest import refused
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap.schemes import Geometry
from hf_posswap.schemes.ladder import RUNGS, rung_code
from hf_posswap.schemes.sinusoidal import sinusoids

SIZES = Geometry(hidden_size=8, num_heads=2, head_dim=4, max_positions=64, trained_positions=64)


def written_out(rung: str, p: int, max_positions: int, size: int) -> list[float]:
    bits = [int(b) for b in reversed(format(p, "b").zfill(math.ceil(math.log2(max_positions))))]
    return {
        "count": [float(p)],
        "normalised": [p / (max_positions - 1)],
        "binary": [float(b) for b in bits],
        "centred": [2.0 * b - 1 for b in bits],
        "dials": [math.sin(2 * math.pi * p / 2 ** (j + 2)) for j in range(len(bits))],
        "slowed": [math.sin(p * 0.0001 ** (j / size)) for j in range(size)],
    }[rung]


RAW = [f"sinusoidal:project=false,layout={layout}" for layout in ("interleaved", "halves", "tensor2tensor")]


@pytest.mark.parametrize("scheme", [f"ladder:rung={rung}" for rung in RUNGS] + RAW)
@pytest.mark.parametrize(("warm_start", "longest"), [(True, 64), (False, 1000)])
def test_added_codes_stand_in_the_models_table(make_model, family, scheme, warm_start, longest):
    """Warm or cold, each rung is its formula with zeros behind, one number everywhere; sinusoids as they are; in a batch."""
    positions, option = torch.tensor([[0, 1, 2, 3, 31], [62, 63, 7, 8, 40]]), scheme.rpartition("=")[2]
    if option in RUNGS:
        code = torch.tensor([[written_out(option, int(p), longest, 32) for p in row] for row in positions])
        width = code.shape[-1]
        expected = code.expand(-1, -1, 32) if width == 1 else torch.nn.functional.pad(code, (0, 32 - width))
    else:
        expected = sinusoids(positions, 32, layout=option)
    model = posswap.swap(make_model(family), scheme, max_positions=longest, warm_start=warm_start)
    assert_close(model.architecture.table(model.base_model)(positions), expected, rtol=0, atol=1e-6)


def test_concatenating_is_adding_a_projected_code():
    """[x, S(p)] times [I; W / C] is x plus what the module returns, for any x and W; W starts at zero."""
    torch.manual_seed(0)
    for rung in RUNGS:
        module = posswap.Ladder(rung=rung, combine="concatenate").embedding_module(SIZES)
        positions = torch.arange(1, 20)
        assert torch.equal(module(positions), torch.zeros(19, 8))
        torch.nn.init.normal_(module.projection)
        words, code = torch.randn(19, 8), rung_code(positions, rung, max_positions=64, size=8)
        both = torch.cat([words, code], dim=1) @ torch.cat([torch.eye(8), module.projection.data / code.shape[1]])
        assert_close(words + module(positions), both, rtol=1e-5, atol=1e-4)


def test_a_warm_concatenation_is_the_best_that_a_code_can_say():
    """A table that a code can say is found again; one that it cannot leaves what least squares leaves, row 0 stays."""
    torch.manual_seed(0)
    for rung in RUNGS:
        module = posswap.Ladder(rung=rung, combine="concatenate").embedding_module(SIZES).double()
        code = rung_code(torch.arange(64), rung, max_positions=64, size=8).double()
        said = code @ torch.randn(code.shape[1], 8, dtype=torch.float64) + torch.randn(8, dtype=torch.float64)
        for table in (said, torch.randn(64, 8, dtype=torch.float64)):
            with torch.no_grad():
                module.fit_table(table)
            fitted = module(torch.arange(64)).double()
            assert_close(fitted[0], table[0], rtol=0, atol=1e-6)
            # Ridge regression as ordinary least squares with rows of its own: sqrt(1e-3) W = 0; the constant has none.
            weights = 1 / (torch.arange(1, 64, dtype=torch.float64) + 4)
            root = (weights / weights.sum() * 64).sqrt()[:, None]
            design = torch.cat([code, torch.ones(64, 1, dtype=torch.float64)], dim=1)[1:]
            ridge = torch.eye(code.shape[1], code.shape[1] + 1, dtype=torch.float64) * 1e-3**0.5
            wanted = torch.cat([root * table[1:], torch.zeros(len(ridge), 8, dtype=torch.float64)])
            best = design @ torch.linalg.lstsq(torch.cat([root * design, ridge]), wanted, driver="gelsd").solution
            assert_close(fitted[1:], best, rtol=0, atol=1e-3, msg=lambda text, rung=rung: f"{rung}: {text}")
            if table is said and rung != "slowed":  # whose slowest numbers the ridge keeps small
                assert_close(fitted[1:], table[1:], rtol=0, atol=0.05)


def test_signed_distances(make_model, tokens):
    """Sinusoidal vectors of keys equal a learned table of the same numbers; cosines are even in the distance, sines odd."""
    for family in ("bert", "gpt2"):
        model = posswap.swap(make_model(family), "relative:clip=6,vectors=sinusoidal")
        twin = posswap.swap(make_model(family), "relative:clip=6")
        torch.manual_seed(1)
        layers = [[a.positions for a in m.architecture.self_attentions(m.base_model)] for m in (model, twin)]
        for ours, theirs in zip(*layers, strict=True):
            torch.nn.init.normal_(ours.key_projection)
            torch.nn.init.normal_(ours.value_table)
            signal = sinusoids(torch.arange(-6, 7), 16)
            sines, cosines = signal[:, 0::2], signal[:, 1::2]
            assert torch.equal(sines, -sines.flip(0)) and torch.equal(cosines, cosines.flip(0))
            theirs.key_table.data = torch.einsum("rd,hde->hre", signal, ours.key_projection.data) / 16
            theirs.value_table.data = ours.value_table.data.clone()
        expected = model.base_model(tokens).last_hidden_state
        assert_close(expected, twin.base_model(tokens).last_hidden_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share_heads", [False, True])
def test_sinusoidal_vectors_are_solved_for(share_heads):
    """A table that sinusoids can say is found again by the closed form, as far as attention looks."""
    from hf_posswap.schemes.relative import _project

    torch.manual_seed(0)
    signal, heads = sinusoids(torch.arange(-9, 10), 8).double(), 1 if share_heads else 2
    wanted = torch.randn(heads, 8, 8, dtype=torch.float64)
    table, weights = signal @ wanted / 8, torch.rand(2, 19, dtype=torch.float64)
    assert_close(signal @ _project(signal, table, weights) / 8, table, rtol=0, atol=0.01)
    weights[:, 10:] = 0  # nothing looks to the right: what stands there does not matter
    table[:, 10:] = 7.0
    assert_close((signal @ _project(signal, table, weights) / 8)[:, :10], table[:, :10], rtol=0, atol=0.05)
    assert (signal @ _project(signal, table, torch.ones_like(weights)) / 8 - table)[:, :10].abs().max() > 0.1


def test_bits_must_fit():
    """A hidden size that is smaller than the number of bits would give two positions one code."""
    small = replace(SIZES, hidden_size=4)
    refused("takes 6 numbers to count to 64, and the hidden size is 4", posswap.Ladder(rung="binary").check, small)
    posswap.Ladder(rung="binary", combine="concatenate").check(small)
