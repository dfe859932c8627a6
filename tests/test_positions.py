"""Numbers behind the pictures: tables, frequencies, and the matrix of a shift."""

import math

import pytest
import torch
from conftest import refused
from torch.testing import assert_close
from transformers import GPT2Model

import hf_posswap as posswap
from hf_posswap.measure.positions import frequencies, one_head, position_table, scheme_of, translation
from hf_posswap.schemes.sinusoidal import sinusoids


@pytest.mark.parametrize("family", ["roberta", "esm", "opt"])
@pytest.mark.parametrize("scheme", [None, "learned:extend=tile", "sinusoidal"])
def test_vectors_are_those_of_a_forward(make_model, make_swapped, family, scheme):
    """Position 0 is that of the first token, also where a family's ids begin at 2."""
    model = make_swapped(family, scheme) if scheme else make_model(family)
    added = []
    table = posswap.ARCHITECTURES[family].table(model.base_model)
    table.register_forward_hook(lambda module, given, vectors: added.append(vectors.detach()))
    tokens = torch.arange(5, 25)[None]
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens))
    found = position_table(model, 20)
    assert torch.equal(found, added[0].view(20, -1))
    found.zero_()  # it is a copy
    assert not found.requires_grad and position_table(model, 20).any()


@pytest.mark.parametrize("layout", ["interleaved", "cosine_first", "halves", "tensor2tensor"])
def test_frequencies(layout, make_swapped):
    """Frequencies are those of the sinusoids' formula, in every layout, and those with which rotary turns."""
    exponents = torch.arange(4, dtype=torch.float64) / (3 if layout == "tensor2tensor" else 4)
    found = frequencies(posswap.Sinusoidal(layout=layout, base=500), one_head(8, 16))
    assert_close(found, 500**-exponents, rtol=1e-5, atol=0)
    model = make_swapped("gpt2", "rotary:theta=100", head=GPT2Model)
    assert_close(frequencies(*scheme_of(model)), 100 ** -(torch.arange(8, dtype=torch.float64) / 8))


def test_translation_of_rotary():
    """Rotary turns its pairs, dimension by dimension as `rotate` does."""
    matrix, missed = translation(posswap.Rotary(), 3, 4)
    cos, sin = math.cos(3), math.sin(3)
    assert missed == 0
    assert_close(matrix[:2], torch.tensor([[cos, -sin, 0, 0], [sin, cos, 0, 0]]))


@pytest.mark.parametrize("layout", ["interleaved", "cosine_first", "halves", "tensor2tensor"])
def test_a_shift_of_sinusoids_is_exact_at_any_size(layout):
    """T moves rows on where pairs are so slow that no fit could tell them apart; an odd number of dimensions is padded."""
    for size in (16, 128, *([7] if layout == "tensor2tensor" else [])):
        matrix, missed = translation(posswap.Sinusoidal(layout=layout), 16, size)
        rows = sinusoids(torch.arange(100), size, layout=layout)
        assert_close(rows[:-16] @ matrix.T, rows[16:], rtol=0, atol=1e-5)
        assert missed == 0 and matrix.count_nonzero() <= 2 * size
        if size % 2 == 0:
            assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rung", ["count", "normalised", "binary", "slowed"])
def test_a_shift_that_is_no_linear_map_misses(rung):
    """p -> p + k is not linear in p: what is missed is told as a share of the step, however large p is."""
    assert translation(posswap.Ladder(rung=rung), 1, 32)[1] > 0.2
    refused("shift=0 must be at least 1", translation, posswap.Ladder(rung=rung), 0, 32)
