"""Self-Extend against a loop in float64, and against rotary positions where all is near."""

import math

import pytest
import torch
from conftest import refused
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap.schemes import Geometry, self_extend

LENGTH, HEADS, DIM = 23, 2, 8


def naive(query, key, value, near: int, group: int, *, causal: bool, temper: float, turning: int = DIM):
    """The formula, pair by pair: the key turned by the distance that the query sees; the trained length is 8."""

    def turned(vector, distance):
        angles = distance * 10_000.0 ** (-torch.arange(0, turning, 2, dtype=torch.float64) / turning)
        x, y = vector[..., 0:turning:2], vector[..., 1:turning:2]
        pairs = torch.stack([x * angles.cos() - y * angles.sin(), x * angles.sin() + y * angles.cos()], dim=-1).flatten(-2)
        return torch.cat([pairs, vector[..., turning:]], dim=-1)

    scores = torch.full((*query.shape[:-1], LENGTH), float("-inf"), dtype=torch.float64)
    for i in range(LENGTH):
        seen = i + 1 if causal else LENGTH
        for j in range(seen):
            distance = j - i
            if abs(distance) >= near:
                distance = j // group - i // group + (1 if distance > 0 else -1) * (near - near // group)
            scores[..., i, j] = (query[..., i, :] * turned(key[..., j, :], distance)).sum(-1) * 0.3
        scores[..., i, :] *= 1 + temper * math.log(max(1, seen / 8))
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("near", "group", "fraction", "temper"), [(5, 3, 1.0, 0.0), (8, 4, 0.5, 0.5), (1, 2, 1.0, 1.0), (30, 4, 1.0, 0.05)]
)
def test_the_formula(monkeypatch, near, group, fraction, temper, causal):
    """Near and far, on both sides, whole or partial, in blocks of queries or at once, also where positions are not counted."""
    scheme = posswap.SelfExtend(group=group, near=near, fraction=fraction, temper=temper)
    module = scheme.attention_module(
        Geometry(hidden_size=HEADS * DIM, num_heads=HEADS, head_dim=DIM, max_positions=64, trained_positions=8)
    ).eval()
    query, key, value = torch.randn(3, 2, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    options, turning = {"near": near, "group": group, "temper": temper}, int(DIM * fraction)
    expected, both = (naive(query, key, value, causal=one, turning=turning, **options) for one in (causal, False))
    ids = torch.arange(LENGTH)[None]
    ahead = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)  # a mask of the user's own shows a causal model all keys

    def attend(keys, mask=None, whole=False):
        shared = module.prepare(ids, ids, LENGTH, keys, mask)
        assert shared.places.in_order == (keys is ids)
        turned = [module.rotate(states, shared).double() for states in (query, key)]  # rotation is in float32
        given = {"scaling": 0.3, "dropout": 0.0, "causal": causal, "return_probabilities": whole}
        return module.attend(*turned, value, mask, shared, **given)

    for blocks in (4, 5, 256):
        monkeypatch.setattr(self_extend, "_QUERIES", blocks)
        for keys in (ids, ids.clone()):  # the same tensor: nothing was given, positions are in order
            for whole in (False, True):
                output, probabilities = attend(keys, whole=whole)
                assert_close(output, expected, rtol=1e-5, atol=1e-5)
                assert probabilities is None or torch.allclose(probabilities.sum(-1), torch.ones(()).double())
        assert_close(attend(ids, ahead)[0], both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_all_near_is_rotary(make_model, family):
    """A text no longer than `near` sees rotary positions; a longer one does not, and groups of one are rotary at any length."""
    tokens = torch.randint(2, 98, (2, 60), generator=torch.Generator().manual_seed(1))
    rotary = posswap.swap(make_model(family), "rotary", max_positions=64)(tokens).logits
    for scheme, same in (("near=60,group=3", True), ("near=4", False), ("near=4,group=1", True)):
        other = posswap.swap(make_model(family), f"self-extend:{scheme},temper=0", max_positions=64)
        assert torch.allclose(other(tokens).logits, rotary, atol=1e-3) == same, scheme
        assert torch.allclose(other.train()(tokens).logits, rotary, atol=1e-3), scheme  # all is exact while it learns


def test_a_fit_is_that_of_rotary(make_model):
    """Which leaves the same weights, and the model in the mode in which it was."""
    text = torch.randint(2, 98, (80, 32), generator=torch.Generator().manual_seed(2))
    models = [posswap.swap(make_model("gpt2"), scheme, max_positions=64) for scheme in ("rotary", "self-extend:near=4")]
    for model in models:
        posswap.fit(model, text, steps=20, progress=False)
        assert not any(module.training for module in model.modules())
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("longest", "group"), [(20, 1), (32, 1), (33, 2), (64, 5), (1024, 125)])
def test_the_longest_input_stays_within_the_trained_length(longest, group):
    """Unless numbers are given: the farthest distance is then no larger than the original's table had rows."""
    geometry = Geometry(hidden_size=16, num_heads=2, head_dim=8, max_positions=longest, trained_positions=32)
    assert posswap.SelfExtend().scales(geometry) == (24, group)
    assert posswap.SelfExtend(near=3, group=7).scales(geometry) == (3, 7)


def test_no_room_for_groups(make_model):
    """Near distances that fill the trained length need a given group."""
    refused("near=32 leaves no room below 32: give group", posswap.swap, make_model("gpt2"), "self-extend:near=32")
    model = posswap.swap(make_model("gpt2"), "self-extend:near=32,group=2")
    assert "distances                 exact below 32, farther ones in groups of 2\n" in str(posswap.describe(model))
    assert "distances" not in str(posswap.describe(posswap.swap(make_model("gpt2"), "rotary")))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_sharpness_counts_what_a_query_sees(make_model, family):
    """So padding, a cache, and another text in the same row change nothing, far beyond the trained length of 32."""
    tokens = torch.randint(2, 98, (1, 60), generator=torch.Generator().manual_seed(3))
    model = posswap.swap(make_model(family), "self-extend:near=4,temper=1", max_positions=64).eval()
    expected = model(tokens).logits
    flat = posswap.swap(make_model(family), "self-extend:near=4,temper=0", max_positions=64).eval()(tokens).logits
    assert not torch.allclose(flat, expected, atol=1e-2)
    padding = torch.zeros(1, 4, dtype=torch.long)
    for rows in ([tokens, padding], [padding, tokens])[: 1 + (family == "gpt2")]:
        mask = torch.cat([torch.ones_like(row) if row is tokens else row for row in rows], dim=1)
        ids = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if family == "gpt2" else {}
        padded = model(torch.cat(rows, dim=1), attention_mask=mask, **ids).logits
        assert_close(padded[mask.bool()], expected[0], rtol=1e-3, atol=1e-3)
    if family == "gpt2":
        start = model(tokens[:, :40], use_cache=True)
        end = model(tokens[:, 40:], past_key_values=start.past_key_values)
        assert_close(torch.cat([start.logits, end.logits], dim=1), expected, rtol=1e-3, atol=1e-3)
        hidden = torch.full((60, 60), -10_000.0).triu(1)[None, None]  # a mask as it was before -inf was usual
        assert_close(model(tokens, attention_mask=hidden, use_cache=False).logits, expected, rtol=1e-3, atol=1e-3)
        packed = torch.cat([tokens[:, :4], tokens], dim=1)
        ids = torch.cat([torch.arange(4), torch.arange(60)])[None]
        assert_close(model(packed, position_ids=ids, use_cache=False).logits[:, 4:], expected, rtol=1e-3, atol=1e-3)


def test_a_mask_with_one_row(make_model):
    """A mask of four dimensions may have one row for all queries, of which there are several blocks."""
    tokens = torch.randint(2, 98, (2, 300), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, 280:] = False
    model = posswap.swap(make_model("bert", "sdpa"), "self-extend:near=4,group=3", max_positions=300).eval()
    assert_close(model(tokens, attention_mask=mask[:, None, None]).logits, model(tokens, attention_mask=mask).logits)
    causal = posswap.swap(make_model("gpt2", "sdpa"), "self-extend:near=4,group=3", max_positions=300).eval()
    whole = mask[:, None, None].expand(-1, -1, 300, -1)  # every query sees every key
    expected = causal(tokens, attention_mask=whole, use_cache=False).logits
    assert_close(causal(tokens, attention_mask=mask[:, None, None], use_cache=False).logits, expected)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_a_mask_that_looks_ahead(make_model, family):
    """A mask of the user's own may show a causal model keys on the right: all near is rotary, far ones are the mirror image."""
    tokens = torch.randint(2, 98, (1, 300), generator=torch.Generator().manual_seed(4))
    given = {"attention_mask": torch.ones(1, 1, 300, 300, dtype=torch.bool), "use_cache": False}
    rotary = posswap.swap(make_model(family, "sdpa"), "rotary", max_positions=300).eval()
    near = posswap.swap(make_model(family, "sdpa"), "self-extend:near=300,group=2,temper=0", max_positions=300).eval()
    assert_close(near(tokens, **given).logits, rotary(tokens, **given).logits, rtol=1e-3, atol=1e-3)
    far = posswap.swap(make_model(family, "sdpa"), "self-extend:near=4,group=3", max_positions=300).eval()
    expected = far(tokens, **given).logits
    far.set_attn_implementation("eager")
    assert_close(far(tokens, **given).logits, expected, rtol=1e-3, atol=1e-3)
