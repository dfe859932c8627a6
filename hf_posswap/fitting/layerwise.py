"""How `fit` works: layer by layer through a swapped model and its original, without end-to-end training.

Both models read the same text. Each layer of the swapped model gets its own hidden states, with the errors of earlier layers,
and its self-attention is fitted so that the layer's output comes near that of the original's layer:

1. the scheme's closed form (`closed_form`), on whole batches, spread evenly over all, of up to 4,096 tokens together: basis and
   kernel of rotary, vectors of relative; kept if it helps;
2. reconstruction: a few steps of Adam (betas 0.9 and 0.95), of about 2,048 tokens each, on the weights of self-attention and of
   its positions. Step s = 0, 1, ... of n has min(1, (s + 1) / 5) (1 - s / n) of the peak rate. What does not help is tried
   again at a tenth of it, or dropped. A batch comes again after all others have come; a layer begins a new random order.

What helps lowers the layer's error on held-out text: the squared distance between its output and the original's, both
normalised as by a plain layer norm, over the original's squared distance from its mean in the batch, each summed over batches.
The weights of self-attention are those of transformers' module: the output projection is one of them in GPT-2, OPT, BioGPT,
DistilBERT and ALBERT, but not in BERT and others of its kin.

So only one layer is trained at a time, and later layers can correct errors of earlier ones. Where one module is several layers
(ALBERT), these are one: the closed form sees all of them, and what counts is the sum of their errors, with gradients through
all runs of the module, in the memory that these take. The approach is that of layer-wise reconstruction in quantization (Nagel
et al. 2020, https://arxiv.org/abs/2004.10568, section 4; Li et al. 2021, BRECQ, https://arxiv.org/abs/2102.05426). Hidden
states are kept on disk: memory does not grow with the amount of text.

The swapped model reads text longer than the original's input whole, the original in windows (`teacher`). The closed form, which
needs all pairs of tokens in both models, uses only the beginnings of such text.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from hf_posswap.architectures import Architecture
from hf_posswap.data.calibration import Batch
from hf_posswap.fitting.teacher import States, Teacher
from hf_posswap.functional.closed_form import Evidence

_TOKENS_TO_SOLVE = 4096  # for the closed forms, which use every pair of tokens
_TABLE_FACTOR = 30.0  # entries of position tables are about 30 times as large as weights


@dataclass(frozen=True)
class LayerFit:
    """One layer's relative error on held-out text; its input are the swapped model's own states.

    Layers that are one module share `kept` and `reconstructed`, which the sum of their errors decides.
    """

    layer: int
    before: float
    solved: float | None  # after the closed form; None if the scheme has none
    kept: bool  # whether the closed form made it smaller
    reconstructed: bool  # whether the steps made it smaller
    after: float


@contextmanager
def _wide(layers: nn.Module) -> Iterator[None]:
    """Inside, weights are frozen and at least float32: half precision would lose steps of a thousandth."""
    before = [(parameter, parameter.dtype, parameter.requires_grad) for parameter in layers.parameters()]
    try:
        for parameter, dtype, _ in before:
            parameter.data = parameter.data.to(torch.promote_types(dtype, torch.float32))
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, dtype, wanted in before:
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(wanted)
            parameter.grad = None


def _stages(layers: list[nn.Module]) -> list[range]:
    """Return the layers, by index, in the shortest runs that have no module in common: of length 1 if none is used again."""
    last, starts, end = {layer: index for index, layer in enumerate(layers)}, [], -1
    for index, layer in enumerate(layers):
        if index > end:
            starts.append(index)
        end = max(end, last[layer])
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(layers)], strict=True)]


def opening(batch: Batch, window: int) -> Batch:
    """Return a batch, or the first `window` tokens of its sequences, which begin at 0, where these are longer."""
    return batch if batch["input_ids"].shape[1] <= window else {key: value[:, :window] for key, value in batch.items()}


class Walk:
    """The walk through the layers of both models, to fit on some batches and to measure with held-out ones.

    error_unfitted: After the walk, the last layer's error of the model before the fit; 0 without windows.
    """

    def __init__(
        self, target, teacher, architecture: Architecture, fitted, held, folder: Path, seed: int, window: int | None = None
    ):
        self.batches: list[Batch] = [*fitted, *held]
        self.fitted, self.held = range(len(fitted)), range(len(fitted), len(self.batches))
        self.architecture = architecture
        self.generator = torch.Generator().manual_seed(seed)
        longest = max(batch["input_ids"].shape[1] for batch in self.batches)
        self.unfitted = [] if window is None else self.held
        window = longest if window is None else window
        short = [opening(batch, window) for batch in fitted]
        # Spread evenly over the batches.
        count = max(1, int(len(short) * min(1.0, _TOKENS_TO_SOLVE / sum(batch["input_ids"].numel() for batch in short))))
        self.solved_on = []
        for i in sorted({int(i) for i in torch.linspace(0, len(short) - 1, count).round()}):
            cut = short[i] is not self.batches[i]  # what is cut becomes a batch of its own
            self.solved_on.append(len(self.batches) if cut else i)
            self.batches += [short[i]] * cut
        self.ours = States(target, architecture, self.batches, folder, "swapped")
        self.theirs = Teacher(teacher, architecture, self.batches, self.fitted, folder, window)
        self.stages = _stages(self.ours.layers)
        for i in self.unfitted:
            self.ours.write("unfitted", i, self.ours.last(i))

    def fit_layers(self, stage: range, steps: int, learning_rate: float, bar: tqdm) -> list[LayerFit]:
        """Fit one of `stages`, then move all hidden states past it."""
        layers = nn.ModuleList(dict.fromkeys(self.ours.layers[index] for index in stage))
        attentions = nn.ModuleList(dict.fromkeys(self.ours.attentions[index] for index in stage))
        reconstructed = False
        self.theirs.advance(stage)
        with _wide(layers):
            before = self._errors(stage)
            solved, kept = self._solve(stage, attentions, before)
            bar.update()
            reached = sum(solved if kept else before)
            found = {name: parameter.clone() for name, parameter in attentions.named_parameters()}
            # Near the optimum the usual rate only adds noise: then try a tenth of it, then none.
            for rate in (learning_rate, learning_rate / 10) if steps else ():
                bar.total += 0 if rate == learning_rate else steps
                self._reconstruct(stage, attentions, steps, rate, bar)
                reconstructed = sum(self._errors(stage)) < reached
                if reconstructed:
                    break
                attentions.load_state_dict(found, strict=False)
        with torch.no_grad():
            after = self._errors(stage)
            for i in range(len(self.batches)):
                *_, out = self.ours.run(stage, i)
                self.ours.write("states", i, out)
            if stage is self.stages[-1]:
                last = len(stage) - 1
                self.error_unfitted = _mean(self._distance(self.ours.read("unfitted", i), last, i) for i in self.unfitted)
        self.theirs.states.move_on()
        errors = zip(stage, before, solved or [None] * len(stage), after, strict=True)
        return [LayerFit(index, start, middle, kept, reconstructed, end) for index, start, middle, end in errors]

    @torch.no_grad()
    def _solve(self, stage: range, attentions: nn.ModuleList, errors: list[float]) -> tuple[list[float] | None, bool]:
        """Try the scheme's closed form; keep it if it makes the layers' `errors` on held-out text smaller."""
        before = {name: parameter.clone() for name, parameter in attentions.named_parameters()}
        for attention in attentions:
            if hasattr(attention, "positions"):
                query_key = self.architecture.query_key(attention)
                evidence = partial(self._evidence, stage, attention)
                attention.positions.solve(evidence, query_key, self.architecture.scaling(attention))
        if all(torch.equal(parameter, before[name]) for name, parameter in attentions.named_parameters()):
            return None, False
        solved = self._errors(stage)
        if sum(solved) < sum(errors):
            return solved, True
        attentions.load_state_dict(before, strict=False)
        return solved, False

    def _evidence(self, stage: range, attention: nn.Module) -> Iterator[Evidence]:
        for i in self.solved_on:
            both = self.ours.observe(stage, i), self.theirs.states.observe(stage, self.theirs.parts[i][0][0])
            for index, ours, theirs in zip(stage, *both, strict=True):
                if self.ours.attentions[index] is attention:
                    wanted = {name: getattr(theirs, name).to(ours.query) for name in ("probabilities", "output")}
                    yield ours._replace(**wanted)

    def _reconstruct(self, stage: range, attentions: nn.ModuleList, steps: int, learning_rate: float, bar: tqdm) -> None:
        """Take steps of Adam on the layers' errors, one batch per step; the rate warms up, then falls to 0."""
        tables = {id(p) for a in attentions if hasattr(a, "positions") for p in a.positions.parameters()}
        own = [p.requires_grad_(True) for p in attentions.parameters()]
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
                errors = [error / spread for error, spread in self._compare(stage, i)]
                sum(errors).backward()
            optimizer.step()
            bar.set_postfix(layer=stage[-1], error=f"{errors[-1].item():.4f}", refresh=False)  # update draws
            bar.update()

    def _compare(self, stage: range, i: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield, layer by layer, the squared error of our output on one batch, and the spread of the original's."""
        for place, out in enumerate(self.ours.run(stage, i)):
            yield self._distance(out, place, i)

    def _distance(self, out: torch.Tensor, place: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask = self.batches[i]["attention_mask"].to(out.device)
        wide = torch.promote_types(out.dtype, torch.float32)  # sums of squares overflow half precision
        both = out.to(wide), self.theirs.said(place, i).to(out.device, wide)
        got, wanted = (functional.layer_norm(s, s.shape[-1:])[mask] for s in both)  # plain, as the next layer would apply it
        return (got - wanted).pow(2).sum(), (wanted - wanted.mean(0)).pow(2).sum()

    @torch.no_grad()
    def _errors(self, stage: range) -> list[float]:
        """Return each layer's relative error over the held-out batches."""
        return [_mean(pairs) for pairs in zip(*(list(self._compare(stage, i)) for i in self.held), strict=True)]


def _mean(found: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    pairs = [(error.item(), spread.item()) for error, spread in found]
    return sum(error for error, _ in pairs) / max(sum(spread for _, spread in pairs), 1e-30)
