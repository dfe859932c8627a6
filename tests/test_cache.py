"""Generation, and decoding past the trained length, a table of 32: `contract.checks.cache` is about shorter inputs."""

import copy

import pytest
import torch
from conftest import CASES, KINDS, refused
from transformers import DynamicCache, StaticCache

import hf_posswap as posswap
from hf_posswap import forward
from hf_posswap.attention import CACHE

CLOSE = {"rtol": 1e-4, "atol": 2e-4}
# Those that pass the old maximum here, and two that the contract gives a cache in encoders alone.
LONGER = tuple(name for name, case in CASES.items() if case.max_positions or name in ("rotary-half", "rotary-unmarked"))


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
def recompute(model, tokens, mask, steps: int = 8):
    """Greedy tokens by a full forward for each, with no cache at all."""
    for _ in range(steps):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
    return tokens


@pytest.mark.only(cases=LONGER)
@pytest.mark.parametrize("left", [0, 9])
def test_generate_equals_recomputing(model, prompt, left):
    """Greedy tokens with either cache, a prefill in chunks or none are those of full forwards, padded on the left or not."""
    mask = torch.ones_like(prompt)
    mask[1, :left] = 0
    expected = recompute(model, prompt, mask)
    ways = [{}, {"cache_implementation": "static", "disable_compile": True}, {"use_cache": False}]
    for options in ways + ([] if left else [{"prefill_chunk_size": 7}]):
        assert torch.equal(generate(model, prompt, attention_mask=mask, **options), expected), options


@pytest.mark.only(cases=("rotary",), families=("gpt2",))
def test_a_cache_with_a_span_is_reset(make_model, prompt):
    """What was read before is forgotten, keys and count."""
    model, cache = posswap.swap(make_model("gpt2"), "rotary", span=8), DynamicCache()
    first = model(prompt[:, :4], **{CACHE: cache}).logits
    cache.reset()
    torch.testing.assert_close(model(prompt[:, :4], **{CACHE: cache}).logits, first)


@pytest.mark.only(cases=("rotary", "relative", "buckets"))
@pytest.mark.parametrize("kin", ["electra-decoder", "roberta-decoder", "opt", "biogpt"])
def test_decoders_of_kin(make_swapped, kin, case):
    """A row padded on the left writes what it writes alone; beams are found with a cache and without."""
    model = make_swapped(kin, case.scheme, "sdpa", max_positions=64)
    prompt = torch.randint(3, 98, (2, 40), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    prompt = prompt.masked_fill(mask == 0, model.config.pad_token_id or 0)
    for options in ({}, {"num_beams": 3}):
        both = generate(model, prompt, attention_mask=mask, **options)
        assert torch.equal(both, generate(model, prompt, attention_mask=mask, use_cache=False, **options))
        assert torch.equal(both[1, 9:], generate(model, prompt[1:, 9:], **options)[0])


@pytest.mark.only(backends=("eager",), cases=KINDS)
def test_assisted_decoding(model, make_swapped, family, case, prompt):
    """Tokens drafted by another model, or looked up in the prompt, change nothing in what is generated."""
    prompt = prompt[:1, 4:]  # transformers drafts past max_length: leave it room
    expected = recompute(model, prompt, torch.ones_like(prompt))
    options = {"max_positions": case.max_positions, "seed": 0}
    assistant = make_swapped(family, case.scheme, **options)
    with torch.no_grad():  # close to the model, so that some drafts are taken and others rejected
        for parameter in assistant.parameters():
            parameter.mul_(1.02)
    assistant.generation_config.eos_token_id = None
    assert torch.equal(generate(model, prompt, assistant_model=assistant), expected)
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=3), expected)


@pytest.mark.only(backends=("eager",), cases=("rotary",))
def test_longer_than_the_model_raises(model, prompt, case):
    """Generation that would pass the last position stops with an error, not with wrong tokens."""
    refused(r"reaches (49|65) positions", generate, model, prompt, max_new_tokens=30)


@pytest.mark.parametrize("scheme", ["alibi", "relative:clip=4", "relative:clip=4,key_query=true", "self-extend:near=4,group=2"])
def test_a_sliding_cache_shows_no_later_token(make_swapped, scheme):
    """Read in chunks, with a cache that forgets, a token changes nothing before it."""
    model = make_swapped("gpt2", scheme)
    model.set_attn_implementation("eager")
    config = copy.deepcopy(model.config)
    config.sliding_window, config.layer_types = 9, ["sliding_attention"] * config.num_hidden_layers

    def read(tokens):
        cache = DynamicCache(config=config)
        return torch.cat([model(chunk, **{CACHE: cache}).logits for chunk in tokens.split(4, 1)], 1)

    tokens = torch.arange(24)[None] + 5
    changed = tokens.clone()
    changed[0, -1] = 40
    with torch.no_grad():
        assert torch.equal(read(tokens)[:, :-1], read(changed)[:, :-1])


@pytest.mark.parametrize("scheme", ["relative:clip=4", "relative:clip=4,key_query=true", "alibi", "self-extend:near=4,group=2"])
@pytest.mark.parametrize("options", [{}, {"span": 6, "first": 2}])
@torch.no_grad()
def test_a_static_cache_as_on_a_gpu(make_swapped, scheme, options, monkeypatch):
    """There a tensor counts what the cache holds, and keys are as many as it has room for; ids may be int32."""

    def slots(cache, inputs):
        past = cache.get_seq_length() if cache is not None else 0
        return past, torch.arange(inputs.shape[-1])[None] + past

    model, tokens = make_swapped("gpt2", scheme, "sdpa", **options), torch.arange(24).view(2, 12) + 5
    expected = model(tokens, use_cache=False).logits
    monkeypatch.setattr(forward, "_slots", slots)
    wide = torch.ones(2, 20, dtype=torch.int64)
    for mask, ids in ((None, None), (wide, None), (None, torch.arange(12, dtype=torch.int32)[None])):
        cache, logits = StaticCache(config=model.config, max_cache_len=20), []
        cache.early_initialization(batch_size=2, num_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
        for place, part in zip((0, 5, 9, 10), tokens.split([5, 4, 1, 2], dim=1), strict=True):
            given = {} if ids is None else {"position_ids": ids[:, place : place + part.shape[1]]}
            logits.append(model(part, attention_mask=mask, **{CACHE: cache}, **given).logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, **CLOSE)


@pytest.mark.parametrize("scheme, options", [("rotary", {"span": 8}), ("alibi", {}), ("buckets", {})])
def test_rows_that_a_gpu_accepts(make_swapped, scheme, options, monkeypatch):
    """Keys that carry positions lie in rows of a multiple of 16 bytes: CUDA's attention refuses others, CPUs take any."""
    attend, seen = torch.nn.functional.scaled_dot_product_attention, set()

    def check(query, key, value, **more):
        for one in (query, key, value):
            seen.add(one.stride()[:-1])
            assert one.stride(-1) == 1 and all(stride * one.element_size() % 16 == 0 for stride in one.stride()[:-1])
        return attend(query, key, value, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", check)
    model = make_swapped("gpt2", scheme, "sdpa", max_positions=64, **options).bfloat16()
    generate(model, torch.arange(20)[None] + 5)
    assert len(seen) > 1
