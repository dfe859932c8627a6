"""Attention to keys nearer than `span` and to the first tokens, in linear time and memory.

    query i sees key j   iff   |i - j| < span  or  j < first  (or i < first, in encoders: those tokens see everything)

and, in causal models, only if j <= i. First tokens that all attend to are the attention sinks of Xiao et al. 2023, "Efficient
Streaming Language Models with Attention Sinks", section 3 (https://arxiv.org/abs/2309.17453); in encoders, where they also
attend to all, the global tokens of Longformer (Beltagy et al. 2020, section 3.1: https://arxiv.org/abs/2004.05150).

Queries come in blocks of `span`; each block attends to the two or three blocks of keys that any of its queries may see, so no
tensor of size length x length is made. B batch, H heads, Q query length, K key length, D head_dim.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch


class Span(NamedTuple):
    """How far attention looks, in tokens, and how many tokens at the beginning all others attend to."""

    span: int
    first: int

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Return which keys are seen, (B or 1, Q, K) bool, from positions of queries (B or 1, Q) and of keys (B or 1, K)."""
        queries, keys = queries[:, :, None], keys[:, None, :]
        seen = ((queries - keys).abs() < self.span) | (keys < self.first)
        return seen & (keys <= queries) if causal else seen | (queries < self.first)

    def blocks(self, length: int, *, causal: bool) -> Iterator[tuple[slice, int, slice]]:
        """Yield queries, how many first keys and which near keys any of them may see, block by block; K = Q = `length`."""
        start = 0
        if self.first and not causal:
            start = min(self.first, length)
            yield slice(0, start), 0, slice(0, length)
        while start < length:
            end = min(start + self.span, length)
            low = max(start - self.span + 1, 0)
            high = end if causal else min(end + self.span - 1, length)
            yield slice(start, end), min(self.first, low), slice(low, high)
            start = end


def banded_attention(
    attend: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span,
    key_mask: torch.Tensor | None, *, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """Return (B, H, Q, D): attention block by block, where Q = K and positions are those in the sequence.

    `attend(query, key, value, mask, queries, keys)` computes one block: (B, H, q, D) from (B, H, q or k, D), a mask
    (B or 1, 1, q, k) bool with True = attend, the slice of queries and the index of keys (k,). `key_mask` is (B, K) bool.
    """
    outputs = []
    everywhere = torch.arange(query.shape[-2], device=query.device)
    for queries, first, near in span.blocks(query.shape[-2], causal=causal):
        places, keys = everywhere[queries], torch.cat([everywhere[:first], everywhere[near]])
        mask = span.allowed(places[None], keys[None], causal=causal)[:, None]
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, keys]
        # Slices and copies of them: indexing by `keys` would be slow, and its gradient very slow.
        seen = [
            torch.cat([states[..., :first, :], states[..., near, :]], dim=-2) if first else states[..., near, :]
            for states in (key, value)
        ]
        outputs.append(attend(query[..., queries, :], *seen, mask, queries, keys))
    return torch.cat(outputs, dim=-2)
