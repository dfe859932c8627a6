"""The one place where families and schemes meet: self-attention with positions.

The family's attention class is subclassed, and `__class__` of the existing module is set to the subclass: weights, hooks and
adapters stay where they are, and what LoRA adds to a projection is rotated with it. Keys are rotated before they enter the
cache. A function registered with transformers' AttentionInterface would not do: it is switched off by
`set_attn_implementation`, leaves padding unmasked under a new name, and sees cached keys without their positions.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.masking_utils import create_causal_mask

from hf_posswap.architectures import Architecture
from hf_posswap.errors import PosswapError
from hf_posswap.functional.banded import Span, banded_attention
from hf_posswap.functional.closed_form import Evidence
from hf_posswap.functional.distance_attention import attend_by_distance
from hf_posswap.schemes import AttentionPositions, Scheme
from hf_posswap.schemes.base import transforms, weigh


class Shared(NamedTuple):
    """What all layers of one kind share in a forward. A tuple, so that accelerate moves its tensors to each layer's device."""

    scheme: Any  # what the scheme's `prepare` returned
    written: torch.Tensor | None = None  # positions that new keys take into the cache, as digits (B or 1, 1, Q, 8); None: none
    carrier: int | None = None  # the layer whose keys take them; None: all of this kind
    span: Span | None = None  # attend block by block within this span; None: as the mask says
    key_mask: torch.Tensor | None = None  # used with `span`, (B, K) bool, True = attend
    mask: torch.Tensor | None = None  # replaces the mask that the layers pass on


class Tokens(NamedTuple):
    """Where the new tokens of a forward stand, and how many are cached before them."""

    positions: torch.Tensor  # counted from 0, (B or 1, Q)
    slots: torch.Tensor  # places in the sequence or cache, (1, Q)
    past: int | torch.Tensor  # a static cache on a GPU counts in a tensor
    given: bool  # whether the caller gave positions, which may be those of several texts in a row

    @property
    def counted(self) -> bool:
        """Whether positions count on from the cache, since no others were given."""
        return self.positions is self.slots

    @property
    def as_counted(self) -> bool:
        """Whether positions are those that would be counted, also where they were given; looks at values."""
        return self.counted or bool((self.positions == self.slots).all())

    @property
    def fresh(self) -> bool:
        """Whether nothing is cached, as far as that is known without looking at values."""
        return isinstance(self.past, int) and self.past == 0

    @property
    def length(self) -> int | None:
        """The length of the sequence, where that is known without looking at values."""
        return self.past + self.slots.shape[-1] if self.counted and isinstance(self.past, int) else None


# What models and layers call their cache: transformers 5.24 has another name for it.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
# Attention implementations that can add a bias to scores.
BIAS_IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention")


class PositionedAttention(nn.Module):
    """Mixin in front of a family's self-attention; `positions` holds the scheme's module for this layer."""

    architecture: Architecture

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        shared_positions: tuple[Shared, ...] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do what the family's own forward does, with the scheme's hooks in it.

        transformers' models pass unknown keywords on to their attention layers: so `shared_positions` gets here from
        `forward.positioned_forward`, one `Shared` for each kind of layer.
        """
        if shared_positions is None:
            what = f"{type(self).__name__} was called without positions"
            raise PosswapError(f"{what}: the layers of its family must pass the keywords that they do not know on to attention")
        query, key, value = self.architecture.project(self, hidden_states)
        mine = shared_positions[self.positions.kind]
        query = self.positions("rotate", query, mine.scheme)  # one after the other: the second reuses the first's memory
        key = self.positions("rotate", key, mine.scheme)
        key, value = self._cached(key, value, mine, kwargs)
        causal = self.architecture.is_causal(self.config)
        if mine.span is None:
            mask = attention_mask if mine.mask is None else mine.mask
            output, probabilities = self._attend(query, key, value, mask, mine.scheme, causal, **kwargs)
        else:
            output, probabilities = self._banded(query, key, value, mine, causal), None
        return self.architecture.output(self, output.flatten(-2), hidden_states), probabilities

    def _cached(self, key, value, mine: Shared, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all tokens so far; the new ones go into the cache, if there is one."""
        cache = self_cache(kwargs.pop(CACHE, None))
        if cache is None:
            return key, value
        head_dim, carries = key.shape[-1], mine.written is not None and mine.carrier in (None, self.layer_idx)
        if carries:
            key = write_positions(key, mine.written)
        # A paged cache reads keywords and changes them. Before 5.24 it came under another name, and attention called it.
        more = {"kwargs": kwargs} if CACHE == "cache" else {}
        key, value = cache.update(key, value, self.layer_idx, **more)
        return key[..., :head_dim] if carries else key, value

    def _attend(self, query, key, value, mask, shared, causal: bool, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (B, Q, H, D), and the probabilities from what returns any, by the scheme or by the model's implementation."""
        scaling, implementation = self.architecture.scaling(self), self.config._attn_implementation
        dropout = self.architecture.dropout(self) if self.training else 0.0
        if self.positions.attend is not None:
            options = {"scaling": scaling, "dropout": dropout, "causal": causal}
            options["return_probabilities"] = implementation == "eager"  # as sdpa: only eager attention does
            output, probabilities = self.positions("attend", query, key, value, mask, shared, **options)
            return output.transpose(1, 2), probabilities
        if self._all_by_distance(query, key, mask, dropout, shared):
            distances = torch.arange(key.shape[-2] - 1, -key.shape[-2], -1, device=key.device)
            bias = self.positions("by_distance", distances).to(query.dtype)
            return attend_by_distance(query, key, value, bias, scaling, causal).transpose(1, 2), None
        if self.positions.bias is not None:
            bias = self.positions("bias", shared, key.shape[-2]).to(query.dtype)
            after = causal and query.shape[-2] > 1  # nothing stands after a single query, the last
            mask = add_bias(mask, bias, shared.causal(key.shape[-2]) if after else None, implementation)
            if implementation == "flex_attention":
                kwargs["position_bias"] = bias.expand(len(query), query.shape[1], *bias.shape[2:])
            if implementation == "sdpa" and transforms():  # where its kernels give no gradient of a mask
                probabilities = weigh(query @ key.mT * scaling, mask, dropout).to(value.dtype)
                return (probabilities @ value).transpose(1, 2), None
        return self.architecture.backend(self)(self, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)

    def _all_by_distance(self, query, key, mask, dropout: float, shared) -> bool:
        """Whether `attend_by_distance` serves: on CPUs in sdpa's place, with each token once and none masked."""
        plain = mask is None and query.shape[-2] == key.shape[-2] and dropout == 0
        sdpa = self.config._attn_implementation == "sdpa" and query.device.type == "cpu"
        return plain and sdpa and self.positions.by_distance is not None and shared.in_order and not transforms()

    def _banded(self, query, key, value, mine: Shared, causal: bool) -> torch.Tensor:
        """Return (B, Q, H, D), a block of queries after the other."""

        def attend(query, key, value, mask, queries, keys):
            shared = mine.scheme.block(queries, keys) if hasattr(mine.scheme, "block") else mine.scheme
            return self._attend(query, key, value, mask, shared, causal=False)[0]  # the mask is causal

        return banded_attention(attend, query, key, value, mine.span, mine.key_mask, causal=causal)


def self_cache(cache: Cache | None) -> Cache | None:
    """Return the cache of self-attention, which may be a part of one that cross-attention has, too."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def add_bias(mask, bias: torch.Tensor, seen: torch.Tensor | None, implementation: str):
    """Return the mask with a bias (1 or B, H, Q, K) added; for flex attention, which adds the bias itself, without.

    `mask` is additive, boolean with True = attend, or None where only causality masks: then `seen` (Q, K) is used.
    """
    if implementation not in BIAS_IMPLEMENTATIONS:
        what = f"these positions are a bias on scores, which attention implementation {implementation!r} cannot add"
        others = ", ".join(map(repr, BIAS_IMPLEMENTATIONS))
        raise PosswapError(f"{what}: call model.set_attn_implementation('sdpa') (or {others})")
    if implementation == "flex_attention":
        return mask
    if mask is None:
        mask = seen
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


# A cache does not store the positions of its keys, but schemes by distance need them. So keys of a kind's first layer carry
# theirs as three base-256 digits behind the head's own dimensions (exact in half precision). Whatever reorders, selects,
# crops, copies, offloads or rebuilds a cache then moves the positions with the keys. Zeros follow: CUDA's attention kernels ask
# for rows of keys that begin at multiples of 16 bytes.
DIGITS, CARRIED = 3, 8
MOST_POSITIONS = 256**DIGITS


def to_digits(positions: torch.Tensor) -> torch.Tensor:
    """Return the digits of positions (B or 1, Q), the lowest first, and zeros, (B or 1, 1, Q, 8) int64."""
    return nn.functional.pad(positions[..., None] >> _shifts(positions) & 255, (0, CARRIED - DIGITS))[:, None]


def write_positions(keys: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    """Return (B, H, Q, D + 8) keys that carry their positions, given as digits."""
    return torch.cat([keys, digits.to(keys.dtype).expand(*keys.shape[:-1], CARRIED)], dim=-1)


def read_positions(keys: torch.Tensor) -> torch.Tensor:
    """Return the positions (B, K) that such keys carry."""
    return (keys[:, 0, :, -CARRIED : DIGITS - CARRIED].long() << _shifts(keys)).sum(-1)


def _shifts(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 8 * DIGITS, 8, device=like.device)


def let_carry(cache: Cache | None, layers: list[int], head_dim: int) -> None:
    """Let keys of these layers carry 0, 1, 2, ... where something else made them: a learned prefix, or room for later ones."""
    cache = self_cache(cache)
    for layer in () if cache is None else (cache.layers[index] for index in layers if index < len(cache.layers)):
        if layer.is_initialized and layer.keys.shape[-1] == head_dim:
            counted = torch.arange(layer.keys.shape[-2], device=layer.keys.device)[None]
            layer.keys = write_positions(layer.keys, to_digits(counted))


def await_offloaded(cache: Cache) -> None:
    """Wait for layers of an offloaded cache: they travel on a stream of their own, which only its next update waits for."""
    if getattr(cache, "offloading", False) and torch.cuda.is_available():
        torch.cuda.synchronize()


def key_positions(
    cache: Cache | None, positions: torch.Tensor, slots: torch.Tensor, past, head_dim: int, carrier: int
) -> torch.Tensor:
    """Return the positions of all keys that queries at `positions` (B or 1, Q) will see, those in the cache first.

    The cache holds them in the layer `carrier`.
    """
    cache = self_cache(cache)
    layer = cache.layers[carrier] if cache is not None and len(cache.layers) > carrier else None
    if layer is None or not layer.is_initialized or (isinstance(past, int) and past == 0):
        return positions
    if layer.keys.shape[-1] != head_dim + CARRIED:
        what = f"this {type(cache).__name__} holds keys of size {layer.keys.shape[-1]}, this model makes {head_dim}"
        raise PosswapError(f"{what} (and their positions): start with a new cache, and not with a quantized one")
    await_offloaded(cache)
    stored = read_positions(layer.keys).to(positions.device)
    positions = positions.expand(stored.shape[0], -1)
    if isinstance(past, int):
        return torch.cat([stored[:, :past], positions], dim=-1)  # a static cache is longer than what it holds
    return stored.scatter(1, slots.expand(stored.shape[0], -1), positions.to(stored.dtype))  # a tensor counts


def visible(attention_mask: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Return which keys a query may see, (B, 1, L, L) bool, from a (B, L) bool mask; padding sees nothing and is not seen."""
    allowed = attention_mask[:, None, None, :] & attention_mask[:, None, :, None]
    return allowed & torch.ones_like(allowed[0, 0]).tril() if causal else allowed


def observe(
    attention: nn.Module,
    architecture: Architecture,
    hidden_states: torch.Tensor,
    allowed: torch.Tensor,
    shared_positions: tuple[Shared, ...] | None,
) -> Evidence:
    """Return all that a self-attention module computes, swapped or not; `allowed` is (B, 1, L, L) bool, before any span.

    It ignores the model's attention implementation: it is for inspection, not for speed.
    """
    query, key, value = architecture.project(attention, hidden_states)
    positions = getattr(attention, "positions", AttentionPositions())  # of the original, hooks that do nothing
    mine = Shared(None) if shared_positions is None else shared_positions[positions.kind]
    shared, scaling, causal = mine.scheme, architecture.scaling(attention), architecture.is_causal(attention.config)
    if mine.span is not None:  # all of it as one block, so that the scheme reads the mask
        places = torch.arange(key.shape[-2], device=key.device)
        allowed = allowed & mine.span.allowed(places[None], places[None], causal=causal)[:, None]
        shared = shared.block(slice(None), places) if hasattr(shared, "block") else shared
    elif mine.mask is not None:
        allowed = allowed & (mine.mask if mine.mask.dtype == torch.bool else mine.mask > torch.finfo(mine.mask.dtype).min / 2)
    turned = [positions("rotate", states, mine.scheme) for states in (query, key)]
    if positions.attend is not None:
        options = {"scaling": scaling, "dropout": 0.0, "causal": causal, "return_probabilities": True}
        output, probabilities = positions("attend", *turned, value, allowed, shared, **options)
        return Evidence(query, key, value, probabilities, output, allowed)
    scores = turned[0] @ turned[1].transpose(-1, -2) * scaling
    if positions.bias is not None:
        scores = scores + positions("bias", shared, key.shape[-2])
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num()  # padding sees nothing: zeros
    return Evidence(query, key, value, probabilities, probabilities @ value, allowed)


POSITIONED_CLASSES: dict[str, type[nn.Module]] = {}  # by model_type; filled when a family is registered


def add_positioned_class(architecture: Architecture) -> None:
    """Make the family's self-attention class with positions, importable from here so that it can be pickled."""
    base = architecture.attention_class
    name = f"Positioned{base.__name__}"
    namespace = {"__module__": __name__, "__doc__": base.__doc__, "architecture": architecture}
    globals()[name] = POSITIONED_CLASSES[architecture.model_type] = type(name, (PositionedAttention, base), namespace)


def check_implementation(scheme: Scheme, span, current: str) -> None:
    """Raise PosswapError when the scheme, or a span (None: there is none), does not support the attention implementation."""
    implementations = scheme.implementations if span is None else ("eager", "sdpa")  # the two that read a mask as a tensor
    if implementations is not None and current not in implementations:
        raise PosswapError(
            f"{scheme.name} positions{'' if span is None else ' with a span'} run with attention implementation "
            f"{' or '.join(map(repr, implementations))}, the model is set to {current!r}: call "
            f"model.set_attn_implementation({implementations[-1]!r})"
        )
