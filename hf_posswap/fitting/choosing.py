"""Settle the options of a scheme that were left "auto", by trying them on some text."""

import copy
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_posswap.data.calibration import check_batches
from hf_posswap.errors import PosswapError
from hf_posswap.fitting.fit import fit
from hf_posswap.schemes import Scheme, parse_scheme
from hf_posswap.swapping import swap

_TOKENS_A_TRIAL = 16_384


def choose(
    model: PreTrainedModel,
    scheme: Scheme | str,
    batches: torch.Tensor | Iterable,
    *,
    max_positions: int | None = None,
    reconstruct: int = 10,
    seed: int = 0,
    progress: bool = True,
) -> Scheme:
    """Return the scheme with every "auto" replaced by the value that hurts this model least; the model itself stays as it is.

    Option by option, the others at their usual values or at what was chosen already, a copy of the model is swapped to each
    candidate of `Scheme.choices` and fitted briefly on part of the text, and the candidate with the least damage on
    held-out text wins. A short fit on the text at hand is what counts here, not what another length would like.

    Args:
        model: The model that is to be swapped.
        scheme: A scheme with options that are "auto", such as "rotary:theta=auto,fraction=auto".
        batches: Text as `posswap.fit` takes it.
        max_positions: As for `posswap.swap`.
        reconstruct: Steps for each layer and candidate.
        seed: As for `posswap.fit`.
        progress: Show a bar.

    Raises:
        PosswapError: Nothing is "auto", or a candidate cannot be swapped to or fitted; the message says why.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> _ = torch.manual_seed(0)
    >>> config = GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64, initializer_range=0.3)
    >>> text = torch.randint(99, (40, 64))
    >>> choose(GPT2LMHeadModel(config), "rotary:fraction=auto", text, reconstruct=2, progress=False).fraction in (1, 0.5, 0.25)
    True
    """
    scheme = parse_scheme(scheme)
    if not scheme.open_options():
        options = ", ".join(scheme.choices) or "none of this scheme's"
        raise PosswapError(f"{scheme} has no option that is 'auto'; options that may be are: {options}")
    checked = check_batches(batches, model, model.config.max_position_embeddings)
    # The first rows of each batch, so that all lengths stay.
    share = min(1.0, _TOKENS_A_TRIAL / sum(batch["input_ids"].numel() for batch in checked))
    text = [{key: value[: max(2, round(len(value) * share))] for key, value in batch.items()} for batch in checked]
    # Batches of a row or two cannot be cut: then every so many of them.
    text = text[:: max(1, sum(batch["input_ids"].numel() for batch in text) // _TOKENS_A_TRIAL)]
    settled = replace(scheme, **{name: scheme.choices[name][0] for name in scheme.open_options()})
    trials = [(name, value) for name in scheme.open_options() for value in scheme.choices[name]]
    damages: dict[str, float] = {}  # by the scheme as a string: one with scalings has no hash
    bar = tqdm(total=len(trials), desc="choose", unit="trial", disable=None if progress else True)
    for name in scheme.open_options():
        candidates = [replace(settled, **{name: value}) for value in scheme.choices[name]]
        for candidate in candidates:
            if str(candidate) not in damages:
                trial = swap(copy.deepcopy(model), candidate, max_positions=max_positions)
                with warnings.catch_warnings():  # a candidate that a short fit does not help counts as it is
                    warnings.filterwarnings("ignore", message="the fit was undone")
                    damages[str(candidate)] = fit(trial, text, reconstruct=reconstruct, seed=seed, progress=False).after.total
            bar.update()
            bar.set_postfix({name: getattr(candidate, name), "damage": f"{damages[str(candidate)]:.4f}"})
        settled = min(candidates, key=lambda candidate: damages[str(candidate)])
    bar.close()
    return settled
