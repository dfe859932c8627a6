"""Open the models that a command names: check the config first, then load the weights with their head."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import find_family
from hf_posswap.assets import EMBEDDED_MODELS, model_source
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.extras import extra
from hf_posswap.pipelines import is_pipeline, kind_of
from hf_posswap.provenance import read_json
from hf_posswap.target import unsupported
from hf_posswap.terminal import say

Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code from the model's folder or repository.")]


def open_model(name: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a model with the head that it was saved with, so that no weights are lost.

    Args:
        name: A folder, a Hub id, or an embedded model.
        trust_remote_code: As in transformers, but False never asks the user.

    PosswapError: the model does not exist, is broken, or is of a family that cannot be swapped.
    """
    source = model_source(name)
    config = open_config(source, trust_remote_code)
    by_name = {kind.__name__: kind for pair in SWAPPED_CLASSES.items() for kind in pair}
    named = next(iter(config.architectures or ()), None)
    known, family = by_name.get(named), find_family(config.model_type)
    if config.model_type.startswith("posswap-"):  # load the swapped class even if the plain one is named
        known = SWAPPED_CLASSES.get(known, known)
    kind = known or (AutoModelForCausalLM if config.model_type.endswith("gpt2") else AutoModel)
    say(f"loading {name}")
    with one_line(f"the weights of {name} cannot be loaded", "copy or download them again"):
        model, info = kind.from_pretrained(source, output_loading_info=True, trust_remote_code=trust_remote_code)
    for lost in info["missing_keys"] if family is not None else ():
        place, _, last = lost.rpartition(".")
        if last == "weight" and model.get_submodule(place) is getattr(*family.table_owner(model.base_model), None):
            raise CheckpointError(f"{name} has no weights for {lost}, which would be random: give a checkpoint that has them")
    left, made = (", ".join(sorted(info[keys])[:3]) for keys in ("unexpected_keys", "missing_keys"))
    if left and known is None:
        what = f"{name} is a {named}, which is not known here" if named else f"config.json of {name} names no class"
        raise CheckpointError(f"{what}, so {left} ... would be lost: load it with its class, and swap it in Python")
    if left:
        say(f"in {name}, and not read: {len(info['unexpected_keys'])} weights, such as {left}")
    if made:
        say(f"not in {name}, and drawn at random: {len(info['missing_keys'])} weights, such as {made}")
    return model


def open_whole(name: str, *, trust_remote_code: bool = False):
    """Load the pipeline of sentence-transformers in a folder or repository, or else a model, as `open_model` does."""
    source = model_source(name)
    open_config(source, trust_remote_code)
    kind = kind_of(source)
    if kind is None:
        return open_model(name, trust_remote_code=trust_remote_code)
    with extra():
        import sentence_transformers
    say(f"loading {name}, a {kind}")
    with one_line(f"{name} cannot be loaded as a {kind}", "copy or download it again"):
        return getattr(sentence_transformers, kind)(source, device="cpu", trust_remote_code=trust_remote_code)


def open_tokenizer(name: str, *, trust_remote_code: bool = False):
    """Return the model's tokenizer, or None if there is none (transformers then makes up a tiny one)."""
    with one_line(f"the tokenizer of {name} cannot be read", "copy or download it again"):
        tokenizer = AutoTokenizer.from_pretrained(model_source(name), trust_remote_code=trust_remote_code)
    return tokenizer if len(tokenizer) > 10 else None


def loading(model, folder: Path) -> str:
    """Return the Python expression that loads the saved model."""
    name, place = type(model).__name__, repr(str(folder))
    if is_pipeline(model):
        return f"{name}({place})"
    return f"AutoModel...from_pretrained({place})" if name.startswith("Posswap") else f"{name}.from_pretrained({place})"


def open_config(source: str, trust_remote_code: bool = False, **options) -> PreTrainedConfig:
    """Return the config of a folder or Hub id with a model of a known family, swapped or not, with `options` for fields."""
    _check_place(source)
    with one_line(f"config.json of {source} cannot be read", "give the config that was saved with the weights"):
        written, _ = PreTrainedConfig.get_config_dict(source)
        kind = written.get("model_type")
        if not isinstance(kind, str):
            kept = Path(source) / "model"  # of a recipe with --save-model
            remedy = f"give {kept}" if kept.is_dir() else "give the folder of a model, or add its family, bert or gpt2"
            raise CheckpointError(f"config.json of {source} names no model_type: {remedy}")
        if find_family(kind) is None and not (trust_remote_code and "auto_map" in written):
            raise unsupported(kind, f"{source}, a {kind!r} model")
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options)


def _check_place(source: str) -> None:
    """Raise CheckpointError if there is no such model; transformers would retry the Hub for half a minute first."""
    folder = Path(source)
    if folder.exists():
        if not (folder / "config.json").is_file() and (folder / "0_Transformer" / "config.json").is_file():
            what = f"{source} is a pipeline whose model lies in a folder of its own, as old ones do"
            raise CheckpointError(f"{what}: load it with sentence-transformers, and save it again")
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{source} is no model: there is no config.json in it")
        read_json(folder / "config.json")
        return
    try:
        if not try_to_load_from_cache(source, "config.json"):
            get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=10)
        return
    except HFValidationError:
        why = "and no model on the Hub has such a name"
    except (RepositoryNotFoundError, GatedRepoError):
        why = "and no such model that you may read: `hf auth login`"
    except (HTTPError, OSError) as error:
        why = f"and the Hub cannot be reached ({_reason(error)})"
    instead = f"take one that is built in, {' or '.join(EMBEDDED_MODELS)}"
    raise CheckpointError(f"there is no folder {source}, {why}: {instead}")


@contextmanager
def one_line(fact: str, remedy: str) -> Iterator[None]:
    """Around a call of transformers: turns any error that a broken file causes into a CheckpointError of one line."""
    try:
        yield
    except (PosswapError, MemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{fact} ({_reason(error)}): {remedy}") from None


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    if "ignore_mismatched_sizes" in words:  # transformers' advice, which does not fit here
        return "their shapes are not those that config.json says"
    return words if len(words) < 200 else f"{words[:200]} ..."
