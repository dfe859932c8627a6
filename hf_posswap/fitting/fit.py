"""Fit a freshly swapped model to its original, in place, and report the damage before and after.

`layerwise` fits the layers. This file checks the input, prepares the text, measures the damage, and undoes everything after an
error.
"""

import copy
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Column, Table
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import Architecture, longest_input
from hf_posswap.checkpoint import SwappedModel
from hf_posswap.data.calibration import (
    Batch,
    TextBatches,
    check_batches,
    few_tokens,
    random_tokens,
    read_texts,
    split_batches,
    written_text,
)
from hf_posswap.errors import CheckpointError, DataError, PosswapError, UnsupportedModelError
from hf_posswap.evaluating import evaluating
from hf_posswap.fitting.layerwise import LayerFit, Walk, opening
from hf_posswap.measure.damage import Damage, damage
from hf_posswap.measure.reading import LongText, Reading
from hf_posswap.pipelines import reads as reads_whole
from hf_posswap.pipelines import tokenizer_of
from hf_posswap.provenance import provenance, weight_hashes, without_home, write_json
from hf_posswap.sharing.delta import saved_weights_hash, weights_hash
from hf_posswap.surgery import is_part, position_modules, undo_of
from hf_posswap.swapping import is_unchanged, original, rewriting_attention
from hf_posswap.target import find_target
from hf_posswap.warm_start import plain_projections

FIT_FILE = "posswap_fit.json"

_MEASURES = {
    "KL": "how far predictions are from the original's, in nats a token",
    "1 - cosine": "1 - cosine of mean-pooled states with the original's",
}
_LOAD_IT = "Load the original checkpoint and pass it as original_model="
_NEAR = 0.05  # damage, in either measure, that users hardly notice

_TOKENS_A_BATCH = 2048  # of one step; memory for attention probabilities grows with it


@dataclass(frozen=True)
class FitReport:
    """The result of a fit, measured on text that it was not fitted on; `print` shows it as tables.

    Damage is measured on text of at most the original's window, `reading` on longer text.
    """

    before: Damage
    after: Damage
    layers: tuple[LayerFit, ...]
    seconds: float
    tokens: int  # fitted on
    tokens_held_out: int  # measured on
    text: str  # "given", "written by the model", "random tokens", or other words
    longest: int  # sequence fitted on, in tokens; longer inputs were not measured
    trained_positions: int  # the original's longest input
    position_scheme: dict  # as the model's config has it
    sha256: str  # of the fitted weights: `delta.weights_hash`
    part: str = "select"  # of the text measured on: "report" is used for nothing else, "select" also decided what to keep
    window: int | None = None  # tokens that the original read at once; None if it read every sequence whole
    reading: Reading | None = None  # of text longer than the window, next to the original's

    @property
    def score(self) -> float:
        """The distance from the original, to compare fits on one text; smaller is better."""
        return self.after.total if self.window is None else self.layers[-1].after

    def __str__(self) -> str:
        rows = [(self.before.measure, self.before.total, self.after.total)]
        for name in ("length", "position"):
            before, after = (getattr(one, f"by_{name}") for one in (self.before, self.after))
            rows += [(f"  {name} {key}", before[key], after[key]) for key in before if len(before) <= 8]
        tables = [_table(("damage", "before", "after"), rows, first="left")]
        if read := self.reading:
            losses = read.measure == "loss"
            kinds = {f"original, window of {read.window}": read.original} if losses else {}
            kinds |= {"before": read.before, "after": read.after}
            rows = [(key, *(kind[key] for kind in kinds.values())) for key in read.before]
            tables.append(_table((f"{read.measure} at {'positions' if losses else 'length'}", *kinds), rows, first="left"))
        rows = []
        by_layer = zip(self.before.by_layer, self.after.by_layer, strict=True)
        for fit, states in zip(self.layers, by_layer, strict=bool(self.layers)):  # none: there was nothing to fit
            solved = "" if fit.solved is None else f"{fit.solved:.4f}" + " (not kept)" * (not fit.kept)
            rows.append(
                (str(fit.layer), fit.before, solved, f"{fit.after:.4f}" + " (no steps)" * (not fit.reconstructed), *states)
            )
        heads = ("layer", "error before", "closed form", "after steps", "states before", "states after")
        told = "which decided nothing" if self.part == "report" else "which also told what to keep"
        words = [
            f"damage: {_MEASURES[self.before.measure]}; 0 is the original. error: of a layer's output, after the layers before "
            "it were fitted; states: of the whole model, after the layer; both relative to the original's variance.",
            f"fitted on {self.tokens:,} tokens, {self.text}, in {self.seconds:.0f} s; measured on {self.tokens_held_out:,} "
            f"others, {told}",
        ]
        if self.longest < self.trained_positions:
            words.append(
                f"no sequence was longer than {self.longest} tokens, and the original reads {self.trained_positions}: give "
                "longer ones too if the model is to read them"
            )
        console = Console(width=100, highlight=False, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            for table in (*tables, _table(heads, rows)):
                console.print(table, "")
            console.print(*words, self._verdict(), sep="\n")
        return "\n".join(line.rstrip() for line in capture.get().splitlines())

    def _verdict(self) -> str:
        """Return a sentence on what the figures mean and what to do next."""
        before, after = self.before.total, self.after.total
        if not self.layers:
            return "the swap had lost nothing, and nothing was fitted"
        if after == before:
            return "nothing was won, and the fit was undone: give more text, or a lower learning_rate"
        won = f"the fit won back {1 - after / before:.0%} of what the swap had lost"
        if after < _NEAR:
            return f"{won}, and little is left: save the model, or train it as you would the original"
        return f"{won}; more text (fitted on {self.tokens:,} tokens) and more steps win more, training the whole model the rest"

    def save(self, folder: str | Path, *, command: str | None = None) -> None:
        """Write `FIT_FILE` next to the saved model, for its card: the report, hashes of the weights, versions and hardware.

        Args:
            folder: Where the fitted model was saved.
            command: The command line that made the model, if any.

        Raises:
            CheckpointError: The folder has no weights, or not the fitted ones.
        """
        hashes = weight_hashes(Path(folder))
        if not hashes:
            raise CheckpointError(f"there is no model in {folder}: save the fitted model there first")
        if saved_weights_hash(Path(folder)) != self.sha256:
            raise CheckpointError(f"{folder} holds other weights than those that this report is of: save the model as fitted")
        report = asdict(self) | {"made": provenance() | {"command": command and without_home(command)}}
        write_json(Path(folder) / FIT_FILE, {"format": 1, "weights": hashes, "report": report})


def _table(heads: Sequence[str], rows: Iterable[Sequence[str | float]], *, first: str = "right") -> Table:
    found = Table(
        *(Column(head, justify="right" if place else first) for place, head in enumerate(heads)), box=None, pad_edge=False
    )
    for row in rows:
        found.add_row(*(cell if isinstance(cell, str) else f"{cell:.4f}" for cell in row))
    return found


def fit(
    model: PreTrainedModel,
    batches: torch.Tensor | Iterable | None = None,
    *,
    reconstruct: int = 100,
    original_model: PreTrainedModel | None = None,
    learning_rate: float = 1e-3,
    seed: int = 0,
    progress: bool = True,
    window: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> FitReport:
    """Fit a freshly swapped model to its original on some text, in place; return the damage before and after.

    Args:
        model: A swapped model, or the pipeline of sentence-transformers around it. Only the weights of self-attention, and its
            positions, change; `restore` still gives the original back bit for bit.
        batches: Texts in a list, which `text_batches` cuts; or token ids (N, L), or an iterable of such of differing
            lengths, or of dicts with `input_ids`, `attention_mask` and `token_type_ids`. Mix lengths up to the longest input
            you care about, also longer than the original's, which then reads through a window that slides by a quarter. None: a
            causal model writes text itself, an encoder gets random tokens; real text is better.
        reconstruct: Steps of Adam for each layer, those that share a module taking theirs together; more win more, most with
            "alibi" and "buckets". 0: only the closed form, if the scheme has one.
        original_model: The original, if this process does not keep it: for a model loaded from a swapped checkpoint.
        learning_rate: Peak learning rate of weights; that of position tables is 30 times as high.
        seed: Of the order of steps, and of text that the model writes.
        progress: Show a bar.
        window: Tokens that the original reads at once where a batch is longer. By default as many as it has positions for;
            fewer where it was tuned on fewer (MiniLM: 128).
        tokenizer: Of the texts; a pipeline has its own.

    With batches from `text_batches`, one held-out part decides what is kept, and another is used for the report only. Of other
    batches every tenth sequence is held out for both.

    Raises:
        PosswapError: The model is not swapped, was trained since, or its original is gone; batches do not belong to it, are
            too few or too long for it; the window is more than the original reads, or no batch is longer than it. The model is
            then unchanged, also after an interrupt. A fit that does not help is undone, with a warning, and the report's
            `after` equals its `before`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from hf_posswap import swap
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    >>> model = swap(GPT2LMHeadModel(config), "rotary")
    >>> report = fit(model, torch.randint(99, (40, 64)), reconstruct=10, progress=False)
    >>> report.after.total < report.before.total
    True
    """
    started = time.perf_counter()
    target, architecture = find_target(model, dispatched=True)
    teacher = _check(target, architecture, original_model, reconstruct, learning_rate)
    reads = min(longest_input(teacher.config), longest_input(target.config))
    if window is not None and (type(window) is not int or not 4 <= window <= reads):
        raise PosswapError(f"window={window!r} must be a number of tokens from 4 to {reads}, which the original reads at once")
    text = "given"
    with evaluating(target, teacher), suppress(_NotBetter):
        causal = architecture.is_causal(target.config)
        if batches is None:
            if causal and not (teacher.can_generate() and teacher.get_output_embeddings() is not None):
                raise DataError("this model has no language-modelling head to write its own text with: pass batches")
            batches = (written_text if causal else random_tokens)(teacher, seed=seed, length=reads)
            text = "written by the model" if causal else "random tokens"
        own, longest = tokenizer or tokenizer_of(model), reads_whole(model, longest_input(target.config))
        batches = read_texts(batches, own, longest, causal=causal, window=window or reads, seed=seed)
        fitted, select, report = _parts(batches, target)
        counts = [sum(int(batch["attention_mask"].sum()) for batch in part) for part in (fitted, report or select)]
        if counts[0] < 4 * target.config.hidden_size or not select:
            size = target.config.hidden_size
            sequences = sum(len(batch["input_ids"]) for batch in (*fitted, *select))
            raise DataError(
                f"{counts[0]:,} tokens to fit on in {sequences} sequences are too few for layers of size {size}: give at least "
                f"{6 * size:,} in all, in two sequences or more, better ten times that"
            )
        longest = max(batch["input_ids"].shape[1] for batch in (*fitted, *select, *report))
        if window is not None and longest <= window:
            raise DataError(f"no batch is longer than window={window}: give longer batches, or leave window out")
        window = (window or reads) if longest > (window or reads) else None
        told = report or select
        long = LongText(teacher, architecture, told, window) if window else None
        before, read = _damage(target, teacher, told, window), long and long.read(target)
        start = before.total if told is select or window else _damage(target, teacher, select, window).total
        after, read_after, layers = before, read, ()
        if window or start > 1e-7:  # otherwise it is the original's own table, with nothing to fit
            with rewriting_attention(target), tempfile.TemporaryDirectory(prefix="posswap-") as folder:
                quiet = {} if progress else {"disable": True}  # None or False would overrule TQDM_DISABLE
                with evaluating(*position_modules(target, architecture), mode=True):  # self-extend learns exact distances
                    walk = Walk(target, teacher, architecture, fitted, select, Path(folder), seed, window)
                    with tqdm(total=len(walk.stages) * (reconstruct + 1), desc="fit", unit="step", **quiet) as bar:
                        stages = (walk.fit_layers(stage, reconstruct, learning_rate, bar) for stage in walk.stages)
                        layers = tuple(fit for stage in stages for fit in stage)
                if not reconstruct and not any(fit.kept for fit in layers):
                    scheme = target.base_model.position_scheme
                    raise PosswapError(f"no closed form of {scheme} makes a layer better: give reconstruct a number of steps")
                found = _damage(target, teacher, told, window)
                if window:
                    start, end = walk.error_unfitted, layers[-1].after
                else:
                    end = found.total if told is select else _damage(target, teacher, select, window).total
                if not end < start:
                    raise _NotBetter
                after, read_after = found, long and long.read(target)
                target.config.position_scheme["fitted_length"] = longest  # much longer inputs give a warning
    if layers and after is before:
        warnings.warn(
            f"the fit was undone: on text not seen, {'the last error' if window else before.measure} went from {start:.4f} to "
            f"{end:.4f}. If {counts[0]:,} tokens were too few, give more text; or a lower learning_rate",
            stacklevel=2,
        )
    return FitReport(
        before=before,
        after=after,
        layers=layers,
        seconds=time.perf_counter() - started,
        tokens=counts[0],
        tokens_held_out=counts[1],
        text=text,
        longest=longest,
        trained_positions=reads,
        position_scheme=copy.deepcopy(target.config.position_scheme),
        sha256=weights_hash(target),
        part="report" if report else "select",
        window=window,
        reading=long and Reading(long.measure, window, long.original, read, read_after),
    )


def _parts(batches: torch.Tensor | Iterable, target: PreTrainedModel) -> list[list[Batch]]:
    """Return the parts to fit on, to select by and to report on, checked, in small batches; the last may be empty."""
    longest = longest_input(target.config)
    if isinstance(batches, TextBatches):
        given = (batches, batches.select, batches.report)
        parts = [check_batches(part, target, longest) if number < 2 or part else [] for number, part in enumerate(given)]
    else:
        parts = [*split_batches(check_batches(batches, target, longest)), []]
    return [few_tokens(part, _TOKENS_A_BATCH) for part in parts]


def _damage(target, teacher, batches: list[Batch], window: int | None) -> Damage:
    """Return the damage on text that the original can read whole; of longer text, on its beginnings."""
    return damage(target, teacher, batches if window is None else [opening(batch, window) for batch in batches])


class _NotBetter(Exception):
    """Raised to undo a fit that did not help."""


def _check(
    target: PreTrainedModel,
    architecture: Architecture,
    given: PreTrainedModel | None,
    reconstruct: int,
    learning_rate: float,
) -> PreTrainedModel:
    """Return the original to fit to; PosswapError says why there is none."""
    if type(reconstruct) is not int or reconstruct < 0:
        raise PosswapError(f"reconstruct={reconstruct!r} must be a number of steps, 0 or more")
    if not isinstance(learning_rate, (int, float)) or isinstance(learning_rate, bool) or not 0 < learning_rate < float("inf"):
        raise PosswapError(f"learning_rate={learning_rate!r} must be a number above 0")
    if torch.is_inference_mode_enabled():
        raise PosswapError("a fit needs gradients and cannot run inside torch.inference_mode(): call it outside")
    if not isinstance(target, SwappedModel):
        raise PosswapError(f"this {type(target).__name__} is not swapped: call posswap.swap(model, scheme) first, then fit")
    if is_part(target):
        raise PosswapError("this is the inner part of a swapped model: fit the whole model, which can restore what was fitted")
    _check_weights(target)
    own = [name for attention in architecture.self_attentions(target.base_model) for name, _ in attention.named_parameters()]
    if not plain_projections(target, architecture) or any("base_layer." in n or "parametrizations." in n for n in own):
        raise UnsupportedModelError("adapters or parametrizations wrap the projections of attention: fit before that")
    if given is None:
        if undo_of(target) is None:
            raise PosswapError(f"this process has no original of a model that was loaded swapped. {_LOAD_IT}")
        if not is_unchanged(target):
            raise PosswapError("attention has changed since it was swapped (trained, cast, loaded): fit right after the swap")
        if any("forward" in vars(module) for module in target.modules()):
            raise UnsupportedModelError(f"accelerate or another patcher has changed this model: fit before. {_LOAD_IT}")
        # A half-precision layer becomes float32 while it is fitted; the original must not change with it.
        wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in target.parameters())
        return original(target, share_weights=wide)
    other, family = find_target(given, dispatched=True)
    sizes = [(c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads) for c in (target.config, other.config)]
    if type(family) is not type(architecture) or sizes[0] != sizes[1]:
        kinds = f"{family.model_type} {sizes[1]}, the swapped one {architecture.model_type} {sizes[0]}"
        raise PosswapError(f"original_model is {kinds} (vocabulary, size, layers, heads): pass what it was swapped from")
    _check_weights(other)
    return other


def _check_weights(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UnsupportedModelError(f"{name} is offloaded or not loaded (meta device): load all of the model, then fit")
        if not torch.isfinite(parameter).all():
            raise PosswapError(f"{name} holds NaN or infinite numbers, as of training that diverged: load the model again")
