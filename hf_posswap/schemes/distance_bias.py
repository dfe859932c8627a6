"""Biases on scores that depend on the distance alone, one function per head: ALiBi and T5's buckets.

    s_ij = scale * q_i . k_j + b_h(j - i)

`Alibi`: Press, Smith, Lewis 2022, "Train Short, Test Long", section 3 (https://arxiv.org/abs/2108.12409), and in encoders the
same on both sides:

    b_h(d) = -m_h |d|

`Buckets`: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", section 2.1 (https://arxiv.org/abs/1910.10683): a
learned number for each bucket of distances. Distances below `buckets` / 2 have a bucket each, farther ones share growing
buckets, and those from `reach` on the last one; left and right have their own. Here each layer has its numbers, in T5 all share
the first layer's.

Both are linear in what they learn, b = sum_n w_n f_n(j - i), so a fit starts them in closed form: with missing scores R and
weights p (`closed_form.missing_scores`) it minimises sum_ij p_ij (scale (R_ij + c_i) - b_ij)^2, c_i a constant for each row,
which the softmax does not see, with a small ridge.

`torch.onnx.export` takes these biases after `model.requires_grad_(False)`: with gradients torch takes attention apart wrongly.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.functional.closed_form import missing_scores, solve_with_ridge, sum_keys_by_distance
from hf_posswap.schemes.base import AttentionPositions, Geometry, Scheme, check_number, is_traced


class DistanceBias(AttentionPositions):
    """One layer's bias as a function of distance; subclasses fill in the empty methods."""

    needs_key_positions = True

    def measure(self, distances: torch.Tensor) -> torch.Tensor:
        """Return what all layers compute from distances (...) alike, (...)."""

    def bias_of(self, measured: torch.Tensor) -> torch.Tensor:
        """Return this layer's bias (H, ...) from what was measured (...)."""

    def by_distance(self, distances):
        return self.bias_of(self.measure(distances))

    def prepare(self, position_ids, *others):
        places = super().prepare(position_ids, *others)
        if position_ids.shape[-1] > 1 or is_traced():
            return places
        return places._replace(measured=self.measure(places.distances(places.keys.shape[-1])))

    def bias(self, shared, key_length):
        if shared.in_order and shared.slots.shape[-1] == key_length:  # a row of values, each row of the bias a step further on
            steps = torch.arange(1 - key_length, key_length, device=shared.slots.device)
            return self.by_distance(steps).unfold(-1, key_length, 1).flip(1)[None]
        measured = shared.measured
        if measured is None or measured.shape[-1] != key_length:  # a static cache is longer than what it holds
            measured = self.measure(shared.distances(key_length))
        return self.bias_of(measured).transpose(0, 1)

    def features(self, distances: torch.Tensor) -> torch.Tensor:
        """Return f, (..., N) float64, of distances (...)."""

    def settle(self, weights: torch.Tensor) -> None:
        """Set the parameters from the closed form's weights, (H, N) float64."""

    def solve(self, observe, query_key, scaling) -> None:
        """Weighted least squares over all pairs, with a constant for each row taken out."""
        gram, product = 0.0, 0.0
        for evidence in observe():
            weights, missing = missing_scores(evidence, evidence.query @ evidence.key.mT, scaling)
            reach = weights.shape[-1] - 1
            sums = (sum_keys_by_distance(one, reach) for one in (weights, weights * missing))
            mass, target = (evidence.tokens(one) for one in sums)  # (H, T, 2 L - 1)
            table = self.features(torch.arange(-reach, reach + 1, device=mass.device))  # (2 L - 1, N)
            rows = mass @ table  # (H, T, N)
            rows = rows / mass.sum(-1, keepdim=True).clamp_min(1e-30).sqrt()
            gram = gram + table.T @ (mass.sum(1)[..., None] * table) - rows.mT @ rows
            product = product + target.sum(1) @ table * scaling  # (H, N)
        self.settle(solve_with_ridge(gram, product, ridge=1e-6))


class AlibiPositions(DistanceBias):
    """A slope per head, stored as its logarithm: it stays positive, and a step changes it by a share of itself."""

    def __init__(self, scheme: "Alibi", geometry: Geometry):
        super().__init__()
        self.heads = geometry.num_heads
        # Fixed slopes are no buffer: a model built on the meta device would lose them.
        self.log_slopes = nn.Parameter(alibi_slopes(self.heads).log()) if scheme.slopes == "fitted" else None

    def initial_values(self):
        return {} if self.log_slopes is None else {"log_slopes": alibi_slopes(self.heads).log()}

    def measure(self, distances):
        return -distances.abs()

    def bias_of(self, measured):
        if self.log_slopes is None:
            slopes = alibi_slopes(self.heads).to(measured.device)
        else:
            slopes = self.log_slopes.float().exp()  # in float32: half precision does not hold large distances
        return slopes.reshape(-1, *[1] * measured.dim()) * measured

    def features(self, distances):
        return -distances.abs().double()[..., None]

    def settle(self, weights):
        self.log_slopes.copy_(weights[:, 0].clamp_min(1e-4).log())  # 0 or below: such a head looks everywhere

    def solve(self, observe, query_key, scaling):
        if self.log_slopes is not None:
            super().solve(observe, query_key, scaling)


def alibi_slopes(heads: int) -> torch.Tensor:
    """Return m_h = 2^(-8 h / H), h = 1 ... H, (H,); where H is no power of two, those of the power below, and every second one
    of the next power: as in the authors' code.

    >>> alibi_slopes(8).tolist()[:3]
    [0.5, 0.25, 0.125]
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return torch.tensor(slopes, dtype=torch.float32)  # whatever torch's default is


class BucketPositions(DistanceBias):
    """A number for each head and bucket, (H, 2 * buckets): first distances up to 0 (left), then those above (right)."""

    def __init__(self, scheme: "Buckets", geometry: Geometry):
        super().__init__()
        self.buckets, self.reach = scheme.buckets, scheme.reach
        self.table = nn.Parameter(torch.zeros(geometry.num_heads, 2 * scheme.buckets))

    def measure(self, distances):
        """Return the bucket of each distance, int64."""
        near, far = self.buckets // 2, distances.abs()
        share = torch.log(far.clamp(min=near).float() / near) / math.log(self.reach / near)  # 0 below `near`
        grown = (share * (self.buckets - near)).long().clamp(max=self.buckets - 1 - near)
        return far.clamp(max=near) + grown + self.buckets * (distances > 0)

    def bias_of(self, measured):
        return self.table[:, measured]

    def features(self, distances):
        return nn.functional.one_hot(self.measure(distances), 2 * self.buckets).double()

    def settle(self, weights):
        self.table.copy_(weights)


@dataclass(frozen=True, kw_only=True)
class Alibi(Scheme):
    """ALiBi: attention falls off linearly with the distance, in each head at its own slope.

    Args:
        slopes: "fitted": they start as the paper's, and a fit and training change them; "fixed": they stay as they are.

    >>> str(Alibi(slopes="fixed"))
    'alibi:slopes=fixed'
    """

    slopes: Literal["fitted", "fixed"] = "fitted"

    name: ClassVar[str] = "alibi"
    in_attention: ClassVar = AlibiPositions
    summary: ClassVar[str] = "ALiBi: scores fall off linearly with the distance"
    shift_invariant: ClassVar[bool] = True
    implementations: ClassVar[tuple[str, ...] | None] = ("eager", "flex_attention", "sdpa")


@dataclass(frozen=True, kw_only=True)
class Buckets(Scheme):
    """T5's bias: a number for each head and bucket of distances, near ones exact, far ones in growing buckets.

    Args:
        buckets: On each side; half of them hold one distance each.
        reach: The distance from which all share the last bucket.

    >>> Buckets(buckets=8, reach=32).to_dict()
    {'name': 'buckets', 'buckets': 8, 'reach': 32}
    """

    buckets: int = 32
    reach: int = 128

    name: ClassVar[str] = "buckets"
    in_attention: ClassVar = BucketPositions
    summary: ClassVar[str] = "T5's bias: a number for each bucket of distances"
    shift_invariant: ClassVar[bool] = True
    implementations: ClassVar[tuple[str, ...] | None] = ("eager", "flex_attention", "sdpa")

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "buckets", int, 2, most=4096)
        check_number(self, "reach", int, 2, most=10**9)
        if self.reach <= self.buckets // 2:
            raise PosswapError(f"buckets: reach={self.reach} must be above buckets / 2 = {self.buckets // 2}, the exact ones")
