"""Attention with a span: block by block as with a dense mask, caches that forget, saving, and what is refused."""

from unittest.mock import patch

import pytest
import torch
from conftest import Operations, refused
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache, StaticCache

import hf_posswap as posswap
from hf_posswap.functional.banded import Span, banded_attention
from hf_posswap.span_cache import SpanLayer

# One of each kind: in the embeddings, in queries and keys, in attention itself.
SCHEMES = ["learned:extend=tile", "rotary", "relative:clip=3", "relative:clip=3,key_query=true", "self-extend:group=3,near=4"]


@pytest.fixture
def text():
    return torch.randint(2, 98, (2, 40), generator=torch.Generator().manual_seed(7))


def dense(span, first, length, causal, padding=None):
    """The mask that a span amounts to, (1 or B, 1, L, L) bool, by a loop."""
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            near = abs(i - j) < span or j < first or (i < first and not causal)
            mask[0, 0, i, j] = near and (j <= i or not causal)
    return mask if padding is None else mask & padding[:, None, None].bool()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("first", [0, 3])
@torch.no_grad()
def test_blocks_are_what_the_mask_says(make, family, scheme, first, text):
    """A span gives what its mask written out gives, on sdpa (block by block) and on eager, with and without padding."""
    span, causal = 6, family != "bert"
    plain = make(family, scheme, "eager")
    padding = torch.ones_like(text)
    padding[1, 29:] = 0
    for inputs, mask in (({"attention_mask": padding}, padding), ({}, None)):
        expected = plain(text, attention_mask=dense(span, first, 40, causal, mask)).logits
        real = padding.bool() if mask is not None else torch.ones_like(text).bool()
        for backend in ("sdpa", "eager"):
            given = make(family, scheme, backend, span=span, first=first)(text, use_cache=False, **inputs).logits
            assert_close(given[real], expected[real], rtol=1e-4, atol=1e-4)
    assert (plain(text).logits - expected).abs().max() > 0.01


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["roberta", "opt"])
@torch.no_grad()
def test_padding_without_positions_of_its_own(make, family, scheme, text):
    """Families that count no padding go block by block, too, if it is on the right."""
    padding = torch.ones_like(text)
    padding[1, 29:] = 0
    models = [make(family, scheme, backend, span=6) for backend in ("sdpa", "eager")]
    text[1, 29:] = models[0].config.pad_token_id
    with patch("hf_posswap.attention.banded_attention", wraps=banded_attention) as blocks:
        one, two = (model(text, attention_mask=padding) for model in models)
    assert blocks.called
    assert_close(one.logits[padding.bool()], two.logits[padding.bool()], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_short_text_with_gaps(make, family, text):
    """Distances are those of positions, also in a text of fewer tokens than the span."""
    positions, ones = torch.tensor([[0, 3, 20, 21]]), torch.ones_like(text[:, :4])
    seen = Span(6, 2).allowed(positions, positions, causal=family != "bert")[:, None].expand(2, -1, -1, -1)
    expected = make(family, "rotary", "eager")(text[:, :4], position_ids=positions, attention_mask=seen).logits
    for backend in ("sdpa", "eager"):
        model = make(family, "rotary", backend, span=6, first=2)
        assert_close(model(text[:, :4], position_ids=positions, attention_mask=ones).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("padding", [slice(0), slice(13), slice(10, 23)], ids=["none", "left", "inside"])
@torch.no_grad()
def test_a_cache_that_forgets(make, scheme, text, padding):
    """Decoding with a cache that keeps only the span gives what no cache gives, in parts of any size, padded or not."""
    model = make("gpt2", scheme, span=6, first=3)
    mask = torch.ones_like(text)
    mask[1, padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = model(text, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for parts in ([1] * 40, [9, 8, 1, 1, 12, 9], [40]):
        cache, start, logits = DynamicCache(config=model.config), 0, []
        for part in parts:
            here = slice(start, start + part)
            given = {} if mask.all() else {"attention_mask": mask[:, : start + part]}
            out = model(text[:, here], past_key_values=cache, position_ids=positions[:, here], **given)
            logits, start = [*logits, out.logits], start + part
            assert cache.get_seq_length() == start and cache.layers[1].keys.shape[-2] <= 3 + 5
        assert_close(torch.cat(logits, dim=1)[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-4)
        assert all(type(layer) is SpanLayer for layer in cache.layers)


@torch.no_grad()
def test_static_caches_and_moved_ones(make, text):
    """A static cache keeps its size, and is masked; rows of one that forgets can be selected; a prefix gets its positions."""
    model = make("gpt2", "relative:clip=3", span=6, first=3)
    whole = model(text, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=48)
    steps = [model(text[:, a:b], past_key_values=cache).logits for a, b in ((0, 20), (20, 21), (21, 40))]
    assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)
    cache, places = StaticCache(config=model.config, max_cache_len=48), torch.arange(40)[None]
    assert_close(model(text, position_ids=places, past_key_values=cache).logits, whole, rtol=1e-4, atol=1e-4)
    static = {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": 7, "max_new_tokens": 8}
    written = model.generate(text, do_sample=False, eos_token_id=None, **static)
    assert torch.equal(written, model.generate(text, do_sample=False, eos_token_id=None, max_new_tokens=8))
    one, other = make("gpt2", "rotary", span=6, first=3, n_layer=1), make("gpt2", "rotary", n_layer=1)
    prefix = other(text[:, :20]).past_key_values  # in a single layer the span makes no difference to keys
    rest = one(text, use_cache=False).logits[:, 20:]
    assert_close(one(text[:, 20:], past_key_values=prefix).logits, rest, rtol=1e-4, atol=1e-4)
    cache = model(text[:, :30]).past_key_values
    cache.reorder_cache(torch.tensor([1, 0]))
    assert_close(model(text[[1, 0], 30:], past_key_values=cache).logits, whole[[1, 0], 30:], rtol=1e-4, atol=1e-4)
    rebuilt = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
    refused("does not know how many tokens were read: pass position_ids", model, text[:, :1], past_key_values=rebuilt)
    refused("has forgotten keys beyond the span", cache.crop, -1)
    for other in ({"span": 7}, {}):
        refused("this cache was made for Span", make("gpt2", "rotary", **other), text[:, :1], past_key_values=cache)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_packed_texts_stay_apart(make, text, backend):
    """Texts packed in one row without a mask do not see each other, nor each other's first tokens."""
    model = make("gpt2", "rotary", backend, span=6, first=2)
    positions = torch.cat([torch.arange(25), torch.arange(15)]).expand(2, -1)
    alone = torch.cat([model(part, use_cache=False).logits for part in text.split([25, 15], dim=1)], dim=1)
    packed = model(text, position_ids=positions, use_cache=True)
    assert_close(packed.logits, alone, rtol=1e-4, atol=1e-4)
    one = {"input_ids": text[:, :1], "position_ids": positions[:, -1:] + 1}
    begun = model(text[:, :25]).past_key_values
    for given in (
        {"input_ids": text, "position_ids": positions, "attention_mask": torch.ones_like(text)},
        one | {"past_key_values": packed.past_key_values},
        one | {"past_key_values": begun, "position_ids": positions[:, :1]},
    ):
        refused("position_ids go back", model, **given)
    assert begun.get_seq_length() == 25
    compiled, changed = torch.compile(model, backend="eager"), text.clone()
    packed = {"position_ids": positions, "use_cache": False}
    changed[:, -1] += 1  # a trace does not see that positions go back, but the last token is behind all others
    before, after = (compiled(one, attention_mask=torch.ones_like(text), **packed).logits for one in (text, changed))
    assert torch.equal(before[:, :-1], after[:, :-1])
    rest = model(text[:, 25:], past_key_values=begun, position_ids=torch.arange(25, 40)[None]).logits  # one row for all
    assert_close(rest, model(text, use_cache=False).logits[:, 25:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "first"), [("gpt2", 4), ("bert", 1), ("bert-decoder", 4)])
def test_first_by_default(make_model, family, first):
    """All see [CLS] in an encoder, as in the recipes of embedders, and four tokens in a causal model."""
    assert posswap.describe(posswap.swap(make_model(family), "rotary", span=6)).span.first == first


@torch.no_grad()
def test_saved_described_restored(make, family, tmp_path, text):
    """The span is in config.json, in the weights' digest and in `describe`; `restore` takes it away."""
    model = make(family, "rotary", span=6, first=2)
    model.save_pretrained(tmp_path)
    again = (AutoModelForCausalLM if family == "gpt2" else AutoModel).from_pretrained(tmp_path).eval()
    assert "to distances below 6 and the first 2 tokens" in str(posswap.describe(again))
    if family == "gpt2":
        assert torch.equal(again(text).logits, model(text).logits)
    again.config.position_scheme["span"]["span"] = 7
    again.config.save_pretrained(tmp_path)
    says = "not the one that these weights were saved with"
    refused(says, AutoModel.from_pretrained, tmp_path, error=posswap.CheckpointError)
    posswap.restore(model)
    assert posswap.describe(model).span is None and "position_scheme" not in model.config.to_dict()


@torch.no_grad()
def test_a_loaded_model_gets_a_span(make, tmp_path, text):
    """A scheme that has no module in attention gets one for the span, and keeps what it learned."""
    model = make("gpt2", "none")
    model.save_pretrained(tmp_path)
    again = posswap.swap(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), "none", span=40, first=2)
    assert_close(again(text).logits, model(text).logits)
    longest = posswap.describe(again).max_positions
    remedy = rf"call posswap.swap\(model, 'none', max_positions={longest + 1}, span=40, first=2\), or truncate"
    refused(remedy, again, torch.full((1, longest + 1), 5))
    again.save_pretrained(tmp_path)
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path).eval()(text).logits, again(text).logits)


@torch.no_grad()
def test_cross_attention_has_a_cache_of_its_own(make_swapped, text):
    """A decoder that reads an encoder's states, and makes its own cache, keeps the span in the part of self-attention."""
    model = make_swapped("bert-decoder", "rotary", max_positions=64, span=6, first=2, add_cross_attention=True)
    states = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    whole = model(text, encoder_hidden_states=states, use_cache=False)[0]
    start = model(text[:, :30], encoder_hidden_states=states, use_cache=True)
    rest = model(text[:, 30:], encoder_hidden_states=states, past_key_values=start.past_key_values)
    assert_close(torch.cat([start[0], rest[0]], dim=1), whole, rtol=1e-4, atol=1e-4)


def test_gradients(make, family, text):
    """Block by block, gradients are those of the mask."""
    gradients = []
    for options, mask in (({"span": 6, "first": 3}, None), ({}, dense(6, 3, 40, family != "bert"))):
        model = make(family, "relative:clip=3", "sdpa", **options).train()
        model(text, attention_mask=mask).logits.pow(2).mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) > 20
    for name, value in gradients[0].items():
        assert_close(value, gradients[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_a_mask_that_is_added(make, family, text, backend):
    """A floating mask of four dimensions is added to scores, as without a span: -10,000 hides, -2 makes less likely."""
    causal, seen = family != "bert", dense(9, 0, 40, family != "bert").expand(2, -1, -1, -1)
    model, plain = make(family, "rotary", backend, span=20), make(family, "rotary", backend)
    for low in (-1e4, -2.0):
        near = torch.zeros(2, 1, 40, 40).masked_fill(
            ~dense(20, model.config.position_scheme["span"]["first"], 40, causal), -1e9
        )
        added = torch.zeros(2, 1, 40, 40).masked_fill(~seen, low)
        expected = plain(text, attention_mask=near + added).logits
        assert_close(model(text, attention_mask=added).logits, expected, rtol=1e-3, atol=1e-3)
    assert model.bfloat16()(text, attention_mask=added).logits.dtype == torch.bfloat16  # whatever the mask's type is


@torch.no_grad()
def test_a_whole_mask_and_then_a_row(make, text):
    """Padding that a mask of four dimensions hides is padding in the cache, too, for what is read with one of two."""
    model, real = make("gpt2", "rotary", "eager", span=6, first=3), torch.ones_like(text)
    real[1, :4] = 0
    ids = (real.cumsum(-1) - 1).clamp(min=0)
    whole = torch.ones(20, 20).tril().bool() & real[:, None, None, :20].bool()
    expected = model(text[:, :20], attention_mask=real[:, :20], position_ids=ids[:, :20]).past_key_values
    given = model(text[:, :20], attention_mask=whole, position_ids=ids[:, :20]).past_key_values
    for place in range(20, 24):
        asked = {"attention_mask": real[:, : place + 1], "position_ids": ids[:, place : place + 1]}
        one, other = (model(text[:, place : place + 1], past_key_values=cache, **asked).logits for cache in (expected, given))
        assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_a_span_asks_the_config(make, text):
    """Whether a model looks ahead is said in its config, not in a call; a decoder without a cache, ESM, needs none."""
    for backend in ("eager", "sdpa"):
        model = make("gpt2", "rotary", backend, span=6)
        refused("is_causal=False belongs in the config", model, text, is_causal=False)
        model(text, is_causal=True)
    model = make("esm", "rotary", "sdpa", span=6, is_decoder=True)
    assert_close(model(text).logits, model(text, use_cache=False).logits)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_masks_longer_than_the_text(make, text, backend):
    """Of a static cache's fixed mask, columns are those of the tokens read."""
    model = make("gpt2", "rotary", span=5, backend=backend)
    cache, parts = StaticCache(config=model.config, max_cache_len=32), []
    for start, end in ((0, 12), (12, 13), (13, 20)):
        mask = (torch.arange(32) < end).long().expand(2, -1)
        parts.append(model(text[:, start:end], attention_mask=mask, past_key_values=cache)[0])
    assert_close(torch.cat(parts, dim=1), model(text[:, :20], use_cache=False)[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_masks_that_do_not_fit(make, text):
    """Other columns or rows, three dimensions, four for a cache that has forgotten, cached tokens hidden or shown later."""
    for family in ("bert", "opt", "gpt2"):
        model = make(family, "rotary", span=5)
        for shape in ((3, 20), (2, 16), (2, 24), (2, 20, 20)):
            refused("does not fit 2 row", model, text[:, :20], attention_mask=torch.ones(shape))
    hide = torch.ones(2, 13)
    hide[:, 8:10] = 0
    for span in (5, 50):
        model = make("gpt2", "rotary", span=span)
        for first, later in ((None, hide), (hide[:, :12], torch.ones(2, 13))):
            cache = model(text[:, :12], attention_mask=first).past_key_values
            if span == 50 or first is None:  # what was forgotten, a later mask may show in vain
                refused("from the first call on", model, text[:, 12:13], attention_mask=later, past_key_values=cache)
    model, whole = make("gpt2", "rotary", span=5), torch.ones(2, 1, 1, 13, dtype=torch.bool)
    cache = model(text[:, :12]).past_key_values
    refused("a mask of 2 dimensions", model, text[:, 12:13], attention_mask=whole, past_key_values=cache)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_packed_texts_in_a_mix(make, text, backend):
    """Layers without a span keep packed texts apart, too, with and without a cache, and encoders as decoders do."""
    positions = torch.tensor([[*range(9), *range(11)]])
    for family in ("gpt2", "opt", "bert", "roberta"):
        model = make(family, "mixed:layers=[none:span=false,rotary]", span=32, first=0, backend=backend)
        alone = torch.cat([model(text[:1, :9])[0], model(text[:1, 9:20])[0]], dim=1)
        for use_cache in (True, False):
            assert_close(model(text[:1, :20], position_ids=positions, use_cache=use_cache)[0], alone, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_padding_that_no_mask_names_begins_no_text(make, text):
    """RoBERTa counts past a padding token: what follows one, without a mask, is still the same text."""
    model = make("roberta", "rotary", span=64)
    text[:, 9] = model.config.pad_token_id
    assert_close(model(text)[0], model(text, attention_mask=torch.ones_like(text))[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_replicas_of_data_parallel(make, family, text):
    """A replica has its weights as plain attributes, and no parameters to ask for a dtype."""
    model = make(family, "rotary", "eager", span=5)
    copies = {one: one._replicate_for_data_parallel() for one in model.modules()}
    for one, replica in copies.items():
        replica._modules = {name: copies[part] for name, part in one.named_children()}
        for name, weight in one._parameters.items():
            setattr(replica, name, None if weight is None else weight.detach())
    for mask in (None, dense(9, 0, 40, causal=False)):
        assert_close(copies[model](text, attention_mask=mask)[0], model(text, attention_mask=mask)[0])


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_in_linear_time(causal):
    """A text of twice the length writes about twice the numbers, forward and backward: no block has a gradient of all keys."""

    def numbers(length: int) -> int:
        states = [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]

        def attend(query, key, value, mask, *_):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2)

        written = []
        with Operations(lambda name, taken, made: written.extend(one.numel() for one in made)):
            banded_attention(attend, *states, Span(16, 1), None, causal=causal).sum().backward()
        return sum(written)

    assert numbers(1280) < 2.2 * numbers(640)


@pytest.mark.parametrize(
    ("scheme", "options", "message"),
    [
        ("rotary", {"span": 0}, "span=0 must be an integer from 1 to 64"),
        ("rotary", {"span": 65}, "span=65 must be an integer from 1 to 64"),
        ("rotary", {"span": 8, "first": -1}, "first=-1 must be an integer from 0"),
        ("rotary", {"span": 2.5}, "span=2.5 must be"),
        ("rotary", {"span": True}, "span=True must be"),
        ("rotary", {"span": 6, "first": 65}, "first=65 must be"),
        ("rotary", {"first": 8}, "first=8 is about a span"),
        ("mixed:layers=[none:span=false]", {"span": 6}, "span=6 holds in no layer"),
    ],
)
def test_refused(make_model, scheme, options, message):
    """A span that cannot be is refused before anything is changed."""
    model = make_model("gpt2")
    refused(message, posswap.swap, model, scheme, max_positions=64, **options)
    assert not posswap.describe(model).swapped
