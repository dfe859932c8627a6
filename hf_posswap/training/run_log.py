"""What a run reports while it trains: losses, progress bar, trackers, and an error when it has diverged or learns nothing.

Numbers stay on the device until they are read, for all processes together and about once a second, because every reading makes
a GPU wait. Steps that take longer than a second are read one by one. A checkpoint is written only after a reading.
"""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, PartialState
from tqdm import tqdm

from hf_posswap.errors import PosswapError
from hf_posswap.training.budget import TrainingRun
from hf_posswap.training.run_state import StopRequest

_SECONDS_BETWEEN_READINGS = 1.0
_MOST_STEPS_BETWEEN_READINGS = 50
_STEPS_WITHOUT_GRADIENT = 10


def announce(text: str) -> None:
    """Print a line about a long run where no bar is drawn, in a file or a pipe, on the main process."""
    if PartialState().is_main_process and not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


class RunLog:
    """Collects each step's numbers in `run`; `stopping` becomes true on all processes when one of them was asked to stop."""

    def __init__(
        self,
        accelerator: Accelerator,
        run: TrainingRun,
        bar: tqdm,
        stop: StopRequest,
        *,
        every_step: bool,
        description: str | None,
    ):
        self.accelerator, self.run, self.bar, self.stop, self.every_step = accelerator, run, bar, stop, every_step
        self.description = description  # None: nothing is said
        if description and run.losses:
            announce(f"{description}: resumed after step {len(run.losses)} of {run.config.max_steps}")
        self.stopping = False
        # Of each step: this process's share of the loss; the same on all of them: gradient norm, tokens, learning rate.
        self.pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        self._interval, self._without_gradient = 1, 0
        self._started, self._read = time.perf_counter() - run.seconds, time.perf_counter()

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Time spent inside does not count towards the run's seconds."""
        before = time.perf_counter()
        yield
        self._started += time.perf_counter() - before

    @property
    def steps(self) -> int:
        return len(self.run.losses) + len(self.pending)

    @property
    def due(self) -> bool:
        """Whether it is time to read. Processes must read together, so with several of them a signal does not count here."""
        alone = self.run.processes == 1
        return self.every_step or len(self.pending) >= self._interval or (alone and self.stop.received is not None)

    def ask(self) -> None:
        """Let all processes know whether one of them was asked to stop; all must call this together."""
        asked = torch.tensor(self.stop.received is not None, dtype=torch.int64, device=self.accelerator.device)
        self.stopping |= self.accelerator.reduce(asked).item() > 0

    def read(self) -> None:
        """Move the pending numbers into `run`.

        PosswapError: a loss or gradient is NaN or infinite, or gradients are zero from the first step on.
        """
        losses, norms, tokens, rates = zip(*self.pending, strict=True)
        first, count = len(self.run.losses) + 1, len(losses)
        # Whether to stop, and the seconds a step took, are summed over processes together with the losses.
        word = [float(self.stop.received is not None), (time.perf_counter() - self._read) / count]
        shares = torch.stack([loss.float() for loss in losses])
        message = self.accelerator.reduce(torch.cat([shares, shares.new_tensor(word)]), "sum").tolist()
        *values, stopping, seconds = message
        norms, tokens = torch.stack(norms).tolist(), torch.stack(tokens).tolist()
        self.pending.clear()
        pace = _SECONDS_BETWEEN_READINGS * self.run.processes / max(seconds, 1e-9)
        self._interval = max(1, min(_MOST_STEPS_BETWEEN_READINGS, int(pace)))
        self.stopping = stopping > 0
        for step, loss, norm, rate in zip(range(first, first + count), values, norms, rates, strict=True):
            self._check(step, loss, norm)
            known_norm = {"gradient_norm": norm} if norm >= 0 else {}
            self.accelerator.log({"loss": loss, **known_norm, "learning_rate": rate}, step=step)
        self.run.losses += values
        self.run.tokens += sum(tokens)
        self._read = time.perf_counter()
        self.run.seconds = self._read - self._started
        self.accelerator.log({"tokens_per_second": self.run.tokens_per_second, "tokens": self.run.tokens}, step=step)
        self.bar.set_postfix(loss=f"{loss:.3f}", tokens_s=f"{self.run.tokens_per_second:.0f}", refresh=False)
        self.bar.update(count)
        done, of = len(self.run.losses), self.run.config.max_steps
        if self.description and done * 10 // of > (done - count) * 10 // of:  # ten lines in a run, at most
            announce(f"{self.description}: step {done} of {of}, loss {loss:.4g}")

    def _check(self, step: int, loss: float, norm: float) -> None:
        config = self.run.config
        # Gradients in float16 may overflow: the scaler then skips the step and lowers its scale.
        wrong = None if math.isfinite(loss) else f"the loss became {loss}"
        if wrong is None and not math.isfinite(norm) and self.accelerator.scaler is None:
            wrong = f"the gradients' norm became {norm}"
        if wrong:
            raise PosswapError(f"{wrong} at step {step}: lower learning_rate ({config.learning_rate:g}) or raise warmup_ratio")
        # With a loss of exactly zero there is nothing left to learn, which is no error. NaN: no longer counted.
        self._without_gradient = self._without_gradient + 1 if norm == 0 and loss != 0 else math.nan
        if self._without_gradient == _STEPS_WITHOUT_GRADIENT:
            raise PosswapError(f"gradients are zero since the first step, loss {loss:.4g}: does compute_loss detach?")
