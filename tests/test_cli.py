"""The command line: what it prints, what it writes, and what it refuses."""

import errno
import json
import os
import random
import re
import shutil
import sys
from contextlib import nullcontext
from io import BytesIO, TextIOWrapper
from pathlib import Path
from statistics import fmean
from unittest.mock import Mock, patch

import hf_posswap_cli
import pytest
import torch
from conftest import WORDS, fails, refused, rewrite, works, write_run
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, BertForTokenClassification, PreTrainedModel
from typer.testing import CliRunner

import hf_posswap as posswap
from hf_posswap.architectures import ARCHITECTURES
from hf_posswap.commands import demo as commands_demo
from hf_posswap.commands import swap as commands_swap
from hf_posswap.data.text import embedded_documents
from hf_posswap.experiments.comparison import load_runs
from hf_posswap.experiments.page import write_comparison
from hf_posswap.provenance import new_folder, weight_hashes
from hf_posswap.schemes import SCHEMES
from hf_posswap.sharing.record import RESULTS_FILE
from hf_posswap.terminal import begin


@pytest.fixture
def folder(save):
    return save("bert")


def test_swap_then_describe(folder, tmp_path, program):
    """A swapped folder is described alike before and after saving, and loads with its tokenizer."""
    output = tmp_path / "out"
    options = ("--scheme", "rotary:fraction=0.5", "--max-positions", 64, "--output", output)
    code, out, err = program("swap", folder, *options)
    assert code == 0 and "learned -> rotary:fraction=0.5" in out and str(output) in out
    assert "posswap.restore" not in out  # the process that could has ended
    stages = [word for word in err.split() if word in ("loading", "swapping", "saving")]
    assert stages == ["loading", "swapping", "saving"]  # what a run says whose output goes to a file
    out = works(program, "describe", output)
    assert "learned -> rotary:fraction=0.5" in out and "64 (trained with 32)" in out
    assert posswap.describe(AutoModel.from_pretrained(output)).new == posswap.Rotary(fraction=0.5)
    assert AutoTokenizer.from_pretrained(output).model_max_length == 64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--scheme", "RoPE"), "it is 'rotary' here"),
        (("--scheme", "rotary", "--max-positions", "3"), "max_positions=3"),
        (("--scheme", "rotary", "--fit-tokens", "999"), "--fit-tokens is about a fit"),
        (("--scheme", "rotary", "--fit", "auto", "--fit-tokens", "0"), "greater than or equal to 1"),
        (("--scheme", "rotary", "--reconstruct", "0"), "--fit-steps is about a fit"),  # its older name
        (("--scheme", "rotary", "--first", "9"), "first=9 is about a span, of which there is none: give span, too"),
        (("--scheme", "rotary", "--fit", "auto", "--fit-steps", "-1"), "greater than or equal to 0"),
        (("--scheme", "rotary", "--window", "16"), "--window is about a fit"),
        (("--scheme", "rotary", "--text-column", "text"), "--text-column is about a fit"),
        (("--scheme", "rotary", "--fit", "auto", "--text-column", "text"), "--fit auto reads none"),
    ],
)
def test_refusals_leave_nothing_behind(folder, tmp_path, program, arguments, says):
    """A bad option ends with one paragraph, exit status 2 and no output folder."""
    fails(says, program, "swap", folder, "--output", tmp_path / "out", *arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"bert"}


def test_a_fit_leaves_its_report(folder, tmp_path, watch, program):
    """The report of a fit lies next to the weights that it is of, and the card shows it."""
    text = " ".join(random.Random(0).choices(WORDS, k=6000))
    (tmp_path / "some[one].txt").write_text(text)
    output = tmp_path / "out"
    options = ("--scheme", "relative:clip=4", "--fit", tmp_path / "some[one].txt", "--fit-tokens", "2000", "--fit-steps", "5")
    options += ("--max-positions", 64)
    draws = watch(commands_swap, "text_batches")
    code, said, err = program("swap", folder, *options, "--output", output)
    assert code == 0 and "fit: 100%" in err, err  # a log file shows how far it is, too
    assert draws[-1].kwargs["window"] == 32  # there are blocks, too, that the original reads at once
    assert "some[one].txt" in said
    assert re.search(r"damage: 1 - cosine of .*\n.*\n(.*\n)*?the fit won back \d+% of what the swap had lost", said)
    kept = json.loads((output / "posswap_fit.json").read_text())
    assert kept["weights"] == weight_hashes(output) and kept["report"]["text"] == "some[one].txt"
    assert kept["report"]["made"]["command"].startswith("hf-posswap swap test_a_fit")
    assert kept["report"]["after"]["total"] < kept["report"]["before"]["total"]
    assert kept["report"]["longest"] == 64
    assert "the card names no licence" in works(program, "card", output, "--base-model", "local:tiny")
    assert f"| {kept['report']['after']['total']:.4f} |" in (output / "README.md").read_text()
    with patch.object(commands_swap.typer, "echo", side_effect=OSError("nobody reads")):
        fails("nobody reads", program, "swap", folder, *options, "--window", 16, "--output", tmp_path / "unread")
    assert draws[-1].kwargs["window"] == 16
    report = json.loads((tmp_path / "unread" / "posswap_fit.json").read_text())["report"]
    assert (kept["report"]["window"], report["window"]) == (32, 16)


def test_a_card_has_results_of_its_own_span(make_model, tmp_path, program):
    """Runs without the model's span, or with another, are not the model's; with one that is, the card names that row."""
    posswap.swap(make_model("gpt2"), "rotary", span=8).save_pretrained(tmp_path / "near")
    command = ("card", tmp_path / "near", "--base-model", "local:tiny", "--results", tmp_path / "runs")
    runs = {"whole": {}, "wider": {"span": 9, "first": 4}, "first": {"span": 8, "first": 2}, "bare": {"span": 8}}
    for name, options in runs.items():
        write_run(tmp_path / "runs" / name, {"accuracy": 0.5}, scheme="rotary", **options)
    rewrite(tmp_path / "runs/bare/result.json", lambda run: run["config"].pop("first"))  # another program's
    what = "no run with rotary (span 8, first 4), the model's positions"
    there = ", ".join(f"rotary (span {span})" for span in ("8, first 2", "8, first None", "9, first 4"))
    fails(f"{what}; it has rotary, {there}", program, *command)
    shutil.rmtree(tmp_path / "runs")
    for span in (None, 8):
        write_run(tmp_path / f"runs/{span}", {"accuracy": 0.5}, scheme="rotary", span=span, first=span and 4)
    write_comparison(load_runs([tmp_path / "runs"]), tmp_path / "runs", vary=["span"])
    works(program, *command)
    assert "positions: *rotary, swap, span 8*." in (tmp_path / "near" / "README.md").read_text()
    whole = (file := tmp_path / "near" / RESULTS_FILE).read_text()
    for other, says in ((whole.replace('"format": 1', '"format": 2'), "install a newer"), (whole[:9], "remove it, and")):
        file.write_text(other)
        fails(says, program, *command)
        assert file.read_text() == other
    file.write_text(whole)
    rewrite(tmp_path / "near" / RESULTS_FILE, lambda content: content["comparisons"][0]["runs"].pop(0))
    for again in (command[:-2], ("leaderboard", tmp_path / "near")):  # as an older version wrote it
        fails(f"{what}; it has rotary:", program, *again)


def test_export(folder, tmp_path, program):
    """A swapped folder becomes one of RoFormer's; what cannot leaves nothing behind, and nothing is written over."""
    for scheme in ("rotary", "relative"):
        program("swap", folder, "--scheme", scheme, "--output", tmp_path / scheme)
    said = works(program, "export", tmp_path / "rotary", "--output", tmp_path / "native")
    assert "-> RoFormerModel" in said and "left out" in said
    assert type(AutoModel.from_pretrained(tmp_path / "native")).__name__ == "RoFormerModel"
    assert len(AutoTokenizer.from_pretrained(tmp_path / "native")) > 10
    fails("relative positions", program, "export", tmp_path / "relative", "--output", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    fails("exists already", program, "export", tmp_path / "rotary", "--output", tmp_path / "native")


BROKEN = {  # what is done to config.json, and what the one line says
    "llama": ({"model_type": "llama"}, "a 'llama' model: it has no table: its positions are rotary already"),
    "nameless": ({"model_type": None}, "names no model_type"),
    "shape": ({"hidden_size": 64}, "their shapes are not those that config.json says"),
    "string": ({"hidden_size": "32"}, "'hidden_size' expected int"),
    "part": ({"model_type": "posswap-bert"}, "needs a complete `position_scheme` entry"),
}


@pytest.mark.parametrize("change", BROKEN)
def test_broken_config(folder, program, change):
    """A config that no command can use is one line; what the config alone tells is told before weights are read."""
    options, says = BROKEN[change]
    rewrite(folder / "config.json", lambda config: config.update(options))
    if change in ("llama", "nameless", "string"):
        (folder / "model.safetensors").unlink()
    code, out, err = program("describe", folder)
    assert code == 2 and says in err and "Traceback" not in err and not out


def test_broken_files(folder, tmp_path, program):
    """Files that are cut off, that are no JSON, or that are not there are one line each."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, written = weights.read_bytes(), config.read_text()
    opened = shutil.copytree(folder, tmp_path.with_name("opened"))
    for damage, says in (
        (lambda: weights.write_bytes(whole[: len(whole) // 2]), "weights of"),
        (lambda: weights.unlink(), "no file named model.safetensors"),
        (lambda: config.write_text("[]"), "must hold an object"),
        (lambda: config.write_text(written[:50]), "is no JSON"),
        (lambda: config.unlink(), "there is no config.json in it"),
        (lambda: shutil.copytree(opened, folder / "0_Transformer"), "is a pipeline whose model lies in a folder of its own"),
    ):
        damage()
        fails(says, program, "swap", folder, "--scheme", "none", "--output", tmp_path / "out")
        assert {path.name for path in tmp_path.iterdir()} == {"bert"}
    fails("take one that is built in, minilm or stdlib-gpt2", program, "describe", "bert-base-uncased")
    assert "there is no folder a:b:c," in program("describe", "a:b:c")[2]  # rich would draw a picture for :b:


def test_code_of_others_is_not_run(folder, program, tmp_path, monkeypatch):
    """A folder that brings code along is read without it, and nobody is asked."""
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Model: pass\nclass Config: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "theirs.Model", "AutoConfig": "theirs.Config"}
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    for kind, status in (("bert", 0), ("theirs", 2)):
        (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
        code, out, err = program("describe", folder)
        assert code == status and not (tmp_path / "ran").exists(), err


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
@pytest.mark.parametrize("command", ["swap", "export"])
def test_full_disk(folder, program, tmp_path, monkeypatch, error, command):
    """What could not be written is one line, and leaves nothing that blocks the next try."""
    posswap.swap(AutoModel.from_pretrained(folder), "none").save_pretrained(tmp_path / "none")

    def save(self, where, **options):
        (Path(where) / "half").write_text("x")
        raise error

    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "save_pretrained", save)
        options = ("--scheme", "none") if command == "swap" else ()
        source = folder if command == "swap" else tmp_path / "none"
        fails("No space left", program, command, source, *options, "--output", tmp_path / "out")
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", ["new", "empty", "link", "dangling", "."])
@pytest.mark.parametrize("raced", [False, True])
def test_folders_that_are_there(place, raced, tmp_path, monkeypatch):
    """An empty folder, a link too, is filled, or left as it was if that fails; of two writers, the second gets an error."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("made")
    monkeypatch.chdir(tmp_path / "empty")
    output, before = tmp_path / place if place != "." else Path(), sorted(tmp_path.rglob("*"))
    with pytest.raises(ZeroDivisionError), new_folder(output) as mine:
        (mine / "mine").write_text(str(1 / 0))
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(posswap.PosswapError, match="exists already") if raced else nullcontext(), new_folder(output) as mine:
        (mine / "mine").write_text("x")
        if raced:
            output.resolve().mkdir(exist_ok=True)
            (output / "theirs").write_text("x")
    assert [path.name for path in output.iterdir()] == ["theirs" if raced else "mine"]
    refused("exists already", new_folder(output).__enter__)
    (tmp_path / "file").write_text("x")
    refused(r"file/out cannot be made \(Not a directory\): choose", new_folder(tmp_path / "file" / "out").__enter__)


@pytest.mark.parametrize("arguments", [["--output", ""], ["--output="], [""], ["--figure", "", "--output", "a.png"]])
def test_an_empty_argument(arguments, program, tmp_path, monkeypatch):
    """A variable of the shell that is not set is no working directory, and no option left out."""
    monkeypatch.chdir(tmp_path)
    fails("is empty, as a variable of the shell", program, "plot", "table", "sinusoidal", *arguments)
    assert not any(tmp_path.iterdir())


def test_a_terminal_without_unicode(monkeypatch):
    """A character that a terminal lacks is a question mark there; one that knows no width gets tables all the same.

    Where errors have no place to go to, nothing fails for that.
    """
    monkeypatch.setattr("sys.stdout", TextIOWrapper(BytesIO(), encoding="ascii"))
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setenv("COLUMNS", "0")
    begin()
    assert Console().width > 0 and not sys.stderr.isatty()
    print("3.0 \u00b1 0.1", flush=True)
    assert sys.stdout.buffer.getvalue().decode().strip() == "3.0 ? 0.1"
    sys.stderr.close()


def test_too_little_room_is_one_line(program, monkeypatch):
    """A picture of 10**8 positions is refused, memory that runs out is no traceback, a full disk that names no file a hint."""
    fails("100000", program, "plot", "table", "sinusoidal", "--positions", 10**8, "--output", "x.png")
    monkeypatch.setattr("hf_posswap.commands.describe.open_model", lambda *_, **__: bytearray(2**62))
    fails("not enough memory", program, "describe", "x")
    full = Mock(side_effect=SafetensorError("I/O error: No space left on device (os error 28)"))
    monkeypatch.setattr("hf_posswap.commands.describe.open_model", full)
    assert "(os error 28): free some, where the command writes (--output)" in program("describe", "x")[2]


@pytest.mark.parametrize(
    ("named", "says"),
    [(["BertForSpelling"], "a BertForSpelling, which is not known here"), (None, "config.json of .* no class")],
)
def test_a_head_that_is_not_known(make_model, tmp_path, program, named, says):
    """Weights of a class that is not known here would be lost: that is refused."""
    make_model("bert", head=BertForTokenClassification).save_pretrained(tmp_path / "plain")
    rewrite(tmp_path / "plain" / "config.json", lambda config: config.update(architectures=named))
    code, out, err = program("swap", tmp_path / "plain", "--scheme", "rotary", "--output", tmp_path / "out")
    assert code == 2 and re.search(f"{says}, so classifier.bias", err) and not (tmp_path / "out").exists()


def test_options_reach_the_swap(folder, tmp_path, program):
    """The command's model is the one that a swap in Python makes with the same options."""
    options = {"max_positions": 48, "span": 8, "first": 2}
    for cold in (False, True):
        given = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)] + ["--cold"] * cold
        program("swap", folder, "--scheme", "relative:clip=4", *given, "--output", tmp_path / f"out{cold}")
        found = AutoModel.from_pretrained(tmp_path / f"out{cold}")
        wanted = posswap.swap(AutoModel.from_pretrained(folder), "relative:clip=4", warm_start=not cold, **options)
        assert posswap.describe(found).span == posswap.describe(wanted).span and posswap.describe(found).max_positions == 48
        assert all(torch.equal(value, wanted.get_parameter(name)) for name, value in found.named_parameters())


@pytest.mark.parametrize("family", ["albert", "roberta", "distilbert", "gpt2", "opt"])
def test_checkpoint_without_its_table(make_model, program, tmp_path, family):
    """A position table that the weights lack would be random: that is refused, whatever the family calls it."""
    make_model(family).save_pretrained(place := tmp_path / "plain")
    owner, name = ARCHITECTURES[family].table_owner(model := AutoModel.from_pretrained(place))
    table = next(key for key, value in model.named_modules() if value is getattr(owner, name))
    lost = [key for key in load_file(place / "model.safetensors") if key.endswith(f"{table}.weight")]
    rewrite(place / "model.safetensors", lambda weights: [weights.pop(key) for key in lost])
    code, out, err = program("swap", place, "--scheme", "rotary", "--output", tmp_path / "swapped")
    assert code == 2 and f"{table}.weight, which would be random" in err and not (tmp_path / "swapped").exists()


def test_the_environment(program, monkeypatch):
    """Where the user has not said otherwise, waiting threads spin for a short while, and matplotlib has a backend."""
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    for given, expected in (({}, "500"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, None)):
        with monkeypatch.context() as patch:
            for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            assert works(program, "--version").startswith("hf_posswap ")
            assert os.environ.get("GOMP_SPINCOUNT") == expected
            assert os.environ["MPLBACKEND"] == "agg"
            os.environ.pop("GOMP_SPINCOUNT", None)


def test_completion_and_typos():
    """Names are completed without an import, and a typo gets the name that is meant."""
    run = CliRunner().invoke(
        hf_posswap_cli.app,
        env={"_HF_POSSWAP_COMPLETE": "complete_bash", "COMP_WORDS": "hf-posswap de", "COMP_CWORD": "1"},
        prog_name="hf-posswap",
    )
    assert run.output.split() == ["demo", "describe"]
    run = CliRunner().invoke(hf_posswap_cli.app, ["descrbe"])
    assert run.exit_code == 2 and "Did you mean 'describe'" in run.output


def test_full_fits_of_the_demo_were_measured():
    """What the demo says that a longer fit reaches stands in the results of that fit."""
    for model, schemes in commands_demo.FULL.items():
        file = Path(__file__).parents[1] / "recipes/results/fit" / model / "comparison.json"
        for scheme, (figure, seconds) in schemes.items():
            runs = [run for run in json.loads(file.read_text())["runs"] if run["config"]["start"] == "fit"]
            runs = [run for run in runs if run["config"]["scheme"] == scheme]
            found = fmean(run["figures"]["cosine_128" if model == "minilm" else "perplexity"] for run in runs)
            assert len(runs) == 3 and f"{found:.{len(figure.partition('.')[2])}f}" == figure, (model, scheme)
            assert f"{min(run['cost']['seconds'] for run in runs):.0f} s" == seconds


@pytest.mark.skipif(not posswap.assets.is_installed("minilm"), reason="the embedded BERT is not installed")
def test_demo(tmp_path, monkeypatch, capsys):
    """The demo runs, fits an 80-column terminal, and leaves a picture, a model that loads, and its card."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, auto in (("minilm", AutoModel), ("stdlib-gpt2", AutoModelForCausalLM)):  # a layer of each
        source = posswap.embedded_model(name)
        auto.from_pretrained(source, num_hidden_layers=1).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / name)
    monkeypatch.setattr(commands_demo, "embedded_model", lambda name: tmp_path / name)
    for name, value in (("SCHEMES", ("rotary",)), ("LONG", 512), ("HELD_OUT", 512)):
        monkeypatch.setattr(commands_demo, name, value)
    few = {causal: embedded_documents("validation", causal=causal) for causal in (True, False)}  # reading all takes seconds
    monkeypatch.setattr(commands_demo, "embedded_documents", lambda split, causal: few[causal])
    commands_demo.demo(tmp_path / "out", fit_tokens=2304, fit_steps=1)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and out.count("original") >= 3 and "nan" not in out
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 10_000
    model = tmp_path / "out" / "stdlib-gpt2-rotary"
    assert posswap.describe(AutoModel.from_pretrained(model)).max_positions == 512
    card = (model / "README.md").read_text()
    assert "stdlib-gpt2" in card and "apache-2.0" in card and ".writing" not in card


def test_the_first_help_names_all():
    """The text stands where nothing heavy is imported: it names every scheme and every family all the same."""
    text = hf_posswap_cli._about.__doc__
    assert [name for name in (*SCHEMES, *ARCHITECTURES) if not re.search(rf"\b{name}\b", text)] == []


def test_a_home_folder_after_an_equals_sign(monkeypatch, tmp_path, program):
    """Shells leave the ~ of --output=~/x alone, and a folder of that name is not what anybody means."""
    monkeypatch.setenv("HOME", str(tmp_path))
    works(program, "plot", "table", "sinusoidal", "--output=~/table.png")
    assert (tmp_path / "table.png").exists()
