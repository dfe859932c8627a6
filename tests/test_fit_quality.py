"""The recipe that measures fits: its rows, its table, its refusals; on tiny models."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from transformers import BertModel

from hf_posswap.errors import PosswapError
from hf_posswap.experiments.fit_table import fit_table

RECIPE = Path(__file__).parents[1] / "recipes" / "fit_quality.py"


@pytest.fixture
def recipe(monkeypatch):
    """The recipe's `main`, as `python recipes/fit_quality.py` would run it."""
    monkeypatch.setattr(sys, "argv", ["fit_quality.py", "--output", "here"])
    return runpy.run_path(str(RECIPE))["main"]


@pytest.fixture
def options(make_model, bert_tokenizer, tmp_path):
    """A small run: a tiny BERT, a text, pairs of sentences."""
    make_model("bert", head=BertModel).save_pretrained(tmp_path / "bert")
    bert_tokenizer.save_pretrained(tmp_path / "bert")
    words = "the cat sat on the mat . a dog ran under the log and it was happy then".split()
    lines = [" ".join(words[i % 7 :] + words[: i % 7]) for i in range(300)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    pairs = "\n".join(f"{lines[i]},{lines[i + 1]},{i % 5}" for i in range(20))
    (tmp_path / "pairs.csv").write_text(f"sentence1,sentence2,label\n{pairs}\n")
    return {
        "output": tmp_path / "out", "model": str(tmp_path / "bert"), "data": str(tmp_path / "text.txt"), "evaluation": None,
        "pairs": tmp_path / "pairs.csv", "scheme": ["relative:clip=4"], "text": ["given", "shuffled", "random"],
        "reconstruct": [0, 2], "tokens": 2000, "evaluation_tokens": 256, "seed": [0, 1], "resume": False,
    }  # fmt: skip


def test_rows_and_table(recipe, options):
    """One row for each scheme, text and number of steps, with every seed; the table shows them; a resume runs nothing again."""
    recipe(**options)
    file = options["output"] / "results.json"
    results = json.loads(file.read_text())
    assert len(results["rows"]) == 6 and results["command"] == "python recipes/fit_quality.py --output here"
    assert set(results["original"]) == {"cosine_8", "cosine_32", "spearman"}
    assert results["original"]["cosine_32"] == pytest.approx(1, abs=1e-5)
    for row in results["rows"]:
        assert [run["seed"] for run in row["fitted"]] == [0, 1]
        assert row["fitted"][0]["cosine_32"] != row["fitted"][1]["cosine_32"]  # the seed does something
        assert len(row["fitted"][0]["layers"]) == 2
    closed, fitted = (row["fitted"][0] for row in results["rows"] if row["text"] == "given")
    assert fitted["cosine_32"] != closed["cosine_32"]
    table = fit_table(results)
    assert table.count("cold swap") == 1 and "closed form on random text" in table and "fit on shuffled text" in table
    assert (options["output"] / "results.md").read_text() == table + "\n"
    before = file.stat().st_mtime_ns
    recipe(**{**options, "resume": True})
    assert file.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "says"), [({"text": ["novel"]}, "'novel' is not one of"), ({"pairs": "text.txt"}, "sentence1")]
)
def test_refusals(recipe, options, tmp_path, change, says):
    """Unknown texts and files without the columns are refused before anything is written."""
    if "pairs" in change:
        change = {"pairs": tmp_path / change["pairs"]}
    with pytest.raises(PosswapError, match=says):
        recipe(**{**options, **change})
    assert not (options["output"] / "results.json").exists()


def test_another_run_is_not_mixed_in(recipe, options):
    """Results in the folder are kept: another --output, --resume with the same options, or an error."""
    options = {**options, "text": ["given"], "reconstruct": [0], "seed": [0]}
    recipe(**options)
    with pytest.raises(PosswapError, match="--resume"):
        recipe(**options)
    with pytest.raises(PosswapError, match="other options"):
        recipe(**{**options, "resume": True, "tokens": 3000})
