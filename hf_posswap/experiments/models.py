"""The models of recipes: load a checkpoint and its tokenizer, and give the model the positions of a run."""

import sys
from collections.abc import Callable

import torch
import transformers
from accelerate import PartialState
from accelerate.utils import set_seed
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import ARCHITECTURES, longest_input
from hf_posswap.assets import model_source
from hf_posswap.describing import describe
from hf_posswap.errors import PosswapError, UnsupportedModelError
from hf_posswap.experiments.comparison import ORIGINAL
from hf_posswap.experiments.opening import one_line, open_config
from hf_posswap.experiments.options import SwapOptions
from hf_posswap.fitting.fit import fit
from hf_posswap.schemes import parse_scheme
from hf_posswap.surgery import geometry_of
from hf_posswap.swapping import swap
from hf_posswap.training import TrainingRun
from hf_posswap.training.launching import share_weights
from hf_posswap.training.run_log import announce

_SWAPPED = "{} has been swapped already: give the unswapped model that it was made of"


def load_family(name: str, **options) -> tuple[PreTrainedConfig, bool]:
    """Return the config of an unswapped checkpoint (built-in name, folder or Hub id), and whether it is causal."""
    config = open_config(model_source(name), **options)
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModelError(_SWAPPED.format(name))
    return config, ARCHITECTURES[config.model_type].is_causal(config)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint; one without a padding token pads with its end-of-text token."""
    source = model_source(name)
    family, tokenizer = open_config(source), AutoTokenizer.from_pretrained(source)
    if not 10 < len(tokenizer) <= family.vocab_size:  # transformers makes up a tiny one for a folder without a tokenizer
        sizes = f"tokenizer ({len(tokenizer)} tokens) and model ({family.vocab_size})"
        raise PosswapError(f"{name}: {sizes} do not belong together: save the model's own beside it")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def usual_class(causal: bool) -> type:
    """Return the Auto class of models to compare: causal ones with their head, encoders without."""
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModel


def load_original(name: str) -> PreTrainedModel:
    """Load an unswapped checkpoint to compare with."""
    _, causal = load_family(name)
    with one_line(f"{name} cannot be loaded as a {'causal LM' if causal else 'model'}", "give another"):
        return usual_class(causal).from_pretrained(model_source(name)).eval()


def load_model(
    config: SwapOptions, auto_class: type, *, max_positions: int | None = None, fit_batches: Callable[[], list] | None = None,
    fit_learning_rate: float = 1e-3, tokenizer: PreTrainedTokenizerBase | None = None,
    prepare: Callable[[PreTrainedModel, set[str]], None] | None = None, **options,
) -> PreTrainedModel:  # fmt: skip
    """Load the checkpoint with one of transformers' Auto classes, and give it the positions of the run.

    A head that the checkpoint lacks is drawn with the run's seed, so it is the same for every scheme. `max_positions` is what
    the recipe needs, unless the user gives it. `fit_batches()` returns the text for the start `fit` (see `text_batches`).
    `prepare(model, missing)` is called before the swap of a checkpoint, with the names of weights that it lacks: a recipe can
    train a new head there that all schemes start from.
    """
    announce(f"loading {config.model}{' with random weights' * (config.start == 'scratch')}, seed {config.seed}")
    set_seed(config.seed)
    source, (family, _) = model_source(config.model), load_family(config.model, **options)
    if tokenizer is not None and family.pad_token_id is None:
        family.pad_token_id = tokenizer.pad_token_id
    trained = longest_input(family)
    longest = longest_text(config, max_positions or 0, trained)
    if config.scheme != ORIGINAL:  # before anything is loaded or trained
        parse_scheme(config.scheme).check(geometry_of(family, longest, trained))
    elif longest > trained:
        raise PosswapError(f"the original reads {trained} tokens, not {longest}: take learned:extend=tile, or ask for fewer")
    with one_line(f"{config.model} cannot be loaded with {auto_class.__name__}", "give another model"):
        if config.start == "scratch":
            model, loading = auto_class.from_config(family), None
        else:
            report = {"output_loading_info": True, "ignore_mismatched_sizes": True}
            model, loading = auto_class.from_pretrained(source, config=family, **report)
    if loading:
        if other := sorted(name for name, *_ in loading["mismatched_keys"]):
            raise PosswapError(f"{config.model} has a head of other labels ({other[0]}): save its model.base_model, take that")
        if prepare is not None:
            prepare(model, set(loading["missing_keys"]))
    if config.scheme != ORIGINAL:
        give_positions(model, config, longest, fit_batches, learning_rate=fit_learning_rate)
    if (unused := getattr(model.base_model, "contact_head", None)) is not None:  # of ESM: DDP waits for every gradient
        unused.requires_grad_(False)
    return model.to(PartialState().device).eval()


def longest_text(config: SwapOptions, asked: int, held: int = 0) -> int:
    """Return how many tokens a model is to read: --max-positions, or by default those `asked` for, and all that it `held`.

    PosswapError: max_positions is less than asked for.
    """
    if config.max_positions and config.max_positions < asked:
        raise PosswapError(f"max_positions={config.max_positions} is less than the {asked} tokens that are asked for: raise it")
    return config.max_positions or max(asked, held)


def give_positions(model, config: SwapOptions, longest: int, fit_batches: Callable[[], list] | None, **fit_options) -> None:
    """Give a model, or a pipeline, the positions of a run, in place, `longest` of them.

    For the start `fit` only the main process fits, on the text that `fit_batches()` returns, and the others get its weights.
    """
    if describe(model).swapped:
        raise UnsupportedModelError(_SWAPPED.format(config.model))
    options = {"max_positions": longest, "warm_start": config.start in ("swap", "fit"), "span": config.span}
    options["first"] = None if config.span is None else config.first
    announce(f"swapping to {config.scheme}{' without a warm start' * (not options['warm_start'])}")
    swap(model, config.scheme, **options)
    if config.start != "fit":
        return
    if fit_batches is None:
        raise PosswapError("this recipe has no text to fit on: take another --start")
    model.to(PartialState().device)
    announce("fitting")
    if PartialState().is_main_process:
        fit(model, fit_batches(), steps=config.fit_steps, seed=config.seed, **fit_options)
    share_weights(model)


def cost(model: PreTrainedModel, run: TrainingRun | None = None) -> dict:
    """Return what a run cost: parameters, tokens, seconds, tokens/s, and peak memory in bytes on this process's device."""
    device = PartialState().device
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _peak_memory()
    spent = {"parameters": model.num_parameters(), "peak_memory_bytes": peak, "processes": PartialState().num_processes}
    if run is not None:
        spent |= {"tokens": run.tokens, "seconds": run.seconds, "tokens_per_second": run.tokens_per_second}
    return spent


def _peak_memory() -> int:
    try:
        import resource
    except ImportError:  # Windows
        import psutil  # which accelerate needs

        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
