"""The command line: what it prints, what it writes, and what it refuses."""

import json
import random

import pytest
from conftest import WORDS
from transformers import AutoModel, AutoTokenizer, BertModel

import hf_posswap as posswap
from hf_posswap import cli
from hf_posswap.provenance import weight_hashes


def _call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["hf-posswap", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code, capsys.readouterr()


@pytest.fixture
def folder(make_model, bert_tokenizer, tmp_path):
    """A tiny BERT with its tokenizer on disk."""
    make_model("bert", head=BertModel).save_pretrained(tmp_path / "bert")
    bert_tokenizer.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_swap_then_describe(folder, tmp_path, monkeypatch, capsys):
    """A swapped folder is described alike before and after saving, and loads with its tokenizer."""
    output = tmp_path / "out"
    code, said = _call(
        monkeypatch,
        capsys,
        "swap",
        folder,
        "--scheme",
        "rotary:fraction=0.5",
        "--max-positions",
        64,
        "--output",
        output,
    )
    assert code == 0 and "learned -> rotary:fraction=0.5" in said.out and str(output) in said.out
    code, said = _call(monkeypatch, capsys, "describe", output)
    assert code == 0 and "learned -> rotary:fraction=0.5" in said.out and "64 (trained with 32)" in said.out
    assert posswap.describe(AutoModel.from_pretrained(output)).new == posswap.Rotary(fraction=0.5)
    assert AutoTokenizer.from_pretrained(output).model_max_length == 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scheme", "rotray"), "did you mean 'rotary'"),
        (("--scheme", "relative:clip=0"), "clip=0"),
        (("--scheme", "rotary", "--max-positions", "3"), "max_positions=3"),
        (("--scheme", "rotary", "--fit-tokens", "999"), "--fit-tokens is about a fit"),
        (("--scheme", "rotary", "--reconstruct", "0"), "--reconstruct is about a fit"),
        (("--scheme", "rotary", "--text-column", "text"), "--text-column is about a fit"),
    ],
)
def test_refusals_leave_nothing_behind(folder, tmp_path, monkeypatch, capsys, arguments, says):
    """A bad option ends with one paragraph, exit status 2 and no output folder."""
    code, said = _call(monkeypatch, capsys, "swap", folder, "--output", tmp_path / "out", *arguments)
    assert code == 2 and says in " ".join(said.err.split()) and "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


def test_a_fit_leaves_its_report(folder, tmp_path, monkeypatch, capsys):
    """The report of a fit lies next to the weights that it is of, and the card shows it."""
    text = " ".join(random.Random(0).choices(WORDS, k=6000))
    (tmp_path / "some.txt").write_text(text)
    output = tmp_path / "out"
    options = ("--scheme", "relative:clip=4", "--fit", tmp_path / "some.txt", "--fit-tokens", "2000", "--reconstruct", "5")
    code, said = _call(monkeypatch, capsys, "swap", folder, *options, "--output", output)
    assert code == 0, said.err
    kept = json.loads((output / "posswap_fit.json").read_text())
    assert kept["weights"] == weight_hashes(output) and kept["report"]["text"] == "some.txt"
    assert kept["report"]["made"]["command"].startswith("hf-posswap swap test_a_fit")
    assert kept["report"]["after"]["total"] < kept["report"]["before"]["total"]
    code, said = _call(monkeypatch, capsys, "card", output, "--base-model", "local:tiny")
    assert code == 0 and f"| {kept['report']['after']['total']:.4f} |" in (output / "README.md").read_text()


def test_existing_folder_is_kept(folder, tmp_path, monkeypatch, capsys):
    """A folder with something in it is not written into."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    code, said = _call(monkeypatch, capsys, "swap", folder, "--scheme", "rotary", "--output", tmp_path / "out")
    assert code == 2 and "exists already" in " ".join(said.err.split())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_export(folder, tmp_path, monkeypatch, capsys):
    """A swapped folder becomes one of RoFormer's; what cannot leaves nothing behind, and nothing is written over."""
    for scheme in ("rotary", "relative"):
        _call(monkeypatch, capsys, "swap", folder, "--scheme", scheme, "--output", tmp_path / scheme)
    code, said = _call(monkeypatch, capsys, "export", tmp_path / "rotary", "--output", tmp_path / "native")
    assert code == 0 and "-> RoFormerModel" in said.out and "left out" in said.out
    assert type(AutoModel.from_pretrained(tmp_path / "native")).__name__ == "RoFormerModel"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "native")) > 10
    code, said = _call(monkeypatch, capsys, "export", tmp_path / "relative", "--output", tmp_path / "other")
    assert code == 2 and "relative positions" in " ".join(said.err.split()) and not (tmp_path / "other").exists()
    code, said = _call(monkeypatch, capsys, "export", tmp_path / "rotary", "--output", tmp_path / "native")
    assert code == 2 and "exists already" in " ".join(said.err.split())


@pytest.mark.parametrize("command", ["swap", "describe", "compare", "export"])
def test_help(monkeypatch, capsys, command):
    """Every command explains itself."""
    code, said = _call(monkeypatch, capsys, command, "--help")
    assert code == 0 and len(said.out) > 200
