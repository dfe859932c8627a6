"""swap, restore and describe: what they change, that all of it comes back, and that no other model notices."""

import copy

import pytest
import torch
from conftest import changes, refused, snapshot
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertForMaskedLM

import hf_posswap as posswap
from hf_posswap.contract.subject import FAMILIES

CHAINS = [
    ["learned"],
    ["rotary", "relative:clip=4", "rotary:fraction=0.5,layout=half"],
    ["sinusoidal", "none", "learned:extend=tile", "relative:values=false"],
    ["none", "rotary", "rotary:theta=50"],
]


@pytest.mark.parametrize(("chain", "warm_start"), list(zip(CHAINS, (False, True, False, True), strict=True)))
def test_restore_is_exact(make_model, family, chain, warm_start, tokens):
    """After any chain of swaps, at several lengths, every weight, class, buffer and config is the one from before."""
    model = make_model(family)
    logits, before = model(tokens).logits, snapshot(model)
    for step, scheme in enumerate(chain):
        length = None if scheme == "learned" else (None, 64, 40, 50)[step]
        assert posswap.swap(model, scheme, max_positions=length, warm_start=warm_start) is model
        assert model.config.max_position_embeddings == (length or 32)
        assert family != "gpt2" or model.config.n_positions == (length or 32)
        model(tokens.repeat(1, 2 if length else 1))
    assert posswap.restore(model) is model
    assert not changes(model, before)
    assert torch.equal(model(tokens).logits, logits)


@pytest.mark.parametrize("before", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("after", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_restore_after_a_cast(make_model, before, after, tokens):
    """A cast alone is no training, and stays, as the mode does; training is noticed in spite of a cast."""
    model = posswap.swap(make_model("gpt2").to(before), "rotary").to(after).train()
    posswap.restore(model)(tokens)
    assert {parameter.dtype for parameter in model.parameters()} == {after}
    assert all(module.training for module in model.modules())
    model = posswap.swap(make_model("gpt2").to(before), "rotary")
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[3, 5] += 0.1
    says = r"1 weights changed since the swap.*: posswap.restore\(model, keep_training=True\)$"
    refused(says, posswap.restore, model.to(after))
    trained = {name: value for name, value in model.state_dict().items() if "wpe" not in name}
    restored = posswap.restore(model, keep_training=True).state_dict()
    assert len(trained) > 20 and all(torch.equal(restored[name], value) for name, value in trained.items())


@pytest.mark.parametrize("schemes", [("relative:clip=4", "none"), ("rotary", "rotary:theta=500")])
def test_training_between_two_swaps(make_model, schemes):
    """A second swap starts from the first's original: weights that were trained between them are still a mixture."""
    model = posswap.swap(make_model("bert"), schemes[0])
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight.add_(0.1)
    posswap.swap(model, schemes[1])
    refused("1 weights changed since the swap", posswap.restore, model)
    untrained = posswap.swap(posswap.swap(make_model("bert"), schemes[0]), schemes[1])
    assert not posswap.describe(posswap.restore(untrained)).swapped


def test_the_mean_of_a_loaded_table_stays(make_swapped, tmp_path):
    """What stands in a table's place has one vector for all positions: another swap takes it as it is."""
    model = make_swapped("gpt2", "rotary")
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    posswap.swap(again, "none")
    for name in ("first", "mean"):
        assert torch.equal(getattr(again.transformer.wpe, name), getattr(model.transformer.wpe, name))
    again.save_pretrained(tmp_path)
    cold = posswap.swap(AutoModelForCausalLM.from_pretrained(tmp_path), "none", warm_start=False)
    assert not cold.transformer.wpe.mean.any() and again.transformer.wpe.mean.any()


def test_other_changes_of_the_config_stay(make_model, family, tokens, tmp_path):
    """Vocabulary size and attention implementation, changed since a swap, stay when swapped again, saved and restored."""
    model = posswap.swap(make_model(family, "eager"), "rotary", max_positions=64)
    model.resize_token_embeddings(120)
    model.set_attn_implementation("sdpa")
    posswap.swap(model, "relative:clip=4")
    assert (model.config.vocab_size, model.config._attn_implementation) == (120, "sdpa")
    model.save_pretrained(tmp_path)
    assert_close(type(model).from_pretrained(tmp_path).eval()(tokens).logits, model(tokens).logits)
    with torch.no_grad():
        words = model.get_input_embeddings().weight.add_(1)  # of the size that the second swap found
    refused("changed since the swap", posswap.restore, model)
    words.data.sub_(1)
    posswap.restore(model, keep_training=True)
    assert (model.config.vocab_size, model.config._attn_implementation) == (120, "sdpa")
    assert model.get_input_embeddings().num_embeddings == 120
    assert model.config.max_position_embeddings == 32 and not hasattr(model.config, "position_scheme")


def test_swap_leaves_other_weights_alone(make_model, family, case):
    """A swap keeps every parameter but the table: the same objects, and the same values where no basis is balanced."""
    model = make_model(family)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in model.named_parameters()}
    posswap.swap(model, case.scheme, max_positions=case.max_positions)
    after = dict(model.named_parameters())
    table = [name for name in before if "position_embeddings" in name or "wpe" in name]
    balanced = case.scheme.name in ("rotary", "self-extend") and family == "bert"
    assert len(table) == 1
    for name in before.keys() - set(table):
        assert after[name] is before[name][0]
        rewritten = balanced and (".query." in name or ".key." in name)
        assert torch.equal(after[name], before[name][1]) != rewritten, name


def test_warm_start_keeps_what_the_table_was(make_model, family):
    """Warm, a new scheme keeps the table's mean and its first row; cold, neither."""
    model = make_model(family)
    owner, name = posswap.ARCHITECTURES[model.config.model_type].table_owner(model.base_model)
    table = getattr(owner, name).weight.detach().clone()
    positions = torch.arange(32)[None]
    for scheme in ("rotary", "none", "relative"):
        posswap.swap(model, scheme)
        vectors = getattr(owner, name)(positions)[0]
        torch.testing.assert_close(vectors[5], table.mean(0))
        assert torch.equal(vectors[0], table[0]) and torch.equal(vectors[5], vectors[31])
        posswap.swap(model, scheme, warm_start=False)
        assert getattr(owner, name)(positions).abs().max() == 0


@pytest.mark.parametrize("family", [*FAMILIES, "roberta", "opt", "esm", "biogpt", "distilbert"])
def test_describe(make_model, family):
    """describe names family, schemes, lengths and layers at each stage; rows that are no positions are dropped parameters."""
    model = make_model(family)
    plain = posswap.describe(model)
    assert (plain.old, plain.new, plain.can_restore) == (posswap.Learned(), posswap.Learned(), False)
    assert (plain.parameters_added, plain.parameters_dropped, plain.layers, plain.layers_patched) == (0, 0, 2, 0)
    before = model.num_parameters()
    posswap.swap(model, posswap.Relative(clip=4), max_positions=100)
    told = posswap.describe(model)
    assert (told.old, told.new, told.can_restore) == (posswap.Learned(), posswap.Relative(clip=4), True)
    assert told.family == family.removesuffix("-decoder")
    assert (told.trained_positions, told.max_positions) == (32, 100)
    assert (told.layers, told.layers_patched) == (2, 2)
    assert told.parameters_dropped == 32 * 32 or family not in FAMILIES
    assert model.num_parameters() == before + told.parameters_added - told.parameters_dropped
    text = str(told)
    for part in ("learned -> relative:clip=4", "100 (trained with 32)", "2 of 2", type(model).__name__, "restore"):
        assert part in text
    posswap.restore(model)
    assert posswap.describe(model) == plain


def test_printed(make_model, tmp_path):
    """A printed model says which scheme each layer has, also one that was loaded."""
    model = make_model("gpt2")
    posswap.swap(model, "mixed:layers=[rotary:theta=500,none]").save_pretrained(tmp_path)
    for one in (model, type(model).from_pretrained(tmp_path)):
        for shown in ("Constant(mixed:layers=", "RotaryPositions(rotary:theta=500)", "AttentionPositions(none)"):
            assert shown in str(one)


@pytest.mark.parametrize("option", ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "scale_attn_weights"])
def test_attention_options_of_gpt2(make_model, option, tokens):
    """GPT-2's scaling by layer, unscaled and upcast attention act under every scheme as they do without one."""
    model = make_model("gpt2", **{option: option != "scale_attn_weights"})
    position_ids = torch.full_like(tokens, 5)  # all in one place: no distance, so relative tables of zero and no turn
    schemes = ("none", "rotary", "relative", "alibi", "buckets", "self-extend")
    outputs = [posswap.swap(model, scheme)(tokens, position_ids=position_ids).logits for scheme in schemes]
    for other in outputs[1:]:
        torch.testing.assert_close(other, outputs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", [lambda a, b: [a], lambda a, b: [b, a], lambda a, b: [a, b, copy.deepcopy(b)]])
def test_layers_that_are_not_those_of_the_swap(make_model, change):
    """Old queries and keys would go to others' layers, or a half of the model back: nothing is restored."""
    model = posswap.swap(make_model("bert"), "rotary")
    encoder, kept = model.bert.encoder, model.bert.encoder.layer
    encoder.layer = torch.nn.ModuleList(change(*kept))
    before = snapshot(model)
    for keep in (False, True):
        refused("layers were deleted, added or moved since the swap", posswap.restore, model, keep_training=keep)
    assert not changes(model, before)
    encoder.layer = kept
    posswap.restore(model)


def test_a_plain_class_of_a_swapped_config(make_model):
    """It has a table, and a config that says another scheme: what it saves would not load."""
    swapped = posswap.swap(make_model("bert"), "rotary")
    plain = BertForMaskedLM(swapped.config)
    for use in (posswap.describe, lambda one: posswap.swap(one, "alibi"), posswap.restore):
        refused("made from the config of a swapped model.*make a PosswapBertForMaskedLM", use, plain)


def test_restored_positions_have_the_mode_of_the_model(make_swapped, tmp_path):
    """Self-Extend reads otherwise in training: positions that come back know that the model is evaluated by now."""
    make_swapped("bert", "self-extend").save_pretrained(tmp_path)
    loaded = AutoModelForMaskedLM.from_pretrained(tmp_path).train()
    posswap.restore(posswap.swap(loaded, "rotary").eval())
    assert not any(module.training for module in loaded.modules())


def test_layers_that_were_put_back(make_swapped):
    """A copy of a layer holds the same weights, but is not what was swapped: another swap could not undo it."""
    model = make_swapped("bert", "relative:clip=4")
    model.bert.encoder.layer[0] = copy.deepcopy(model.bert.encoder.layer[0])
    refused("layers were deleted, added or moved", posswap.swap, model, "alibi")
