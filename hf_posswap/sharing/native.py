"""What native exports share: names of configs, heads in pairs, and what a swap has put where the table was."""

from collections.abc import Sequence

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, RoFormerPreTrainedModel

from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.schemes.rotary import RotaryPositions

# What configs call by the same name.
COMMON = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "use_cache", "id2label", "label2id", "problem_type",
)  # fmt: skip


def common(config: PreTrainedConfig) -> dict:
    """Return those that this config has."""
    return {name: getattr(config, name) for name in COMMON if hasattr(config, name)}


Converted = tuple[PreTrainedModel, tuple[str, ...], tuple[str, ...]]  # with a certificate's `left_out` and `holds_for`


def pairs_of_heads(family: str, native: str, heads: Sequence[str]) -> dict[type, type]:
    """Return a family's classes with the native ones of these heads."""
    return {getattr(transformers, f"{family}{head}"): getattr(transformers, f"{native}{head}") for head in heads}


def build(kind: type, config: PreTrainedConfig, weights: dict[str, torch.Tensor], model: SwappedModel) -> PreTrainedModel:
    """Return a native model of this class with these weights, in the swapped model's dtype."""
    # RoFormer has attention of its own; the others attend as the swapped model does, which makes them equal to the last bit.
    attention = {} if issubclass(kind, RoFormerPreTrainedModel) else {"attn_implementation": model.config._attn_implementation}
    exported = kind._from_config(config, dtype=model.dtype, **attention)
    exported.load_state_dict(weights)  # strict: nothing is missing, and nothing is left over
    return exported


def with_table(model: SwappedModel, stock: type, _) -> Converted:
    """The family itself, with what the scheme adds at each position as its learned table."""
    owner, name = model.architecture.table_owner(model.base_model)
    embedding = getattr(owner, name)
    own = ("position_scheme", "architectures", "auto_map")
    fields = {key: value for key, value in model.config.to_dict().items() if key not in own}
    config = model.architecture.config_class(**{**fields, "model_type": model.architecture.model_type})
    weights, prefix = without(model, embedding)
    family, longest = model.architecture, model.architecture.longest_input(config)
    positions = torch.arange(-family.first_row(config), longest, device=model.device).clamp(min=0)  # rows of padding: any
    weights[f"{prefix}.weight"] = embedding(positions[None] + family.first_id(config))[0]
    return build(stock, config, weights, model), (), ()


def without(model: SwappedModel, embedding: nn.Module) -> tuple[dict[str, torch.Tensor], str]:
    """Return the weights without those of the embedding-side module, and that module's name."""
    prefix = next(name for name, module in model.named_modules() if module is embedding)
    return {name: value for name, value in model.state_dict().items() if not name.startswith(f"{prefix}.")}, prefix


def constant(model: SwappedModel) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return (mean, first minus mean), float64, and whether the latter is something."""
    owner, name = model.architecture.table_owner(model.base_model)
    constant = getattr(owner, name)
    mean = constant.mean.double()
    difference = torch.zeros_like(mean) if constant.first is None else constant.first.double() - mean
    return mean, difference, bool(difference.any())


def pairs_first(positions: RotaryPositions) -> torch.Tensor:
    """Order a head's dimensions as (x, y) pairs, fastest first, then those that do not turn; (D,) int64."""
    still = torch.arange(positions.rotary_dim, positions.geometry.head_dim)
    return torch.cat([positions.planes().flatten(), still])


NO_PLACE = (
    "the first token has a vector of its own, and {} has no place for it, where any token may come first: swap with "
    "posswap.Rotary(mark_first=False), fit, and export that"
)


CLS = "inputs that begin with [CLS] and have it nowhere else: it carries what marked the first token"


def mark_cls(model: SwappedModel, name: str, weights: dict[str, torch.Tensor], tokenizer, native: str) -> tuple[str, ...]:
    """Move what marks the first token of an encoder into [CLS] among its words, by name; return what that holds for."""
    _, difference, marked = constant(model)
    if not marked:
        return ()
    cls = getattr(tokenizer, "cls_token_id", None)
    if model.config.is_decoder:
        raise UnsupportedModelError(NO_PLACE.format(f"{native} as a decoder"))
    if cls is None:
        raise UnsupportedModelError(
            f"the first token has a vector of its own, which belongs to [CLS] in {native}: pass the tokenizer (which must have "
            "a cls_token), or swap with posswap.Rotary(mark_first=False)"
        )
    weights[name] = weights[name].clone()  # the head's own are another tensor now, and stay as they were
    weights[name][cls] = (weights[name][cls].double() + difference).to(model.dtype)
    return (CLS,)


def halves_first(positions: RotaryPositions) -> torch.Tensor:
    """Order a head's dimensions for a class that turns (m, m + R/2): all x, all y, then those that do not turn; (D,)."""
    turning, still = pairs_first(positions).split([positions.rotary_dim, positions.geometry.head_dim - positions.rotary_dim])
    return torch.cat([turning[0::2], turning[1::2], still])


def in_order(weight: torch.Tensor, order: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of a query or key projection, weight or bias, with each head's dimensions in this order."""
    return weight.unflatten(0, (heads, -1))[:, order.to(weight.device)].flatten(0, 1)


def rope_parameters(positions: RotaryPositions) -> tuple[dict, int]:
    """Return `rope_parameters` of transformers for these positions, and what its config must call the maximum."""
    scheme, geometry = positions.scheme, positions.geometry
    # int() of the share must be R again.
    share = positions.rotary_dim / geometry.head_dim
    if int(geometry.head_dim * share) != positions.rotary_dim:
        share = (positions.rotary_dim + 0.5) / geometry.head_dim
    scaling = dict(scheme.scaling or {"rope_type": "default"})
    dynamic = scaling["rope_type"] == "dynamic"
    if scaling["rope_type"] not in ("default", "linear", "dynamic"):
        scaling.setdefault("original_max_position_embeddings", geometry.trained_positions)
    # Where `dynamic` begins to grow is what these classes call their maximum.
    longest = geometry.trained_positions if dynamic else geometry.max_positions
    return {**scaling, "rope_theta": float(scheme.theta), "partial_rotary_factor": share}, longest
