"""The training loop: budgets, exact resuming, two processes against one, and stops that say why."""

import json
import os
import subprocess
import sys

import pytest
import torch

from hf_posswap import PosswapError
from hf_posswap.training import TrainingConfig, train


def _rows(count=24, length=16):
    tokens = torch.randint(2, 98, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def _run(model, config, **options):
    return train(model, _rows(), config, progress=False, **options)


def test_budget_and_learning(make_model):
    """The run reports the tokens it saw, one loss a step, and the loss falls."""
    model, run = _run(make_model("gpt2"), TrainingConfig(max_steps=12, batch_size=8, learning_rate=1e-2))
    assert run.tokens == 12 * 8 * 16 and len(run.losses) == 12 and run.tokens_per_second > 0
    assert run.losses[-1] < 0.8 * run.losses[0]
    assert not model.training and "forward" not in vars(model)


def test_resume_is_exact_across_epochs(make_model, tmp_path):
    """Stopped after a checkpoint and resumed, losses and weights equal those of an uninterrupted run."""
    config = TrainingConfig(max_steps=8, batch_size=8, learning_rate=1e-2, checkpoint_every=2)  # 3 steps an epoch
    whole, expected = _run(make_model("gpt2", resid_pdrop=0.1), config, output=tmp_path / "whole")

    class Stop(Exception):
        pass

    calls = []

    def interrupted(model, batch):
        calls.append(1)
        if len(calls) > 5:
            raise Stop
        return model(**batch).loss

    with pytest.raises(Stop):
        _run(make_model("gpt2", resid_pdrop=0.1), config, output=tmp_path / "cut", compute_loss=interrupted)
    resumed, run = _run(make_model("gpt2", resid_pdrop=0.1, seed=9), config, output=tmp_path / "cut", resume=True)
    assert run.losses == expected.losses and run.tokens == expected.tokens
    for (name, ours), theirs in zip(resumed.state_dict().items(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    assert len(list((tmp_path / "whole" / "checkpoints").iterdir())) == config.checkpoints_kept


def test_resume_refuses_another_run(make_model, tmp_path):
    """A checkpoint of other settings is not gone on with."""
    config = TrainingConfig(max_steps=2, batch_size=8, checkpoint_every=1)
    _run(make_model("gpt2"), config, output=tmp_path)
    with pytest.raises(PosswapError, match="resume with the same"):
        _run(make_model("gpt2"), TrainingConfig(max_steps=4, batch_size=8), output=tmp_path, resume=True)


def test_accumulation_equals_the_large_batch(make_model):
    """Two halves accumulated are the step of the whole batch."""
    config = dict(max_steps=3, batch_size=8, learning_rate=1e-3)
    _, whole = _run(make_model("gpt2"), TrainingConfig(**config))
    _, halves = _run(make_model("gpt2"), TrainingConfig(**config, gradient_accumulation_steps=2))
    assert halves.losses == pytest.approx(whole.losses, rel=1e-4)


def test_dropout_can_be_off(make_model):
    """`dropout=False` trains in evaluation mode: another seed of dropout changes nothing."""
    torch_losses = [
        _run(make_model("gpt2", resid_pdrop=0.5), TrainingConfig(max_steps=1, batch_size=24, seed=seed, dropout=drop))[1]
        for seed, drop in ((0, False), (1, False), (0, True), (1, True))
    ]
    first, second, third, fourth = (run.losses[0] for run in torch_losses)
    assert first == pytest.approx(second, rel=1e-5)
    assert abs(third - fourth) > 1e-3


def test_tables_learn_faster(make_model):
    """Adam's first step moves every entry by its learning rate: tables by `table_learning_rate_factor` times as much."""
    import hf_posswap as posswap

    for factor in (1.0, 50.0):
        model = posswap.swap(make_model("gpt2"), "relative:clip=4,values=false")
        before = model.transformer.h[0].attn.c_attn.weight.detach().clone()
        budget = TrainingConfig(
            max_steps=1, batch_size=8, learning_rate=1e-4, warmup_ratio=0, table_learning_rate_factor=factor
        )
        _run(model, budget)
        attention = model.transformer.h[0].attn
        assert attention.positions.key_table.abs().max().item() == pytest.approx(1e-4 * factor, rel=1e-2)
        assert (attention.c_attn.weight - before).abs().max().item() == pytest.approx(1e-4, rel=1e-2)


def test_nan_stops(make_model):
    """A loss that is no number ends the run with advice."""
    with pytest.raises(PosswapError, match="learning_rate"):
        _run(make_model("gpt2"), TrainingConfig(batch_size=8), compute_loss=lambda m, b: m(**b).loss * float("nan"))


def test_after_step_looks_and_changes_nothing(make_model):
    """Called once a step with the plain model and the run so far; evaluation mode is left behind it, losses stay the same."""
    config, seen = TrainingConfig(max_steps=3, batch_size=8), []

    def look(model, run):
        seen.append((type(model).__name__, model.training, run.tokens, len(run.losses)))
        model.eval()

    _, expected = _run(make_model("gpt2", resid_pdrop=0.1), config)
    _, run = _run(make_model("gpt2", resid_pdrop=0.1), config, after_step=look)
    assert seen == [("GPT2LMHeadModel", True, step * 8 * 16, step) for step in (1, 2, 3)]
    assert run.losses == expected.losses


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_steps": 0}, "1 or more"),
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "does not divide"),
        ({"batch_size": 99}, "do not fill one batch"),
    ],
)
def test_bad_budget(make_model, options, says):
    """A budget that cannot be spent is refused before training."""
    with pytest.raises(PosswapError, match=says):
        _run(make_model("gpt2"), TrainingConfig(**options))


_SCRIPT = """
import json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
import hf_posswap as posswap
from hf_posswap.training import TrainingConfig, train
torch.manual_seed(0)
config = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=32, initializer_range=0.3,
                    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2)
model = posswap.swap(GPT2LMHeadModel(config), "relative:clip=4")
tokens = torch.randint(2, 98, (24, 16), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
model, run = train(model, rows, TrainingConfig(max_steps=5, batch_size=8, learning_rate=1e-3), progress=False)
import accelerate
if accelerate.PartialState().is_main_process:
    open(sys.argv[1], "w").write(json.dumps([run.processes, run.losses]))
"""


def test_two_processes_take_the_steps_of_one(tmp_path):
    """The same global batch and the same losses with two processes as with one, on a swapped model, none unused."""
    script, results = tmp_path / "job.py", []
    script.write_text(_SCRIPT)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    for count in (1, 2):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        out = tmp_path / f"{count}.json"
        subprocess.run([*launch, str(script), str(out)], env=environment, check=True, capture_output=True, timeout=300)
        results.append(json.loads(out.read_text()))
    (one, alone), (two, together) = results
    assert (one, two) == (1, 2)
    assert together == pytest.approx(alone, abs=1e-4)


def test_a_lone_process_of_two_is_refused(make_model, monkeypatch):
    """WORLD_SIZE=2 with one connected process is an error, not a silent single run."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PosswapError, match="torchrun"):
        _run(make_model("gpt2"), TrainingConfig(max_steps=1, batch_size=8))
