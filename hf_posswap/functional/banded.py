"""Attention to keys nearer than `span` and to the first tokens, in linear time and memory.

    query i sees key j   iff   |i - j| < span  or  j < first  (or i < first, in encoders: those tokens see everything)

and, in causal models, only if j <= i. First tokens that all attend to are the attention sinks of Xiao et al. 2023, "Efficient
Streaming Language Models with Attention Sinks", section 3 (https://arxiv.org/abs/2309.17453); in encoders, where they also
attend to all, the global tokens of Longformer (Beltagy et al. 2020, section 3.1: https://arxiv.org/abs/2004.05150).

Text is cut into pieces of `span` tokens; queries of one attend to keys of the two or three pieces that they may see, so no
tensor of size length x length is made. B batch, H heads, Q query length, K key length, D head_dim.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
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

    def bounds(self, length: int, *, causal: bool) -> list[int]:
        """Return where pieces of `span` tokens begin, and the last ends, 0 to `length`; global tokens are one of their own."""
        start = 0 if causal else min(self.first, length)
        return [*([0] if start else []), *range(start, length, self.span), length]

    def blocks(self, bounds: list[int], *, causal: bool) -> Iterator[tuple[int, slice]]:
        """Yield for each piece of queries how many first keys, and which pieces of near keys, any of them may see."""
        last = len(bounds) - 1
        for piece in range(last):
            low, high = max(piece - 1, 0), piece + 1 if causal else min(piece + 2, last)
            if piece == 0 and self.first and not causal:
                high = last
            yield min(self.first, bounds[low]), slice(low, high)


def banded_attention(
    attend: Callable[..., torch.Tensor], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, span: Span,
    key_mask: torch.Tensor | None, *, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """Return (B, Q, H, D): attention block by block, where Q = K, or K is longer, and positions are those in the sequence.

    `attend(query, key, value, mask, queries, keys)` computes one block: (B, q, H, D) from (B, H, q or k, D), a mask
    (B or 1, 1, q, k) bool with True = attend, the slice of queries and the index of keys (k,). `key_mask` is (B, K) bool.
    """
    length, outputs = query.shape[-2], []
    key, value = key[..., :length, :], value[..., :length, :]  # those of a static cache are longer
    everywhere, bounds = torch.arange(length, device=query.device), span.bounds(length, causal=causal)
    # Split once: the gradient of a slice is as long as the whole, and one for each block would take quadratic time.
    sizes = [end - start for start, end in pairwise(bounds)]
    places, queries, keys, values = (one.split(sizes, dim=-2) for one in (everywhere[:, None], query, key, value))
    heads = [states[..., : span.first, :] for states in (everywhere[:, None], key, value)]
    for piece, (first, near) in enumerate(span.blocks(bounds, causal=causal)):
        index, *seen = (
            torch.cat([*([head[..., :first, :]] if first else []), *parts[near]], dim=-2)
            for head, parts in zip(heads, (places, keys, values), strict=True)
        )
        index, here = index[:, 0], slice(bounds[piece], bounds[piece + 1])
        mask = span.allowed(everywhere[None, here], index[None], causal=causal)[:, None]
        if key_mask is not None:
            mask = mask & key_mask[:, None, None, index]
        outputs.append(attend(queries[piece], *seen, mask, here, index))
    return torch.cat(outputs, dim=1)
