"""What config.json says of a swapped model's scheme, and a digest beside the weights that shows edits."""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from hf_posswap.architectures import longest_input
from hf_posswap.assets import EMBEDDED_MODELS, embedded_model, is_installed
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.functional.banded import Span
from hf_posswap.schemes import ABOUT_THE_MODEL, PositionEmbedding, Scheme, scheme_from_dict

FORMAT = 1
DIGEST = "scheme_digest"  # the name of a buffer beside the table
# Its bytes wrap in a sum, so an average of state dicts, (a + b) / 2, changes it.
AVERAGED = f"Or {DIGEST} was averaged with the weights: average floating-point tensors alone, and keep the others"


def config_entry(
    scheme: Scheme,
    trained_positions: int,
    max_positions: int,
    base_model: dict[str, str | None] | None = None,
    span: Span | None = None,
) -> dict[str, Any]:
    """Return what config.json stores under `position_scheme`: the format, the scheme with all fields, the trained length.

    Also, for a model from the Hub, its {"id": ..., "revision": ...}; and for a scheme that cannot be resized the length it was
    made for, since a caller can change the config's own number on loading.
    """
    entry = {"format": FORMAT, "trained_positions": trained_positions, **scheme.to_dict()}
    if span is not None:
        entry |= {"span": span._asdict(), "guarded": True}  # see PositionEmbedding.guard; older folders have none
    if not scheme.resizable:
        entry["made_for_positions"] = max_positions
    return entry if base_model is None else entry | {"base_model": base_model}


def check_options(scheme: Scheme) -> None:
    """Raise PosswapError for an option that config.json cannot hold."""
    for option, value in scheme.to_dict().items():
        what = f"{scheme.name}: config.json cannot hold {option}={value!r:.60}"
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise PosswapError(f"{what}: let the option be numbers and text, and make the rest from it in the module") from None
        if not _has_text_keys(value):
            raise PosswapError(f"{what}, whose keys would become text: let them be text, and read numbers from it there")


def _has_text_keys(value) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(one) for key, one in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))


def scheme_in(entry: dict[str, Any]) -> Scheme:
    """Return the scheme in such an entry; its other keys describe the model."""
    return scheme_from_dict({key: value for key, value in entry.items() if key not in ABOUT_THE_MODEL})


def on_hub(name_or_path: str) -> dict[str, str | None] | None:
    """Return a loaded checkpoint's {"id": ..., "revision": ...} on the Hub; None where that is not known.

    transformers does not say where a checkpoint came from, and a relative path looks like an id. So a name counts as an id if
    the Hub's cache holds it, and the revision is known if the cache holds a single commit of it.
    """
    for name, hub_id in EMBEDDED_MODELS.items():
        if hub_id is not None and is_installed(name) and name_or_path == embedded_model(name):
            return {"id": hub_id, "revision": None}
    if not is_repo_id(name_or_path):
        return None
    snapshots = Path(HF_HUB_CACHE, repo_folder_name(repo_id=name_or_path, repo_type="model"), "snapshots")
    commits = [folder.name for folder in snapshots.iterdir()] if snapshots.is_dir() else []
    if Path(name_or_path).exists() or not commits:
        return None
    return {"id": name_or_path, "revision": commits[0] if len(commits) == 1 else None}


def is_repo_id(name) -> bool:
    """Whether the Hub would take this as the name of a repository."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def read_config_entry(config: PreTrainedConfig) -> tuple[Scheme, int]:
    """Return the scheme and the trained length that a swapped model's config holds."""
    entry = getattr(config, "position_scheme", None)
    if not isinstance(entry, dict) or type(entry.get("trained_positions")) is not int:
        raise CheckpointError(f"{config.model_type} needs a complete `position_scheme` entry, not {entry!r}: save it again")
    if (version := entry.get("format")) != FORMAT:
        raise CheckpointError(f"this checkpoint has position format {version!r}, not {FORMAT}: install a newer hf_posswap")
    longest = longest_input(config)
    if entry.get("made_for_positions", longest) != longest:
        made = f"{entry.get('name')} was made for {entry['made_for_positions']} positions, not {longest}"
        raise CheckpointError(f"{made}: load it without max_position_embeddings, or swap the original model")
    counts = {name: entry.get(name, 1) for name in ("trained_positions", "fitted_length")} | {"max positions": longest}
    if wrong := [f"{name}={count!r}" for name, count in counts.items() if type(count) is not int or count < 1]:
        raise CheckpointError(f"config.json has {wrong[0]}: it must be a number of tokens, 1 or more; save the model again")
    try:
        return scheme_in(entry), entry["trained_positions"]
    except PosswapError as error:
        raise CheckpointError(f"config.json holds a position scheme that cannot be used: {error}") from None


def span_in(entry: dict[str, Any]) -> Span | None:
    """Return the span in such an entry; None: attention looks everywhere."""
    entry = entry.get("span")
    if entry is None:
        return None
    right = isinstance(entry, dict) and entry.keys() == {"span", "first"} and all(type(n) is int for n in entry.values())
    if not right or entry["span"] < 1 or entry["first"] < 0:
        raise CheckpointError(f"config.json has a span of {entry!r}: it must be {{'span': 1 or more, 'first': 0 or more}}")
    return Span(**entry)


def digest(scheme: Scheme, trained_positions: int, span: Span | None) -> torch.Tensor:
    """Return a hash of scheme, trained length and span, (16,) uint8: saved with the weights, it shows a config edited since."""
    entry = json.dumps([scheme.to_dict(), trained_positions, span and span._asdict()], sort_keys=True)
    return torch.frombuffer(bytearray(hashlib.sha256(entry.encode()).digest()[:16]), dtype=torch.uint8)


def sign(embedding: PositionEmbedding, own: torch.Tensor, *, guard: bool = True) -> None:
    """Register a scheme's digest beside the table; with `guard`, `load_state_dict` refuses the weights of another scheme."""
    embedding.register_buffer(DIGEST, own)
    if guard:  # by a copy: where a model is made without memory (`to_empty`), the buffer holds nothing yet
        embedding.register_load_state_dict_pre_hook(functools.partial(_check_digest, own.clone()))
        embedding.register_state_dict_post_hook(functools.partial(_give_digest, own.clone()))


def _check_digest(own: torch.Tensor, embedding: PositionEmbedding, state_dict: dict, prefix: str, *rest) -> None:
    given = state_dict.get(f"{prefix}{DIGEST}")
    if given is not None and not given.is_meta and not torch.equal(given.cpu(), own.cpu()):
        what = "these weights belong to another position scheme, or other options of it"
        rest[-1].append(f"{what}: swap to the scheme that they were saved with, then load them. {AVERAGED}")  # torch raises it


def _give_digest(own: torch.Tensor, embedding: PositionEmbedding, state_dict: dict, prefix: str, *rest) -> None:
    """Save the digest whatever became of the buffer: averages of models average their buffers (`AveragedModel`)."""
    if not (kept := state_dict[f"{prefix}{DIGEST}"]).is_meta:
        state_dict[f"{prefix}{DIGEST}"] = own.to(kept.device)


def is_edited(config: PreTrainedConfig) -> bool:
    """Whether the config says that its scheme was changed on purpose after the weights were saved."""
    return config.position_scheme.get("edited") is True
