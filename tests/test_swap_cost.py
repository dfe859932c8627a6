"""The recipes that measure what a swap costs and what a fit wins back: figures, texts, refusals; on tiny models."""

import json
from dataclasses import replace

import pytest
from conftest import refused

from hf_posswap.experiments.swap_cost import SwapCostConfig, run


@pytest.fixture
def options(save, tmp_path):
    """Both models as small files, a text, and a budget of moments."""
    save("bert"), save("gpt2")
    words = "Alpha beta gamma delta the cat dog sat ran on under mat log and then".split()
    lines = [" ".join(words[i % 5 :] + words[: i % 5]) + f" w{i} the end." for i in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return {
        "train_file": str(tmp_path / "text.txt"), "max_steps": 2, "batch_size": 4, "evaluation_tokens": 256, "fit_steps": 10,
        "fit_tokens": 4096, "word_order_sentences": 40, "report_to": (),
    }  # fmt: skip


@pytest.fixture
def fit_quality(recipe, options, tmp_path):
    """The function that runs the recipe on that BERT, the text and pairs of its sentences, with some options."""
    module, lines = recipe("fit_quality"), (tmp_path / "text.txt").read_text().splitlines()
    pairs = "\n".join(f"{lines[i]},{lines[i + 1]},{i % 5}" for i in range(20))
    (tmp_path / "pairs.csv").write_text(f"sentence1,sentence2,label\n{pairs}\n")
    given = {"model": str(tmp_path / "bert"), "pairs": str(tmp_path / "pairs.csv"), "scheme": "relative:clip=4"}
    given |= {"train_file": options["train_file"], "evaluation_tokens": 256, "fit_tokens": 2000, "fit_steps": 2}
    return lambda **changes: module.run(module.Config(**{**given, **changes}), tmp_path / "out", False)


def test_figures(fit_quality, capsys):
    """The original is unhurt; seed, text, start and steps each matter; a fit says what it read and what each layer won."""
    original = fit_quality(scheme="original")
    assert "swap" not in capsys.readouterr().err
    assert set(original["figures"]) == {"cosine_8", "cosine_32", "spearman"}
    assert original["figures"]["cosine_32"] == pytest.approx(1, abs=1e-5) and original["details"]["layers"] == []
    changes = [{}, {"seed": 1}, {"text": "shuffled"}, {"text": "random"}]
    changes += [{"start": "swap"}, {"start": "cold"}, {"fit_steps": 0}]
    found = [fit_quality(**change) for change in changes]
    told = capsys.readouterr().err
    assert [told.count(words) for words in ("start swap", "fitting\n", "=4\n", "without a warm start\n")] == [0, 5, 6, 1]
    assert len({one["figures"]["cosine_32"] for one in found}) == len(changes)
    assert all(one["figures"]["cosine_32"] < 1 for one in found)
    assert len(found[0]["details"]["layers"]) == 2 and found[0]["cost"]["tokens"] > 0 and "tokens" not in found[4]["cost"]


def test_figures_of_a_causal_model(fit_quality, options, tmp_path):
    """The ratio is that of two perplexities, block by block, and KL is that of the two models. Both recipes measure on the same
    tokens, so that a number of one table may be held against the other's.
    """
    given = {"model": str(tmp_path / "gpt2"), "pairs": None, "start": "cold"}
    original, cold = (fit_quality(scheme=scheme, **given) for scheme in ("original", "none"))
    swapped = run(SwapCostConfig(model=given["model"], scheme="original", **options), tmp_path / "run", False)
    assert original["items"]["perplexity"] == pytest.approx(swapped["items"]["perplexity_32"])
    assert original["figures"]["ratio"] == pytest.approx(1) and original["figures"]["kl"] == pytest.approx(0, abs=1e-6)
    figures = cold["figures"]
    assert figures["ratio"] == pytest.approx(figures["perplexity"] / original["figures"]["perplexity"], rel=1e-4)
    assert figures["kl"] > 0.01 and {len(items) for items in cold["items"].values()} == {8}  # of 32 tokens


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pairs": "text.csv"}, "sentence1"),
        ({"text": "written"}, "needs a causal model"),
        ({"start": "scratch"}, "known are cold, swap, fit"),
        ({"validation_file": "text.txt"}, "to train on and to measure on"),
    ],
)
def test_refusals(fit_quality, tmp_path, change, says):
    """Options that make no sense are refused, such as one text to fit on and to measure on."""
    (tmp_path / "text.csv").write_text("text\nx\n")
    files = {name: str(tmp_path / value) for name, value in change.items() if name in ("pairs", "validation_file")}
    refused(says, fit_quality, **{**change, **files})


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_every_scheme_and_start(options, family, tmp_path):
    """The original costs nothing; a fit costs less than a warm start, that less than a cold one; all under one budget."""
    found = {}
    for scheme, start in [("original", "fit"), *(("rotary", start) for start in ("cold", "swap", "fit"))]:
        span = 8 if scheme == "original" else None  # which it does not have
        config = SwapCostConfig(model=str(tmp_path / family), scheme=scheme, start=start, span=span, **options)
        found[start if scheme == "rotary" else scheme] = run(config, tmp_path / "runs" / f"{scheme}-{start}", False)
    figures = {name: one["figures"] for name, one in found.items()}
    assert len({json.dumps([one["cost"]["tokens"], one["details"]]) for one in found.values()}) == 1
    if family == "bert":
        names = {"cosine_32", "word_order"}
        assert figures["original"]["cosine_32"] == pytest.approx(1.0, abs=1e-5)
        assert figures["cold"]["cosine_32"] < figures["swap"]["cosine_32"] < figures["fit"]["cosine_32"] < 1
        assert not found["fit"]["model"].pooler.dense.weight.requires_grad  # it gets no gradient, and DDP waits for all
    else:
        names = {"perplexity_32", "perplexity_64", "perplexity_128", "kl", "word_order"}
        assert figures["original"]["kl"] == pytest.approx(0.0, abs=1e-5)
        assert figures["cold"]["kl"] > figures["fit"]["kl"] > 0 and figures["swap"]["kl"] > figures["fit"]["kl"]
    for one in figures.values():
        assert set(one) == names | {f"tuned_{name}" for name in names}
    assert figures["fit"] != {name: figures["fit"][name.removeprefix("tuned_")] for name in figures["fit"]}


def test_bad_options(save, tmp_path):
    """Bad options are refused before anything is loaded."""
    config = SwapCostConfig(model=str(save("bert")), skip_to=40)
    refused("skip_to=40: the original.* has 32: lower it", run, config, tmp_path, False)
    refused("what a checkpoint loses; known are cold, swap, fit", SwapCostConfig, start="scratch")
    refused("word_order_sentences=2", SwapCostConfig, word_order_sentences=2)
    (tmp_path / "zh.txt").write_text("他是一個人。" * 999)  # no spaces, so no sentences of words
    (tmp_path / "bert.txt").write_text("the cat sat on " * 999)
    given = {"model": str(save("bert")), "max_steps": 1, "batch_size": 2, "evaluation_tokens": 64, "report_to": ()}
    config = SwapCostConfig(**given, train_file=str(tmp_path / "bert.txt"), scheme="rotary")
    refused("word_order_sentences=0", run, config, tmp_path, False)
    assert "word_order" not in run(replace(config, word_order_sentences=0), tmp_path, False)["figures"]
