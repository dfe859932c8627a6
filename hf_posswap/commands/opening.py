"""Models that a command names: refused by their config alone where no command can use them, then loaded with their head."""

import json
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, HTTPError, RepositoryNotFoundError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import find_family
from hf_posswap.assets import EMBEDDED_MODELS, model_source
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.extras import extra
from hf_posswap.pipelines import is_pipeline, kind_of
from hf_posswap.target import unsupported
from hf_posswap.terminal import say

TRUST_HELP = "Run the code that the model's folder or repository brings along."


def open_model(name: str, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load a model with the head that it was saved with, so that nothing is lost on the way.

    Args:
        name: A folder, a Hub id, or an embedded model.
        trust_remote_code: As in transformers. Nobody is asked: False refuses.

    Raises:
        PosswapError: It is not there, it is broken, or its family cannot be swapped; the config alone tells the last.
    """
    source = model_source(name)
    config = _config(source, trust_remote_code)
    by_name = {kind.__name__: kind for pair in SWAPPED_CLASSES.items() for kind in pair}
    named = next((one for one in config.architectures or () if isinstance(one, str)), None)
    known = by_name.get(named)
    if config.model_type.startswith("posswap-"):  # never as a plain model, whatever class is named
        known = SWAPPED_CLASSES.get(known, known)
    auto_class = AutoModelForCausalLM if config.model_type.endswith("gpt2") else AutoModel
    say(f"loading {name}")
    with _one_line(f"the weights of {name} cannot be loaded", "copy or download them again"):
        model, info = (known or auto_class).from_pretrained(
            source, output_loading_info=True, trust_remote_code=trust_remote_code
        )
    left, made = (", ".join(sorted(info[keys])[:3]) for keys in ("unexpected_keys", "missing_keys"))
    if left and known is None:
        raise CheckpointError(
            f"{name} was saved as {named}, which is none of the known classes, and weights would be lost ({left} ...): swap "
            "it in Python, where you choose the class"
        )
    if left:
        say(f"in {name}, and not read: {len(info['unexpected_keys'])} weights, such as {left}")
    if made:
        say(f"not in {name}, and drawn at random: {len(info['missing_keys'])} weights, such as {made}")
    return model


def open_whole(name: str, *, trust_remote_code: bool = False):
    """Load a model as `open_model` does, or the pipeline of sentence-transformers that it is the first module of."""
    source = model_source(name)
    _config(source, trust_remote_code)
    kind = kind_of(source)
    if kind is None:
        return open_model(name, trust_remote_code=trust_remote_code)
    with extra():
        import sentence_transformers
    say(f"loading {name}, a {kind}")
    with _one_line(f"{name} cannot be loaded as a {kind}", "copy or download it again"):
        return getattr(sentence_transformers, kind)(source, device="cpu", trust_remote_code=trust_remote_code)


def open_tokenizer(name: str, *, trust_remote_code: bool = False):
    """Return the tokenizer of such a model, or None: where it has none, transformers makes one up with hardly a word."""
    with _one_line(f"the tokenizer of {name} cannot be read", "copy or download it again"):
        tokenizer = AutoTokenizer.from_pretrained(model_source(name), trust_remote_code=trust_remote_code)
    return tokenizer if len(tokenizer) > 10 else None


def loading(model, folder: Path) -> str:
    """Return the line of Python that loads what was saved."""
    name, place = type(model).__name__, repr(str(folder))
    if is_pipeline(model):
        return f"{name}({place})"
    return f"AutoModel...from_pretrained({place})" if name.startswith("Posswap") else f"{name}.from_pretrained({place})"


def _config(source: str, trust_remote_code: bool) -> PreTrainedConfig:
    _check_place(source)
    with _one_line(f"config.json of {source} cannot be read", "give the config that was saved with the weights"):
        written, _ = PreTrainedConfig.get_config_dict(source)
    kind = written.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError(f"config.json of {source} names no model_type: add the family, bert or gpt2")
    if find_family(kind) is None and not (trust_remote_code and "auto_map" in written):
        raise unsupported(kind, f"{source}, a {kind!r} model")
    with _one_line(f"config.json of {source} cannot be read", "give the config that was saved with the weights"):
        return AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)


def _check_place(source: str) -> None:
    """Raise where there is no such model: transformers tries to reach the Hub for half a minute before it says so."""
    folder = Path(source)
    if folder.exists():
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{source} is no model: there is no config.json in it")
        if not isinstance(_json(folder / "config.json"), dict):
            raise CheckpointError(f"config.json of {source} holds no options: give the config that was saved with the weights")
        return
    instead = f"take one that is built in, {' or '.join(EMBEDDED_MODELS)}"
    try:
        if try_to_load_from_cache(source, "config.json"):
            return
        get_hf_file_metadata(hf_hub_url(source, "config.json"), timeout=10)
    except HFValidationError:
        raise CheckpointError(f"there is no folder {source}, and no model on the Hub has such a name: {instead}") from None
    except (RepositoryNotFoundError, GatedRepoError):
        raise CheckpointError(
            f"there is no folder {source}, and on the Hub none that you may read: log in with `hf auth login`, or {instead}"
        ) from None
    except (HTTPError, OSError) as error:
        raise CheckpointError(
            f"there is no folder {source}, and the Hub cannot be reached ({_reason(error)}): {instead}"
        ) from None


def _json(path: Path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON ({error}): give the config that was saved with the weights") from None


class _one_line:
    """Around a call of transformers: whatever a broken file makes it raise becomes one line."""

    def __init__(self, fact: str, remedy: str):
        self.fact, self.remedy = fact, remedy

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, Exception) and not isinstance(error, (PosswapError, MemoryError)):
            raise CheckpointError(f"{self.fact} ({_reason(error)}): {self.remedy}") from None


def _reason(error: Exception) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    if "ignore_mismatched_sizes" in words:  # what transformers says, while the shapes are in its log
        return "their shapes are not those that config.json says"
    return words if len(words) < 200 else f"{words[:200]} ..."
