"""Training that stops, and goes on: no numbers, signals, full disks, and deaths inside a save."""

import itertools
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from conftest import refused, rewrite
from test_training import even_rows, trained
from torch.utils.data import default_collate

from hf_posswap import PosswapError
from hf_posswap.commands.compare import run_all
from hf_posswap.errors import Interrupted
from hf_posswap.provenance import write_json
from hf_posswap.training import TrainingConfig, train


def checkpoint_names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_nan_keeps_the_last_good_checkpoint(make_model, tmp_path, bad):
    """Neither a loss nor a gradient that is no number reaches a checkpoint; the run goes on from the one before."""
    config, calls = TrainingConfig(max_steps=9, batch_size=8, checkpoint_every=2), []

    def breaks(model, batch):
        calls.append(1)
        loss = model(**batch).loss
        if len(calls) == 6:
            if bad == "loss":
                return loss * float("nan")
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    refused("at step 6.*learning_rate", trained, make_model("gpt2"), config, compute_loss=breaks, output=tmp_path)
    assert checkpoint_names(tmp_path) == ["step-00000002", "step-00000004"]
    resumed, run = trained(make_model("gpt2"), config, output=tmp_path, resume=True)
    assert run.losses == trained(make_model("gpt2"), config)[1].losses


@pytest.mark.parametrize(("number", "at", "saved"), [(signal.SIGTERM, 3, 4), (signal.SIGINT, 3, 4), (signal.SIGTERM, 6, 6)])
def test_signals_save_and_stop(make_model, tmp_path, number, at, saved, monkeypatch):
    """The step is finished, a checkpoint saved, handlers are put back; resumed, the run is the uninterrupted one, with the
    tokens that a collate masks at random. A signal while the last step is measured is heard, too.
    """
    monkeypatch.setattr("hf_posswap.training.run_state._ONE_PRESS", 600.0)  # a busy machine may stand still between two
    config, before = TrainingConfig(max_steps=6, batch_size=8, learning_rate=1e-2), signal.default_int_handler
    outside = signal.signal(number, before)  # a shell's background jobs are born ignoring Ctrl-C

    def mask(rows):
        batch = default_collate(rows)
        return batch | {"input_ids": batch["input_ids"].masked_fill(torch.rand(batch["input_ids"].shape) < 0.2, 3)}

    def stop(model, run):
        if len(run.losses) == at:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a launcher forwards what the terminal has sent already

    try:
        with pytest.raises(Interrupted, match="--resume"):
            trained(make_model("gpt2", resid_pdrop=0.1), config, collate=mask, output=tmp_path, after_step=stop)
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, outside)
    assert checkpoint_names(tmp_path) == [f"step-0000000{saved}"]
    again = {"collate": mask, "output": tmp_path, "resume": True}
    resumed, run = trained(make_model("gpt2", seed=9, resid_pdrop=0.1), config, **again)
    expected, whole = trained(make_model("gpt2", resid_pdrop=0.1), config, collate=mask)
    assert run.losses == whole.losses
    for ours, theirs in zip(resumed.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_second_ctrl_c_acts_as_usual(make_model, tmp_path, monkeypatch):
    """A second Ctrl-C does not wait for the end of the step; without an output not even the first does."""
    monkeypatch.setattr("hf_posswap.training.run_state._ONE_PRESS", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born ignoring it

    def stop(model, batch):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # not os.kill: what is sent twice before it is handled arrives once
        return model(**batch).loss

    try:
        for output in (tmp_path, None):
            with pytest.raises(KeyboardInterrupt):
                trained(make_model("gpt2"), TrainingConfig(max_steps=2, batch_size=8), compute_loss=stop, output=output)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a shell script's background job
        config = TrainingConfig(max_steps=2, batch_size=8)
        assert len(trained(make_model("gpt2"), config, compute_loss=stop, output=tmp_path)[1].losses) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_a_comparison(monkeypatch, tmp_path):
    """Its run gets SIGTERM, on which the training loop saves; that is waited for, also where a launcher ends before. One line
    and 130 are the end.
    """
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    run = f"trap 'sleep 1; echo > {saved}; exit' TERM; echo > {begun}; while :; do sleep 0.1; done"
    process = subprocess.Popen(["sh", "-c", f"({run}) & wait"], start_new_session=True)
    wait, waited = process.wait, []

    def interrupted():
        waited.append(1)
        if len(waited) > 1:
            return wait()
        while not begun.exists():
            time.sleep(0.01)
        raise KeyboardInterrupt

    process.wait = interrupted
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: process)
    refused("the same command does the rest", run_all, ["any"], [("none", "swap", 0)], tmp_path, error=Interrupted)
    assert process.returncode == -signal.SIGTERM and saved.exists()


def test_a_folder_with_checkpoints_is_not_begun_again(make_model, tmp_path, watch):
    """A folder with checkpoints takes no new run; what killed runs left half written is removed; files execute nothing."""
    config = TrainingConfig(max_steps=2, batch_size=8, checkpoint_every=1)
    for remnant in ("writing-step-00000009", "removing-step-00000001"):
        (tmp_path / "checkpoints" / remnant).mkdir(parents=True)
    trained(make_model("gpt2"), config, output=tmp_path)
    assert checkpoint_names(tmp_path) == ["step-00000001", "step-00000002"]
    refused("earlier run", trained, make_model("gpt2"), config, output=tmp_path)
    loads = watch(torch, "load")
    assert len(trained(make_model("gpt2"), config, output=tmp_path, resume=True)[1].losses) == 2  # it was at its end
    assert [load.kwargs["weights_only"] for load in loads] == [True] * 4  # optimizer, schedule, random states twice
    assert (tmp_path / "checkpoints" / "step-00000002" / "model.safetensors").exists()


def test_resume_may_change_how_but_not_what(make_model, tmp_path):
    """Checkpoints may come more often in a resumed run; another seed or another data set is another run."""
    config = dict(max_steps=4, batch_size=8)

    def stop(model, run):
        if len(run.losses) == 2:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        trained(make_model("gpt2"), TrainingConfig(**config, checkpoint_every=1), output=tmp_path, after_step=stop)
    refused("seed 0 and 1", trained, make_model("gpt2"), TrainingConfig(**config, seed=1), output=tmp_path, resume=True)
    with pytest.raises(PosswapError, match="examples 24 and 20"):
        train(make_model("gpt2"), even_rows(20), TrainingConfig(**config), output=tmp_path, resume=True, progress=False)
    again = TrainingConfig(**config, checkpoint_every=2, gradient_checkpointing=True)
    rewrite(tmp_path / "checkpoints" / "step-00000001" / "progress.json", lambda progress: progress.update(seconds=500.0))
    _, run = trained(make_model("gpt2"), again, output=tmp_path, resume=True)
    assert len(run.losses) == 4 and run.seconds > 500  # those before the stop count


def test_a_full_disk(make_model, tmp_path):
    """Where a checkpoint cannot be written, the one before stays, nothing half written does, and the run can go on from it."""
    config, limits = TrainingConfig(max_steps=3, batch_size=8, checkpoint_every=1), resource.getrlimit(resource.RLIMIT_FSIZE)

    def shrink(model, run):
        if len(run.losses) == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))

    try:
        refused("could not be written.*make room", trained, make_model("gpt2"), config, output=tmp_path, after_step=shrink)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint_names(tmp_path) == ["step-00000001"]
    whole = trained(make_model("gpt2"), config)[1]
    assert trained(make_model("gpt2"), config, output=tmp_path, resume=True)[1].losses == whole.losses
    with patch.object(Path, "replace", side_effect=OSError(28, "No space")), pytest.raises(OSError, match="json/config.json"):
        write_json(tmp_path / "json" / "config.json", {})
    assert not list((tmp_path / "json").iterdir())


def test_a_checkpoint_that_is_cut_off(make_model, tmp_path):
    """A file that was cut off when the power went is one line; without its checkpoint the run goes on from the one before."""
    config = TrainingConfig(max_steps=3, batch_size=8, checkpoint_every=1)
    whole, last = trained(make_model("gpt2"), config, output=tmp_path)[1], tmp_path / "checkpoints" / "step-00000003"
    files = ("progress.json", "model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    for name, end in itertools.product(files, (9, -9)):
        kept = (last / name).read_bytes()
        (last / name).write_bytes(kept[:end])
        refused(f"{last}.*: if it was cut off, remove it", trained, make_model("gpt2"), config, output=tmp_path, resume=True)
        (last / name).write_bytes(kept)
    shutil.rmtree(last)
    assert trained(make_model("gpt2"), config, output=tmp_path, resume=True)[1].losses == whole.losses


WHOLE = {"progress.json", "model.safetensors", "optimizer.bin", "scheduler.bin"}


@pytest.mark.parametrize(
    ("owner", "name", "call"),  # in the third checkpoint: written, named, the oldest put aside, that removed
    [(Accelerator, "save_state", 3), (Path, "rename", 3), (Path, "rename", 4), (shutil, "rmtree", 1)],
)
def test_a_killed_run(make_model, tmp_path, monkeypatch, owner, name, call):
    """Wherever a run dies, checkpoints are whole, only steps since the last are lost, and the end is the same bit for bit."""
    config = TrainingConfig(max_steps=5, batch_size=8, checkpoint_every=1)
    real, calls = getattr(owner, name), itertools.count(1)

    def dies(first, *given, **options):
        last = next(calls) == call
        if last and name == "rmtree":
            (first / "model.safetensors").unlink()
        elif not last or name == "save_state":  # progress.json comes after it
            real(first, *given, **options)
        if last:
            raise KeyboardInterrupt  # nothing tidies up after it, as after kill -9

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(owner, name, dies)
        trained(make_model("gpt2"), config, output=tmp_path)
    left = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert left[-1].name >= "step-00000002" and all(WHOLE <= {file.name for file in folder.iterdir()} for folder in left)
    resumed, run = trained(make_model("gpt2"), config, output=tmp_path, resume=True)
    expected, whole = trained(make_model("gpt2"), config)
    assert run.losses == whole.losses and checkpoint_names(tmp_path) == ["step-00000004", "step-00000005"]
    for ours, theirs in zip(resumed.state_dict().values(), expected.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
