"""Position deltas: kilobytes that go onto the weights they were made from, and onto no others."""

import pytest
import torch
from conftest import KINDS, refused, rewrite
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification, GPT2ForSequenceClassification, GPT2LMHeadModel

import hf_posswap as posswap
from hf_posswap.contract.subject import move, position_parameters, text
from hf_posswap.sharing.delta import ABOUT, WEIGHTS, weights_hash


@pytest.fixture
def delta(make_model, tmp_path):
    """A delta with trained tables, its base and the model that it describes."""

    def make(family, scheme, **options):
        base, model = make_model(family), make_model(family)
        # In an encoder a warm rotary rewrites queries and keys, and a delta has no place for those.
        posswap.swap(model, scheme, warm_start=family == "gpt2" or scheme.name != "rotary", **options)
        move(position_parameters(model), 0.3)
        posswap.save_delta(model, folder := tmp_path / f"delta{len(list(tmp_path.iterdir()))}")
        return base, model, folder

    return make


@pytest.mark.only(cases=KINDS)
def test_round_trip(delta, case, family, tokens):
    """Base and delta are the swapped model, to the last bit; restored, the base is what it was."""
    base, model, folder = delta(family, case.scheme, max_positions=case.max_positions)
    before = base(tokens).logits
    assert posswap.load_delta(base, folder) is base
    assert torch.equal(base(tokens).logits, model(tokens).logits) and posswap.describe(base).new == case.scheme
    assert base.config.max_position_embeddings == (case.max_positions or 32)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 60_000
    posswap.restore(base)
    assert torch.equal(base(tokens).logits, before)


def test_a_fit_after_a_delta(delta, make_model):
    """It needs the original passed to it, and says so."""
    base, _, folder = delta("gpt2", posswap.Relative(clip=4))
    posswap.load_delta(base, folder)
    options = {"steps": 1, "progress": False}
    refused("a delta.*pass it as original_model=", posswap.fit, base, text(40), **options)
    assert posswap.fit(base, text(40), original_model=make_model("gpt2"), **options).layers
    posswap.restore(base)
    assert weights_hash(base) == weights_hash(make_model("gpt2"))


def test_a_table_with_a_span_of_before(delta, family, tokens):
    """Such a delta has no row that is no position."""
    base, model, folder = delta(family, posswap.Learned(), span=4)
    rewrite(folder / ABOUT, lambda about: about["position_scheme"].pop("guarded"))
    rewrite(folder / WEIGHTS, lambda weights: weights.update({name: table[:-1].clone() for name, table in weights.items()}))
    assert torch.equal(posswap.load_delta(base, folder)(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(("family", "head"), [("gpt2", GPT2ForSequenceClassification), ("bert", BertForSequenceClassification)])
def test_another_head(delta, make_model, family, head, tokens):
    """A delta does not mind which head is on."""
    base, model, folder = delta(family, posswap.Relative(clip=4))
    other = make_model(family, head=head)
    bare = {name: value for name, value in base.base_model.state_dict().items() if not name.startswith("pooler")}
    other.base_model.load_state_dict(bare, strict=False)
    posswap.load_delta(other, folder)
    assert torch.equal(other.base_model(tokens).last_hidden_state, model.base_model(tokens).last_hidden_state)


def test_other_weights_are_refused(delta, make_model):
    """A delta for other weights or settings, another dtype, family or a swapped model is refused; the model is as it was."""
    base, _, folder = delta("gpt2", posswap.Relative(clip=4))
    others = [make_model("gpt2", seed=1), make_model("gpt2").bfloat16()]
    settings = ({"activation_function": "relu"}, {"layer_norm_epsilon": 1e-2}, {"scale_attn_weights": False})
    for other in (*others, *(make_model("gpt2", **changed) for changed in settings)):
        before = weights_hash(other)
        refused("made from (other weights|a model .* with)", posswap.load_delta, other, folder, error=posswap.CheckpointError)
        assert weights_hash(other) == before and type(other) is GPT2LMHeadModel
    refused("load those, in float32", posswap.load_delta, others[1], folder, error=posswap.CheckpointError)
    for field in ("is_decoder", "layer_norm_eps", "do_layer_norm_before", "pad_token_id"):
        kind = {"do_layer_norm_before": "opt", "pad_token_id": "esm"}.get(field, "bert")
        other, _, made = delta(kind, posswap.Relative(clip=4))
        vars(other.config)[field] = 7
        refused(f"made from a model .* with {field}=", posswap.load_delta, other, made, error=posswap.CheckpointError)
    refused("is for a gpt2 model", posswap.load_delta, make_model("bert"), folder, error=posswap.CheckpointError)
    posswap.load_delta(base, folder)
    refused("swapped already", posswap.load_delta, base, folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 9}, "delta format 9"),
        ({"position_scheme": {"format": 1, "name": "relative", "clip": 5}}, "does not hold the weights"),
        ({"max_positions": 3}, "max_positions=3"),
        ({"num_heads": 4}, "made from a model .* with num_attention_heads=4"),
    ],
)
def test_broken_deltas(delta, change, says):
    """What the file says is checked, and the base stays as it is."""
    base, _, folder = delta("gpt2", posswap.Relative(clip=4))
    rewrite(folder / ABOUT, lambda about: about.update(change))
    before = weights_hash(base)
    refused(says, posswap.load_delta, base, folder, error=posswap.CheckpointError)
    assert weights_hash(base) == before and not posswap.describe(base).swapped


def test_broken_files(delta):
    """Deltas with cut weights, weights of another scheme or without their description are refused, and so are none."""
    base, _, folder = delta("gpt2", posswap.Relative(clip=4))
    weights = {name: value.clone() for name, value in load_file(folder / WEIGHTS).items()}  # not the file, mapped
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])
    refused("the delta is broken", posswap.load_delta, base, folder, error=posswap.CheckpointError)
    (name, first), *others = weights.items()
    for damaged in (dict(others), weights | {name: first[:-1].clone()}, weights | {name: first * float("nan")}):
        save_file(damaged, folder / WEIGHTS)
        says = rf"does not hold the weights of its scheme \(see {name}\)"
        refused(says, posswap.load_delta, base, folder, error=posswap.CheckpointError)
        assert not posswap.describe(base).swapped
    (folder / ABOUT).unlink()
    for place, says in (
        (folder, "no position_delta.json"),
        (folder / "nope", "neither a folder nor a name on the Hub"),
        ("nope", "there is no folder nope; the Hub cannot be reached"),
    ):
        refused(says, posswap.load_delta, base, place, error=posswap.CheckpointError)
    assert not posswap.describe(base).swapped


def test_a_causal_mask_is_not_in_the_weights(make_model, tmp_path):
    """A GPT-2 that reads both ways (`is_causal` in its config) has the same weights: its delta does not load onto another."""
    both = make_model("gpt2")
    both.config.is_causal = False
    posswap.save_delta(posswap.swap(both, "relative:clip=4"), tmp_path / "both")
    refused("with is_causal=False", posswap.load_delta, make_model("gpt2"), tmp_path / "both", error=posswap.CheckpointError)
    posswap.save_delta(posswap.swap(make_model("gpt2"), "relative:clip=4"), tmp_path / "left")
    refused("with is_causal=True", posswap.load_delta, posswap.restore(both), tmp_path / "left", error=posswap.CheckpointError)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")  # PEFT asks by the old name
def test_changed_weights_cannot_be_a_delta(make_model, tmp_path, tokens):
    """A balanced basis, a fit, training: the weights that changed are named, and nothing is written."""
    base = make_model("bert")
    balanced = posswap.swap(make_model("bert"), "rotary")
    refused(r"attention\.self\.(query|key)", posswap.save_delta, balanced, tmp_path / "out")
    trained = posswap.swap(make_model("bert"), "relative:clip=4")
    trained.bert.encoder.layer[1].output.dense.bias.data[3] += 1e-3
    says = r"1 weights are not the base model's \(encoder.layer.1.output.dense.bias"
    refused(says, posswap.save_delta, trained, tmp_path / "out", base_model=base)
    refused("not swapped", posswap.save_delta, base, tmp_path / "out")
    refused("must be an unswapped bert model", posswap.save_delta, trained, tmp_path / "out", base_model=make_model("gpt2"))
    adapted = get_peft_model(posswap.swap(make_model("bert"), "relative:clip=4"), LoraConfig(target_modules=["query"]))
    refused("adapters.*merge them first", posswap.save_delta, adapted, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    refused("exists already", posswap.save_delta, posswap.swap(base, "none"), tmp_path / "full", error=posswap.CheckpointError)


def test_a_trained_head_is_not_lost(make_model, tmp_path):
    """A delta has no head: one that is not the base model's is named; a base without a head may be given."""
    base = make_model("bert", head=BertForSequenceClassification)
    for name in ("classifier.weight", "bert.pooler.dense.bias"):
        model = posswap.swap(make_model("bert", head=BertForSequenceClassification), "relative:clip=4")
        posswap.save_delta(model, tmp_path / f"before-{name}", base_model=base)
        model.get_parameter(name).data.add_(1)
        refused(f"{name.removeprefix('bert.')}.*without this one", posswap.save_delta, model, tmp_path / "x", base_model=base)
        headless = type(base.bert)(base.config, add_pooling_layer=False)
        headless.load_state_dict(base.bert.state_dict(), strict=False)
        posswap.save_delta(model, tmp_path / name, base_model=headless)


def test_after_saving_and_loading(make_model, tmp_path, tokens):
    """A swapped model from disk has no original at hand: pass it."""
    base = make_model("gpt2")
    posswap.swap(make_model("gpt2"), "relative:clip=4").save_pretrained(tmp_path / "model")
    loaded = type(posswap.swap(make_model("gpt2"), "none")).from_pretrained(tmp_path / "model")
    refused("original", posswap.save_delta, loaded, tmp_path / "delta")
    posswap.save_delta(loaded, tmp_path / "delta", base_model=base)
    posswap.load_delta(base, tmp_path / "delta")
    rewrite(tmp_path / "delta" / ABOUT, lambda about: about["position_scheme"].pop("trained_positions"))
    refused("lacks 'trained_positions'", posswap.write_card, tmp_path / "delta")
    torch.testing.assert_close(base(tokens).logits, loaded(tokens).logits)  # one attends eagerly, the other by sdpa
