"""Fit a swapped model to its original, layer by layer, without training it end to end.

Both models read the same text. Layer after layer, the swapped one is handed its own hidden states, errors of earlier layers
included, and its self-attention is fitted so that the layer's output comes near what the original's layer gives:

1. the scheme's closed form (`closed_form`): basis and kernel of rotary, vectors of relative; kept where it helps;
2. reconstruction: a few steps of Adam on the weights of self-attention and of its positions, on the layer's own error.

So no more than one layer is ever trained, and an error is corrected by the next layer that can. The approach is that of
layer-wise reconstruction in quantization (Nagel et al. 2020, https://arxiv.org/abs/2004.10568, section 4; Li et al. 2021,
BRECQ, https://arxiv.org/abs/2102.05426). Hidden states wait on disk: memory does not grow with the amount of text.
"""

import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.attention import Observation, observe
from hf_posswap.calibration import Batch, check_batches, random_tokens, split_batches, written_text
from hf_posswap.checkpoint import SwappedModel
from hf_posswap.closed_form import Evidence
from hf_posswap.errors import DataError, PosswapError, UnsupportedModelError
from hf_posswap.measure.damage import Damage, damage
from hf_posswap.swap import find_target, is_unchanged, original, rewriting_attention
from hf_posswap.warm_start import plain_projections

_TOKENS_A_BATCH = 2048  # of one step; memory for attention probabilities goes with it
_TOKENS_TO_SOLVE = 4096  # of the closed forms, which look at every pair of tokens
_TABLE_FACTOR = 30.0  # position tables have the size of keys, weights are about a thirtieth of that


@dataclass(frozen=True)
class LayerFit:
    """One layer's relative error on text that was not fitted on, given the swapped model's own states so far."""

    layer: int
    before: float
    solved: float | None  # after the closed form; None where the scheme has none
    kept: bool  # whether the closed form was better than what was there
    after: float


@dataclass(frozen=True)
class FitReport:
    """What a fit did, measured on the tenth of the text that it did not see; `print` shows it as tables."""

    before: Damage
    after: Damage
    layers: tuple[LayerFit, ...]
    seconds: float
    tokens: int  # fitted on
    tokens_held_out: int  # measured on
    text: str  # whose: "given", "written by the model", "random tokens"

    def __str__(self) -> str:
        found = Table(box=None, pad_edge=False)
        for title in ("damage", "before", "after"):
            found.add_column(title, justify="left" if title == "damage" else "right")
        found.add_row(self.before.measure, f"{self.before.total:.4f}", f"{self.after.total:.4f}")
        for name, kind in (("length", "by_length"), ("position", "by_position")):
            before, after = getattr(self.before, kind), getattr(self.after, kind)
            keys = list(before) if len(before) <= 8 else []
            for key in keys:
                found.add_row(f"  {name} {key}", f"{before[key]:.4f}", f"{after[key]:.4f}")
        layers = Table(box=None, pad_edge=False)
        for title in ("layer", "error before", "closed form", "after", "states before", "states after"):
            layers.add_column(title, justify="right")
        for fit, states in zip(self.layers, zip(self.before.by_layer, self.after.by_layer, strict=True), strict=True):
            solved = "" if fit.solved is None else f"{fit.solved:.4f}" + ("" if fit.kept else " (not kept)")
            layers.add_row(
                str(fit.layer), f"{fit.before:.4f}", solved, f"{fit.after:.4f}", *(f"{value:.4f}" for value in states)
            )
        console = Console(width=100, highlight=False, color_system=None)
        with console.capture() as capture:
            console.print(found, "", layers)
            console.print(
                f"fitted on {self.tokens:,} tokens, {self.text}, in {self.seconds:.0f} s; measured on "
                f"{self.tokens_held_out:,} others"
            )
        return "\n".join(line.rstrip() for line in capture.get().splitlines())


def fit(
    model: PreTrainedModel,
    batches: torch.Tensor | Iterable | None = None,
    *,
    reconstruct: int = 100,
    original_model: PreTrainedModel | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
) -> FitReport:
    """Fit a freshly swapped model to its original on some text, in place; return what that cost and won.

    Args:
        model: A swapped model. Only the weights of self-attention, and its positions, change; `restore` still gives
            the original back bit for bit.
        batches: Token ids (N, L), or an iterable of such of differing lengths, or of dicts with `input_ids`,
            `attention_mask` and `token_type_ids`. Mix lengths up to the longest input you care about. None: a causal model
            writes text itself, an encoder gets random tokens, which real text beats.
        reconstruct: Steps of Adam for each layer; 0 is the closed form alone, where the scheme has one.
        original_model: The original, if this process does not keep it: for a model loaded from a swapped checkpoint.
        learning_rate: Peak of the steps for weights; position tables learn 30 times as fast.
        seed: Of the order of steps, and of text that the model writes.
        progress: Show a bar.

    Every tenth sequence is held out, for the figures of the report and to tell whether a closed form helps.

    Raises:
        PosswapError: The model is not swapped, was trained since, or its original is gone; batches do not belong to it or are
            too few; or the fit made it worse. The model is as it was before the call, also after an interrupt.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from hf_posswap import swap
    >>> config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    >>> model = swap(GPT2LMHeadModel(config), "rotary")
    >>> report = fit(model, torch.randint(99, (40, 64)), reconstruct=10, progress=False)
    >>> report.after.total < report.before.total
    True
    """
    started = time.perf_counter()
    target, architecture = find_target(model, dispatched=True)
    teacher = _check(target, architecture, original_model, reconstruct, learning_rate)
    longest = min(teacher.config.max_position_embeddings, target.config.max_position_embeddings)
    text = "given"
    modes = {module: module.training for one in (target, teacher) for module in one.modules()}
    try:
        target.eval(), teacher.eval()
        if batches is None:
            causal = architecture.is_causal(target.config)
            if causal and not (teacher.can_generate() and teacher.get_output_embeddings() is not None):
                raise DataError("this model has no language-modelling head to write its own text with: pass batches")
            batches = (written_text if causal else random_tokens)(teacher, seed=seed, length=longest)
            text = "written by the model" if causal else "random tokens"
        checked = check_batches(batches, teacher, longest)
        fitted, held = split_batches(checked, tokens_a_batch=_TOKENS_A_BATCH)
        counts = [sum(int(batch["attention_mask"].sum()) for batch in part) for part in (fitted, held)]
        if counts[0] < 4 * target.config.hidden_size or not held:
            raise DataError(
                f"{sum(counts):,} tokens in {sum(len(b['input_ids']) for b in checked)} sequences are too few to fit layers "
                f"of size {target.config.hidden_size}: give at least {5 * target.config.hidden_size:,} in two sequences, "
                "better ten times that"
            )
        before = damage(target, teacher, held)
        if before.total < 1e-7:  # the original's own table: there is nothing to fit
            return FitReport(before, before, (), time.perf_counter() - started, *counts, text)
        with rewriting_attention(target), tempfile.TemporaryDirectory(prefix="posswap-") as folder:
            fitting = _Pass(target, teacher, architecture, fitted, held, Path(folder), seed)
            count = len(fitting.layers[0])
            quiet = {} if progress else {"disable": True}  # None or False would overrule TQDM_DISABLE
            with tqdm(total=count * (reconstruct + 1), desc="fit", unit="step", **quiet) as bar:
                layers = [fitting.fit_layer(index, reconstruct, learning_rate, bar) for index in range(count)]
            after = damage(target, teacher, held)
            if not reconstruct and not any(fit.kept for fit in layers):
                raise PosswapError(
                    f"{target.base_model.position_scheme} positions have no closed form here, or it makes no layer better: "
                    "give reconstruct a number of steps"
                )
            if not after.total < before.total:
                raise PosswapError(
                    f"the fit made it worse on text not seen: {after.measure} {before.total:.4f} -> {after.total:.4f}, and "
                    f"was undone. {counts[0]:,} tokens are few for it: give more text, or fewer reconstruct steps"
                )
    finally:
        for module, training in modes.items():
            module.training = training
    return FitReport(before, after, tuple(layers), time.perf_counter() - started, *counts, text)


def _check(
    target: PreTrainedModel,
    architecture: Architecture,
    given: PreTrainedModel | None,
    reconstruct: int,
    learning_rate: float,
) -> PreTrainedModel:
    """Return the original to fit to, or raise saying why there is none."""
    if not isinstance(reconstruct, int) or isinstance(reconstruct, bool) or reconstruct < 0:
        raise PosswapError(f"reconstruct={reconstruct!r} must be a number of steps, 0 or more")
    if not isinstance(learning_rate, (int, float)) or isinstance(learning_rate, bool) or not 0 < learning_rate < float("inf"):
        raise PosswapError(f"learning_rate={learning_rate!r} must be a number above 0")
    if torch.is_inference_mode_enabled():
        raise PosswapError("a fit needs gradients and cannot run inside torch.inference_mode(): call it outside")
    if not isinstance(target, SwappedModel):
        raise PosswapError(f"this {type(target).__name__} is not swapped: call posswap.swap(model, scheme) first, then fit")
    if vars(target).get("_posswap_part"):
        raise PosswapError("this is the inner part of a swapped model: fit the whole model, which can restore what was fitted")
    _check_weights(target)
    own = [name for attention in architecture.self_attentions(target.base_model) for name, _ in attention.named_parameters()]
    if not plain_projections(target, architecture) or any("base_layer." in n or "parametrizations." in n for n in own):
        raise UnsupportedModelError(
            "the projections of attention are wrapped by adapters, parametrized or shared: fit before that"
        )
    if given is None:
        if not hasattr(target, "_posswap_record"):
            raise PosswapError(
                "the original is not here: this model was loaded from a swapped checkpoint. Load the original checkpoint and "
                "pass it as original_model="
            )
        if not is_unchanged(target):
            raise PosswapError(
                "this model's attention has changed since it was swapped (trained, cast or loaded): fit right after the swap"
            )
        if any("forward" in vars(module) for module in target.modules()):
            raise UnsupportedModelError(
                "no original can be made from a model that accelerate has dispatched (or another patcher changed): fit before "
                "that, or load the original checkpoint and pass it as original_model="
            )
        # In half precision a layer is widened while it is fitted; the original must not be widened with it.
        wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in target.parameters())
        return original(target, share_weights=wide)
    other, family = find_target(given, dispatched=True)
    sizes = [(c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads) for c in (target.config, other.config)]
    if type(family) is not type(architecture) or sizes[0] != sizes[1]:
        raise PosswapError(
            f"original_model is a {family.model_type} with (vocabulary, hidden size, layers, heads) {sizes[1]}, the swapped "
            f"one a {architecture.model_type} with {sizes[0]}: pass the checkpoint that it was swapped from"
        )
    _check_weights(other)
    return other


def _check_weights(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModelError(f"{name} is offloaded or not loaded (meta device): load all of the model, then fit")
        if not torch.isfinite(parameter).all():
            raise PosswapError(
                f"{name} holds NaN or infinite numbers: the checkpoint is broken, or training has diverged; load it again"
            )


class _Reached(Exception):
    """Ends a forward where what it was wanted for has been seen."""


class _Pass:
    """The walk through the layers of both models; hidden states of all batches are on disk, for the current layer only."""

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
        layer, attention = self.layers[0][index], self.attentions[0][index]
        with torch.no_grad():
            for i in range(len(self.batches)):
                self._write("next", 1, i, self._run(1, index, i))
        dtypes = [parameter.dtype for parameter in layer.parameters()]
        asked = [parameter.requires_grad for parameter in layer.parameters()]
        try:
            for parameter in layer.parameters():  # steps of a thousandth are lost in half precision
                parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
            before = self._error(index, self.held)
            solved, kept = self._solve(index, attention)
            bar.update()
            if steps:
                self._reconstruct(index, attention, steps, learning_rate, bar)
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
        return LayerFit(index, before, solved, kept, after)

    @torch.no_grad()
    def _solve(self, index: int, attention: nn.Module) -> tuple[float | None, bool]:
        """Try the scheme's closed form; keep it if the layer's error on held-out text is smaller."""
        positions = getattr(attention, "positions", None)
        before = {name: parameter.clone() for name, parameter in attention.named_parameters()}
        if positions is None:
            return None, False
        query_key = self.architecture.query_key(attention)
        start = self._error(index, self.held)
        positions.solve(lambda: self._evidence(index), query_key, attention.scaling)
        if all(torch.equal(parameter, before[name]) for name, parameter in attention.named_parameters()):
            return None, False
        solved = self._error(index, self.held)
        if solved < start:
            return solved, True
        for name, parameter in attention.named_parameters():
            parameter.copy_(before[name])
        return solved, False

    def _evidence(self, index: int) -> Iterator[Evidence]:
        for i in self.solved_on:
            mask = self.batches[i]["attention_mask"]
            length = mask.shape[1]
            ours, theirs = (self._observe(side, index, i) for side in (0, 1))
            device = ours.query.device
            allowed = (mask[:, None, None, :] & mask[:, None, :, None]).to(device)
            if self.architecture.is_causal(self.models[0].config):
                allowed = allowed & torch.ones(length, length, dtype=torch.bool, device=device).tril()
            yield Evidence(
                ours.query, ours.key, ours.value, theirs.probabilities.to(ours.query), theirs.output.to(ours.query), allowed
            )

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
        """Run a model up to its first layer and return what that is handed: hidden states, other arguments, keywords."""
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
        mask = self.batches[i]["attention_mask"].to(hidden_states.device)
        allowed = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        if self.architecture.is_causal(self.models[side].config):
            allowed = allowed & torch.ones_like(allowed[0, 0]).tril()
        return observe(self.attentions[side][index], self.architecture, hidden_states, allowed, shared)

    # -- hidden states on disk -------------------------------------------------------------------------------------

    def _path(self, what: str, side: int, i: int) -> Path:
        return self.folder / f"{what}-{side}-{i}.safetensors"

    def _write(self, what: str, side: int, i: int, states: torch.Tensor) -> None:
        save_file({"states": states.detach().cpu().contiguous()}, self._path(what, side, i))

    def _read(self, what: str, side: int, i: int) -> torch.Tensor:
        return load_file(self._path(what, side, i))["states"]
