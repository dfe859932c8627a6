"""Rotary positions with a temperature: scores grow with the logarithm of how much a query sees.

    s_ij = (1 + slope * ln(max(1, (i + 1) / known))) * scale * q_i . k_j,      i the query's position

More keys make a softmax flatter, and this sharpens it again ("log-n" scaling; Chiang and Cholak 2022, section 5.3,
https://arxiv.org/abs/2202.12172). It wins less than `self-extend`, so it is no scheme of the package. Measured with

    python recipes/read_on.py --schemes-from recipes/results/read_on/far/tempered.py --scheme tempered ...
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch.nn import functional

import hf_posswap as posswap
from hf_posswap.schemes.rotary import RotaryPositions


class Shared(NamedTuple):
    angles: tuple
    factor: torch.Tensor  # (B or 1, 1, Q, 1)


class TemperedPositions(RotaryPositions):
    """For whole texts in a causal model: no cache, no padding."""

    def prepare(self, position_ids, slots, length, key_positions, attention_mask=None):
        seen = (position_ids + 1) / (self.scheme.known or self.geometry.trained_positions)
        factor = 1 + self.scheme.slope * seen.clamp(min=1).log()[:, None, :, None]
        return Shared(super().prepare(position_ids, slots, length, key_positions), factor)

    def rotate(self, states, shared):
        return super().rotate(states, shared.angles)

    @property
    def attend(self):
        """None in training and in a fit, as for `self-extend`."""
        return None if self.training else self._attend

    def _attend(self, query, key, value, mask, shared, *, scaling, dropout, causal, return_probabilities):
        query, options = query * shared.factor, {"attn_mask": mask, "is_causal": mask is None, "scale": scaling}
        return functional.scaled_dot_product_attention(query, key, value, **options), None


@posswap.register_scheme
@dataclass(frozen=True, kw_only=True)
class Tempered(posswap.Rotary):
    """Rotary; `known` is how many tokens a query sees without a temperature, by default the trained length."""

    slope: float = 0.2
    known: int | None = None

    name: ClassVar[str] = "tempered"
    summary: ClassVar[str] = "RoPE, with a temperature in the log of the length"
    implementations: ClassVar[tuple[str, ...] | None] = ("sdpa",)

    def attention_module(self, geometry):
        return TemperedPositions(self, geometry)
