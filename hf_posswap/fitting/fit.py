"""Fit a freshly swapped model to its original, in place, and report the damage before and after.

`layerwise` fits the layers. This file checks the input, prepares the text, measures the damage, and undoes everything after an
error.
"""

import copy
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import Architecture, longest_input
from hf_posswap.checkpoint import SwappedModel
from hf_posswap.data import calibration
from hf_posswap.errors import DataError, PosswapError, UnsupportedModelError
from hf_posswap.evaluating import evaluating, exactly
from hf_posswap.fitting.layerwise import Walk, opening
from hf_posswap.fitting.report import FitReport
from hf_posswap.measure.damage import Damage, damage
from hf_posswap.measure.reading import LongText, Reading
from hf_posswap.pipelines import change, tokenizer_of
from hf_posswap.pipelines import reads as reads_whole
from hf_posswap.sharing.delta import head_hashes, weights_hash
from hf_posswap.surgery import is_part, position_modules, undo_of, weights_beside_positions
from hf_posswap.swapping import is_unchanged, original, rewriting_attention
from hf_posswap.target import find_target
from hf_posswap.warm_start import plain_projections

_LOAD_IT = "Load the original checkpoint and pass it as original_model="
_TOKENS_A_BATCH = 2048  # of one step; memory for attention probabilities grows with it


def fit(
    model: PreTrainedModel,
    batches: torch.Tensor | Iterable | None = None,
    *,
    steps: int = 100,
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
        steps: Steps of Adam for each layer; layers that share a module take them together. More win more, most with
            "alibi". 0: only the closed form, if the scheme has one.
        original_model: The original, if this process does not keep it: for a model loaded from a swapped checkpoint.
        learning_rate: Peak learning rate of weights; that of position tables is 30 times as high.
        seed: Of the order of steps, and of text that is drawn or written.
        progress: Show a bar.
        window: Tokens that the original reads at once where a batch is longer. By default as many as it has positions for;
            give fewer if it was tuned on fewer (MiniLM: 128).
        tokenizer: Of the texts; a pipeline has its own.

    With batches from `text_batches`, one held-out part decides what is kept, by the damage or, if some of it is longer than the
    original reads, by the last layer's error; another is used for the report only. Of other batches every tenth sequence of
    each width, or one of fewer, is held out for both, and its copies are left out. Padding in front is moved behind the text.

    Raises:
        PosswapError: The model is not swapped, was trained since, or its original is gone; batches do not belong to it, are
            too few, too long for it or mostly one token; the window is more than the original reads, or no batch is longer than
            it. The model is then unchanged, also after an interrupt. A fit that does not help is undone, with a warning, and
            the report's `after` equals its `before`.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from hf_posswap import swap
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
    >>> model = swap(GPT2LMHeadModel(config), "rotary")
    >>> report = fit(model, torch.randint(99, (40, 64)), steps=10, progress=False)
    >>> report.after.total < report.before.total
    True
    """
    started = time.perf_counter()
    target, architecture = find_target(model, dispatched=True)
    teacher = _check(target, architecture, original_model, steps, learning_rate)
    reads = min(longest_input(teacher.config), longest_input(target.config))
    if window is not None and (type(window) is not int or not 4 <= window <= reads):
        raise PosswapError(f"window={window!r} must be a number of tokens from 4 to {reads}, which the original reads at once")
    quiet = {} if progress else {"disable": True}  # None or False would overrule TQDM_DISABLE
    quiet |= {} if "TQDM_MININTERVAL" in os.environ else {"mininterval": 1}  # seconds: log files keep each
    # Text and its generators are on the CPU. Where that is the default, torch would look at each call, which costs a twentieth.
    device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    # From here on, since writing text and measuring damage may take minutes, too.
    with tqdm(desc="fit", unit="step", **quiet) as bar, device, exactly(target), evaluating(target, teacher):
        causal, kind = architecture.is_causal(target.config), "given"
        if batches is None:
            bar.set_postfix_str("making text")
            kind, batches = _own_text(teacher, causal, seed, reads)
        own, longest = tokenizer or tokenizer_of(model), reads_whole(model, longest_input(target.config))
        batches = calibration.read_texts(batches, own, longest, causal=causal, window=window or reads, seed=seed)
        text = _parts(batches, target)
        told = text.report or text.select
        longest = max(batch["input_ids"].shape[1] for batch in (*text, *text.select, *text.report))
        if window is not None and longest <= window:
            raise DataError(f"no batch is longer than window={window}: give longer batches, or leave window out")
        window = (window or reads) if longest > (window or reads) else None
        long = LongText(teacher, architecture, told, window) if window else None

        def measure() -> tuple[Damage, float, dict | None]:
            """Return the damage to report, the total that decides unless there is a window, and the reading of long text."""
            bar.set_postfix_str("measuring")
            found = damage(target, teacher, [opening(batch, window) for batch in told] if window else told)
            decides = found if window or told is text.select else damage(target, teacher, text.select)
            return found, decides.total, long and long.read(target)

        before, start, read = after, end, read_after = measure()
        if math.isnan(start):
            raise PosswapError("states of the model are NaN or infinite on this text: fit it in float32")
        if start <= 1e-7 and not window and isinstance(teacher, SwappedModel):
            raise PosswapError(f"original_model is this swapped model again, and not its original. {_LOAD_IT}")
        layers = ()
        if window or start > 1e-7:  # otherwise it is the original's own table, with nothing to fit
            with suppress(_NotBetter), rewriting_attention(target), tempfile.TemporaryDirectory(prefix="posswap-") as folder:
                with evaluating(*position_modules(target, architecture), mode=True):  # self-extend learns exact distances
                    walk = Walk(target, teacher, architecture, text, text.select, Path(folder), seed, window)
                    bar.set_postfix_str("", refresh=False)
                    bar.reset(total=len(walk.stages) * (steps + 1))
                    stages = (walk.fit_layers(stage, steps, learning_rate, bar) for stage in walk.stages)
                    layers = tuple(fit for stage in stages for fit in stage)
                if not steps and not any(fit.kept for fit in layers):
                    scheme = target.base_model.position_scheme
                    raise PosswapError(f"no closed form of {scheme} makes a layer better: give steps a number above 0")
                found, end, read_found = measure()
                if window:
                    start, end = walk.error_unfitted, layers[-1].after
                if not end < start:
                    raise _NotBetter
                after, read_after = found, read_found
                target.config.position_scheme["fitted_length"] = longest  # much longer inputs give a warning
                change(model)
    if layers and after is before:
        warnings.warn(
            f"the fit was undone: on text not seen, {'the last error' if window else before.measure} went from {start:.4f} to "
            f"{end:.4f}. If {_tokens(text):,} tokens were too few, give more text; or a lower learning_rate",
            stacklevel=2,
        )
    return FitReport(
        before=before,
        after=after,
        layers=layers,
        seconds=time.perf_counter() - started,
        tokens=_tokens(text),
        tokens_held_out=_tokens(told),
        text=kind,
        longest=longest,
        trained_positions=reads,
        position_scheme=copy.deepcopy(target.config.position_scheme),
        sha256=weights_hash(target),
        head=head_hashes(target),
        part="report" if text.report else "select",
        window=window,
        reading=long and Reading(long.measure, window, long.original, read, read_after),
        error=(start if after is before else end) if window else None,
    )


class _NotBetter(Exception):
    """Raised to undo a fit that did not help."""


def _own_text(teacher: PreTrainedModel, causal: bool, seed: int, length: int) -> tuple[str, torch.Tensor | list[torch.Tensor]]:
    """Return text that the model makes itself, and what it is called."""
    if not causal:
        return "random tokens", calibration.random_tokens(teacher, seed=seed, length=length)
    if not (teacher.can_generate() and teacher.get_output_embeddings() is not None):
        raise DataError("this model has no language-modelling head to write its own text with: pass batches")
    return "written by the model", calibration.written_text(teacher, seed=seed, length=length)


def _parts(batches: torch.Tensor | Iterable, target: PreTrainedModel) -> calibration.TextBatches:
    """Return what to fit on, to select by and to report on, checked, in small batches; the last may be empty."""
    longest, size = longest_input(target.config), target.config.hidden_size
    if isinstance(batches, calibration.TextBatches):
        given = (batches, batches.select, batches.report)
        parts = [calibration.check_batches(one, target, longest) if place < 2 or one else [] for place, one in enumerate(given)]
    else:
        parts = [*calibration.split_batches(calibration.check_batches(batches, target, longest)), []]
    small = (calibration.few_tokens(part, _TOKENS_A_BATCH) for part in parts)
    # A lone token says nothing of positions, and has no spread to divide an error by.
    text = calibration.TextBatches(*([batch for batch in part if batch["attention_mask"].sum(1).max() > 1] for part in small))
    if _tokens(text) < 4 * size or not text.select:
        sequences = sum(len(batch["input_ids"]) for batch in (*text, *text.select))
        what = f"{_tokens(text):,} tokens to fit on in {sequences} sequences, less copies of those held out, are too few"
        least = f"at least {6 * size:,} in all, in two sequences or more, better ten times that (tokens=, --fit-tokens)"
        raise DataError(f"{what} for layers of size {size}: give {least}")
    tokens = torch.cat([batch["input_ids"][batch["attention_mask"]] for batch in text])
    if (tokens == (most := tokens.mode().values)).sum() > 0.75 * len(tokens):  # indented code may be half spaces
        what = f"three quarters of the text are token {most}, as if it were padding, or words that the tokenizer does not know"
        raise DataError(f"{what}: give real text, and the attention_mask of rows with padding")
    return text


def _tokens(batches: list[calibration.Batch]) -> int:
    return sum(int(batch["attention_mask"].sum()) for batch in batches)


def _check(
    target: PreTrainedModel, architecture: Architecture, given: PreTrainedModel | None, steps: int, learning_rate: float
) -> PreTrainedModel:
    """Return the original to fit to; PosswapError says why there is none."""
    if type(steps) is not int or steps < 0:
        raise PosswapError(f"steps={steps!r} must be a number, 0 or more")
    if not isinstance(learning_rate, int | float) or not 0 < learning_rate < float("inf"):  # "1e-3" of a YAML file
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
            what = "attention has changed since it was swapped (trained, cast, loaded, a delta)"
            raise PosswapError(f"{what}: fit right after the swap. {_LOAD_IT}")
        if any("forward" in vars(module) for module in target.modules()):
            raise UnsupportedModelError(f"accelerate or another patcher has changed this model: fit before. {_LOAD_IT}")
        known = undo_of(target).weights
        if new := [name for name in weights_beside_positions(target, architecture) if name not in known]:
            raise UnsupportedModelError(f"{new[0]} is new since the swap (adapters, parametrizations): fit before. {_LOAD_IT}")
        # A half-precision layer becomes float32 while it is fitted; the original must not change with it.
        wide = all(parameter.dtype in (torch.float32, torch.float64) for parameter in target.parameters())
        return original(target, share_weights=wide)
    other, family = find_target(given, dispatched=True)
    if other is target:
        raise PosswapError(f"original_model is this swapped model itself. {_LOAD_IT}")
    sizes = [(c.vocab_size, c.hidden_size, c.num_hidden_layers, c.num_attention_heads) for c in (target.config, other.config)]
    if type(family) is not type(architecture) or sizes[0] != sizes[1]:
        kinds = f"{family.model_type} {sizes[1]}, the swapped one {architecture.model_type} {sizes[0]}"
        raise PosswapError(f"original_model is {kinds} (vocabulary, size, layers, heads): pass what it was swapped from")
    _check_weights(other)
    if (likeness := _likeness(target, other)) < 0.5:
        what = f"original_model is another model of this size: its word embeddings are others (correlation {likeness:.2f})"
        raise PosswapError(f"{what}. Pass the checkpoint that was swapped, or one that was trained further from it")
    return other


def _likeness(*models: PreTrainedModel) -> float:
    """Return the correlation of two models' word embeddings: near 1 after any fine-tuning, near 0 of other models."""
    words = [model.get_input_embeddings().weight.detach() for model in models]
    if not all(one.is_floating_point() for one in words):  # quantized
        return 1.0
    if words[0].shape != words[1].shape:
        return 0.0
    some = [one[:: 1 + len(one) // 10_000].float().cpu() for one in words]  # of XLM-RoBERTa all would take gigabytes
    return float(torch.cosine_similarity(*((one - one.mean(0)).flatten() for one in some), dim=0))


def _check_weights(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta or hasattr(parameter, "device_mesh"):  # a DTensor's
            raise UnsupportedModelError(f"{name} is offloaded, sharded or not loaded (meta device): load all of it, then fit")
        if not torch.isfinite(parameter).all():
            raise PosswapError(f"{name} holds NaN or infinite numbers, as of training that diverged: load the model again")
