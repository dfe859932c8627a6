"""Pushed to a Hub on loopback and pulled from it, by the real client in processes of their own: models and deltas."""

import json
import os
import subprocess
import sys

import pytest
import torch
from hub import Hub

import hf_posswap as posswap

PUSH = """
import json, sys
import hf_posswap as posswap
from transformers import AutoModelForMaskedLM
from huggingface_hub import HfApi
folder, delta = sys.argv[1:]
model = AutoModelForMaskedLM.from_pretrained(folder)
model.push_to_hub("tester/swapped")
HfApi().create_repo("tester/delta", exist_ok=True)
HfApi().upload_folder(repo_id="tester/delta", folder_path=delta)
print(json.dumps([model(input_ids=__import__("torch").arange(5, 25)[None]).logits.sum().item()]))
"""
PULL = """
import json, sys, torch
from transformers import AutoModelForMaskedLM
tokens = torch.arange(5, 25)[None]
trusted = AutoModelForMaskedLM.from_pretrained("tester/swapped", trust_remote_code=True)
import hf_posswap as posswap
known = AutoModelForMaskedLM.from_pretrained("tester/swapped")
base = posswap.load_delta(AutoModelForMaskedLM.from_pretrained(sys.argv[1]), "tester/delta")
print(json.dumps([model(input_ids=tokens).logits.sum().item() for model in (trusted, known, base)]))
"""


def _client(hub, home, program, *arguments):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | hub.environment(home), timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("storage", ["xet", "lfs"])
def test_push_and_pull(make_model, tmp_path, storage):
    """A swapped model and its delta come back from the Hub as they went: by import, by trust_remote_code, onto the base."""
    (tmp_path / "xet").mkdir()
    base, model = make_model("bert"), make_model("bert")
    base.save_pretrained(tmp_path / "base")
    posswap.swap(model, posswap.Relative(clip=4))
    with torch.no_grad():
        for attention in model.architecture.self_attentions(model.base_model):
            attention.positions.key_table.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "swapped")
    posswap.save_delta(model, tmp_path / "delta", base_model=base)
    with Hub.serve(tmp_path / "xet" if storage == "xet" else None) as hub:
        (expected,) = _client(hub, tmp_path / "home", PUSH, tmp_path / "swapped", tmp_path / "delta")
        pulled = _client(hub, tmp_path / "other-home", PULL, tmp_path / "base")
        files = set(hub.repos["tester/swapped"].commits[hub.repos["tester/swapped"].refs["main"]].tree)
    assert pulled == pytest.approx([expected] * 3, abs=1e-4)
    assert {"config.json", "model.safetensors", "modeling_hf_posswap.py"} <= files
