"""Position deltas: a swap as a few kilobytes that are put onto a public base model.

If a swap leaves all other weights as they are, only the scheme and its parameters have to be shared. A delta is a folder with
position_delta.json (format, scheme, lengths, and the base model's Hub id, revision and SHA-256) and
position_delta.safetensors. It loads only onto the weights that it was made from, under the config that they had: see `_READ`.
The hash covers all weights of the headless model but the pooler, so the base model may have any head.
"""

import hashlib
import json
import re
from pathlib import Path

import torch
from huggingface_hub import errors, hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture, find_family, longest_input
from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.provenance import check_new, read_json, write_json
from hf_posswap.scheme_entry import DIGEST, config_entry, on_hub, scheme_in, span_in
from hf_posswap.surgery import check_edits, position_modules, state_of
from hf_posswap.swapping import original, restore, swap
from hf_posswap.target import check_no_adapters, find_target

FORMAT = 1
ABOUT, WEIGHTS = "position_delta.json", "position_delta.safetensors"
# Fields of a family's config with which the same weights compute something else, whatever the head.
_READ = (
    "num_hidden_layers", "hidden_act", "activation_function", "activation", "layer_norm_eps", "layer_norm_epsilon",
    "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "scale_embedding", "token_dropout", "mask_token_id",
    "do_layer_norm_before", "is_decoder",
)  # fmt: skip


def save_delta(model: PreTrainedModel, folder: str | Path, *, base_model: PreTrainedModel | None = None) -> None:
    """Write a swapped model's scheme and its parameters into a new folder, without the weights of the base model.

    Args:
        model: A swapped model whose other weights are the base model's.
        folder: A new folder.
        base_model: The base model, to compare with. Default: the original that this process keeps of the model. That shows
            if a fit or a warm start has rewritten attention. Training of other weights shows only if the base model is
            passed here, or when the delta is loaded; of a head or a pooler, only if it is passed and has one, too.

    Raises:
        PosswapError: The model is not swapped, its base is unknown, or other weights differ from the base's.
        CheckpointError: The folder is not empty.

    >>> import copy, tempfile
    >>> import hf_posswap as posswap
    >>> from transformers import GPT2Config, GPT2Model
    >>> base = GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=50))
    >>> folder = tempfile.mkdtemp()
    >>> posswap.save_delta(posswap.swap(copy.deepcopy(base), "relative:clip=8"), folder)
    >>> print(posswap.describe(posswap.load_delta(base, folder)).new)
    relative:clip=8
    """
    target, architecture = find_target(model)
    if not isinstance(target, SwappedModel):
        raise PosswapError(f"this {type(target).__name__} is not swapped: pass a swapped model")
    check_no_adapters(model)
    folder = Path(folder)
    check_new(folder)
    if base_model is None:
        base_model = original(target)
    base, base_architecture = find_target(base_model)
    if isinstance(base, SwappedModel) or base_architecture is not architecture:
        raise PosswapError(f"base_model must be an unswapped {architecture.model_type} model, not a {type(base).__name__}")
    mine = _position_weights(target, architecture)
    own = {name: value for name, value in _weights(target).items() if name not in mine}
    table = _position_weights(base, architecture)
    theirs = {name: value for name, value in _weights(base).items() if name not in table}
    if own.keys() != theirs.keys():
        raise PosswapError(f"base_model has other weights: {sorted(own.keys() ^ theirs.keys())[:3]} ...")
    beside = _beside(target), _beside(base)
    both = beside[0].keys() & beside[1].keys()
    own, theirs = ({**some, **{name: more[name] for name in both}} for some, more in zip((own, theirs), beside, strict=True))
    pairs = {name: (value.to(theirs[name].device), theirs[name]) for name, value in own.items()}
    changed = [name for name, (one, other) in pairs.items() if one.dtype != other.dtype or not torch.equal(one, other)]
    if changed:
        what = f"{len(changed)} weights are not the base model's ({', '.join(changed[:3])}...), and a delta has positions only"
        way = "save the whole model, or swap with warm_start=False and neither fit nor train"
        if set(changed) <= both:
            way = "save the whole model, or, if others may bring a head of their own, pass a base_model without this one"
        raise PosswapError(f"{what}: {way}")
    check_edits(target)
    scheme, trained = target.base_model.position_scheme, target.config.position_scheme["trained_positions"]
    read = (*_READ, "pad_token_id") if architecture.first_id(target.config) else _READ  # positions are counted from its id
    longest, known = longest_input(target.config), on_hub(base.name_or_path) or {"id": None, "revision": None}
    about = {
        "format": FORMAT,
        "model_type": architecture.model_type,
        "position_scheme": config_entry(scheme, trained, longest, span=state_of(target).span),
        "max_positions": longest,
        "dtype": str(base.dtype).removeprefix("torch."),
        "num_heads": target.config.num_attention_heads,
        "config": {name: value for name in read if (value := getattr(target.config, name, None)) is not None},
        "causal": architecture.is_causal(target.config),  # where the field is not given, the family decides
        "base_model": {**known, "sha256": weights_hash(base)},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in mine.items()}, folder / WEIGHTS)
    write_json(folder / ABOUT, about)


def load_delta(base_model: PreTrainedModel, folder_or_id: str | Path, *, revision: str | None = None) -> PreTrainedModel:
    """Swap a base model in place, as the delta says, and return it. `posswap.restore` undoes it.

    Args:
        base_model: The model that the delta was made from, with any head, in the dtype that it had then.
        folder_or_id: A folder that `save_delta` wrote, or a repository on the Hub.
        revision: The revision of that repository.

    Raises:
        CheckpointError: The delta is incomplete, of a newer format, or of another base model; nothing is changed.
    """
    target, architecture = find_target(base_model)  # of a pipeline, the model inside
    if isinstance(target, SwappedModel):
        raise PosswapError("this model is swapped already: load the delta onto the unswapped checkpoint")
    folder = Path(folder_or_id)
    if not folder.is_dir():
        folder = download(str(folder_or_id), ABOUT, revision).parent
        download(str(folder_or_id), WEIGHTS, folder.name)  # of the same commit
    for name in (ABOUT, WEIGHTS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder_or_id} has no {name}, so it is no position delta: give a folder of save_delta")
    try:
        about = json.loads((folder / ABOUT).read_text("utf-8"))
        weights = load_file(folder / WEIGHTS)
        version, kind, longest = about["format"], about["model_type"], about["max_positions"]
        entry, digest = dict(about["position_scheme"]), about["base_model"]["sha256"]
        known = f"{about['base_model'].get('id')}, revision {about['base_model'].get('revision')}"
        fields = {"num_attention_heads": about.get("num_heads"), **about.get("config", {})}  # before, deltas had neither
        causal = about.get("causal", architecture.is_causal(target.config))
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{folder_or_id} cannot be read ({error!r}): the delta is broken, download it again") from None
    if version != FORMAT:
        raise CheckpointError(f"{folder_or_id} has delta format {version!r}, not {FORMAT}: install a newer hf_posswap")
    if kind != architecture.model_type:
        raise CheckpointError(f"{folder_or_id} is for a {kind} model ({known}), not {architecture.model_type}: load that one")
    if weights_hash(target) != digest:
        dtype = about.get("dtype", "the same dtype")
        raise CheckpointError(f"{folder_or_id} was made from other weights ({known}): load those, in {dtype}")
    for name, value in fields.items():
        if value is not None and value != getattr(target.config, name, None):
            raise CheckpointError(f"{folder_or_id} was made from a model ({known}) with {name}={value!r}: load it with that")
    if causal != architecture.is_causal(target.config):
        raise CheckpointError(f"{folder_or_id} was made from a model ({known}) with is_causal={causal}: load it with that")
    try:
        near, asked = span_in(entry), None if longest == longest_input(target.config) else longest
        swap(base_model, scheme_in(entry), max_positions=asked, warm_start=False, **near._asdict() if near else {})
    except PosswapError as error:
        raise CheckpointError(f"{folder_or_id} holds a scheme that cannot be used: {error}") from None
    wanted = _position_weights(target, architecture)
    if near and "guarded" not in entry and architecture.table(target.base_model).keeps_table:  # see PositionEmbedding.guard
        weights = {name: torch.cat([rows, torch.zeros_like(rows[:1])]) for name, rows in weights.items()}
    shapes = [{(name, one.shape) for name, one in some.items()} for some in (weights, wanted)]
    broken = {name for name, one in weights.items() if not torch.isfinite(one).all()}
    if wrong := ", ".join(sorted(broken | {name for name, _ in shapes[0] ^ shapes[1]})):
        restore(base_model)
        raise CheckpointError(f"{folder_or_id} does not hold the weights of its scheme (see {wrong}): download the delta again")
    with torch.no_grad():
        for name, value in wanted.items():
            value.copy_(weights[name])
    return base_model


# Messages for errors of the Hub; the first that matches is used, since some are subclasses of others.
_HUB_SAYS = {
    errors.HFValidationError: "{name} is neither a folder nor a name on the Hub (owner/name)",
    errors.RepositoryNotFoundError: "there is no folder {name}, and no such model on the Hub that you may read",
    errors.RevisionNotFoundError: "{name} has no revision {revision}",
    errors.LocalEntryNotFoundError: "there is no folder {name}; the Hub cannot be reached, and its cache has no {file} of it",
    errors.EntryNotFoundError: "{name} has no {file}: it was not shared with hf_posswap",
    errors.HfHubHTTPError: "{name} could not be read: the Hub answered with an error; try again",
}


def download(name: str, file: str, revision: str | None) -> Path:
    """Return a file of a repository on the Hub, as it lies in the cache; raise CheckpointError if there is none."""
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except tuple(_HUB_SAYS) as error:
        says = next(words for kind, words in _HUB_SAYS.items() if isinstance(error, kind))
        raise CheckpointError(says.format(name=name, file=file, revision=revision)) from None


def weights_hash(model: PreTrainedModel) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values of the headless model's weights, without its pooler."""
    return _hash(_weights(model))


def head_hashes(model: PreTrainedModel) -> dict[str, str]:
    """Return the SHA-256 of each weight that is not of the headless model, by name."""
    return {name: _hash({name: value}) for name, value in _head(model).items()}


def saved_hashes(folder: Path) -> tuple[str, dict[str, str]]:
    """Return `weights_hash` and `head_hashes` of the swapped model in a folder; files leave out weights that are tied."""
    file = folder / "config.json"
    family = find_family(str(read_json(file).get("model_type"))) if file.is_file() else None
    if family is None:
        raise CheckpointError(f"{folder} holds no swapped model: save the fitted model there first")
    prefix = f"{family.file_prefix or family.base_class.base_model_prefix}."
    there = [*folder.glob("*.safetensors")]  # where variants lie beside it, the one without a name is what was fitted
    files = [one for one in there if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors", one.name)] or there
    found = {name: value for path in files for name, value in load_file(path).items()}  # mapped only
    inside = {name for name in found if name.startswith(prefix)} or {*found}  # a headless model's names have no prefix
    base = {plain: found[name] for name in inside if _counts(plain := name.removeprefix(prefix))}
    return _hash(base), {name: _hash({name: found[name]}) for name in sorted(found.keys() - inside)}


def _hash(weights: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.base_model.state_dict().items() if _counts(name)}


def _head(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    prefix, headless = f"{model.base_model_prefix}.", model.base_model is model
    return {} if headless else {name: value for name, value in model.state_dict().items() if not name.startswith(prefix)}


def _beside(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights that a delta says nothing of: those of the head and of the pooler."""
    return _head(model) | {name: value for name, value in model.base_model.state_dict().items() if name.startswith("pooler.")}


def _counts(name: str) -> bool:
    return not name.startswith("pooler.") and not name.endswith(DIGEST)


def _position_weights(model: PreTrainedModel, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Return the tensors of the table, or of a scheme's modules, by name in the headless model; they are not copied."""
    modules = position_modules(model, architecture)
    inside = tuple(f"{name}." for name, module in model.base_model.named_modules() if module in modules)
    # Without the scheme's digest: position_delta.json names the scheme.
    return {name: value for name, value in _weights(model).items() if name.startswith(inside)}
