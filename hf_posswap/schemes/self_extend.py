"""Self-Extend: rotary positions, read on two scales. Jin et al. 2024, "LLM Maybe LongLM: Self-Extend LLM Context Window Without
Tuning", section 3 (https://arxiv.org/abs/2401.01325).

Near keys keep their distance d = j - i, far ones get that of their groups of G tokens, moved so that both meet at |d| = near:

    d'(i, j) = j - i                                       where |j - i| < near
    d'(i, j) = j // G - i // G + sign(j - i) s             elsewhere,  s = near - near // G

So a text of L tokens shows the model distances up to about near + (L - near) / G: for near = 192 and G = 64, 4,096 tokens look
like 253. The order of near words is exact, that of far ones is known by groups. The paper has it for causal models; here far
keys on the right of a query, in encoders, are the mirror image of those on the left.

More keys make a softmax flatter. So scores are sharpened with the logarithm of n, how many keys a query sees, over the trained
length T (Chiang and Cholak 2022, section 5.3, https://arxiv.org/abs/2202.12172):

    s_ij = (1 + temper * ln(max(1, n_i / T))) * scale * q_i . k_j

It is a way to read, not to learn: in training mode, and in a fit, all distances are exact and no score is sharpened. Recipes
that train without dropout do so in evaluation mode, and so with groups, as the model will read.

Keys are rotated by their own position before they enter the cache, as in `rotary`. For far scores they are turned again, by
j // G - j, and the query by i // G - i plus or minus s: rotations add up.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.schemes.base import AttentionPositions, Geometry, Places, Scheme, check_number, is_traced, weigh
from hf_posswap.schemes.rotary import Rotary, RotaryPositions

_QUERIES = 256  # in a block: scores of one block are all that is in memory


class Turns(NamedTuple):
    """What all layers share: places, and angles as `RotaryPositions.prepare` returns them."""

    places: Places
    own: tuple  # of queries, or new keys, by their own positions
    keys: tuple  # of all keys, from their own positions to their groups'
    left: tuple  # of queries, from their own positions to those from which they look at groups on the left
    right: tuple  # the same, on the right
    looks_ahead: bool  # a mask of the user's own may let queries of a causal model see keys on their right

    def block(self, queries: slice, keys: torch.Tensor) -> "Turns":
        """Return what belongs to a slice of the queries and to keys by index."""
        parts = {name: [one[..., queries, :] for one in getattr(self, name)] for name in ("own", "left", "right")}
        return self._replace(places=self.places.block(queries, keys), keys=[one[..., keys, :] for one in self.keys], **parts)

    def of_keys(self, length: int) -> list[torch.Tensor]:
        """Return the angles of the cache's keys: a static one is longer than what it holds, a sliding one holds the last."""
        return [nn.functional.pad(k[..., -length:, :], (0, 0, 0, max(0, length - k.shape[-2]))) for k in self.keys]


class SelfExtendPositions(RotaryPositions):
    """Rotates queries and keys, and attends with far distances in groups."""

    needs_key_positions = True

    def __init__(self, scheme: "SelfExtend", geometry: Geometry):
        super().__init__(scheme.rotary(), geometry)
        self.near, self.group = scheme.scales(geometry)
        self.temper, self.trained = scheme.temper, geometry.trained_positions

    def prepare(self, position_ids, slots, length, key_positions, attention_mask=None) -> Turns:
        keys = position_ids if key_positions is None else key_positions
        shift, to_group = self.near - self.near // self.group, position_ids // self.group - position_ids
        turns = position_ids, keys // self.group - keys, to_group + shift, to_group - shift
        places = AttentionPositions.prepare(self, position_ids, slots, None, keys)
        looks_ahead = attention_mask is not None and attention_mask.dim() == 4 and position_ids.shape[-1] > 1
        return Turns(places, *(RotaryPositions.prepare(self, turn, slots, None, None) for turn in turns), looks_ahead)

    def rotate(self, states, shared):
        return super().rotate(states, shared.own)

    @property
    def attend(self):
        """None while training or fitting, for attention as with `rotary`: so distances up to the text's length are learned."""
        return None if self.training else self._attend

    def _attend(self, query, key, value, mask, shared: Turns, *, scaling, dropout, causal, return_probabilities):
        """Take and return what `RelativePositions.attend` does."""
        turn, length = super().rotate, key.shape[-2]
        seen = shared.places.causal(length)[None, None] if causal and mask is None else mask
        grouped, query = turn(key, shared.of_keys(length)), query * (scaling * self._sharpness(seen, key)).to(query.dtype)
        causal = causal and not shared.looks_ahead
        left, right = turn(query, shared.left), None if causal else turn(query, shared.right)

        def block(rows: slice, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
            """Attend from some queries to the keys before `stop`; before `start` all are far."""
            keys, close = slice(stop), slice(start, stop)
            distances = shared.places.distances(length, rows)[:, None, :, close]
            far = left[..., rows, :] @ grouped[..., keys, :].mT
            near = torch.where(distances > -self.near, query[..., rows, :] @ key[..., close, :].mT, far[..., close])
            if right is not None:
                near = torch.where(distances < self.near, near, right[..., rows, :] @ grouped.mT)
            scores = torch.cat([far[..., :start], near], dim=-1) if start else near
            asked = rows if seen is not None and seen.shape[-2] > 1 else slice(None)  # a mask may have one row for all queries
            hidden = None if seen is None else seen.expand(-1, -1, -1, length)[..., asked, keys]  # too wide a mask raises
            probabilities = weigh(scores, hidden, dropout).to(value.dtype)
            return probabilities @ value[..., keys, :], probabilities

        if return_probabilities or is_traced():
            return block(slice(None), 0, length)
        outputs = []
        for start in range(0, query.shape[-2], _QUERIES):
            stop, ends = start + _QUERIES, (0, length)
            if causal and shared.places.in_order:
                ends = max(0, start - self.near + 1), min(stop, length)
            outputs.append(block(slice(start, stop), *ends)[0])
        return torch.cat(outputs, dim=-2), None

    def _sharpness(self, mask: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor:
        """Return the factor of the scores of each query, (B or 1, H or 1, Q or 1, 1)."""
        if mask is None:
            seen = torch.full((1, 1, 1, 1), key.shape[-2], device=key.device)
        else:
            seen = (mask if mask.dtype == torch.bool else mask > -1e3).sum(-1, keepdim=True)
        return 1 + self.temper * (seen.float() / self.trained).clamp(min=1).log()


@dataclass(frozen=True, kw_only=True)
class SelfExtend(Scheme):
    """Rotary positions; in evaluation, distances are exact near by and counted in groups far away.

    So a model reads many times the length that it was fitted or trained on. In training mode it is `Rotary`.

    Args:
        near: Distances below it are exact, in tokens; None: three quarters of the trained length.
        group: Tokens of a group, G; None: as many as keep the farthest distance at most the trained length, so that another
            `max_positions` means other groups.
        temper: How much scores are sharpened where a query sees more keys than the trained length; 0: not at all.
        theta, fraction, mark_first: As in `Rotary`.

    >>> str(SelfExtend(group=16))
    'self-extend:group=16'
    """

    near: int | None = None
    group: int | None = None
    temper: float = 0.05
    theta: float = 10_000
    fraction: float = 1.0
    mark_first: bool = True

    name: ClassVar[str] = "self-extend"
    in_attention: ClassVar = SelfExtendPositions
    summary: ClassVar[str] = "RoPE with far distances in groups, for long texts"
    implementations: ClassVar[tuple[str, ...] | None] = ("eager", "sdpa")  # it reads the mask that these two get

    def __post_init__(self):
        super().__post_init__()
        for field in ("near", "group"):
            if getattr(self, field) is not None:
                check_number(self, field, int, 1)
        check_number(self, "temper", float, 0)
        check_number(self, "theta", float, 1, above=True)  # `choose` knows no "auto" of this scheme
        check_number(self, "fraction", float, 0, above=True)
        self.rotary()

    def rotary(self) -> Rotary:
        """Return the rotation at near distances."""
        return Rotary(theta=self.theta, fraction=self.fraction, mark_first=self.mark_first)

    def scales(self, geometry: Geometry) -> tuple[int, int]:
        """Return near and G in tokens."""
        near = self.near or max(1, geometry.trained_positions * 3 // 4)
        far, room = geometry.max_positions - near, max(1, geometry.trained_positions - near)
        return near, self.group or max(1, -(-far // room))

    def distances(self, geometry: Geometry) -> str:
        near, group = self.scales(geometry)
        return f"exact below {near:,}, farther ones in groups of {group:,}"

    def check(self, geometry: Geometry) -> None:
        self.rotary().check(geometry)
        if self.group is None and self.scales(geometry)[0] >= geometry.trained_positions:
            what = f"self-extend: near={self.near} leaves no room below {geometry.trained_positions}"
            raise PosswapError(f"{what}: give group, too")

    def embedding_module(self, geometry: Geometry):
        return self.rotary().embedding_module(geometry)
