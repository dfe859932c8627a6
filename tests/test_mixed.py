"""Layers with different schemes: against each scheme alone, against models put together by hand, with spans and caches."""

import json

import pytest
import torch
from conftest import refused
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache, StaticCache

import hf_posswap as posswap
from hf_posswap.contract.subject import padded
from hf_posswap.scheme_entry import DIGEST
from hf_posswap.schemes import parse_scheme
from hf_posswap.span_cache import SpanLayer

SPAN = {"span": 6, "first": 2}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


MIXES = [
    ("sdpa", {}, "rotary", "none"),
    ("eager", {}, "none", "relative:clip=3"),
    ("sdpa", {}, "relative:clip=3", "rotary"),
    ("sdpa", {}, "alibi", "relative:clip=3"),
    ("sdpa", SPAN, "none:span=false", "rotary"),
    ("eager", SPAN, "rotary", "alibi:slopes=fixed,span=false"),
    ("sdpa", SPAN, "relative:clip=3", "none:span=false"),
    ("eager", SPAN, "relative:clip=3,span=false", "relative:clip=3"),
]
mixes = pytest.mark.parametrize(("backend", "span", "first", "second"), MIXES, ids=lambda value: str(value))


def by_hand(make, family, mixed, entries, backend, span):
    """Return a function like `mixed`, made of two models of one scheme each: the second is handed what the first has read."""
    models = []
    weights = {name: value for name, value in mixed.state_dict().items() if not name.endswith(DIGEST)}  # of another scheme
    for entry in entries:
        scheme = entry.replace(":span=false", "").replace(",span=false", "")
        models.append(make(family, scheme, backend, **({} if scheme != entry else span)))
        models[-1].load_state_dict(weights, strict=False)
    first, second = models

    def run(tokens, **inputs):
        states = first.base_model(tokens, output_hidden_states=True, use_cache=False, **inputs).hidden_states[1]
        layer = second.architecture.layers(second.base_model)[1]
        hook = layer.register_forward_pre_hook(lambda _, arguments: (states, *arguments[1:]))
        logits = second(tokens, use_cache=False, **inputs).logits
        hook.remove()
        return logits

    return run


@mixes
@torch.no_grad()
def test_layers_have_their_own(make, family, backend, span, first, second, tokens):
    """Each layer computes what it does in a model of its scheme alone, within the span or beyond, padded or not."""
    model = make(family, posswap.Mixed(layers=[first, second]), backend, **span)
    expected = by_hand(make, family, model, (first, second), backend, span)
    for inputs in ({}, padded(after=7), padded(before=7)):
        real = inputs.get("attention_mask", torch.ones_like(tokens)).bool()
        assert_close(model(tokens, use_cache=False, **inputs).logits[real], expected(tokens, **inputs)[real], **CLOSE)
    turned = make(family, posswap.Mixed(layers=[second, first]), backend, **span)
    assert (turned(tokens).logits - model(tokens).logits).abs().max() > 0.01


@mixes
@torch.no_grad()
def test_caches(make, backend, span, first, second, tokens):
    """With a cache, dynamic or static, padded or not, in parts of any size, as without; layers with a span forget."""
    model = make("gpt2", posswap.Mixed(layers=[first, second]), backend, **span)
    for inputs in (padded(), padded(before=13)):
        mask, positions = inputs.values()
        whole = model(tokens, use_cache=False, **inputs).logits[mask.bool()]
        for cache in (None, DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=24)):
            start, logits = 0, []
            for part in tokens.split((11, 1, 5, 1, 2), dim=1):
                end = start + part.shape[1]
                given = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
                out = model(part, past_key_values=cache, **given)
                cache, start, logits = out.past_key_values, end, [*logits, out.logits]
            assert_close(torch.cat(logits, dim=1)[mask.bool()], whole, **CLOSE)
            if isinstance(cache, DynamicCache):
                forgets = [bool(span) and "span=false" not in entry for entry in (first, second)]
                assert [type(layer) is SpanLayer for layer in cache.layers] == forgets
                assert [layer.keys.shape[-2] for layer in cache.layers] == [7 if one else 20 for one in forgets]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "attention_mask": mask[:, :12], "num_beams": 2}
    assert torch.equal(*(model.generate(tokens[:, :12], use_cache=cached, **options) for cached in (True, False)))


@torch.no_grad()
def test_saved_described_restored(make, make_model, tmp_path, tokens):
    """config.json holds every option of every layer; a loaded model computes the same; `restore` gives the original back."""
    model = make("gpt2", "mixed:layers=[none:span=false, rotary:{theta=100,layout=half}]", **SPAN)
    model.save_pretrained(tmp_path)
    entry = json.loads((tmp_path / "config.json").read_text())["position_scheme"]
    told = [(one["name"], one.get("span", True), one.get("theta")) for one in entry["layers"]]
    assert told == [("none", False, None), ("rotary", True, 100)]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens).logits, model(tokens).logits) and again.position_scheme == model.position_scheme
    told = str(posswap.describe(again))
    assert "-> mixed:layers=[none:{span=false}, rotary:{theta=100,layout=half}]" in " ".join(told.split())
    assert "below 6 and the first 2 tokens, in 1 of 2 layers" in told
    mix = make("gpt2", "mixed:layers=[none, rotary]")
    refused("has mixed positions", posswap.export_native, mix, error=posswap.UnsupportedModelError)
    assert torch.equal(posswap.restore(model)(tokens).logits, make_model("gpt2", "sdpa")(tokens).logits)


def test_fit(make_model, family):
    """Each layer is solved by its own scheme's closed form, and a layer without one is left to the steps."""
    model = posswap.swap(make_model(family), "mixed:layers=[relative:clip=4, none]")
    text = torch.randint(2, 98, (40, 24), generator=torch.Generator().manual_seed(0))
    report = posswap.fit(model, text, steps=5, progress=False)
    assert [layer.solved is None for layer in report.layers] == [False, True]
    assert report.after.total < report.before.total


def test_warm_start_balances_turning_layers(make_model):
    """In an encoder the basis of a rotary layer is balanced, and that of another one is left alone."""
    plain, model = make_model("bert"), posswap.swap(make_model("bert"), "mixed:layers=[none, rotary]")
    pairs = zip(*(one.base_model.encoder.layer for one in (plain, model)), strict=True)
    same = [torch.equal(one.attention.self.query.weight, other.attention.self.query.weight) for one, other in pairs]
    assert same == [True, False]


def test_claims_and_shared_layers(make_model):
    """What a mix claims follows from its entries; layers that share their weights count once."""
    one, other = parse_scheme("mixed:layers=[alibi, relative, none]"), posswap.Mixed()
    assert (one.implementations, one.shift_invariant, one.resizable) == (("eager", "sdpa"), True, True)
    assert other.implementations is None
    factors = [1.0] * 8
    longrope = posswap.Rotary(scaling={"rope_type": "longrope", "short_factor": factors, "long_factor": factors})
    assert not posswap.Mixed(layers=["none", longrope]).resizable
    model = posswap.swap(make_model("gpt2"), "mixed:layers=[none, rotary:mark_first=false]")
    assert model.transformer.wpe.first is None  # one entry drops row 0
    refused("2 entries are too many for a model of 1 layers", posswap.swap, make_model("albert"), other)
    posswap.swap(make_model("albert", num_hidden_groups=2), other)
    model = make_model("gpt2", n_layer=5)  # an odd number: the last repeat ends early
    posswap.swap(model, "mixed:layers=[none, rotary]")
    assert [hasattr(block.attn.positions, "planes") for block in model.transformer.h] == [False, True] * 2 + [False]


def test_layers_that_were_moved(make_model, tokens, tmp_path):
    """A mix gives layers their schemes by their places: where these change after a swap, saved and loaded it is another."""
    model = posswap.swap(make_model("bert", num_hidden_layers=4), "mixed:layers=[rotary, rotary:{theta=5}]")
    encoder, kept = model.bert.encoder, model.bert.encoder.layer
    encoder.layer, model.config.num_hidden_layers = kept[:2], 2  # in order still
    model.save_pretrained(tmp_path / "cut")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "cut", attn_implementation="eager")
    assert torch.equal(again(tokens).logits, model.eval()(tokens).logits)
    for order in ((1, 2), (1, 0, 2, 3), (0,)):
        encoder.layer, model.config.num_hidden_layers = torch.nn.ModuleList(kept[i] for i in order), len(order)
        for use, given in ((model, tokens), (model.save_pretrained, tmp_path / "moved")):
            refused(r"layers were deleted or moved.*order of mixed:.*put them back", use, given)


@pytest.mark.parametrize(("scheme", "options"), [("mixed:layers=[none,alibi]", {}), ("rotary", SPAN)])
@torch.no_grad()
def test_layers_that_a_cache_knows_by_other_numbers(make_model, tokens, scheme, options):
    """Layers deleted before a swap keep their numbers, and positions of cached keys would be sought in others."""
    model = make_model("gpt2", n_layer=4)
    model.transformer.h = torch.nn.ModuleList(model.transformer.h[i] for i in (0, 2, 3))
    expected = posswap.swap(model, scheme, **options)(tokens, use_cache=False).logits
    refused(r"would know layers .* as .*set layer_idx of each", model, tokens, past_key_values=DynamicCache())
    for place, block in enumerate(model.transformer.h):
        block.attn.layer_idx = place
    cache = model(tokens[:, :12]).past_key_values
    assert_close(model(tokens[:, 12:], past_key_values=cache).logits, expected[:, 12:], **CLOSE)
