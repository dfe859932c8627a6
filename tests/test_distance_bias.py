"""Additive biases: slopes as BLOOM's, buckets as T5's, and closed forms that find what made the attention they are shown."""

import pytest
import torch
from conftest import refused
from torch.testing import assert_close
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from hf_posswap import Alibi, Buckets
from hf_posswap.functional.closed_form import Evidence
from hf_posswap.schemes import Geometry, Places

GEOMETRY = Geometry(hidden_size=48, num_heads=6, head_dim=8, max_positions=300, trained_positions=64)


def places(length: int) -> Places:
    """Where everything is in a text."""
    steps = torch.arange(length)[None]
    return Places(steps, steps, steps)


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_slopes_are_those_of_bloom(heads):
    """ALiBi's bias is BLOOM's up to a constant for each row."""
    module = Alibi().attention_module(Geometry(**{**vars(GEOMETRY), "num_heads": heads}))
    ours = module.bias(places(9), 9).tril()  # (1, H, 9, 9)
    theirs = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).view(1, heads, 1, 9)
    assert_close(ours, (theirs - theirs.mT).tril(), check_dtype=False)


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_those_of_t5(causal):
    """The bias of buckets is T5's, in a decoder (one side) and in an encoder (half of the buckets for each side)."""
    module = Buckets(buckets=16, reach=100).attention_module(GEOMETRY)
    with torch.no_grad():
        module.table.normal_()
    config = T5Config(d_model=48, num_heads=6, d_kv=8, relative_attention_num_buckets=16 if causal else 32)
    config.is_decoder, config.relative_attention_max_distance = causal, 100
    theirs = T5Attention(config, has_relative_attention_bias=True)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(module.table.T[: 16 if causal else 32])
        ours, expected = module.bias(places(300), 300), theirs.compute_bias(300, 300, torch.device("cpu"))
    assert_close(ours.tril() if causal else ours, expected.tril() if causal else expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scheme", [Alibi(), Buckets(buckets=6, reach=20)])
@torch.no_grad()
def test_closed_form(scheme, causal):
    """Attention that such a bias has made is found again, whatever the constant of each row was."""
    generator = torch.Generator().manual_seed(0)
    truth, module = (scheme.attention_module(GEOMETRY) for _ in range(2))
    for parameter in truth.parameters():
        parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    query, key = torch.randn(2, 3, 6, 24, 8, generator=generator)
    allowed = torch.ones(3, 1, 24, 24, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    allowed[2, :, 15:], allowed[2, ..., 15:] = False, False  # padding

    def attention(positions):
        scores = query @ key.mT * 0.3 + positions.bias(places(24), 24)
        return scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num()

    evidence = Evidence(query, key, key, attention(truth), key, allowed)
    before = (attention(module) - attention(truth)).abs().max()
    module.solve(lambda: [evidence], None, 0.3)
    assert before > 0.05
    assert_close(attention(module), attention(truth), atol=2e-4, rtol=0)


def test_fixed_slopes_stay():
    """Fixed slopes are no parameters, and a fit leaves them alone."""
    module = Alibi(slopes="fixed").attention_module(GEOMETRY)
    assert not list(module.parameters()) and not module.state_dict()
    module.solve(None, None, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"buckets": 1}, "buckets=1 must be an integer of at least 2"), ({"buckets": 64, "reach": 32}, "reach=32 must be above")],
)
def test_bad_options(options, message):
    """Bad options are refused when the scheme is made."""
    refused(message, Buckets, **options)
    refused("slopes='steep' is not one of", Alibi, slopes="steep")
