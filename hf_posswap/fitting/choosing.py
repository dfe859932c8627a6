"""Choose the options of a scheme that were left "auto", by trying their values on some text."""

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import longest_input
from hf_posswap.data.calibration import Batch, TextBatches, check_batches, read_texts
from hf_posswap.errors import PosswapError
from hf_posswap.fitting.fit import fit
from hf_posswap.pipelines import reads, tokenizer_of
from hf_posswap.schemes import Scheme, parse_scheme
from hf_posswap.swapping import swap
from hf_posswap.target import find_target

_TOKENS_A_TRIAL = 16_384


def choose(
    model: PreTrainedModel,
    scheme: Scheme | str,
    batches: torch.Tensor | Iterable,
    *,
    max_positions: int | None = None,
    span: int | None = None,
    first: int | None = None,
    warm_start: bool = True,
    steps: int = 10,
    seed: int = 0,
    progress: bool = True,
    window: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Scheme:
    """Return the scheme with every "auto" replaced by the value that does least damage; the model is unchanged.

    Options are chosen one by one, the others at their usual or already chosen values. A copy of the model is swapped to each
    candidate in `Scheme.choices` and fitted briefly on part of the text; the one with the least damage on held-out text wins.
    What is best for this short fit and these lengths may not be best for others.

    Args:
        model: The model that is to be swapped.
        scheme: A scheme with options that are "auto", such as "rotary:theta=auto,fraction=auto".
        batches: Text as `posswap.fit` takes it.
        max_positions, span, first, warm_start: As for `posswap.swap`.
        steps: Steps for each layer and candidate.
        seed: As for `posswap.fit`.
        progress: Show a bar.
        window, tokenizer: As for `posswap.fit`.

    The `report` part of `text_batches` is not used.

    Raises:
        PosswapError: Nothing is "auto", or a candidate cannot be swapped to or fitted; the message says why.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    >>> text = torch.randint(99, (40, 64))
    >>> choose(GPT2LMHeadModel(config), "rotary:fraction=auto", text, steps=2, progress=False).fraction in (1, 0.5, 0.25)
    True
    """
    scheme = parse_scheme(scheme)
    if not scheme.open_options():
        options = ", ".join(scheme.choices) or "none of this scheme's"
        raise PosswapError(f"{scheme} has no option that is 'auto'; options that may be are: {options}")
    given, (model, architecture) = model, find_target(model)
    trained, causal = longest_input(model.config), architecture.is_causal(model.config)
    longest = max_positions or reads(given, trained)
    batches = read_texts(batches, tokenizer or tokenizer_of(given), longest, causal=causal, window=window or trained, seed=seed)
    parts = [(batches, 0.9), (batches.select, 0.1)] if isinstance(batches, TextBatches) else [(batches, 1.0)]
    thin = [_thin(check_batches(part, model, max_positions or trained), share) for part, share in parts]
    text = TextBatches(*thin) if len(thin) > 1 else thin[0]
    settled = replace(scheme, **{name: scheme.choices[name][0] for name in scheme.open_options()})
    trials = sum(len(scheme.choices[name]) for name in scheme.open_options())
    options = {"max_positions": max_positions, "span": span, "first": first, "warm_start": warm_start}
    damages: dict[str, float] = {}  # by the scheme as a string: a scheme with scalings is not hashable
    with tqdm(total=trials, desc="choose", unit="trial", **({} if progress else {"disable": True})) as bar:
        for name in scheme.open_options():
            candidates = [replace(settled, **{name: value}) for value in scheme.choices[name]]
            for candidate in candidates:
                if str(candidate) not in damages:
                    trial = swap(copy.deepcopy(model), candidate, **options)
                    with warnings.catch_warnings():  # if a short fit does not help, the candidate is judged unfitted
                        warnings.filterwarnings("ignore", message="the fit was undone")
                        report = fit(trial, text, steps=steps, seed=seed, progress=False, window=window)
                    damages[str(candidate)] = report.score
                bar.update()
                bar.set_postfix({name: getattr(candidate, name), "damage": f"{damages[str(candidate)]:.4f}"})
            settled = min(candidates, key=lambda candidate: damages[str(candidate)])
    return settled


def _thin(batches: list[Batch], part: float) -> list[Batch]:
    """Return that part of a trial's tokens: the first rows of each batch, so that all lengths stay."""
    wanted = part * _TOKENS_A_TRIAL
    share = min(1.0, wanted / sum(batch["input_ids"].numel() for batch in batches))
    few = [{key: value[: max(2, round(len(value) * share))] for key, value in batch.items()} for batch in batches]
    # Batches of a row or two cannot be cut: keep every n-th batch instead, the longest first, in whatever order they came.
    few.sort(key=lambda batch: batch["input_ids"].shape[-1], reverse=True)
    return few[:: max(1, int(sum(batch["input_ids"].numel() for batch in few) // wanted))]
