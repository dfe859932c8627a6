"""A cache for attention with a span: it keeps the first and the last keys, in constant memory.

Each layer's keys carry their positions (`attention.write_positions`), and padding carries `PADDING`. So every layer knows which
keys to keep, rows may be padded on the left, and reordering or copying keys moves their positions, too.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from hf_posswap.attention import MOST_POSITIONS, await_offloaded, read_positions, self_cache
from hf_posswap.errors import PosswapError
from hf_posswap.functional.banded import Span

PADDING = MOST_POSITIONS - 1  # the position that marks a key as padding, which no query sees
CHANGED_MASK = (
    "attention_mask hides or shows other tokens than when they were read into this cache, which with a span is too late: give "
    "it from the first call on, or start with a new cache"
)


class SpanLayer(DynamicLayer):
    """One layer: keys of the `first` tokens and of the last `span` - 1, (B, H, first + span - 1, D) once it is full."""

    is_croppable = False

    def __init__(self, span: Span):
        super().__init__()
        self.span, self.seen = span, 0
        self.in_order = True  # whether no row has padding, and each token stands behind those before it

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Return all keys and values that the new queries may see; keep what later ones may see."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.seen += key_states.shape[-2]
        first, near = self.span.first, self.span.span - 1
        if keys.shape[-2] > first + near:
            if self.in_order:
                last = keys.shape[-2] - near
                self.keys, self.values = (
                    torch.cat([states[..., :first, :], states[..., last:, :]], dim=-2) for states in (keys, values)
                )
                return keys, values
            positions = read_positions(keys)
            # Keep the first and the last tokens of each row's text, which may have padding around and inside it; padding, too,
            # where the row has fewer tokens.
            rank = positions.argsort(dim=-1, stable=True).argsort(dim=-1)  # in the text; padding has the largest number
            count = (positions != PADDING).sum(-1, keepdim=True)
            wanted = (rank < first) | ((rank >= count - near) & (rank < count))
            index = wanted.int().argsort(dim=-1, descending=True, stable=True)[:, None, : first + near, None]
            self.keys = keys.gather(2, index.expand(-1, keys.shape[1], -1, keys.shape[-1]))
            self.values = values.gather(2, index.expand(-1, keys.shape[1], -1, values.shape[-1]))
        return keys, values

    def get_seq_length(self) -> int:
        """Return how many tokens were read, not how many are kept: new ones count on from there."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys there were, and their offset, 0: for the mask of layers that forget none."""
        return self.seen + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from the end; PosswapError if keys have been forgotten."""
        if self.is_initialized and self.keys.shape[-2] != self.seen:
            what = "this cache has forgotten keys beyond the span and cannot go back"
            raise PosswapError(f"{what}: generate without an assistant, or swap without span=")
        super().crop(tokens_to_remove)
        self.seen = self.keys.shape[-2] if self.is_initialized else 0

    def reset(self) -> None:
        self.__init__(self.span)  # transformers 5.17 keeps the keys, as zeros


def keep_span(cache: Cache | None, spans: list[Span | None], *, counted: bool, in_order: bool, hidden: bool) -> Cache | None:
    """Return the cache for a model with each layer's span or None: an empty dynamic one is given such layers, in place.

    `counted`: positions count on from the cache's length; `in_order`: and no row is padded, as far as that is known;
    `hidden`: a mask hides tokens that are cached. Static caches stay as they are. PosswapError: it was made for other spans, or
    those tokens were not hidden before.
    """
    own = self_cache(cache)
    if not isinstance(own, Cache):  # none, or that of generate_batch, which takes no spans
        return cache
    made = [layer.span if isinstance(layer, SpanLayer) else None for layer in own.layers]
    if any(made) and made != spans:
        raise PosswapError(f"this cache was made for {_told(made)}, the model has {_told(spans)}: start with a new cache")
    if not any(spans):
        return cache
    plain = isinstance(own, DynamicCache) and all(type(layer) is DynamicLayer for layer in own.layers)
    if plain and own.get_seq_length() == 0:
        own.layers = [DynamicLayer() if span is None else SpanLayer(span) for span in spans]
    elif plain and counted:  # built from tensors: its length leaves out forgotten keys
        await_offloaded(own)
        positions = read_positions(own.layers[next(layer for layer, span in enumerate(spans) if span)].keys)
        if positions.masked_fill(positions == PADDING, 0).max() >= own.get_seq_length():
            what = "this cache was built from one that had forgotten keys, and does not know how many tokens were read"
            raise PosswapError(f"{what}: pass position_ids, or use the cache that the model returned")
    for layer in own.layers:
        if isinstance(layer, SpanLayer):
            if layer.in_order and hidden:
                raise PosswapError(CHANGED_MASK)
            layer.in_order &= in_order
    return cache


def _told(spans: list[Span | None]) -> str:
    return " and ".join("no span" if span is None else str(span) for span in dict.fromkeys(spans))
