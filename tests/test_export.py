"""Native export: every head, layout, scaling and dtype against the swapped model; what cannot be exported says why."""

import json
import math
from dataclasses import replace

import pytest
import torch
import transformers
from conftest import CASES, WORDS, refused
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertModel,
    BertTokenizer,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)
from transformers.models.roformer import modeling_roformer

import hf_posswap as posswap
from hf_posswap.architectures import longest_input
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.sharing.native_decoders import GPT_NEOX as ALL_GPT_NEOX
from hf_posswap.sharing.native_encoders import ESM, JINA
from hf_posswap.sharing.native_encoders import ROFORMER as ALL_ROFORMER

GPT_NEOX = {ours: theirs for ours, theirs in ALL_GPT_NEOX.items() if ours.config_class.model_type == "gpt2"}
ROFORMER = {ours: theirs for ours, theirs in ALL_ROFORMER.items() if ours.config_class.model_type == "bert"}
KIN = {ours: theirs for ours, theirs in (JINA | ESM | ALL_ROFORMER | ALL_GPT_NEOX).items() if ours not in ROFORMER | GPT_NEOX}
HEADS = [kind.__name__ for kind in SWAPPED_CLASSES if kind.config_class.model_type in ("bert", "gpt2")]
ADDED = ("sinusoidal", "sinusoidal-raw-t2t", "ladder-concatenate", "learned-interpolate", "none", "learned")
SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8, "beta_slow": 2, "truncate": False, "attention_factor": 1.3},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 2.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]


def _tokens(length, batch=2, first=None):
    """Random tokens; `first` stands at the beginning and nowhere else."""
    tokens = torch.randint(5, 98, (batch, length), generator=torch.Generator().manual_seed(length))
    if first is not None:
        tokens[:, 0] = first
    return tokens


def _outputs(model, tokens):
    choices = "MultipleChoice" in type(model).__name__
    found = model(tokens[:, None] if choices else tokens)
    return [value for name, value in found.items() if isinstance(value, torch.Tensor) and name != "pooler_output"]


def _equal(ours, theirs, tokens, tolerance=2e-5):
    for one, other in zip(_outputs(ours, tokens), _outputs(theirs, tokens), strict=True):
        assert one.float().std() > 1e-3 or one.numel() < 3
        assert (one.float() - other.float()).abs().max() < tolerance


KINDS = [
    ("interleaved", 1.0, torch.float32),
    ("half", 0.5, torch.float32),
    ("interleaved", 0.5, torch.bfloat16),
    ("half", 1.0, torch.float64),
]


@pytest.mark.parametrize(
    ("head", "layout", "fraction", "dtype"),
    [
        *((head, *KINDS[turn % 4]) for turn, head in enumerate([*ROFORMER, *GPT_NEOX])),
        *((GPT2LMHeadModel, *kind) for kind in KINDS),  # BERT has heads enough to meet all four
    ],
)
def test_rotary_heads(make_swapped, bert_tokenizer, head, layout, fraction, dtype):
    """RoFormer and GPT-NeoX compute what BERT and GPT-2 with rotary positions do, far past the trained length."""
    bert = head in ROFORMER
    decoder = {"is_decoder": True} if head.__name__ == "BertLMHeadModel" else {}
    scheme = posswap.Rotary(layout=layout, fraction=fraction, theta=500, mark_first=bert and not decoder)
    model = make_swapped("bert" if bert else "gpt2", scheme, head=head, max_positions=128, **decoder).to(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if decoder and not hasattr(modeling_roformer, "create_causal_mask"):  # transformers 5.17: its decoder sees later tokens
        refused("does not compute what the swapped one does", posswap.export_native, model, bert_tokenizer)
        return
    native = posswap.export_native(model, bert_tokenizer if bert else None)
    assert type(native.model) is (ROFORMER | GPT_NEOX)[head] and native.model.dtype == dtype
    assert native.model.config.max_position_embeddings == 128 and not native.model.training
    # GPT-NeoX computes angles in float32, in every dtype.
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-6 if bert else 2e-5, torch.bfloat16: 0.5}[dtype]
    _equal(model, native.model, _tokens(100, first=bert_tokenizer.cls_token_id if bert else None), tolerance)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert native.certificate.left_out == (("pooler.dense.weight", "pooler.dense.bias") if head is BertModel else ())
    assert set(native.certificate.random) == {16, 128} and bool(native.certificate.text) == bert


_SIZES = {
    "opt": {"do_layer_norm_before": True, "word_embed_proj_dim": 32, "enable_bias": False},
    "electra": {"embedding_size": 16},
    "albert": {"embedding_size": 16, "num_hidden_layers": 4, "num_hidden_groups": 2, "inner_group_num": 2},
}


@pytest.mark.parametrize("head", KIN, ids=lambda kind: kind.__name__)
def test_rotary_heads_of_kin(make_swapped, bert_tokenizer, head):
    """The classes that the export's docstring names for each family; layouts, fractions and marks in turn."""
    turn, family = list(KIN).index(head), head.config_class.model_type
    fraction = 1.0 if head in JINA or turn % 2 else 0.5
    marked = head.__name__ in ("XLMRobertaForMaskedLM", "EsmModel", "DistilBertForMaskedLM", "AlbertForMultipleChoice")
    scheme = posswap.Rotary(layout=("half", "interleaved")[turn // 2 % 2], fraction=fraction, theta=500, mark_first=marked)
    model = make_swapped(family, scheme, head=head, max_positions=128, **_SIZES.get(family, {}))
    native = posswap.export_native(model, bert_tokenizer if marked else None)
    assert type(native.model) is KIN[head] and not hasattr(native.model.config, "position_scheme")
    _equal(model, native.model, _tokens(100, first=bert_tokenizer.cls_token_id if marked else None))
    left_out = ("pooler.weight", "pooler.bias") if head.__name__ == "AlbertModel" else ()
    assert set(native.certificate.random) == {16, 128} and native.certificate.left_out == left_out


def test_cls_before_padding(make_swapped):
    """A certificate's random tokens hold neither [CLS] nor padding, where these are 0 and 1; autocast does not round it."""
    tokenizer = BertTokenizer(vocab={word: n for n, word in enumerate(["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *WORDS])})
    model = make_swapped("roberta", posswap.Rotary(), max_positions=128, pad_token_id=1)
    with torch.autocast("cpu", torch.bfloat16):
        assert posswap.export_native(model, tokenizer).certificate.largest < 1e-4


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        *((kind, ADDED[turn % 6]) for turn, kind in enumerate(HEADS)),
        *((f"{kind}Model", "sinusoidal-halves") for kind in ("Albert", "BioGpt", "Electra", "Esm", "OPT", "Roberta")),
    ],
)
def test_tables(make_swapped, kind, case):
    """What is added to the embeddings becomes the family's own table, wherever its rows begin: every head, to the last bit."""
    head = getattr(transformers, kind)
    family, options = head.config_class.model_type, {"is_decoder": True} if kind == "BertLMHeadModel" else {}
    model = make_swapped(family, CASES[case].scheme, head=head, max_positions=CASES[case].max_positions, **options)
    drawn = torch.get_rng_state()
    native = posswap.export_native(model)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert type(native.model) is head and native.certificate.largest == 0
    assert native.model.config.model_type == family and not hasattr(native.model.config, "position_scheme")
    _equal(model, native.model, _tokens(longest_input(model.config)), 1e-9)


@pytest.mark.parametrize("scheme", ["sinusoidal", "rotary:mark_first=false"])
@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Albert", "Ernie", "Esm"])
def test_without_a_pooler(make_model, kind, scheme):
    """A model that was made with `add_pooling_layer=False` becomes one without a pooler."""
    head = getattr(transformers, f"{kind}Model")
    model = head(make_model(head.config_class.model_type, head=head).config, add_pooling_layer=False).eval()
    swapped = posswap.swap(model, scheme)
    if (kind, scheme[:6]) == ("Ernie", "rotary"):
        return refused("no native counterpart", posswap.export_native, swapped, error=posswap.UnsupportedModelError)
    native = posswap.export_native(swapped)
    assert native.certificate.largest < 1e-4 and not any("pooler" in name for name in native.model.state_dict())


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling and f"{scaling['rope_type']}-{len(scaling)}")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_scalings(make_swapped, bert_tokenizer, family, scaling):
    """Each length scaling, below and above the trained length; RoFormer refuses the two that look at the length."""
    scheme = posswap.Rotary(fraction=0.5, scaling=scaling, mark_first=False)
    model = make_swapped(family, scheme, max_positions=128)
    if family == "bert" and scaling and scaling["rope_type"] in ("dynamic", "longrope"):
        refused("chooses angles by length", posswap.export_native, model, error=posswap.UnsupportedModelError)
        return
    export = posswap.export_native(model)
    dynamic, native = scaling is not None and scaling["rope_type"] == "dynamic", export.model
    assert any("in order of length" in condition for condition in export.certificate.holds_for) == dynamic
    assert export.certificate.longest == 128
    for length in (20, 32, 33, 120):
        _equal(model, native, _tokens(length), 1e-4)
    after = (_outputs(model, _tokens(40))[0] - _outputs(native, _tokens(40))[0]).abs().max()
    assert (after > 1e-2) == dynamic
    unscaled = make_swapped(family, posswap.Rotary(fraction=0.5, mark_first=False), max_positions=128)
    if scaling:  # the comparison can fail
        assert (_outputs(unscaled, _tokens(120))[0] - _outputs(native, _tokens(120))[0]).abs().max() > 1e-3


def test_the_card_of_a_dynamic_export(make_swapped, tmp_path):
    """The native config has the trained length, from which angles are scaled; the card says what the model reads."""
    scheme = posswap.Rotary(scaling={"rope_type": "dynamic", "factor": 2.0}, mark_first=False)
    posswap.export_native(make_swapped("gpt2", scheme, max_positions=128)).save_pretrained(tmp_path / "native")
    assert "It reads 128 tokens" in posswap.write_card(tmp_path / "native", base_model="local:tiny").read_text("utf-8")


@pytest.mark.parametrize("changes", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}, {"n_inner": 48}])
def test_gpt2_variants(make_swapped, changes):
    """GPT-2's other scales of attention are exported exactly."""
    model = make_swapped("gpt2", posswap.Rotary(mark_first=False), **changes)
    _equal(model, posswap.export_native(model).model, _tokens(30))
    regression = make_swapped("gpt2", "sinusoidal", head=GPT2ForSequenceClassification, num_labels=1)  # one number, unpadded
    assert posswap.export_native(regression).certificate.largest < 1e-4


@pytest.mark.parametrize("family", ["opt", "esm", "gpt2"])
def test_padding_inside_a_text(make_swapped, family):
    """Where the stock class counts it and ours does not, the certificate says so; also where it reads no token types."""
    options = {"do_layer_norm_before": True, "word_embed_proj_dim": 32} if family == "opt" else {}
    model = make_swapped(family, posswap.Rotary(mark_first=False), **options)
    native, mask = posswap.export_native(model), torch.ones(1, 12, dtype=torch.long)
    mask[:, 4:7] = 0
    tokens = _tokens(12)[:1].masked_fill(mask == 0, model.config.pad_token_id or 0)
    with torch.no_grad():
        ours, theirs = (one(input_ids=tokens, attention_mask=mask)[0][mask > 0] for one in (model, native.model))
    said = any("padding before or after a text" in words for words in native.certificate.holds_for)
    assert said == (family != "gpt2") == bool((ours - theirs).abs().max() > 0.1)
    typed = any("without token_type_ids" in words for words in native.certificate.holds_for)
    assert typed == (family == "gpt2")
    if typed:
        ours, theirs = (one(tokens, token_type_ids=torch.zeros_like(tokens))[0] for one in (model, native.model))
        assert (ours - theirs).abs().max() > 0.1


def test_the_folder(make_swapped, bert_tokenizer, tmp_path):
    """Weights, tokenizer and certificate; tied heads stay tied where that is right; nothing is written over."""
    model = make_swapped("bert", posswap.Rotary(), max_positions=64)
    native = posswap.export_native(model, bert_tokenizer)
    assert native.model.config.tie_word_embeddings is False  # [CLS] reads another vector than the head
    native.save_pretrained(tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "parity.json").read_text())["certificate"]
    assert facts["position_scheme"]["name"] == "rotary"
    assert [words for words in facts["holds_for"] if "[CLS]" in words] and "  holds for: positions" in str(native.certificate)
    assert facts["target"] == "RoFormerForMaskedLM" and set(facts["random"]) == {"16", "64"} and facts["text"]
    assert str(native) == repr(native) == str(native.certificate) and "RoFormerForMaskedLM" in str(native)
    again = type(native.model).from_pretrained(tmp_path / "out")
    _equal(native.model, again, _tokens(50), 1e-9)
    read = [one.model_max_length for one in (transformers.AutoTokenizer.from_pretrained(tmp_path / "out"), native.tokenizer)]
    assert read == [64, 64] and bert_tokenizer.model_max_length != 64
    bert_tokenizer.model_max_length = 20
    assert posswap.export_native(make_swapped("bert", "sinusoidal"), bert_tokenizer).tokenizer.model_max_length == 20
    refused("exists already", native.save_pretrained, tmp_path / "out", error=posswap.CheckpointError)
    unmarked = make_swapped("bert", posswap.Rotary(mark_first=False))
    assert posswap.export_native(unmarked).model.config.tie_word_embeddings is True


def test_generation(make_swapped, tmp_path):
    """Past the trained length, from prompts padded on the left, a saved GPT-NeoX, which knows nothing of us, says the same."""
    model = make_swapped("gpt2", posswap.Rotary(mark_first=False), max_positions=128)
    posswap.export_native(model).save_pretrained(tmp_path / "out")
    native = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert type(native) is transformers.GPTNeoXForCausalLM and "posswap" not in (tmp_path / "out" / "config.json").read_text()
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :5] = 0
    options = {"attention_mask": mask, "max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(native.generate(_tokens(20), **options), model.generate(_tokens(20), **options))


ROTARY, YARN = posswap.Rotary(mark_first=False), {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize(
    ("family", "scheme", "options", "says"),
    [
        ("bert", posswap.Relative(clip=4), {}, "no class of transformers has relative positions"),
        ("bert", posswap.Rotary(), {}, "pass the tokenizer"),
        ("electra", ROTARY, {"hidden_act": "relu"}, "RoFormer's head applies relu, ELECTRA's gelu"),
        ("albert", ROTARY, {"embedding_size": 32}, "projects words of another size alone"),
        ("distilbert", ROTARY, {"head": transformers.DistilBertForSequenceClassification}, "heads that have one are Distil"),
        ("gpt2", posswap.Rotary(), {}, "GPT-NeoX has no place, since"),
        ("gpt2", None, {}, "has not been swapped"),
        ("roberta", posswap.Rotary(fraction=0.5), {}, "rotates all dimensions of a head, not 8 of 16"),
        ("esm", ROTARY, {"token_dropout": True, "mask_token_id": 4}, "has no place in ESM, which rescales its words"),
        ("esm", posswap.Rotary(scaling=YARN, mark_first=False), {}, "yarn scaling does not fit"),
        ("opt", ROTARY, {}, "this OPT is post-norm or projects its words"),
        ("opt", ROTARY, _SIZES["opt"] | {"_remove_final_layer_norm": True}, "or has no last norm"),
    ],
)
def test_what_cannot_be_exported(make_model, make_swapped, family, scheme, options, says):
    model = make_model(family) if scheme is None else make_swapped(family, scheme, **options)
    refused(says, posswap.export_native, model, error=posswap.UnsupportedModelError)


@pytest.mark.parametrize("name", ["minilm", "stdlib-gpt2"])
def test_real_checkpoints(name):
    """The two embedded checkpoints are exported with a small difference, on real text past their length."""
    source = posswap.embedded_model(name)
    tokenizer = AutoTokenizer.from_pretrained(source)
    bert = name == "minilm"
    model = (AutoModel if bert else AutoModelForCausalLM).from_pretrained(source)
    longest = 576 if bert else 320
    posswap.swap(model, posswap.Rotary(mark_first=bert), max_positions=longest)
    certificate = posswap.export_native(model, tokenizer).certificate
    assert max(certificate.text) == longest > model.config.position_scheme["trained_positions"]
    assert 0 < certificate.largest < (1e-5 if bert else 1e-3) and certificate.deviation > 0.1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
def test_adapters_and_tokenizers(make_swapped, bert_tokenizer, tmp_path):
    """Adapters must be merged first, and are exported then; a tokenizer of another model is refused."""
    model = make_swapped("bert", posswap.Rotary(mark_first=False))
    adapted = get_peft_model(model, LoraConfig(target_modules=["query", "value"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path)  # it must not name the plain model as what it goes onto
    about = json.loads((tmp_path / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] is None
    assert about["auto_mapping"]["base_model_class"] == "PosswapBertForMaskedLM"
    refused("merge_and_unload", posswap.export_native, adapted, error=posswap.UnsupportedModelError)
    merged = adapted.merge_and_unload()
    _equal(merged, posswap.export_native(merged).model, _tokens(30))
    merged.classifier_like = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    refused("weights are torch.bfloat16 and torch.float32: give it one dtype", posswap.export_native, merged)
    small = make_swapped("bert", posswap.Rotary(), vocab_size=20)
    refused("tokens and the model 20", posswap.export_native, small, bert_tokenizer)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted = get_peft_model(make_swapped("gpt2", posswap.Rotary(mark_first=False)), prompt)
    for verb, more in ((posswap.export_native, ()), (posswap.save_delta, (tmp_path / "delta",))):
        refused("learned prompts", verb, prompted, *more, error=posswap.UnsupportedModelError)


def test_a_wrong_export_is_not_returned(make_swapped, monkeypatch):
    """The certificate can fail: with the layouts confused, an export is an error."""
    model = make_swapped("gpt2", posswap.Rotary(mark_first=False, layout="half"))
    monkeypatch.setattr("hf_posswap.sharing.native.pairs_first", lambda positions: torch.arange(positions.geometry.head_dim))
    refused("does not compute what the swapped one does", posswap.export_native, model)
    monkeypatch.undo()
    certificate = posswap.export_native(model).certificate
    assert math.isnan(replace(certificate, text={16: 0.1, 128: math.nan}).largest)  # a model that overflows at one length
