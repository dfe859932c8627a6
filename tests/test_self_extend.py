"""Self-Extend against a loop in float64, and against rotary positions where all is near."""

import pytest
import torch
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap.schemes import Geometry, self_extend

LENGTH, HEADS, DIM = 23, 2, 8


def naive(query, key, value, near: int, group: int, *, causal: bool, turning: int = DIM, theta: float = 10_000.0):
    """The formula, pair by pair: the key turned by the distance that the query sees."""

    def turned(vector, distance):
        angles = distance * theta ** (-torch.arange(0, turning, 2, dtype=torch.float64) / turning)
        x, y = vector[..., 0:turning:2], vector[..., 1:turning:2]
        pairs = torch.stack([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], dim=-1).flatten(-2)
        return torch.cat([pairs, vector[..., turning:]], dim=-1)

    scores = torch.full((*query.shape[:-1], LENGTH), float("-inf"), dtype=torch.float64)
    for i in range(LENGTH):
        for j in range(i + 1 if causal else LENGTH):
            distance = j - i
            if abs(distance) >= near:
                distance = j // group - i // group + (1 if distance > 0 else -1) * (near - near // group)
            scores[..., i, j] = (query[..., i, :] * turned(key[..., j, :], distance)).sum(-1) * 0.3
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("blocks", [4, 5, 256])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("near", "group", "fraction"), [(5, 3, 1.0), (8, 4, 0.5), (1, 2, 1.0), (30, 4, 1.0)])
def test_the_formula(monkeypatch, near, group, fraction, causal, blocks):
    """Near and far, on both sides, whole or partial, in blocks of queries or at once, also where positions are not counted."""
    monkeypatch.setattr(self_extend, "_QUERIES", blocks)
    scheme = posswap.SelfExtend(group=group, near=near, fraction=fraction)
    module = scheme.attention_module(
        Geometry(hidden_size=HEADS * DIM, num_heads=HEADS, head_dim=DIM, max_positions=64, trained_positions=32)
    )
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = naive(query, key, value, near, group, causal=causal, turning=int(DIM * fraction))
    options = {"scaling": 0.3, "dropout": 0.0, "causal": causal}
    ids = torch.arange(LENGTH)[None]
    for keys in (ids, ids.clone()):  # the same tensor: nothing was given, positions are in order
        shared = module.prepare(ids, ids, LENGTH, keys)
        turned = [module.rotate(states, shared).double() for states in (query, key)]  # rotation is in float32
        for whole in (False, True):
            output, probabilities = module.attend(*turned, value, None, shared, return_probabilities=whole, **options)
            assert_close(output, expected, rtol=1e-5, atol=1e-5)
            assert probabilities is None or torch.allclose(probabilities.sum(-1), torch.ones(()).double())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_all_near_is_rotary(make_model, family):
    """A text no longer than `near` sees rotary positions; a longer one does not, and groups of one are rotary at any length."""
    tokens = torch.randint(2, 98, (2, 30), generator=torch.Generator().manual_seed(1))
    rotary = posswap.swap(make_model(family), "rotary")(tokens).logits
    for scheme, same in (("near=30", True), ("near=4", False), ("near=4,group=1", True)):
        other = posswap.swap(make_model(family), f"self-extend:{scheme}")(tokens).logits
        assert torch.allclose(other, rotary, atol=1e-3) == same, scheme


def test_near_is_half_of_the_trained_length():
    """Unless it is given."""
    geometry = Geometry(hidden_size=16, num_heads=2, head_dim=8, max_positions=64, trained_positions=32)
    assert posswap.SelfExtend().attention_module(geometry).near == 16
    assert posswap.SelfExtend(near=3).attention_module(geometry).near == 3
