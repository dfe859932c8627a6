"""What cannot work is refused with a PosswapError that says why and what to do, and the model is as it was before."""

from dataclasses import fields
from itertools import count
from unittest.mock import Mock

import numpy
import pytest
import torch
import transformers
from conftest import changes, refused, snapshot
from torch import nn
from transformers import AutoModel, BertConfig, BertForMaskedLM

import hf_posswap as posswap
from hf_posswap import surgery
from hf_posswap.schemes.relative import Relative, RelativePositions

SCHEME_ERRORS = [
    ("rotery", r"unknown scheme 'rotery' \(did you mean 'rotary'\?\); known are learned, sinusoidal, relative, rotary, self-"),
    ("xyzzy", r"unknown scheme 'xyzzy'; known are"),
    ("rotary:thetta=5", r"rotary has no option 'thetta' \(did you mean 'theta'\?\); it has theta, fraction, layout, scaling"),
    ("none:clip=5", r"none has no option 'clip'; it has none"),
    ("rotary:theta=[", r"cannot read the options of 'rotary:theta=\['; write name:option=value"),
    ("rotary:theta=1", r"theta=1 must be a number above 1"),
    ("rotary:theta=.inf", r"theta=inf must be a number"),
    ("rotary:fraction=0", r"fraction=0 must be a number above 0"),
    ("rotary:fraction=1.5", r"fraction=1.5 must lie in \(0, 1\]"),
    ("rotary:fraction=0.2", r"fraction=0.2 of head_dim 16 is 3 dimensions.*fraction=0.125 \(2 dimensions\) or fraction=0.25"),
    ("rotary:fraction=0.01", r"is 0 dimensions.*fraction=0.125"),
    ("rotary:layout=halves", r"layout='halves' is not one of 'interleaved', 'half'"),
    ("rotary:scaling={rope_type=magic}", r"'rope_type' out of linear, dynamic, yarn, longrope, llama3"),
    ("rotary:scaling={rope_type=[linear],factor=2}", r"'rope_type' out of linear"),
    ("rotary:scaling={rope_type=linear}", r"linear scaling needs \['factor'\].*given were \[\]"),
    ("rotary:scaling={rope_type=linear,factor=2,beta=3}", r"given were \['beta', 'factor'\]"),
    ("rotary:scaling={rope_type=linear,factor=big}", r"factor='big'"),
    ("rotary:scaling={rope_type=linear,factor=0}", r"factor=0"),
    ("rotary:scaling={rope_type=longrope,short_factor=[1,2],long_factor=[1,2]}", r"short_factor must have 8 numbers.*has 2"),
    ("rotary:scaling={rope_type=longrope,short_factor=2,long_factor=3}", r"short_factor"),
    ("relative:clip=0", r"clip=0 must be an integer of at least 1"),
    ("relative:clip=2.5", r"clip=2.5 must be an integer"),
    ("relative:clip=true", r"clip=True must be an integer"),
    ("rotary:theta=100,theta=200", r"cannot read the options of .*each once"),
    ("alibi:slopes=1,2", "cannot read the options of .*lists in brackets"),
    ("rotary:name=alibi", r"cannot read the options of 'rotary:name=alibi'"),
    ("rotary:theta=2026-13-41", r"cannot read the options of"),
    ("relative:values=1", r"values=1 is not one of True, False"),
    ("sinusoidal:base=0", r"base=0 must be a number above 1"),
    ("relative:clip=100000000000000", r"clip=100000000000000 must be an integer .* at most 65,536"),
    ("rotary:fraction=0.125,scaling={rope_type=dynamic,factor=2}", r"dynamic scaling needs at least 4 dimensions"),
    ("self-extend:theta=auto", r"self-extend: theta='auto' must be a number"),  # which `choose` settles for rotary alone
    ("self-extend:fraction=auto", r"self-extend: fraction='auto' must be a number"),
    ("buckets:buckets=1", r"buckets=1 must be an integer of at least 2"),
    ("buckets:buckets=64,reach=32", r"reach=32 must be above"),
    ("mixed:layers=[]", r"layers=\[\] must be a list of schemes"),
    ("mixed:layers=[rotary, rotery]", r"unknown scheme 'rotery' .did you mean 'rotary'"),
    ("mixed:layers=[rotary, 5]", r"mixed: 5 in layers is no scheme"),
    ("mixed:layers=[rotary: 5, none]", r"rotary has no option '5'"),
    ("mixed:layers=[rotary:theta=100,fraction=0.5]", r"unknown scheme 'fraction'"),
    ("mixed:layers=[rotary:{theta=auto}]", r"cannot be part of a mix: .* numbers for 'auto'"),
    ("mixed:layers=[mixed:layers=[rotary]]", r"cannot be part of a mix"),
    ("mixed:layers=[none:span=5]", r"span=5 in layers must be true or false"),
    ("mixed:layers=[rotary, learned]", r"learned adds vectors to the embeddings, which all layers get"),
    ("mixed:layers=[rotary, none, none]", r"3 entries are too many for a model of 2 layers"),
    ("mixed:layers=[rotary:fraction=0.1, none]", r"rotary: fraction=0.1 of head_dim 16"),
    (None, r"None is no scheme: pass an instance such as posswap.Rotary"),
    (posswap.Rotary, r"is no scheme: pass an instance"),
    ({"name": "rotary"}, r"is no scheme"),
]
SCHEME_ERRORS += [  # no option takes a word that it does not know
    (f"{kind.name}:{one.name}=nonsense", f"{one.name}='nonsense' (must be|is not one of)")
    for kind in posswap.SCHEMES.values()
    for one in fields(kind)
]


@pytest.mark.parametrize(("scheme", "message"), SCHEME_ERRORS, ids=lambda value: str(value)[:40])
def test_bad_scheme(make_model, scheme, message):
    """An unknown or impossible scheme names what was given and what exists; nothing happens to the model."""
    model = make_model("bert")
    before = snapshot(model)
    refused(message, posswap.swap, model, scheme)
    assert not changes(model, before)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_bad_max_positions(make_model, family):
    """Fewer positions than the model holds, no number, a table that cannot grow are refused; a NumPy integer is one."""
    model = make_model(family)
    before = snapshot(model)
    for length in (0, -1, 16, 31, 64.0, "64", True, 16_777_217, 10**30):
        says = f"max_positions={length!r} must be an integer from 32.* to 16,777,216"
        refused(says, posswap.swap, model, "rotary", max_positions=length)
    says = "32 rows and cannot hold max_positions=33: pass extend='tile' or"
    refused(says, posswap.swap, model, "learned", max_positions=33)
    assert not changes(model, before)
    posswap.swap(model, "rotary", max_positions=numpy.int64(64), span=numpy.int8(8), first=torch.tensor(2))
    told = posswap.describe(model)
    assert repr([told.max_positions, told.span]) == "[64, Span(span=8, first=2)]" and model.config.to_json_string()


def test_odd_sizes(make_model):
    """Head sizes that cannot turn in pairs, and hidden sizes without pairs, are refused with the remedy."""
    model = make_model("gpt2", n_embd=33, n_head=33)
    before = snapshot(model)
    refused(r"head_dim 1", posswap.swap, model, "rotary")
    refused(r"hidden size 33 is odd; only layout='tensor2tensor'", posswap.swap, model, "sinusoidal")
    assert not changes(model, before)
    posswap.swap(model, posswap.Sinusoidal(layout="tensor2tensor"))(torch.arange(2, 9)[None])
    model = make_model("gpt2", n_embd=36, n_head=4)  # 9 dimensions a head
    refused(r"head_dim 9 is 9 dimensions.*fraction=0.8888888889 \(8 dimensions\)", posswap.swap, model, "rotary")
    posswap.swap(model, posswap.Rotary(fraction=0.8888888889))(torch.arange(2, 9)[None])


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES_WITHOUT = [
    ("Llama", SIZES | {"intermediate_size": 16}, "'llama' model.*rotary already"),
    ("MegatronBert", SIZES, "'megatron-bert' model.*bert, biogpt.*register_architecture"),
    ("GPTNeo", {"hidden_size": 32, "num_layers": 1, "attention_types": [[["local"], 1]], "num_heads": 2}, "has local layers"),
    ("MPNet", SIZES, "besides its table it has a bias by distance"),
    ("T5", {"d_model": 32, "num_layers": 1, "num_heads": 2}, "'t5' model.*it has no table"),
    ("Esm", SIZES | {"pad_token_id": 0, "position_embedding_type": "rotary"}, "rotary positions already"),
]


@pytest.mark.parametrize(("kind", "sizes", "says"), FAMILIES_WITHOUT)
def test_families_that_cannot_be(kind, sizes, says):
    """The error of every verb says why, and what can be done."""
    with torch.device("meta"):
        model = AutoModel.from_config(getattr(transformers, f"{kind}Config")(vocab_size=9, **sizes))
    for verb in (lambda model: posswap.swap(model, "rotary"), posswap.describe, posswap.restore):
        refused(says, verb, model, error=posswap.UnsupportedModelError)


@pytest.mark.parametrize(
    "thing", [None, "bert-base-uncased", nn.Linear(2, 2), BertConfig()], ids=["None", "str", "Linear", "config"]
)
def test_things_that_are_no_models(thing):
    """Whatever is no transformers model is refused by its type's name."""
    refused(f"{type(thing).__name__} cannot be swapped: pass", posswap.swap, thing, "rotary")


TABLE, QUERY = "bert.embeddings.position_embeddings.weight", "bert.encoder.layer.1.attention.self.query.weight"
CHANGES = {  # what is done to a BERT, and what the error then says
    "quantized": (lambda m: setattr(m, "is_quantized", True), "quantized: swap the full-precision checkpoint, then quantize"),
    "compiled": (lambda m: m.compile(backend="eager"), "compiled already: swap, describe or restore it before that"),
    "compiled inside": (
        lambda m: setattr(m.bert, "embeddings", torch.compile(m.bert.embeddings, backend="eager")),
        "BertEmbeddings is compiled already: swap, describe",
    ),
    "block": (lambda m: m.bert.encoder.layer[1].compile(backend="eager"), "BertLayer is compiled already: swap, describe"),
    "forward": (
        lambda m: setattr(m.bert.encoder.layer[1].attention.self, "forward", m.forward),
        "forward of BertSelfAttention",
    ),
    "table": (lambda m: setattr(m.bert.embeddings, "position_embeddings", nn.Identity()), "position_embeddings is Identity"),
    "inside": (lambda m: posswap.swap(m.bert, "none"), "inside this BertForMaskedLM was swapped by itself.*: posswap.restore"),
    "meta": (lambda m: m.to("meta"), "meta device: load them first"),
    "sharded": (lambda m: setattr(m.get_parameter(QUERY), "device_mesh", "a DTensor's"), "weights are sharded .fully_shard"),
    "nan": (lambda m: nn.init.constant_(m.get_parameter(TABLE), float("nan")), "table holds NaN or infinite numbers"),
    "query": (lambda m: nn.init.constant_(m.get_parameter(QUERY), float("nan")), "not finite.*warm_start=False"),
    "flex": (lambda m: m.set_attn_implementation("flex_attention"), "'eager' or 'sdpa', the model is set to 'flex_attention'"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_models_that_cannot_be_swapped(make_model, name):
    """The reason is said, and nothing happens to the model."""
    change, says = CHANGES[name]
    model = make_model("bert")
    change(model)
    before = snapshot(model) if name != "meta" else {}
    kept = type(model), list(model.state_dict()), model.config.to_dict()
    refused(says, posswap.swap, model, "relative" if name == "flex" else "rotary")
    assert not changes(model, before) and (type(model), list(model.state_dict()), model.config.to_dict()) == kept
    if name == "query":  # a cold start looks at no query
        posswap.swap(model, "rotary", warm_start=False)


class OwnBert(BertForMaskedLM):
    """A user's subclass."""


def test_wrapped_models(make_model):
    """A class of the user's own and what torch.compile returns are refused; the model inside the first can be swapped."""
    model = make_model("bert")
    refused("compiled already: swap, describe or restore", posswap.swap, torch.compile(model, backend="eager"), "rotary")
    model = OwnBert(model.config)
    refused("OwnBert is not one of transformers' own bert classes.*BertModel inside it", posswap.swap, model, "rotary")
    posswap.swap(model.bert, "rotary")


FAMILIES, PLACES = ("bert", "bert-decoder", "gpt2"), ("first layer", "second layer", "config", "record")


@pytest.mark.parametrize(
    ("family", "first", "place"),
    [
        (FAMILIES[turn % 3], (None, "rotary", "relative:clip=3", "sinusoidal")[turn % 4], PLACES[(turn + turn // 4) % 4])
        for turn in range(12)
    ],
)
def test_interrupted(make_model, family, first, place, monkeypatch, tokens):
    """A swap that is interrupted leaves the model, swapped and fitted before or not, bit for bit and still restorable."""
    model = make_model(family)
    original = model(tokens).logits
    if first is not None:
        posswap.swap(model, first, max_positions=40)
    if first == "relative:clip=3":
        posswap.fit(model, torch.randint(2, 98, (99, 16)), steps=20, progress=False)
    before, logits = snapshot(model), model(tokens).logits
    scheme = "rotary:fraction=0.5"
    if "layer" in place:
        scheme, calls = "relative:clip=5", count()

        def fails_later(self, geometry):
            if next(calls) > (place == "second layer"):
                raise KeyboardInterrupt("out of luck")
            return RelativePositions(self, geometry)

        monkeypatch.setattr(Relative, "attention_module", fails_later)
    else:  # the config is new, or weights are rewritten and what `restore` needs is noted, which takes time on large models
        owner, name = (posswap.Rotary, "to_dict") if place == "config" else (surgery, "Weight")
        monkeypatch.setattr(owner, name, Mock(side_effect=KeyboardInterrupt("out of luck")))
    refused("out of luck", posswap.swap, model, scheme, max_positions=64, error=KeyboardInterrupt)
    monkeypatch.undo()
    assert not changes(model, before)
    assert torch.equal(model(tokens).logits, logits)
    assert posswap.describe(model).can_restore == (first is not None)
    posswap.swap(model, scheme, max_positions=64)
    posswap.restore(model)
    assert torch.equal(model(tokens).logits, original)


@pytest.mark.parametrize(("scheme", "span"), [("relative", None), ("rotary", 6)])
def test_refuses_flex_attention_later(make_swapped, scheme, span, tokens):
    """An attention implementation that is set after the swap is looked at, too; a span needs its mask read as a tensor."""
    model = make_swapped("bert", scheme, span=span)
    attention = model.base_model.encoder.layer[0].attention.self
    refused("was called without positions: the layers of its family must pass", attention, torch.zeros(1, 3, 32))
    model.set_attn_implementation("flex_attention")
    refused("set_attn_implementation", model, tokens)


def test_restore_without_swap(make_model, family):
    """There is nothing to restore in a plain model, twice neither, and not in a part of a swapped one."""
    model = make_model(family)
    refused("is not swapped: there is nothing to restore", posswap.restore, model)
    posswap.swap(model, "rotary")
    refused("part of the model that was swapped.*restore the whole model", posswap.restore, model.base_model)
    posswap.restore(model)
    refused("nothing to restore", posswap.restore, model)


@pytest.mark.parametrize("what", ["attention", "table", "cast"])
def test_swap_after_training(make_model, family, what, tokens):
    """A second swap would lose what was learned since the first: it is refused, and both ways out work."""
    model = make_model(family)
    posswap.swap(model, "relative:clip=4")
    if what == "cast":
        model.bfloat16()
    else:
        attention = model.architecture.self_attentions(model.base_model)[1]
        with torch.no_grad():
            parameters = dict(attention.named_parameters())
            parameters["positions.key_table"].add_(0.1) if what == "table" else next(iter(parameters.values())).add_(0.1)
    before = snapshot(model)
    refused(r"weights have changed since.*relative:clip=4.*posswap.restore\(model\)", posswap.swap, model, "rotary")
    assert not changes(model, before)
    posswap.restore(model, keep_training=what == "attention")
    posswap.swap(model, "rotary")
