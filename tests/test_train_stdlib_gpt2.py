"""The recipe that trains the embedded GPT-2, on a tiny library."""

import json
import runpy
from pathlib import Path

from conftest import fails, works
from transformers import AutoModelForCausalLM

RECIPE = Path(__file__).parents[1] / "recipes" / "train_stdlib_gpt2.py"


def test_train_stdlib_gpt2(program, tmp_path, monkeypatch):
    """A step leaves a model that loads, and says what it learnt; a mistake is one line."""
    monkeypatch.setattr("hf_posswap.data.text.stdlib_documents", lambda split: {split: "import this\n" * 600})

    def start(*options):
        given = ("--output", tmp_path, "--batch-size", "1", *options)
        return program(*given, main=lambda: runpy.run_path(str(RECIPE), run_name="__main__"))

    fails("max_steps=0 must be at least 1", start, "--max-steps", "0")
    works(start, "--max-steps", "1")
    report = json.loads((tmp_path / "training.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == report["parameters"]
    assert report["held_out_perplexity"] > 1 and "256" in (tmp_path / "README.md").read_text()
