"""The one file that puts modules into a model and takes them out again.

`swap` checks before and warms up after it. It changes instances, never transformers' classes.
"""

import functools
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import Architecture, family_of
from hf_posswap.attention import POSITIONED_CLASSES
from hf_posswap.errors import PosswapError
from hf_posswap.functional.banded import Span
from hf_posswap.schemes import AttentionPositions, Geometry, Scheme


@dataclass
class Snapshot:
    """Everything that a swap may change, as it was: modules and classes by reference, weights as copies."""

    classes: tuple[type, ...]  # of the model and the models in it: see `_parts`
    config: PreTrainedConfig
    base_config: PreTrainedConfig
    max_positions: int
    state: "SwapState | None"
    table: nn.Module
    attentions: list[tuple[nn.Module, type, nn.Module | None]]
    query_keys: list[tuple[torch.Tensor, ...]] | None = field(default=None, repr=False)
    attention_weights: list[dict[str, torch.Tensor]] | None = field(default=None, repr=False)  # as before a fit


@dataclass
class Undo:
    """What `restore` needs: the original, and what the model was right after the swap."""

    snapshot: Snapshot
    fingerprint: int  # of positions and attention
    weights: dict[str, "Weight"]  # of all but positions: see `weights_beside_positions`
    config_fields: dict
    name_or_path: str
    pipeline: dict  # what is changed around it: see `pipelines.settings`
    trained: bool = False  # whether attention was trained before its first fit: what is put back then is no original


class Weight:
    """What tells later whether a weight has been changed, also where the model was cast meanwhile."""

    def __init__(self, values: torch.Tensor):
        self.shape, self.dtype = values.shape, values.dtype
        kinds = {values.dtype, torch.float32, torch.bfloat16, torch.float16}
        self.checksums = {kind: _checksum([values.to(kind)]) for kind in kinds}

    def is_of(self, values: torch.Tensor) -> bool:
        """Whether these values are the same, to the rounding of a cast; those of another shape were changed on purpose."""
        kind = values.dtype if values.dtype in self.checksums else self.dtype
        return self.shape != values.shape or self.checksums[kind] == _checksum([values.to(kind)])


class Kind(NamedTuple):
    """Layers that share what a scheme prepares: the first one, and how far their attention looks (None: everywhere)."""

    first: int
    span: Span | None


@dataclass
class SwapState:
    """What a swapped model remembers of its swap, as one attribute of the headless model."""

    scheme: Scheme
    geometry: Geometry
    span: Span | None
    kinds: list[Kind]
    inside: bool  # the headless model is part of a swapped one with a head, whose config names the scheme
    undo: Undo | None = None  # None: the model was loaded, without the original


def state_of(model: PreTrainedModel) -> SwapState | None:
    """Return the state of a swapped model, with or without its head; None where it is not swapped."""
    return vars(model.base_model).get("posswap_state")


def check_edits(model: PreTrainedModel) -> None:
    """Raise if the longest input in a swapped model's config was edited, or layers of a mix were deleted or moved.

    Saved and loaded, it would be another model: a mix gives layers their schemes by their places.
    """
    state = state_of(model)
    own, mixed = state.geometry.max_positions, len(state.kinds) > 1
    kinds = [module.kind for module in position_modules(model, model.architecture)[1:]] if mixed else []
    if mixed and kinds != [state.scheme.kind_of(layer) for layer in range(max(len(kinds), len(state.scheme.layers)))]:
        what = f"layers were deleted or moved, and do not stand in the order of {state.scheme} any more"
        raise PosswapError(f"{what}: put them back, or change the layers of the original model and swap that")
    for config in (model.config, model.base_model.config):
        if (said := model.architecture.longest_input(config)) != own:
            what = f"its length and padding id now make {said} positions, the model was set up for {own}"
            way = "Set it back; for another length call posswap.swap(model, scheme, max_positions=...)"
            raise PosswapError(f"the config was changed: {what}. {way}")


def is_part(model: PreTrainedModel) -> bool:
    """Whether this is the headless model inside a swapped one: it cannot be swapped or restored by itself."""
    state = state_of(model)
    return state is not None and state.inside and model is model.base_model


def undo_of(model: PreTrainedModel) -> Undo | None:
    """Return what `restore` needs; None if the original is not kept, or only the whole model can be restored."""
    state = state_of(model)
    return None if state is None or is_part(model) else state.undo


def position_modules(model: PreTrainedModel, architecture: Architecture) -> list[nn.Module]:
    """Return the modules of a model's positions: the table, or the one in its place, and those in attention."""
    attentions = architecture.self_attentions(model.base_model)
    return [architecture.table(model.base_model), *(a.positions for a in attentions if hasattr(a, "positions"))]


def geometry_of(config: PreTrainedConfig, max_positions: int, trained_positions: int) -> Geometry:
    """Return the sizes that a scheme needs to know."""
    family = family_of(config)
    return Geometry(
        hidden_size=family.embedding_size(config),
        num_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        max_positions=max_positions,
        trained_positions=trained_positions,
        num_layers=family.own_layers(config),
    )


def take_snapshot(model: PreTrainedModel, architecture: Architecture, *, weights: bool) -> Snapshot:
    """Remember the model's positions; with `weights` also the query and key projections."""
    base = model.base_model
    attentions, query_keys = architecture.self_attentions(base), None
    if weights:
        query_keys = [tuple(one.detach().clone() for one in architecture.query_key(a).tensors()) for a in attentions]
    return Snapshot(
        classes=tuple(type(part) for part in _parts(model, architecture)),
        config=model.config,
        base_config=base.config,
        max_positions=architecture.longest_input(model.config),
        state=state_of(model),
        table=architecture.table(base),
        attentions=[(a, type(a), getattr(a, "positions", None)) for a in attentions],
        query_keys=query_keys,
    )


def install(
    model: PreTrainedModel,
    architecture: Architecture,
    scheme: Scheme,
    geometry: Geometry,
    *,
    span: Span | None,
    classes: dict[type, type],
    config: PreTrainedConfig | None = None,
) -> nn.Module:
    """Put the scheme's modules in the places of the old ones; return the embedding-side module, not yet warmed up.

    `classes` maps classes of transformers to ours, `config` is the one that names the scheme (None: the model has it already).
    """
    base = model.base_model
    owner, name = architecture.table_owner(base)
    like = base.get_input_embeddings().weight
    embedding = scheme.embedding_module(geometry).to(device=like.device, dtype=like.dtype)
    embedding.shown = str(scheme)
    if (config or model.config).position_scheme.get("guarded"):
        embedding.guard()
    if architecture.first_row(base.config):
        count = functools.partial(_count_from_zero, architecture.first_id(base.config))
        embedding.register_forward_pre_hook(count, with_kwargs=True)
    setattr(owner, name, embedding.train(owner.training))
    kinds, attentions = scheme.kinds(), architecture.self_attentions(base)
    kind_of = [scheme.kind_of(layer) for layer in range(len(attentions))]
    for attention, kind in zip(attentions, kind_of, strict=True):
        positions = kinds[kind][0].attention_module(geometry)
        if positions is None and (span is not None or len(kinds) > 1):
            positions = AttentionPositions()  # no scheme in this layer's attention, and yet a span, or others beside it
        if positions is None:
            _set_positions(attention, architecture.attention_class, None)
        else:
            positions.kind, positions.shown = kind, str(kinds[kind][0])
            _set_positions(attention, POSITIONED_CLASSES[architecture.model_type], positions)
    architecture.resize(base, geometry.max_positions)
    if config is not None:
        _set_config(model, config, config)
    for part in _parts(model, architecture):
        part.__class__ = classes.get(type(part), type(part))
    found = [Kind(kind_of.index(kind), span if spans else None) for kind, (_, spans) in enumerate(kinds)]
    _set_state(base, architecture, SwapState(scheme, geometry, span, found, inside=base is not model))
    return embedding


def _parts(model: PreTrainedModel, architecture: Architecture) -> tuple[PreTrainedModel, ...]:
    """Return the model, the headless model in it, and the `reader` in that; one module may be all three."""
    return model, model.base_model, architecture.reader(model.base_model)


def _set_state(base: PreTrainedModel, architecture: Architecture, state: "SwapState | None") -> None:
    for part in (base, architecture.reader(base)):
        if state is None:
            vars(part).pop("posswap_state", None)
        else:
            part.posswap_state = state


def _count_from_zero(first_id: int, embedding: nn.Module, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    """Turn the family's ids into positions that start at 0; padding, which has no position, gets 0."""
    ids = named["position_ids"] if named else arguments[0]
    return ((ids - first_id).clamp(min=0),), {}


@torch.no_grad()
def revert(model: PreTrainedModel, architecture: Architecture, snapshot: Snapshot) -> None:
    """Put the model back to a snapshot, on the device and in the dtype that the model has now."""
    base = model.base_model
    owner, name = architecture.table_owner(base)
    like = base.get_input_embeddings().weight
    setattr(owner, name, snapshot.table.to(device=like.device, dtype=like.dtype).train(owner.training))
    attentions = architecture.self_attentions(base)
    for attention, attention_class, positions in snapshot.attentions:
        _set_positions(attention, attention_class, positions)
    _set_config(model, snapshot.config, snapshot.base_config)
    architecture.resize(base, snapshot.max_positions)  # which asks the config where positions begin
    for part, part_class in zip(_parts(model, architecture), snapshot.classes, strict=True):
        part.__class__ = part_class
    _set_state(base, architecture, snapshot.state)
    if snapshot.attention_weights is not None:
        write_attention_weights(attentions, snapshot.attention_weights)
    for attention, values in zip(attentions, snapshot.query_keys or (), strict=snapshot.query_keys is not None):
        for target, value in zip(architecture.query_key(attention).tensors(), values, strict=True):
            target.copy_(value)
    torch.clear_autocast_cache()


def fingerprint(model: PreTrainedModel, architecture: Architecture) -> int:
    """Return a checksum of the weights that positions work with: the table's place and every self-attention."""
    modules = [architecture.table(model.base_model), *architecture.self_attentions(model.base_model)]
    return _checksum(p for module in modules for p in module.parameters())


def weights_beside_positions(model: PreTrainedModel, architecture: Architecture) -> dict[str, tuple[nn.Parameter, bool]]:
    """Return each weight that is not of positions, and whether it is of self-attention, by name."""
    inside = {id(p) for attention in architecture.self_attentions(model.base_model) for p in attention.parameters()}
    skipped = {id(p) for module in position_modules(model, architecture) for p in module.parameters()}
    named = ((name.replace("base_layer.", ""), p) for name, p in model.named_parameters())
    return {name: (p, id(p) in inside) for name, p in named if id(p) not in skipped}


def _checksum(parameters: Iterable[torch.Tensor]) -> int:
    checksum = 0
    for parameter in parameters:
        data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
        checksum = zlib.crc32(data.numpy(), checksum)
    return checksum


def copy_attention_weights(attentions: list[nn.Module]) -> list[dict[str, torch.Tensor]]:
    """Return copies of each layer's weights by name, those of the scheme's module among them."""
    return [{name: p.detach().clone() for name, p in _weights(attention).items()} for attention in attentions]


@torch.no_grad()
def write_attention_weights(attentions: list[nn.Module], weights: list[dict[str, torch.Tensor]]) -> None:
    """Put the copies back, even if adapters have been wrapped around the layers since."""
    for attention, values in zip(attentions, weights, strict=True):
        parameters = _weights(attention)
        for name, value in values.items():
            parameters[name].copy_(value)


def can_write_attention_weights(attentions: list[nn.Module], weights: list[dict[str, torch.Tensor]] | None) -> bool:
    """Whether there is a parameter of the same shape for each of these copies."""
    pairs = [(_weights(one), values) for one, values in zip(attentions, weights or (), strict=weights is not None)]
    return all(name in own and own[name].shape == value.shape for own, values in pairs for name, value in values.items())


def can_write_query_keys(attentions: list[nn.Module], architecture: Architecture) -> bool:
    """Whether query and key weights are parameters; `torch.nn.utils.prune` and parametrizations compute them from others."""
    for attention in attentions:
        own, views = {p.untyped_storage().data_ptr() for p in attention.parameters()}, architecture.query_key(attention)
        if not {view.untyped_storage().data_ptr() for view in (views.query, views.key)} <= own:
            return False
    return True


def _weights(attention: nn.Module) -> dict[str, nn.Parameter]:
    return {name.replace("base_layer.", ""): p for name, p in attention.named_parameters()}  # PEFT's name for what it wraps


def _set_config(model: PreTrainedModel, config: PreTrainedConfig, base_config: PreTrainedConfig) -> None:
    """Replace the model's config and the headless model's in every module that holds one; leave other configs.

    They are usually one object, but a composite model or a user may have given the head its own copy.
    """
    old = model.config, model.base_model.config
    inside = set(model.base_model.modules())
    for module in model.modules():
        if any(getattr(module, "config", None) is one for one in old):
            module.config = base_config if module in inside else config


def _set_positions(attention: nn.Module, attention_class: type, positions: nn.Module | None) -> None:
    attention.__class__ = attention_class
    if positions is not None:
        like = next(attention.parameters())  # layers of one model may live on several devices
        attention.positions = positions.to(device=like.device, dtype=like.dtype).train(attention.training)
    elif hasattr(attention, "positions"):
        del attention.positions
