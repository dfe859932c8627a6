"""How `fit` works: a walk through the layers of a swapped model and its original, without training end to end.

Both models read the same text. Layer after layer, the swapped one is handed its own hidden states, errors of earlier layers
included, and its self-attention is fitted so that the layer's output comes near what the original's layer gives:

1. the scheme's closed form (`closed_form`): basis and kernel of rotary, vectors of relative; kept where it helps;
2. reconstruction: a few steps of Adam on the weights of self-attention and of its positions, on the layer's own error; kept
   where they help on text that they did not see.

So no more than one layer is ever trained, and an error is corrected by the next layer that can. The approach is that of
layer-wise reconstruction in quantization (Nagel et al. 2020, https://arxiv.org/abs/2004.10568, section 4; Li et al. 2021,
BRECQ, https://arxiv.org/abs/2102.05426). Hidden states wait on disk: memory does not grow with the amount of text.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from hf_posswap.architectures import Architecture
from hf_posswap.attention import Observation, observe, visible
from hf_posswap.data.calibration import Batch
from hf_posswap.functional.closed_form import Evidence

_TOKENS_TO_SOLVE = 4096  # of the closed forms, which look at every pair of tokens
_TABLE_FACTOR = 30.0  # position tables have the size of keys, weights are about a thirtieth of that


@dataclass(frozen=True)
class LayerFit:
    """One layer's relative error on text that was not fitted on, given the swapped model's own states so far."""

    layer: int
    before: float
    solved: float | None  # after the closed form; None where the scheme has none
    kept: bool  # whether the closed form was better than what was there
    reconstructed: bool  # whether the steps after it were
    after: float


class _Reached(Exception):
    """Ends a forward where what it was wanted for has been seen."""


@torch.no_grad()
def _write(module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, parameter in module.named_parameters():
        parameter.copy_(values[name])


class Walk:
    """The walk through the layers of both models; hidden states of all batches are on disk, for the current layer only.

    `fitted` and `held` are batches to fit on and to measure with; what has the two in an attribute has the swapped model first.
    """

    def __init__(self, target, teacher, architecture: Architecture, fitted, held, folder: Path, seed: int):
        self.models = (target.base_model, teacher.base_model)
        self.architecture = architecture
        self.layers = [architecture.layers(base) for base in self.models]
        self.attentions = [architecture.self_attentions(base) for base in self.models]
        self.batches: list[Batch] = [*fitted, *held]
        self.fitted, self.held = range(len(fitted)), range(len(fitted), len(self.batches))
        self.folder = folder
        self.generator = torch.Generator().manual_seed(seed)
        sizes = torch.tensor([batch["input_ids"].numel() for batch in fitted])
        # Evenly over the batches, and so over lengths.
        count = max(1, int(len(fitted) * min(1.0, _TOKENS_TO_SOLVE / int(sizes.sum()))))
        self.solved_on = sorted({int(i) for i in torch.linspace(0, len(fitted) - 1, count).round()})
        for index in range(len(self.batches)):
            for side in (0, 1):
                self._write("states", side, index, self._call(side, index)[0])

    def fit_layer(self, index: int, steps: int, learning_rate: float, bar: tqdm) -> LayerFit:
        """Fit one layer, then move all hidden states past it."""
        layer, attention, reconstructed = self.layers[0][index], self.attentions[0][index], False
        with torch.no_grad():
            for i in range(len(self.batches)):
                self._write("next", 1, i, self._run(1, index, i))
        dtypes = [parameter.dtype for parameter in layer.parameters()]
        asked = [parameter.requires_grad for parameter in layer.parameters()]
        try:
            for parameter in layer.parameters():  # steps of a thousandth are lost in half precision
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            before = self._error(index, self.held)
            solved, kept = self._solve(index, attention, before)
            bar.update()
            reached = solved if kept else before
            found = {name: parameter.clone() for name, parameter in attention.named_parameters()}
            # Where little is left to win, the usual rate only adds noise: then a tenth of it, and then none.
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
                self._write("states", 0, i, self._run(0, index, i))
                self._path("next", 1, i).replace(self._path("states", 1, i))
        return LayerFit(index, before, solved, kept, reconstructed, after)

    @torch.no_grad()
    def _solve(self, index: int, attention: nn.Module, error: float) -> tuple[float | None, bool]:
        """Try the scheme's closed form; keep it if it makes the layer's `error` on held-out text smaller."""
        positions = getattr(attention, "positions", None)
        before = {name: parameter.clone() for name, parameter in attention.named_parameters()}
        if positions is None:
            return None, False
        query_key = self.architecture.query_key(attention)
        positions.solve(lambda: self._evidence(index), query_key, attention.scaling)
        if all(torch.equal(parameter, before[name]) for name, parameter in attention.named_parameters()):
            return None, False
        solved = self._error(index, self.held)
        if solved < error:
            return solved, True
        _write(attention, before)
        return solved, False

    def _evidence(self, index: int) -> Iterator[Evidence]:
        for i in self.solved_on:
            ours, theirs = (self._observe(side, index, i) for side in (0, 1))
            allowed = self._visible(0, i, ours.query.device)
            yield Evidence(
                ours.query, ours.key, ours.value, theirs.probabilities.to(ours.query), theirs.output.to(ours.query), allowed
            )

    def _visible(self, side: int, i: int, device: torch.device) -> torch.Tensor:
        mask = self.batches[i]["attention_mask"].to(device)
        return visible(mask, causal=self.architecture.is_causal(self.models[side].config))

    def _reconstruct(self, index: int, attention: nn.Module, steps: int, learning_rate: float, bar: tqdm) -> None:
        """Adam on the layer's error, on one batch of one length a step; warm-up, then down to nothing."""
        layer = self.layers[0][index]
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

    # -- one batch through one layer -------------------------------------------------------------------------------

    def _compare(self, index: int, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the squared error of our layer's output on one batch, and the spread of the original's."""
        out = self._run(0, index, i)
        mask = self.batches[i]["attention_mask"].to(out.device)
        # A plain layer norm: how the next layer reads them.
        got, wanted = (functional.layer_norm(s, s.shape[-1:])[mask] for s in (out, self._read("next", 1, i).to(out)))
        return (got - wanted).pow(2).sum(), (wanted - wanted.mean(0)).pow(2).sum()

    @torch.no_grad()
    def _error(self, index: int, batches: Iterable[int]) -> float:
        found = [self._compare(index, i) for i in batches]
        return (sum(error.item() for error, _ in found)) / max(sum(spread.item() for _, spread in found), 1e-30)

    def _call(self, side: int, i: int) -> tuple[torch.Tensor, tuple, dict]:
        """Run a model up to its first layer and return what that is handed: hidden states, other arguments, keywords.

        Again for every batch and layer: that costs little, and the masks of all batches would not fit into memory.
        """
        seen = []

        def stop(layer, args, kwargs):
            kwargs = dict(kwargs)
            hidden_states = args[0] if args else kwargs.pop("hidden_states")
            seen.append((hidden_states.detach(), args[1:], kwargs))
            raise _Reached

        base = self.models[side]
        device = base.get_input_embeddings().weight.device
        hook = self.layers[side][0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with torch.no_grad():
                base(**{key: value.to(device) for key, value in self.batches[i].items()}, use_cache=False)
        except _Reached:
            pass
        finally:
            hook.remove()
        return seen[0]

    def _run(self, side: int, index: int, i: int) -> torch.Tensor:
        layer = self.layers[side][index]
        _, args, kwargs = self._call(side, i)
        out = layer(self._read("states", side, i).to(next(layer.parameters())), *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    def _observe(self, side: int, index: int, i: int) -> Observation:
        """Return the inside of a layer's self-attention on one batch."""
        seen = []

        def stop(attention, args, kwargs):
            seen.append((args[0] if args else kwargs["hidden_states"], kwargs.get("shared_positions")))
            raise _Reached

        hook = self.attentions[side][index].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._run(side, index, i)
        except _Reached:
            pass
        finally:
            hook.remove()
        hidden_states, shared = seen[0]
        allowed = self._visible(side, i, hidden_states.device)
        return observe(self.attentions[side][index], self.architecture, hidden_states, allowed, shared)

    # -- hidden states on disk -------------------------------------------------------------------------------------

    def _path(self, what: str, side: int, i: int) -> Path:
        return self.folder / f"{what}-{side}-{i}.safetensors"

    def _write(self, what: str, side: int, i: int, states: torch.Tensor) -> None:
        save_file({"states": states.detach().cpu().contiguous()}, self._path(what, side, i))

    def _read(self, what: str, side: int, i: int) -> torch.Tensor:
        return load_file(self._path(what, side, i))["states"]
