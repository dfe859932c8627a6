"""What makes a run safe to stop at any moment: checkpoints that are complete or absent, and signals that wait for a step's end.

accelerate writes the state, so this works under FSDP and DeepSpeed as well. Weights are safetensors. Optimizer, schedule and
random states are torch files, read with `weights_only=True`, so nothing in them is executed. The exceptions are sharded
checkpoints of FSDP and those of DeepSpeed, whose own formats hold pickled metadata.
"""

import json
import shutil
import signal
import threading
import time
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate import Accelerator, utils

from hf_posswap.errors import CheckpointError
from hf_posswap.training.budget import TrainingRun

_ONE_PRESS = 1.0  # seconds in which signals count as one: the terminal sends Ctrl-C, and a launcher forwards it
_REMEDY = "if it was cut off, remove it, and the run goes on from the one before it, or begins again"


def checkpoint_folders(output: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((output / "checkpoints").glob("step-*"))


def remove_checkpoints(output: Path, *, keep: int = 0) -> None:
    """Remove all checkpoints but the newest `keep`."""
    for folder in checkpoint_folders(output)[: -keep or None]:
        aside = folder.with_name(f"removing-{folder.name}")
        folder.rename(aside)  # a half-deleted checkpoint must not look complete
        shutil.rmtree(aside)


def accumulation_steps_of(output: Path) -> int | None:
    """Return the accumulation steps of the newest checkpoint; None if there is none."""
    folders = checkpoint_folders(output)
    return _progress(folders[-1])["gradient_accumulation_steps"] if folders else None


def _progress(checkpoint: Path) -> dict:
    try:
        return json.loads((checkpoint / "progress.json").read_text("utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint} cannot be read ({error}): {_REMEDY}") from None


class Checkpoints:
    """The last checkpoints of one run, in `output/checkpoints`; all processes must save and load together."""

    def __init__(self, accelerator: Accelerator, output: Path, *, resume: bool):
        self.accelerator, self.output, self.folder = accelerator, output, output / "checkpoints"
        if not resume and checkpoint_folders(output):
            raise CheckpointError(f"{self.folder} is of an earlier run: pass resume=True (--resume), or another folder")
        if accelerator.is_main_process:
            for remnant in (*self.folder.glob("writing-*"), *self.folder.glob("removing-*")):
                shutil.rmtree(remnant)
        accelerator.wait_for_everyone()

    def save(self, run: TrainingRun, examples: int) -> None:
        """Write a checkpoint under another name, rename it, then remove old ones: a killed process leaves those before."""
        folder = self.folder / f"step-{len(run.losses):08d}"
        aside = folder.with_name(f"writing-{folder.name}")
        failure = None
        try:
            self.accelerator.save_state(str(aside))
            if self.accelerator.is_main_process:
                (aside / "progress.json").write_text(json.dumps({**asdict(run), "examples": examples}), "utf-8", newline="\n")
        except Exception as error:  # a full disk raises OSError, RuntimeError (torch) or SafetensorError
            failure = error
        failures = torch.tensor(failure is not None, dtype=torch.int64, device=self.accelerator.device)
        if self.accelerator.reduce(failures).item():
            if self.accelerator.is_main_process:
                shutil.rmtree(aside, ignore_errors=True)
            what = f"{folder} could not be written ({failure or 'another process says why'}); earlier checkpoints are whole"
            raise CheckpointError(f"{what}: make room, then continue with resume=True (--resume)") from failure
        if self.accelerator.is_main_process:
            aside.rename(folder)
            remove_checkpoints(self.output, keep=run.config.checkpoints_kept)
        self.accelerator.wait_for_everyone()

    def load(self, run: TrainingRun, examples: int) -> None:
        """Load the newest checkpoint, if there is one; raise CheckpointError if another run made it."""
        if not checkpoint_folders(self.output):
            return
        newest = checkpoint_folders(self.output)[-1]
        progress = _progress(newest)
        theirs, ours = progress["config"], json.loads(json.dumps(asdict(run.config)))
        exact = {*run.config.budget(), "seed", "gradient_accumulation_steps"}
        pairs = {name: (theirs.get(name), ours[name]) for name in sorted(exact)}
        pairs |= {"processes": (progress["processes"], run.processes), "examples": (progress["examples"], examples)}
        differences = [f"{name} {before} and {now}" for name, (before, now) in pairs.items() if before != now]
        if differences:
            raise CheckpointError(f"{newest} is of a run that differs ({'; '.join(differences)}): resume with the same options")
        try:
            # accelerate goes on without random states that it cannot read.
            utils.load(newest / f"{utils.RNG_STATE_NAME}_{self.accelerator.process_index}.pkl")
            self.accelerator.load_state(str(newest))
        except (torch.OutOfMemoryError, MemoryError):
            raise
        except Exception as error:  # each of its files has another for being cut off, torch's an OSError that names no file
            raise CheckpointError(f"{newest} cannot be read ({error}): {_REMEDY}") from error
        self.accelerator.step = 0  # in parts of steps: a checkpoint stands at a step's end, and there may be more parts now
        run.tokens, run.seconds, run.losses = progress["tokens"], progress["seconds"], progress["losses"]
        run.points = progress.get("points", [])  # older checkpoints have none


class StopRequest:
    """Inside `with`, the first SIGTERM or Ctrl-C is only noted; the next one has its usual effect.

    What is ignored stays so: a background job of a shell script ignores Ctrl-C.
    """

    def __init__(self, *, active: bool):
        # Python lets only its main thread handle signals.
        self.active = active and threading.current_thread() is threading.main_thread()
        self.received: float | None = None
        self._before = {}

    def __enter__(self) -> "StopRequest":
        if self.active:
            heeded = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number, frame) -> None:
        now = time.monotonic()
        if self.received is None:
            self.received = now
        elif now - self.received > _ONE_PRESS:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
