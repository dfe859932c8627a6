"""Relative positions: Shaw, Uszkoreit, Vaswani 2018, "Self-Attention with Relative Position Representations", section 3.2
(https://arxiv.org/abs/1803.02155).

    s_ij = scale * q_i . (k_j + a^K_r),   z_i = sum_j softmax(s_i)_j (v_j + a^V_r),   r = clip(j - i, -clip, clip) + clip

j is the key's position, i the query's: r < clip looks to the left. Tables are (H, R, D), or (R, D) when all heads share
them as in the paper. With zero tables this is plain attention without positions.

q_i . a^K_r is one (Q, R) product for each head that is then spread over the keys, and the value term collects the
probabilities by distance before one product with a^V: no (Q, K, D) tensor ever exists.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.schemes.base import AttentionPositions, Geometry, Scheme, check_choice, check_number


class RelativePositions(AttentionPositions):
    """One layer's tables, and the attention that uses them."""

    def __init__(self, scheme: "Relative", geometry: Geometry):
        super().__init__()
        self.clip = scheme.clip
        rows = 2 * scheme.clip + 1
        shape = (rows, geometry.head_dim) if scheme.share_heads else (geometry.num_heads, rows, geometry.head_dim)
        # Zero tables: the start that changes nothing but the missing table, and every entry gets a gradient.
        self.key_table = nn.Parameter(torch.zeros(shape))
        self.value_table = nn.Parameter(torch.zeros(shape)) if scheme.values else None

    needs_key_positions = True

    def prepare(self, position_ids, slots, length, key_positions) -> Any:
        return position_ids, slots, key_positions

    def distances(self, shared: Any, key_length: int) -> torch.Tensor:
        """Return r for each query and key, (B or 1, Q, K).

        Positions are compared, those of cached keys too. While compiling, cached keys have none: places in the cache are
        compared then, the same thing as long as positions run without gaps.
        """
        query_positions, slots, key_positions = shared
        if key_positions is not None:
            # A static cache is longer than what it holds; the rest is masked.
            key_positions = nn.functional.pad(key_positions, (0, key_length - key_positions.shape[-1]))
        elif key_length == query_positions.shape[-1]:
            key_positions = query_positions
        else:
            query_positions, key_positions = slots, torch.arange(key_length, device=slots.device)[None]
        distance = key_positions[:, None, :] - query_positions[:, :, None]
        return distance.clamp(-self.clip, self.clip) + self.clip

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        shared: Any,
        *,
        scaling: float,
        dropout: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B, H, Q, D) and the probabilities (B, H, Q, K). `mask` is additive, or boolean with True = attend."""
        slots = shared[1]
        index = self.distances(shared, key.shape[-2])[:, None]  # (B or 1, 1, Q, K)
        index = index.expand(query.shape[0], query.shape[1], -1, -1)
        query = query * scaling
        by_distance = query @ self.key_table.transpose(-1, -2)  # (B, H, Q, R)
        scores = by_distance.gather(-1, index) + query @ key.transpose(-1, -2)  # (B, H, Q, K)
        if mask is None and causal:
            mask = (torch.arange(key.shape[-2], device=slots.device) <= slots[:, :, None])[:, None]
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        elif mask is not None and not mask.is_floating_point():
            raise PosswapError(f"a 4D attention mask must be boolean or floating point, this one is {mask.dtype}")
        elif mask is not None:
            scores = scores + mask
        probabilities = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        probabilities = nn.functional.dropout(probabilities, dropout)
        output = probabilities @ value
        if self.value_table is not None:
            mass = probabilities.new_zeros(by_distance.shape).scatter_add(-1, index, probabilities)  # (B, H, Q, R)
            output = output + mass @ self.value_table
        return output, probabilities


@dataclass(frozen=True, kw_only=True)
class Relative(Scheme):
    """Clipped relative positions in keys and values (Shaw et al. 2018), causal or bidirectional.

    Args:
        clip: Distances beyond it look alike; there are 2 * clip + 1 vectors a table.
        values: Also add a vector to the values; False is the key term alone.
        share_heads: One table for all heads of a layer, as in the paper.

    >>> Relative(clip=16, share_heads=True).to_dict()
    {'name': 'relative', 'clip': 16, 'values': True, 'share_heads': True}
    """

    clip: int = 64
    values: bool = True
    share_heads: bool = False

    name: ClassVar[str] = "relative"
    summary: ClassVar[str] = "Shaw's clipped relative vectors in keys and values"
    implementations: ClassVar[tuple[str, ...] | None] = ("eager", "sdpa")  # it reads the mask that these two get

    def __post_init__(self):
        check_number(self, "clip", int, 1)
        check_choice(self, "values", (True, False))
        check_choice(self, "share_heads", (True, False))

    def attention_module(self, geometry: Geometry) -> AttentionPositions:
        return RelativePositions(self, geometry)
