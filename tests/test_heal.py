"""The healing recipe: rows and their files, resuming, tokens to a mark, and two processes."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from hf_posswap.errors import PosswapError
from hf_posswap.fitting.distillation import distillation_loss

RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.fixture
def recipe(monkeypatch):
    """The module recipes/heal.py, imported as Python imports it when it is run."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("heal")


@pytest.fixture
def folders(make_model, bert_tokenizer, gpt2_tokenizer, tmp_path):
    """A folder with two tiny models and a text."""
    for name, model, tokenizer in (
        ("bert", make_model("bert", head=BertModel), bert_tokenizer),
        ("gpt2", make_model("gpt2", vocab_size=99, bos_token_id=1, eos_token_id=1), gpt2_tokenizer),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = "the cat dog sat ran on under mat log and then it was happy sad".split()
    chosen = torch.randint(len(words), (6000,), generator=torch.Generator().manual_seed(2))
    (tmp_path / "text.txt").write_text(" ".join(words[i] for i in chosen))
    return tmp_path


@pytest.fixture
def config(recipe, folders):
    """Two steps on the tiny GPT-2; tests replace what they are about."""
    return recipe.HealConfig(
        model=str(folders / "gpt2"), schemes=("rotary",), starts=("cold",), data=str(folders / "text.txt"), max_steps=2,
        batch_size=4, fit_tokens=1024, evaluation_tokens=256,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_healing_end_to_end(recipe, config, folders, tmp_path, name):
    """Every start of every scheme has a row with its curve, tokens are counted, damage falls, and all files are written."""
    config = replace(
        config, model=str(folders / name), schemes=("rotary", "relative:clip=4"), starts=tuple(recipe.STARTS), max_steps=20
    )
    output = tmp_path / "out"
    results = recipe.heal(config, output, progress=False)
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    assert all((output / file).stat().st_size > 0 for file in ("results.md", "recovery.png"))
    assert [(row["scheme"], row["start"], row["seed"]) for row in results["rows"]] == config.rows()
    assert results["command"].startswith("python recipes/heal.py")
    for row in results["rows"]:
        steps = [point["tokens"] // (4 * results["block_size"]) for point in row["curve"]]
        assert steps == [0, *recipe.measured_steps(20)] and row["tokens"] == 20 * 4 * results["block_size"]
        if row["start"] != "fit":  # which at its start is nearly where so short a run ends
            assert row["curve"][-1]["damage"] < row["curve"][0]["damage"]
        assert ("perplexity" in row["curve"][0]) == ("perplexity" in results["original"]) == (name == "gpt2")
        assert set(row["tokens_to_recover"]) == {"90", "95", "99"} and "tokens_to_cold_end" in row
        assert ("fit" in row) == (row["start"] == "fit")
        if row["start"] == "cold":
            assert row["curve"][0]["damage"] == pytest.approx(row["reference"]["damage"], rel=1e-4)


def test_resume_runs_what_is_missing(recipe, config, tmp_path):
    """Finished rows are not run again, lost ones are, and another configuration or a folder in use is refused."""
    config, output = replace(config, seeds=(0, 1)), tmp_path / "out"
    results = recipe.heal(config, output, progress=False)
    before = {path: path.stat().st_mtime_ns for path in (output / "rows").iterdir()}
    (output / "rows" / "1.json").unlink()
    again = recipe.heal(config, output, resume=True, progress=False)
    after = {path: path.stat().st_mtime_ns for path in (output / "rows").iterdir()}
    assert {path.name for path in before if before[path] != after[path]} == {"1.json"}
    assert [row["curve"] for row in again["rows"]] == [row["curve"] for row in results["rows"]]
    with pytest.raises(PosswapError, match="--resume"):
        recipe.heal(config, output, progress=False)
    with pytest.raises(PosswapError, match="another configuration"):
        recipe.heal(replace(config, max_steps=3), output, resume=True, progress=False)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"starts": ("warm",)}, "known are cold"),
        ({"schemes": ("rotray",)}, "did you mean"),
        ({"max_steps": 0}, "at least 1"),
        ({"seeds": ()}, "at least one"),
        ({"block_size": 33}, "from 3 to 32"),
    ],
)
def test_bad_options(recipe, config, tmp_path, changes, says):
    """What cannot be run is refused with what can."""
    with pytest.raises(PosswapError, match=says):
        recipe.heal(replace(config, **changes), tmp_path / "out", progress=False)


def test_command_line(recipe, config, tmp_path, monkeypatch, capsys):
    """Options reach the run, and an error is one paragraph."""
    options = ["--model", config.model, "--scheme", "none", "--start", "swap", "--seed", "3", "--max-steps", "1"]
    options += ["--batch-size", "4", "--data", config.data, "--evaluation-tokens", "256", "--output", str(tmp_path / "out")]
    for code in (0, 2):
        monkeypatch.setattr("sys.argv", ["heal.py", *options])
        with pytest.raises(SystemExit) as stop:
            recipe.main()
        assert stop.value.code == code
    assert "heal: " in capsys.readouterr().err
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert (row["scheme"], row["start"], row["seed"], len(row["curve"])) == ("none", "swap", 3, 2)


def test_tokens_to_reach(recipe):
    """Zero at the start, none if never, and a straight line of the logarithm in between; the first crossing counts."""
    curve = [{"tokens": t, "damage": d} for t, d in ((0, 1.0), (100, 0.1), (200, 0.001), (300, 0.5))]
    assert recipe.tokens_to_reach(curve, 1.0) == 0
    assert recipe.tokens_to_reach(curve, 0.0001) is None
    assert recipe.tokens_to_reach(curve, 0.1) == 100
    assert recipe.tokens_to_reach(curve, 0.01) == 150
    assert recipe.tokens_to_reach(curve, 10**-0.5) == 50
    healed = [{"tokens": 0, "damage": 1.0}, {"tokens": 10, "damage": -1e-9}]
    assert 0 < recipe.tokens_to_reach(healed, 0.1) < 10


def test_marks_are_those_of_the_cold_swap(recipe):
    """All starts are held against the cold swap's cost, and against the end of the cold run of their own seed."""

    def row(start, seed, first, last):
        curve = [{"tokens": 0, "damage": first}, {"tokens": 100, "damage": last}]
        return {"scheme": "rotary", "start": start, "seed": seed, "reference": {"damage": 1.0}, "curve": curve}

    cold, warm, other = recipe.with_tokens([row("cold", 0, 1.0, 0.04), row("swap", 0, 0.09, 0.009), row("swap", 1, 0.5, 0.2)])
    assert cold["tokens_to_recover"]["99"] is None and cold["tokens_to_cold_end"] == 100
    assert warm["tokens_to_recover"]["90"] == 0 and 0 < warm["tokens_to_recover"]["95"] < warm["tokens_to_recover"]["99"]
    assert 0 < warm["tokens_to_cold_end"] < 100
    assert other["tokens_to_recover"] == {"90": None, "95": None, "99": None} and "tokens_to_cold_end" not in other


def test_distillation_loss(make_model, make_swapped, tokens):
    """Zero against itself; with a head the KL of the definition."""
    for family in ("bert", "gpt2"):
        model = make_model(family)
        assert distillation_loss(model)(model, {"input_ids": tokens}).item() == pytest.approx(0, abs=1e-6)
    headless = make_model("bert", head=BertModel)
    assert distillation_loss(headless)(make_swapped("bert", "rotary", head=BertModel), {"input_ids": tokens}) > 0.01
    model, other = make_model("gpt2"), make_swapped("gpt2", "rotary")
    p, q = (m(input_ids=tokens).logits.double().log_softmax(-1) for m in (model, other))
    expected = (p.exp() * (p - q)).sum(-1).mean().item()
    assert distillation_loss(model)(other, {"input_ids": tokens}).item() == pytest.approx(expected, rel=1e-4)


def test_two_processes_write_what_one_writes(recipe, config, folders, tmp_path):
    """Under torchrun only the main process writes; rows have the same keys and start from the same damage."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    config = replace(config, model=str(folders / "bert"), schemes=("relative:clip=4",), starts=("fit", "swap"))
    alone = recipe.heal(config, tmp_path / "alone", progress=False)
    options = []
    for name, value in asdict(config).items():
        option = {"schemes": "scheme", "starts": "start", "seeds": "seed"}.get(name, name).replace("_", "-")
        for one in value if isinstance(value, tuple) else (value,):
            options += [] if one is None else [f"--{option}", str(one)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    command = [*launch, str(RECIPES / "heal.py"), *options, "--output", str(tmp_path / "two")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    together = json.loads((tmp_path / "two" / "results.json").read_text())
    for ours, theirs in zip(together["rows"], alone["rows"], strict=True):
        assert ours.keys() == theirs.keys() and (ours["processes"], theirs["processes"]) == (2, 1)
        for one, other in zip(ours["curve"], theirs["curve"], strict=True):
            assert one == pytest.approx(other, rel=0.02)


def test_text_teaches_and_the_original_is_the_control(recipe, config, tmp_path):
    """With its own next tokens in the loss, text tunes any model to itself: the original too, which is a row of its own."""
    config = replace(config, schemes=("original", "rotary"), starts=("fit",), max_steps=30, learning_rate=1e-2)
    ends = {}
    for weight in (0.0, 0.5):
        results = recipe.heal(replace(config, text_weight=weight), tmp_path / str(weight), progress=False)
        assert [(row["scheme"], row["start"]) for row in results["rows"]] == [("original", ""), ("rotary", "fit")]
        ends[weight] = [row["curve"][-1]["perplexity"] / results["original"]["perplexity"] for row in results["rows"]]
    assert all(end < 0.9 * without for end, without in zip(ends[0.5], ends[0.0], strict=True))
    table = (tmp_path / "0.5" / "results.md").read_text()
    assert "next tokens with a weight of 0.5" in table and "| original |  |" in table


def test_text_weight_is_the_cross_entropy(make_model):
    """(1 - w) KL + w CE, by transformers' own loss; refused where there is no next token, and out of range."""
    teacher, model = make_model("gpt2"), make_model("gpt2", seed=1)
    batch = {"input_ids": torch.randint(2, 98, (3, 12), generator=torch.Generator().manual_seed(0))}
    divergence = distillation_loss(teacher)(model, batch)
    expected = 0.7 * divergence + 0.3 * model(**batch, labels=batch["input_ids"]).loss
    assert distillation_loss(teacher, text_weight=0.3)(model, batch).item() == pytest.approx(expected.item(), rel=1e-5)
    for wrong, says in ((-0.1, "from 0 to 1"), (1.5, "from 0 to 1")):
        with pytest.raises(PosswapError, match=says):
            distillation_loss(teacher, text_weight=wrong)
    with pytest.raises(PosswapError, match="nothing else predicts"):
        distillation_loss(make_model("bert"), text_weight=0.5)


def test_fit_options_count(recipe, config, tmp_path):
    """Steps and rate of the fit reach it."""
    config = replace(config, starts=("fit",), max_steps=1, learning_rate=1e-9)
    starts = []
    for number, options in enumerate(({"fit_steps": 1}, {"fit_steps": 20}, {"fit_steps": 20, "fit_learning_rate": 1e-5})):
        results = recipe.heal(replace(config, **options), tmp_path / str(number), progress=False)
        starts.append(results["rows"][0]["curve"][0]["damage"])
    assert starts[1] < 0.9 * starts[0] and starts[1] < 0.9 * starts[2]
