"""What was saved before the redesign goes on loading: checkpoints and deltas of format 1, result files, the card's record.

Each folder of format-1/ holds the logits that its model had; they were written at commit 186f5fa, with transformers 5.23.0, by
golden/make_format_1.py of commit f776502.
"""

import os
from pathlib import Path

import pytest
import torch
from conftest import run_python
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

import hf_posswap as posswap
from hf_posswap.experiments.comparison import load_runs, markdown
from hf_posswap.sharing.record import read_results

GOLDEN = Path(__file__).parent / "golden" / "format-1"
RESULTS = GOLDEN.with_name("format-1-results")
AUTO = {"bert": AutoModelForMaskedLM, "gpt2": AutoModelForCausalLM}
FOLDERS = sorted(path.name for path in GOLDEN.iterdir() if path.name.partition("-")[2] not in ("base", "delta"))
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def load(name: str, **options):
    """Load a folder as a user would."""
    return AUTO[name.partition("-")[0]].from_pretrained(GOLDEN / name, **options).eval()


@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoint(name):
    """The Auto classes load it, and it computes what it computed."""
    assert len(FOLDERS) == 12
    expected, model = load_file(GOLDEN / name / "expected.safetensors"), load(name)
    told = posswap.describe(model)
    assert told.new.name == name.partition("-")[2] and told.trained_positions == 24 and not told.can_restore
    torch.testing.assert_close(model(expected["tokens"]).logits, expected["logits"], **EXACT)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_delta(family):
    """It loads onto the base it was made from, which then computes what the swapped model computed."""
    expected, model = load_file(GOLDEN / f"{family}-delta" / "expected.safetensors"), load(f"{family}-base")
    posswap.load_delta(model, GOLDEN / f"{family}-delta")
    assert posswap.describe(model).new == posswap.Relative(clip=4)
    torch.testing.assert_close(model(expected["tokens"]).logits, expected["logits"], **EXACT)


def test_by_the_code_in_the_folder(tmp_path):
    """A process that has not imported this package loads it by the few lines that were saved next to it."""
    program = (
        "import sys, transformers; from safetensors.torch import load_file, save_file\n"
        "model = transformers.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True).eval()\n"
        "tokens = load_file(sys.argv[1] + '/expected.safetensors')['tokens']\n"
        "save_file({'logits': model(tokens).logits.detach()}, sys.argv[2])"
    )
    folder, found = GOLDEN / "bert-relative", tmp_path / "found.safetensors"
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules")}  # where transformers copies code to
    run_python("-c", program, folder, found, env=os.environ | cache)
    torch.testing.assert_close(load_file(found)["logits"], load_file(folder / "expected.safetensors")["logits"], **EXACT)


def test_results():
    """A comparison's runs and a card's record are read: by the table that compares, and by leaderboards."""
    runs = load_runs([RESULTS / "comparison.json"])
    assert [run["config"]["scheme"] for run in runs] == ["original", "relative"]
    assert f"| relative, fit | {runs[1]['figures']['accuracy']:.3f} |" in markdown(runs, figures=["accuracy"])
    record = read_results(RESULTS)
    assert record["model"]["position_scheme"]["name"] == "rotary" and record["fit"]["after"]["total"] < 0.08
    assert "| rotary" in posswap.leaderboard([RESULTS])
