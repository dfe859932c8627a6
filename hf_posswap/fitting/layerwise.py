"""How `fit` works: layer by layer through a swapped model and its original, without end-to-end training.

Both models read the same text. Each layer of the swapped model gets its own hidden states, with the errors of earlier layers,
and its self-attention is fitted so that the layer's output comes near that of the original's layer:

1. the scheme's closed form (`closed_form`): basis and kernel of rotary, vectors of relative; kept if it helps;
2. reconstruction: a few steps of Adam on the weights of self-attention and of its positions, on the layer's own error; kept
   if they help on held-out text.

So only one layer is trained at a time, and later layers can correct errors of earlier ones. The approach is that of layer-wise
reconstruction in quantization (Nagel et al. 2020, https://arxiv.org/abs/2004.10568, section 4; Li et al. 2021, BRECQ,
https://arxiv.org/abs/2102.05426). Hidden states are kept on disk: memory does not grow with the amount of text.

The swapped model reads text longer than the original's input whole, the original in windows (`teacher`). The closed form, which
needs all pairs of tokens in both models, uses only the beginnings of such text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from hf_posswap.architectures import Architecture
from hf_posswap.data.calibration import Batch
from hf_posswap.fitting.states import States
from hf_posswap.fitting.teacher import Teacher
from hf_posswap.functional.closed_form import Evidence
from hf_posswap.measure.windows import lay_windows

_TOKENS_TO_SOLVE = 4096  # for the closed forms, which use every pair of tokens
_TABLE_FACTOR = 30.0  # entries of position tables are about 30 times as large as weights


@dataclass(frozen=True)
class LayerFit:
    """One layer's relative error on held-out text, given the swapped model's own states up to it."""

    layer: int
    before: float
    solved: float | None  # after the closed form; None if the scheme has none
    kept: bool  # whether the closed form made it smaller
    reconstructed: bool  # whether the steps made it smaller
    after: float


@torch.no_grad()
def _write(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(values[name])


def opening(batch: Batch, window: int) -> Batch:
    """Return a batch, or the first `window` tokens of each of its sequences where these are longer."""
    if batch["input_ids"].shape[1] <= window:
        return batch
    return lay_windows(batch["attention_mask"], window, window, causal=True).opening().cut(batch)


class Walk:
    """The walk through the layers of both models, to fit on some batches and to measure with held-out ones.

    error_unfitted: After the walk, the last layer's error of the model before the fit; 0 without windows.
    """

    def __init__(
        self, target, teacher, architecture: Architecture, fitted, held, folder: Path, seed: int, window: int | None = None
    ):
        self.batches: list[Batch] = [*fitted, *held]
        self.fitted, self.held = range(len(fitted)), range(len(fitted), len(self.batches))
        self.folder = folder
        self.architecture = architecture
        self.generator = torch.Generator().manual_seed(seed)
        longest = max(batch["input_ids"].shape[1] for batch in self.batches)
        self.unfitted = [] if window is None else self.held
        window = longest if window is None else window
        short = [opening(batch, window) for batch in fitted]
        # Spread evenly over the batches, and so over lengths.
        count = max(1, int(len(short) * min(1.0, _TOKENS_TO_SOLVE / sum(batch["input_ids"].numel() for batch in short))))
        self.solved_on = []
        for i in sorted({int(i) for i in torch.linspace(0, len(short) - 1, count).round()}):
            self.solved_on.append(i if short[i] is self.batches[i] else len(self.batches))
            self.batches += [] if short[i] is self.batches[i] else [short[i]]
        self.ours = States(target, architecture, self.batches, folder, "swapped")
        self.theirs = Teacher(teacher, architecture, self.batches, self.fitted, folder, window)
        self.error_unfitted = 0.0
        for i in self.unfitted:
            self.ours.write("unfitted", i, self.ours.last(i))

    def fit_layer(self, index: int, steps: int, learning_rate: float, bar: tqdm) -> LayerFit:
        """Fit one layer, then move all hidden states past it."""
        layer, attention, reconstructed = self.ours.layers[index], self.ours.attentions[index], False
        self.theirs.advance(index)
        dtypes = [parameter.dtype for parameter in layer.parameters()]
        asked = [parameter.requires_grad for parameter in layer.parameters()]
        try:
            for parameter in layer.parameters():  # half precision would lose steps of a thousandth
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            before = self._error(index, self.held)
            solved, kept = self._solve(index, attention, before)
            bar.update()
            reached = solved if kept else before
            found = {name: parameter.clone() for name, parameter in attention.named_parameters()}
            # Near the optimum the usual rate only adds noise: then try a tenth of it, then none.
            for rate in (learning_rate, learning_rate / 10) if steps else ():
                bar.total += 0 if rate == learning_rate else steps
                self._reconstruct(index, attention, steps, rate, bar)
                reconstructed = self._error(index, self.held) < reached
                if reconstructed:
                    break
                _write(attention, found)
        finally:
            for parameter, dtype, wanted in zip(layer.parameters(), dtypes, asked, strict=True):
                parameter.data = parameter.data.to(dtype)
                parameter.requires_grad_(wanted)
                parameter.grad = None
        with torch.no_grad():
            after = self._error(index, self.held)
            for i in range(len(self.batches)):
                self.ours.write("states", i, self.ours.run(index, i))
            if layer is self.ours.layers[-1]:
                self.error_unfitted = _mean(self._distance(self.ours.read("unfitted", i), i) for i in self.unfitted)
        self.theirs.move_on()
        return LayerFit(index, before, solved, kept, reconstructed, after)

    @torch.no_grad()
    def _solve(self, index: int, attention: nn.Module, error: float) -> tuple[float | None, bool]:
        """Try the scheme's closed form; keep it if it makes the layer's `error` on held-out text smaller."""
        positions = getattr(attention, "positions", None)
        before = {name: parameter.clone() for name, parameter in attention.named_parameters()}
        if positions is None:
            return None, False
        query_key = self.architecture.query_key(attention)
        positions.solve(lambda: self._evidence(index), query_key, self.architecture.scaling(attention))
        if all(torch.equal(parameter, before[name]) for name, parameter in attention.named_parameters()):
            return None, False
        solved = self._error(index, self.held)
        if solved < error:
            return solved, True
        _write(attention, before)
        return solved, False

    def _evidence(self, index: int) -> Iterator[Evidence]:
        for i in self.solved_on:
            ours, theirs = self.ours.observe(index, i), self.theirs.states.observe(index, self.theirs.parts[i][0][0])
            allowed = self.ours.visible(i).to(ours.query.device)
            yield Evidence(
                ours.query, ours.key, ours.value, theirs.probabilities.to(ours.query), theirs.output.to(ours.query), allowed
            )

    def _reconstruct(self, index: int, attention: nn.Module, steps: int, learning_rate: float, bar: tqdm) -> None:
        """Take steps of Adam on the layer's error, one batch per step; the rate warms up, then falls to 0."""
        layer = self.ours.layers[index]
        positions = getattr(attention, "positions", None)
        tables = {id(p) for p in ([] if positions is None else positions.parameters())}
        for parameter in layer.parameters():
            parameter.requires_grad_(False)
        own = [p.requires_grad_(True) for p in attention.parameters()]
        groups = [
            {"params": [p for p in own if id(p) not in tables], "factor": 1.0},
            {"params": [p for p in own if id(p) in tables], "factor": _TABLE_FACTOR},
        ]
        optimizer = torch.optim.Adam([group for group in groups if group["params"]], betas=(0.9, 0.95))
        order: list[int] = []
        for step in range(steps):
            order = order or torch.randperm(len(self.fitted), generator=self.generator).tolist()
            i = order.pop()
            rate = learning_rate * min(1, (step + 1) / 5) * (1 - step / steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            optimizer.zero_grad()
            with torch.enable_grad():
                error, spread = self._compare(index, i)
                (error / spread).backward()
            optimizer.step()
            bar.update()
            bar.set_postfix(layer=index, error=f"{(error / spread).item():.4f}")

    def _compare(self, index: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squared error of our layer's output on one batch, and the spread of the original's."""
        return self._distance(self.ours.run(index, i), i)

    def _distance(self, out: torch.Tensor, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = self.batches[i]["attention_mask"].to(out.device)
        # A plain layer norm, as the next layer would apply.
        got, wanted = (functional.layer_norm(s, s.shape[-1:])[mask] for s in (out, self.theirs.said(i).to(out)))
        return (got - wanted).pow(2).sum(), (wanted - wanted.mean(0)).pow(2).sum()

    @torch.no_grad()
    def _error(self, index: int, batches: Iterable[int]) -> float:
        return _mean(self._compare(index, i) for i in batches)


def _mean(found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    pairs = [(error.item(), spread.item()) for error, spread in found]
    return sum(error for error, _ in pairs) / max(sum(spread for _, spread in pairs), 1e-30)
