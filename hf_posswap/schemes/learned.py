"""The checkpoint's own learned table, as it is or made longer.

`tile` repeats the rows, p -> table[p mod P] (Beltagy et al. 2020, Longformer, section 5: https://arxiv.org/abs/2004.05150);
`interpolate` stretches them, p -> table[p (P - 1) / (N - 1)], linear between rows (as for vision transformers,
Dosovitskiy et al. 2021, section 3.2: https://arxiv.org/abs/2010.11929). P is the trained length, N the new one.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.schemes.base import Geometry, PositionEmbedding, Scheme


class Table(nn.Embedding):
    """A learned table with the stock name `weight` and shape: plain classes may load it, and compute the same.

    With a span they would not, so the table then has one row more, which is no position, and they refuse it.
    """

    keeps_table: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, extend: str | None):
        # Given weights, nn.Embedding draws no random ones: a swap leaves the global random state alone.
        weight = torch.empty(geometry.max_positions, geometry.hidden_size)
        super().__init__(geometry.max_positions, geometry.hidden_size, _weight=weight)
        self.extend = extend

    def fit_table(self, table: torch.Tensor) -> None:
        length = self.num_embeddings
        if self.extend == "interpolate" and length != len(table):
            rows = nn.functional.interpolate(table.T[None], size=length, mode="linear", align_corners=True)[0].T
        else:
            rows = table[torch.arange(length, device=table.device) % len(table)]
        self.weight[:length].copy_(rows)

    def guard(self) -> None:  # see PositionEmbedding
        self.weight = nn.Parameter(torch.cat([self.weight, torch.zeros_like(self.weight[:1])]))


@dataclass(frozen=True, kw_only=True)
class Learned(Scheme):
    """Keep learned absolute positions; with `max_positions`, tile or interpolate the table.

    Without `extend` this is the identity: logits and gradients stay bit-equal.

    >>> str(Learned(extend="tile"))
    'learned:extend=tile'
    """

    extend: Literal["tile", "interpolate", None] = None

    name: ClassVar[str] = "learned"
    summary: ClassVar[str] = "the checkpoint's own table, as it is, tiled or interpolated"

    def check(self, geometry: Geometry) -> None:
        if self.extend is None and geometry.max_positions > geometry.trained_positions:
            what = f"the table has {geometry.trained_positions} rows and cannot hold max_positions={geometry.max_positions}"
            raise PosswapError(f"learned: {what}: pass extend='tile' or extend='interpolate', or another scheme")

    def embedding_module(self, geometry: Geometry) -> PositionEmbedding:
        return Table(geometry, self.extend)
