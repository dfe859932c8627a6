"""The healing recipe: what it measures on the way, tokens to a mark, and text that teaches."""

import math

import pytest
import torch
from conftest import refused
from transformers import BertModel

from hf_posswap.experiments import models
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.measure import kl_divergence, perplexity


@pytest.fixture
def recipe(recipe):
    return recipe("heal")


@pytest.fixture
def heal(recipe, save, tmp_path):
    """The function that runs the recipe on a tiny GPT-2, or BERT, and a small text, with some options."""
    words = "the cat dog sat ran on under mat log and then it was happy sad".split()
    chosen = torch.randint(len(words), (6000,), generator=torch.Generator().manual_seed(2))
    (tmp_path / "text.txt").write_text(" ".join(words[i] for i in chosen))
    small = {"scheme": "rotary", "max_steps": 2, "batch_size": 4, "fit_tokens": 1024, "fit_steps": 20}
    small |= {"evaluation_tokens": 256, "report_to": ()}

    def run(model="gpt2", **options):
        given = {"model": str(save(model)), "train_file": str(tmp_path / "text.txt")}
        config = recipe.Config(**given, **small | options)
        return recipe.run(config, tmp_path / str(len(list(tmp_path.iterdir()))), False)

    return run


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_healing_end_to_end(recipe, heal, watch, name):
    """Every start has a curve, tokens are counted, damage falls, a fit gets its options, and all have the cold swap's mark."""
    marks, fits = set(), watch(models, "fit")
    span = heal(name, scheme="rotary", start="cold", span=4)
    assert span["figures"]["damage_0"] == pytest.approx(span["details"]["cold_damage"], rel=1e-4)
    for scheme, start in (("rotary", "cold"), ("rotary", "swap"), ("relative:clip=4", "fit"), ("original", "swap")):
        result = heal(name, scheme=scheme, start=start, max_steps=20, fit_learning_rate=2e-3, seed=3)
        curve, details, figures = result["details"]["curve"], result["details"], result["figures"]
        assert [point["step"] for point in curve] == [0, *recipe.measured_steps(20)]
        assert curve[-1]["tokens"] == result["cost"]["tokens"] == 20 * 4 * details["block_size"]
        assert figures["damage"] == figures[f"damage_{curve[-1]['tokens']}"] and figures["damage_0"] == curve[0]["damage"]
        assert all(len(values) > 1 for values in result["items"].values()) and "damage" in result["items"]
        assert ("perplexity" in figures) == ("ratio" in figures) == (name == "gpt2")
        if name == "gpt2":
            assert figures["ratio"] == pytest.approx(figures["perplexity"] / details["original"]["perplexity"], rel=1e-4)
        if scheme == "rotary":
            assert figures["damage"] < figures["damage_0"]
            marks.add(details["cold_damage"])
        if start == "cold":
            assert figures["damage_0"] == pytest.approx(details["cold_damage"], rel=1e-4)
        if scheme == "original":
            assert details["cold_damage"] is None and figures["damage_0"] == pytest.approx(0, abs=1e-6)
            assert not any(figure.startswith("to_") for figure in figures)
    assert len(marks) == 1
    assert [[fit.kwargs[name] for name in ("steps", "learning_rate", "seed")] for fit in fits] == [[20, 2e-3, 3]]


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_select_text_is_not_trained_on(recipe, heal, monkeypatch, name):
    """`select` is damage, or the ratio where the text teaches, on blocks that share no six tokens with training."""
    kept, trained = [], []
    parts = recipe.RunText.parts
    monkeypatch.setattr(recipe.RunText, "parts", lambda *given: kept.append(parts(*given)) or kept[-1])
    train = recipe.train
    monkeypatch.setattr(recipe, "train", lambda model, rows, *a, **o: trained.extend(rows) or train(model, rows, *a, **o))

    def runs_of_six(rows):
        return {tuple(six) for row in rows for six in row.unfold(0, 6, 1).tolist()}

    result = heal(name, learning_rate=1e-9, evaluation_tokens=4096)
    seen = runs_of_six(row["input_ids"] for row in trained)
    assert len(runs_of_six(kept[0][1])) > 300 and len(seen & runs_of_six(kept[0][1])) < 0.01 * len(seen)
    figures = result["figures"]
    assert figures["select"] == pytest.approx(figures["damage"], rel=0.5) and figures["select"] != figures["damage"]
    if name == "gpt2":
        assert heal(name, learning_rate=1e-9, text_weight=0.5)["figures"]["select"] == pytest.approx(1, abs=0.5)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"start": "scratch"}, "random weights have nothing to win back.*known are cold, swap, fit"),
        ({"block_size": 33}, "from 3 to 32"),
        ({"batch_size": 1000}, "fewer than one batch"),
        ({"skip_to": 40}, "has 32: lower it"),
        ({"text_weight": 1.5}, "must be from 0 to 1"),
    ],
)
def test_bad_options(heal, recipe, monkeypatch, changes, says):
    """What cannot be run is refused with what can, before any fit."""
    monkeypatch.setattr(recipe.RunText, "load", None)
    refused(says, heal, **changes)


def test_tokens_to_reach(recipe):
    """Tokens to a mark are read off the first crossing, in a straight line of the logarithm; None if there is none."""
    curve = [{"tokens": t, "damage": d} for t, d in ((0, 1.0), (100, 0.1), (200, 0.001), (300, 0.5))]
    wanted = {1.0: 0, 0.0001: None, 0.1: 100, 0.01: 150, 10**-0.5: 50}
    assert {mark: recipe.tokens_to_reach(curve, mark) for mark in wanted} == wanted
    healed = [{"tokens": 0, "damage": 1.0}, {"tokens": 10, "damage": -1e-9}]
    assert 0 < recipe.tokens_to_reach(healed, 0.1) < 10


def test_distillation_loss(make_model, make_swapped, tokens):
    """Zero against itself; the relative error of states without a head, KL with one, (1 - w) KL + w CE with a text weight w."""
    for family, dropout in (("bert", "attention_probs_dropout_prob"), ("gpt2", "attn_pdrop")):
        model, training = make_model(family), make_model(family, **{dropout: 0.5}).train()
        assert distillation_loss(training)(model, {"input_ids": tokens}).item() == pytest.approx(0, abs=1e-6)
        assert training.training
    headless = make_model("bert", head=BertModel)
    swapped = make_swapped("bert", "rotary", head=BertModel)
    states = zip(*(one(tokens, output_hidden_states=True).hidden_states[1:] for one in (swapped, headless)), strict=True)
    wanted = torch.stack([(s - t).pow(2).mean() / t.pow(2).mean() for s, t in states]).mean().item()
    assert distillation_loss(headless)(swapped, {"input_ids": tokens}).item() == pytest.approx(wanted, rel=1e-5)
    model, other = make_model("gpt2"), make_swapped("gpt2", "rotary")
    p, q = (m(input_ids=tokens).logits.double().log_softmax(-1) for m in (model, other))
    divergence, text = (p.exp() * (p - q)).sum(-1).mean().item(), other(input_ids=tokens, labels=tokens).loss.item()
    assert kl_divergence(other, model, tokens) == pytest.approx(divergence, rel=1e-4)
    assert math.log(perplexity(other, tokens)) == pytest.approx(text, rel=1e-4)
    for weight in (0.0, 0.3):
        found = distillation_loss(model, text_weight=weight)(other, {"input_ids": tokens.int()}).item()
        assert found == pytest.approx((1 - weight) * divergence + weight * text, rel=1e-5)
    window = distillation_loss(model, window=8)(other, {"input_ids": tokens}).item()
    through = p.clone()  # windows start at 0, 2, 4, ...: later ones say their last two tokens
    for end in range(10, tokens.shape[1] + 1, 2):
        through[:, end - 2 : end] = model(tokens[:, end - 8 : end]).logits[:, -2:].double().log_softmax(-1)
    assert window == pytest.approx((through.exp() * (through - q)).sum(-1).mean().item(), rel=1e-5)
    assert window != pytest.approx(divergence, rel=1e-3)
    refused("window=8 needs a causal model", distillation_loss, headless, window=8)
    refused("window=64 must be from 1 to 32", distillation_loss, model, window=64)
    for wrong in (-0.1, 1.5):
        refused("from 0 to 1", distillation_loss, model, text_weight=wrong)
    refused("which predicts the next", distillation_loss, make_model("bert"), text_weight=0.5)


def test_text_teaches_and_the_original_is_the_control(heal):
    """With its own next tokens in the loss, text tunes any model to itself: the original too, which is a row of its own."""
    ends = []
    for scheme, start in (("original", "swap"), ("rotary", "fit")):
        options = {"scheme": scheme, "start": start, "max_steps": 30, "learning_rate": 1e-2}
        without, taught = (heal(text_weight=weight, **options)["figures"] for weight in (0.0, 0.5))
        ends.append(taught["ratio"] / without["ratio"])
        assert "ratio_0" in taught and "damage_0" in without and "ratio_0" not in without
    assert all(end < 0.9 for end in ends)
