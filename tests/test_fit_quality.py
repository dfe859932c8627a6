"""The recipe that measures fits: its figures, its texts, its refusals; on tiny models."""

import pytest
from conftest import refused


@pytest.fixture
def fit_quality(recipe, save, tmp_path):
    """The function that runs the recipe on a tiny BERT, a text and pairs of sentences, with some options."""
    module = recipe("fit_quality")
    words = "the cat sat on the mat . a dog ran under the log and it was happy then".split()
    lines = [" ".join(words[i % 7 :] + words[: i % 7]) for i in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    pairs = "\n".join(f"{lines[i]},{lines[i + 1]},{i % 5}" for i in range(20))
    (tmp_path / "pairs.csv").write_text(f"sentence1,sentence2,label\n{pairs}\n")
    given = {
        "model": str(save("bert")), "train_file": str(tmp_path / "text.txt"), "pairs": str(tmp_path / "pairs.csv"),
        "scheme": "relative:clip=4", "fit_tokens": 2000, "fit_steps": 2, "evaluation_tokens": 256,
    }  # fmt: skip
    return lambda **options: module.run(module.Config(**{**given, **options}), tmp_path / "out", False)


def test_figures(fit_quality):
    """The original is unhurt; seed, text, start and steps each matter; a fit says what it read and what each layer won."""
    original = fit_quality(scheme="original")
    assert set(original["figures"]) == {"cosine_8", "cosine_32", "spearman"}
    assert original["figures"]["cosine_32"] == pytest.approx(1, abs=1e-5) and original["details"]["layers"] == []
    changes = [{}, {"seed": 1}, {"text": "shuffled"}, {"text": "random"}]
    changes += [{"start": "swap"}, {"start": "cold"}, {"fit_steps": 0}]
    found = [fit_quality(**change) for change in changes]
    assert len({one["figures"]["cosine_32"] for one in found}) == len(changes)
    assert all(one["figures"]["cosine_32"] < 1 for one in found)
    assert len(found[0]["details"]["layers"]) == 2 and found[0]["cost"]["tokens"] > 0 and "tokens" not in found[4]["cost"]


def test_figures_of_a_causal_model(fit_quality, save):
    """The ratio is that of two perplexities, block by block, and KL is that of the two models."""
    options = {"model": str(save("gpt2")), "pairs": None, "start": "cold"}
    original, cold = (fit_quality(scheme=scheme, **options) for scheme in ("original", "none"))
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
