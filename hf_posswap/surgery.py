"""The only file that changes a model: put a scheme's modules in, and take them out again.

Nothing here decides anything; `swap` checks first and warms up afterwards. Instances are changed, never the library.
"""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.attention import POSITIONED_CLASSES
from hf_posswap.schemes import Geometry, Scheme


@dataclass
class Snapshot:
    """Everything that a swap may change, as it was: modules and classes by reference, weights as copies."""

    model_class: type
    base_class: type
    config: PreTrainedConfig
    base_config: PreTrainedConfig
    max_positions: int
    scheme: Scheme | None
    table: nn.Module
    attentions: list[tuple[type, nn.Module | None]]
    query_keys: list[tuple[torch.Tensor, ...]] | None = field(default=None, repr=False)
    attention_weights: list[dict[str, torch.Tensor]] | None = field(default=None, repr=False)  # as before a fit


def geometry_of(config: PreTrainedConfig, max_positions: int, trained_positions: int) -> Geometry:
    """Return the sizes that a scheme needs to know."""
    return Geometry(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        max_positions=max_positions,
        trained_positions=trained_positions,
    )


def take_snapshot(model: PreTrainedModel, architecture: Architecture, *, weights: bool) -> Snapshot:
    """Remember the model's positions; with `weights` also the query and key projections."""
    base = model.base_model
    owner, name = architecture.table_owner(base)
    attentions = architecture.self_attentions(base)
    query_keys = None
    if weights:
        query_keys = [
            tuple(tensor.detach().clone() for tensor in architecture.query_key(attention).tensors()) for attention in attentions
        ]
    return Snapshot(
        model_class=type(model),
        base_class=type(base),
        config=model.config,
        base_config=base.config,
        max_positions=model.config.max_position_embeddings,
        scheme=getattr(base, "position_scheme", None),
        table=getattr(owner, name),
        attentions=[(type(a), getattr(a, "positions", None)) for a in attentions],
        query_keys=query_keys,
    )


@torch.no_grad()
def revert(model: PreTrainedModel, architecture: Architecture, snapshot: Snapshot) -> None:
    """Put the model back to a snapshot, on the device and in the dtype that the model has now."""
    base = model.base_model
    owner, name = architecture.table_owner(base)
    like = base.get_input_embeddings().weight
    setattr(owner, name, snapshot.table.to(device=like.device, dtype=like.dtype).train(owner.training))
    attentions = architecture.self_attentions(base)
    for attention, (kind, positions) in zip(attentions, snapshot.attentions, strict=True):
        here = next(attention.parameters())
        _set_positions(attention, kind, positions and positions.to(device=here.device, dtype=here.dtype))
    architecture.resize(base, snapshot.max_positions)
    set_config(model, snapshot.config, snapshot.base_config)
    base.__class__ = snapshot.base_class
    model.__class__ = snapshot.model_class
    if snapshot.scheme is None:
        vars(base).pop("position_scheme", None)
    else:
        base.position_scheme = snapshot.scheme
    if snapshot.attention_weights is not None:
        write_attention_weights(attentions, snapshot.attention_weights)
    for attention, values in zip(attentions, snapshot.query_keys or (), strict=snapshot.query_keys is not None):
        for target, value in zip(architecture.query_key(attention).tensors(), values, strict=True):
            target.copy_(value)


def copy_attention_weights(attentions: list[nn.Module], *, positions: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return copies of each layer's own weights by name; those of the scheme's module only with `positions`."""
    return [{name: p.detach().clone() for name, p in _own(attention, positions).items()} for attention in attentions]


@torch.no_grad()
def write_attention_weights(attentions: list[nn.Module], weights: list[dict[str, torch.Tensor]]) -> None:
    """Put copies back where they came from, also when adapters have been wrapped around since."""
    for attention, values in zip(attentions, weights, strict=True):
        parameters = _own(attention, positions=True)
        for name, value in values.items():
            parameters[name].copy_(value)


def can_write_attention_weights(attentions: list[nn.Module], weights: list[dict[str, torch.Tensor]] | None) -> bool:
    """Whether there is a parameter of the same shape for each of these copies."""
    for attention, values in zip(attentions, weights or (), strict=weights is not None):
        parameters = _own(attention, positions=True)
        if any(name not in parameters or parameters[name].shape != value.shape for name, value in values.items()):
            return False
    return True


def _own(attention: nn.Module, positions: bool) -> dict[str, nn.Parameter]:
    named = {name.replace("base_layer.", ""): p for name, p in attention.named_parameters()}  # PEFT's name for what it wraps
    return {name: p for name, p in named.items() if positions or not name.startswith("positions.")}


def install(model: PreTrainedModel, architecture: Architecture, scheme: Scheme, geometry: Geometry) -> nn.Module:
    """Put the scheme's modules in the places of the old ones; return the embedding-side module, not yet warmed up."""
    base = model.base_model
    owner, name = architecture.table_owner(base)
    like = base.get_input_embeddings().weight
    embedding = scheme.embedding_module(geometry).to(device=like.device, dtype=like.dtype)
    setattr(owner, name, embedding.train(owner.training))
    for attention in architecture.self_attentions(base):
        positions = scheme.attention_module(geometry)
        if positions is None:
            _set_positions(attention, architecture.attention_class, None)
        else:
            like = next(attention.parameters())  # layers of one model may live on several devices
            positions = positions.to(device=like.device, dtype=like.dtype).train(model.training)
            _set_positions(attention, POSITIONED_CLASSES[architecture.model_type], positions)
    architecture.resize(base, geometry.max_positions)
    base.position_scheme = scheme
    return embedding


def set_config(model: PreTrainedModel, config: PreTrainedConfig, base_config: PreTrainedConfig) -> None:
    """Give every module that holds the model's config, or that of the headless model in it, another; other models keep theirs.

    The two are one object as a rule, but a composite model or a user may have given the head its own copy.
    """
    old = model.config, model.base_model.config
    inside = set(model.base_model.modules())
    for module in model.modules():
        if any(getattr(module, "config", None) is one for one in old):
            module.config = base_config if module in inside else config


def _set_positions(attention: nn.Module, kind: type, positions: nn.Module | None) -> None:
    attention.__class__ = kind
    if positions is not None:
        attention.positions = positions
    elif hasattr(attention, "positions"):
        del attention.positions
