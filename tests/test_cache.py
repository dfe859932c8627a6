"""Generation, and decoding past the trained length: `contract.checks.cache` is about shorter inputs.

Where the scheme was set up for more positions than the table held, all sequences here run past that old maximum of 32.
"""

import pytest
import torch
from conftest import KINDS

import hf_posswap as posswap

CLOSE = {"rtol": 1e-4, "atol": 2e-4}


pytestmark = pytest.mark.only(families=("bert-decoder", "gpt2"))


@pytest.fixture
def prompt(case) -> torch.Tensor:
    """Two rows that end 8 tokens before the model's longest input."""
    length = 24 if case.max_positions is None else 40
    return torch.randint(2, 98, (2, length), generator=torch.Generator().manual_seed(3))


def generate(model, prompt, **options):
    """Eight new tokens without sampling and without an end."""
    model.generation_config.eos_token_id = None
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 8, **options}
    return model.generate(prompt, **options)


@torch.no_grad()
def recompute(model, tokens, steps: int, mask=None):
    """Greedy tokens by a full forward for each, with no cache at all."""
    mask = torch.ones_like(tokens) if mask is None else mask
    for _ in range(steps):
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(tokens, attention_mask=mask, position_ids=position_ids, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, mask[:, :1].fill_(1) if mask.all() else torch.ones_like(mask[:, :1])], dim=1)
    return tokens


def test_generate_equals_recomputing(model, prompt):
    """Greedy tokens with a dynamic or static cache, a prefill in chunks, and no cache are those of full forwards."""
    expected = recompute(model, prompt, 8)
    assert expected.shape[1] == prompt.shape[1] + 8
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}):
        assert torch.equal(generate(model, prompt, **options), expected), options
    assert torch.equal(generate(model, prompt, prefill_chunk_size=7), expected)


def test_generate_left_padded(model, prompt):
    """A left-padded row continues as it does alone, with a dynamic and with a static cache."""
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    alone = generate(model, prompt[1:, 9:])[:, -8:]
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        both = generate(model, prompt, attention_mask=mask, **options)
        assert torch.equal(both[1:, -8:], alone), options
        assert torch.equal(both[:1], generate(model, prompt[:1])), options


@pytest.mark.only(cases=KINDS)
def test_beams(model, prompt):
    """Beam search, which reorders the cache at every step, finds the same beams without a cache."""
    with_cache = generate(model, prompt, num_beams=3)
    assert torch.equal(with_cache, generate(model, prompt, num_beams=3, use_cache=False))


@pytest.mark.only(backends=("eager",), cases=KINDS)
def test_assisted_decoding(model, make_swapped, family, case, prompt):
    """Tokens drafted by another model, or looked up in the prompt, change nothing in what is generated."""
    prompt = prompt[:1, 4:]  # transformers drafts past max_length: leave it room
    expected = recompute(model, prompt, 8)
    options = {"max_positions": case.max_positions, "seed": 0}
    assistant = make_swapped(family, case.scheme, **options)
    with torch.no_grad():  # close to the model, so that some drafts are taken and others rejected
        for parameter in assistant.parameters():
            parameter.mul_(1.02)
    assistant.generation_config.eos_token_id = None
    assert torch.equal(generate(model, prompt, assistant_model=assistant), expected)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), expected)


@pytest.mark.only(backends=("eager",), cases=KINDS)
def test_longer_than_the_model_raises(model, prompt, case):
    """Generation that would pass the last position stops with an error, not with wrong tokens."""
    with pytest.raises(posswap.PosswapError, match=r"reaches 3[3-9] positions|reaches (49|65) positions"):
        generate(model, prompt, max_new_tokens=30)
