"""A native export in the hands of programs that know only transformers: ONNX, and the LM evaluation harness."""

import json
import os

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import run_python

import hf_posswap as posswap

# Runs where hf_posswap cannot be imported; prints what the model writes, and what the harness made of it.
HARNESS = """
import json, sys, torch
sys.modules["hf_posswap"] = None
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM
model, tasks, prompt, options = sys.argv[1:]
prompt, mask = map(torch.tensor, json.loads(prompt))
written = AutoModelForCausalLM.from_pretrained(model).generate(prompt, attention_mask=mask, **json.loads(options))
found = lm_eval.simple_evaluate(
    model=HFLM(pretrained=model, device="cpu", batch_size=2), tasks=["animals"], log_samples=True, bootstrap_iters=0,
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
)
samples = found["samples"]["animals"]
likelihoods = [[r[0][0] for r in one["resps"]] for one in samples]
print(json.dumps([written.tolist(), found["results"]["animals"]["acc,none"], likelihoods]))
"""
TASK = """
task: animals
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{ends}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""


class _Logits(torch.nn.Module):
    """Tokens in, logits out: caches are no affair of ONNX."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids).logits


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_onnx(make_swapped, tmp_path, family):
    """The graph computes what the swapped model does, at another batch and length than it was traced with."""
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    model = make_swapped(family, posswap.Rotary(mark_first=False), max_positions=64, **layers)
    native = posswap.export_native(model).model.eval()
    native.config.use_cache = False
    sizes = ({0: "batch", 1: "length"},)
    with torch.no_grad():
        torch.onnx.export(
            _Logits(native), (torch.randint(2, 98, (2, 20)),), tmp_path / "model.onnx", input_names=["input_ids"],
            dynamo=True, dynamic_shapes=sizes, verbose=False,
        )  # fmt: skip
        tokens = torch.randint(2, 98, (3, 33))
        expected = model(tokens).logits.numpy()
    (found,) = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"input_ids": tokens.numpy()})
    assert np.abs(found - expected).max() < 1e-3 and expected.std() > 0.1


def test_the_evaluation_harness(make_swapped, gpt2_tokenizer, tmp_path):
    """Past its trained length it writes what the swapped model does; a task of lm-evaluation-harness finds its likelihoods."""
    model = make_swapped("gpt2", posswap.Rotary(mark_first=False), max_positions=128, bos_token_id=1, eos_token_id=1)
    posswap.export_native(model, gpt2_tokenizer).save_pretrained(tmp_path / "model")
    rows = [{"start": "the cat sat", "ends": ["on", "happy"], "gold": 0}, {"start": "a dog", "ends": ["ran", "and"], "gold": 1}]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tasks" / "animals.yaml").write_text(TASK.format(rows=tmp_path / "rows.jsonl"))
    prompt = torch.randint(5, 98, (2, 20)).tolist(), [[1] * 20, [0] * 5 + [1] * 15]
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    places = str(tmp_path / "model"), str(tmp_path / "tasks")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_DATASETS_OFFLINE": "1"}
    done = run_python("-c", HARNESS, *places, json.dumps(prompt), json.dumps(options), env=environment)
    written, accuracy, likelihoods = json.loads(done.stdout.splitlines()[-1])
    tokens, mask = map(torch.tensor, prompt)
    assert written == model.generate(tokens, attention_mask=mask, **options).tolist()
    expected = []
    for row in rows:
        expected.append([])
        for end in row["ends"]:
            texts = (row["start"], f"{row['start']} {end}")
            start, whole = (gpt2_tokenizer(text, return_tensors="pt").input_ids for text in texts)
            places = range(start.shape[1], whole.shape[1])
            scores = model(whole).logits.log_softmax(-1)[0]
            expected[-1].append(sum(scores[place - 1, whole[0, place]].item() for place in places))
    for found, wanted in zip(likelihoods, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-3)
    assert accuracy == np.mean([np.argmax(wanted) == row["gold"] for wanted, row in zip(expected, rows, strict=True)])
