"""What native exports share: config fields, pairs of head classes, the order of rotary dimensions, and `Constant`'s vectors."""

from collections.abc import Sequence

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, RoFormerPreTrainedModel

from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.functional.closed_form import wide
from hf_posswap.schemes.rotary import RotaryPositions

# Fields with the same name in all configs.
COMMON = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "use_cache", "id2label", "label2id", "problem_type",
)  # fmt: skip

NO_PLACE = (
    "the first token has a vector of its own, for which {} has no place, since any token may come first: swap with "
    "posswap.Rotary(mark_first=False), fit, and export that"
)
COUNTED = "padding before or after a text, not inside it, since {} gives it positions, too"
CLS = "inputs that begin with [CLS] and have it nowhere else: it carries what marked the first token"
DYNAMIC = "texts in order of length: with dynamic scaling {} keeps the angles of the longest text that it has read"

Converted = tuple[PreTrainedModel, tuple[str, ...], tuple[str, ...]]  # the model, and `left_out` and `holds_for` of Certificate


def common(config: PreTrainedConfig, *more: str) -> dict:
    """Return the `COMMON` fields, and more, that this config has."""
    return {name: getattr(config, name) for name in (*COMMON, *more) if hasattr(config, name)}


def family_config(model: SwappedModel, **changes) -> PreTrainedConfig:
    """Return the config of the unswapped family with the model's fields, some of them changed."""
    ours = ("position_scheme", "architectures", "auto_map", "model_type")
    fields = {key: value for key, value in model.config.to_dict().items() if key not in ours}
    return model.architecture.config_class(**fields | changes)


def pairs_of_heads(families: Sequence[str], native: str, heads: Sequence[str]) -> dict[type, type]:
    """Return {a family's class: the native class} for these families and heads."""
    names = [(f"{family}{head}", f"{native}{head}") for family in families for head in heads]
    return {getattr(transformers, ours): getattr(transformers, theirs) for ours, theirs in names}


def build(kind: type, config: PreTrainedConfig, weights: dict[str, torch.Tensor], model: SwappedModel) -> PreTrainedModel:
    """Return a native model of this class with these weights, in the swapped model's dtype."""
    # RoFormer has only eager attention; with the others, the same implementation as before makes outputs equal bit for bit.
    options = {} if issubclass(kind, RoFormerPreTrainedModel) else {"attn_implementation": model.config._attn_implementation}
    if options and getattr(model, "pooler", True) is None:  # as it was made; RoFormer never has one
        options["add_pooling_layer"] = False
    with torch.random.fork_rng(devices=[]):  # first weights are random, and replaced
        exported = kind._from_config(config, dtype=model.dtype, **options)
    # A bias or a norm's weight that the swapped model lacks is 0 or 1, as the class begins. Other names must fit: it is strict.
    simple = {name: value for name, value in exported.state_dict().items() if value.dim() == 1}
    exported.load_state_dict(simple | weights)
    return exported


def with_table(model: SwappedModel, stock: type, _) -> Converted:
    """Export to the family itself: the vectors that the scheme adds at each position become its learned table."""
    embedding, config = model.architecture.table(model.base_model), family_config(model)
    weights, prefix = without(model, embedding)
    family, longest = model.architecture, model.architecture.longest_input(config)
    positions = torch.arange(-family.first_row(config), longest, device=model.device).clamp(min=0)  # unused rows: as at 0
    weights[f"{prefix}.weight"] = embedding(positions[None] + family.first_id(config))[0]
    return build(stock, config, weights, model), (), ()


def without(model: SwappedModel, embedding: nn.Module) -> tuple[dict[str, torch.Tensor], str]:
    """Return the model's weights without those of this module, and the module's name."""
    prefix = next(name for name, module in model.named_modules() if module is embedding)
    return {name: value for name, value in model.state_dict().items() if not name.startswith(f"{prefix}.")}, prefix


def constant(model: SwappedModel) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return the vectors mean and (first - mean), (E,) float64, and whether the latter is nonzero."""
    constant = model.architecture.table(model.base_model)
    mean = wide(constant.mean)
    difference = torch.zeros_like(mean) if constant.first is None else wide(constant.first) - mean
    return mean, difference, bool(difference.any())


def pairs_first(positions: RotaryPositions) -> torch.Tensor:
    """Order a head's dimensions as (x, y) pairs, fastest first, then the unrotated ones; (D,) int64."""
    still = torch.arange(positions.rotary_dim, positions.geometry.head_dim)
    return torch.cat([positions.planes().flatten(), still])


def without_constant(
    model: SwappedModel, tokenizer, native: str, *, onto: str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...], bool]:
    """Return an encoder's weights without position embeddings, for which inputs they hold, and whether the words stay tied.

    What `Constant` added is in embeddings: the mean in `onto`, token types or words, which every token has; the first token's
    vector in [CLS].
    """
    weights, prefix = without(model, model.base_model.embeddings.position_embeddings)
    mean, difference, marked = constant(model)
    added, words = (prefix.replace("position_embeddings", f"{name}_embeddings.weight") for name in (onto, "word"))
    # DistilBERT has no types of tokens: both are the same here.
    weights[added] = (wide(weights.get(added, mean.new_zeros(2, len(mean)))) + mean).to(model.device, model.dtype)
    if marked:
        cls = getattr(tokenizer, "cls_token_id", None)
        if model.architecture.is_causal(model.config):
            raise UnsupportedModelError(NO_PLACE.format(f"{native} as a decoder"))
        if cls is None:
            raise UnsupportedModelError(f"{native} has the first token's vector in [CLS]: pass the tokenizer, which knows it")
        weights[words] = weights[words].clone()
        weights[words][cls] = (wide(weights[words][cls]) + difference).to(model.dtype)
    tied = model.config.tie_word_embeddings and model.get_output_embeddings() is not None
    # A tied head keeps the old words.
    return weights, (CLS,) * marked, tied and torch.equal(weights[words], model.get_input_embeddings().weight)


def halves_first(positions: RotaryPositions) -> torch.Tensor:
    """Order a head's dimensions for a class that rotates pairs (m, m + R/2): all x, all y, then the unrotated ones; (D,)."""
    turning, still = pairs_first(positions).split([positions.rotary_dim, positions.geometry.head_dim - positions.rotary_dim])
    return torch.cat([turning[0::2], turning[1::2], still])


def reorder(weights: dict[str, torch.Tensor], order: torch.Tensor, heads: int) -> None:
    """Put each head's dimensions in this order, in an encoder's query and key projections."""
    for name, value in weights.items():
        if ".attention.self.query." in name or ".attention.self.key." in name:
            weights[name] = value.unflatten(0, (heads, -1))[:, order.to(value.device)].flatten(0, 1)


def rope_fields(positions: RotaryPositions) -> dict:
    """Return transformers' `rope_parameters` for these positions, and the `max_position_embeddings` that go with them."""
    scheme, geometry = positions.scheme, positions.geometry
    # int(D * share) must give R.
    share = positions.rotary_dim / geometry.head_dim
    if int(geometry.head_dim * share) != positions.rotary_dim:
        share = (positions.rotary_dim + 0.5) / geometry.head_dim
    scaling = dict(scheme.scaling or {"rope_type": "default"})
    dynamic = scaling["rope_type"] == "dynamic"
    if scaling["rope_type"] not in ("default", "linear", "dynamic"):
        scaling.setdefault("original_max_position_embeddings", geometry.trained_positions)
    # With `dynamic`, frequencies change beyond max_position_embeddings.
    longest = geometry.trained_positions if dynamic else geometry.max_positions
    parameters = {**scaling, "rope_theta": float(scheme.theta), "partial_rotary_factor": share}
    return {"rope_parameters": parameters, "max_position_embeddings": longest}
