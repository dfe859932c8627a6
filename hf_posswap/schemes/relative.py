"""Relative positions: Shaw, Uszkoreit, Vaswani 2018, "Self-Attention with Relative Position Representations", section 3.2
(https://arxiv.org/abs/1803.02155).

    s_ij = scale * q_i . (k_j + a^K_r),   z_i = sum_j softmax(s_i)_j (v_j + a^V_r),   r = clip(j - i, -clip, clip) + clip

With `key_query` the vectors are multiplied with keys, too: s_ij = scale * (q_i . k_j + q_i . a^K_r + k_j . a^K_r), method 4 of
Huang et al. 2020, "Improve Transformer Models with Better Relative Position Embeddings" (https://arxiv.org/abs/2009.13658).

With `vectors="sinusoidal"` key vectors are not a free table but projected sinusoids of the signed distance, a^K_r = PE(j - i) W
/ D with one W (D, D) for each head, as in Transformer-XL (Dai et al. 2019, section 3.3: https://arxiv.org/abs/1901.02860).
Sines change sign with the direction, so left and right differ.

j is the key's position, i the query's: r < clip looks to the left. Tables are (H, R, D), R = 2 * clip + 1, or (R, D) when all
heads share them as in the paper. With zero tables this is plain attention without positions.

Two functions compute the same numbers. Where positions go up by one from key to key, also with padding or a cache,
`relative_attention` costs little more than plain attention on a CPU, and less than `attend_by_index`, which is for all else:
other positions (packed documents, gaps), masks for each pair of query and key, eager attention (which returns probabilities),
compiled models, and `key_query`.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.functional.closed_form import (
    distance_index,
    fit_relative_keys,
    missing_scores,
    solve_with_ridge,
    sum_keys_by_distance,
    wide,
)
from hf_posswap.functional.relative_attention import IMPLEMENTATIONS, relative_attention
from hf_posswap.schemes.base import AttentionPositions, Geometry, Places, Scheme, check_number, is_plain, weigh
from hf_posswap.schemes.sinusoidal import sinusoids


class RelativePositions(AttentionPositions):
    """One layer's tables, and the attention that uses them."""

    needs_key_positions = True
    implementation = "auto"  # of `relative_attention`; see `set_relative_implementation`

    def __init__(self, scheme: "Relative", geometry: Geometry):
        super().__init__()
        self.clip, self.key_query = scheme.clip, scheme.key_query
        rows = 2 * scheme.clip + 1
        shape = (rows, geometry.head_dim) if scheme.share_heads else (geometry.num_heads, rows, geometry.head_dim)
        # Zeros change nothing but the missing table, and every entry gets a gradient.
        self.key_table = nn.Parameter(torch.zeros(shape)) if scheme.vectors == "learned" else None
        projection = (*shape[:-2], geometry.head_dim, geometry.head_dim)
        self.key_projection = nn.Parameter(torch.zeros(projection)) if scheme.vectors == "sinusoidal" else None
        self.value_table = nn.Parameter(torch.zeros(shape)) if scheme.values else None

    def prepare(self, position_ids, slots, length, key_positions, attention_mask=None) -> Places:
        """Check once for all layers whether positions go up by one from key to key."""
        places = Places(position_ids, slots, key_positions)
        if is_plain() or key_positions is None:
            return places
        mask = None
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape[-1] != key_positions.shape[-1]:
                return places
            mask = attention_mask.to(key_positions.device, torch.bool, copy=True)  # the caller's may change before the backward
        # The same tensor as `slots`: no positions were given, so there are none to check. Longer than the text: those of all
        # that a static cache has room for, on a GPU, while queries must be the last.
        in_order = key_positions is slots or (key_positions.shape[-1] <= slots[0, -1] + 1 and _in_order(key_positions, mask))
        return places._replace(key_mask=mask, in_order=True) if in_order else places

    def key_mask(self, shared: Places) -> torch.Tensor | None:
        return shared.key_mask

    def key_vectors(self) -> torch.Tensor:
        """Return a^K, (H, R, D) or (R, D)."""
        if self.key_table is not None:
            return self.key_table
        return (self._signal().to(self.key_projection) @ self.key_projection) / self.key_projection.shape[-1]

    def _signal(self) -> torch.Tensor:
        device = self.key_projection.device
        return sinusoids(torch.arange(-self.clip, self.clip + 1, device=device), self.key_projection.shape[-1])

    def solve(self, observe, query_key, scaling) -> None:
        """Fit key vectors, then value vectors, to what the layer misses at each distance; see `closed_form`.

        Sinusoidal key vectors are fitted to the free ones, each distance weighted by its attention.

        With `key_query` nothing is done: its key products would need other equations.
        """
        if self.key_query:
            return
        self._solve_keys(observe, scaling)
        if self.value_table is not None:
            self._solve_values(observe, scaling)

    def _solve_keys(self, observe, scaling: float) -> None:
        queries, masses, targets = [], [], []
        for evidence in observe():
            weights, missing = missing_scores(evidence, evidence.query @ evidence.key.transpose(-1, -2), scaling)
            queries.append(evidence.tokens(evidence.query))
            masses.append(evidence.tokens(sum_keys_by_distance(weights, self.clip)))
            targets.append(evidence.tokens(sum_keys_by_distance(weights * missing, self.clip)))
        shared = self.key_vectors().dim() == 2
        table = fit_relative_keys(*(torch.cat(parts, dim=1) for parts in (queries, masses, targets)), shared=shared)
        if self.key_table is not None:
            self.key_table.copy_(table.view_as(self.key_table))
        else:
            seen = sum(part.sum(1) for part in masses)  # (H, R)
            self.key_projection.copy_(_project(wide(self._signal()), table, seen).view_as(self.key_projection))

    def _solve_values(self, observe, scaling: float) -> None:
        moment, product = 0.0, 0.0  # of M^T M a = M^T Y, from the masses M by distance and the missing outputs Y
        for evidence in observe():
            scores = evidence.query @ evidence.key.transpose(-1, -2)
            by_distance = evidence.query @ self.key_vectors().to(scores.dtype).transpose(-1, -2)
            scores = (scores + by_distance.gather(-1, distance_index(scores, self.clip))) * scaling
            probabilities = scores.masked_fill(~evidence.allowed, float("-inf")).softmax(-1).nan_to_num()
            mass = evidence.tokens(sum_keys_by_distance(probabilities, self.clip))
            moment = moment + mass.transpose(1, 2) @ mass
            product = product + mass.transpose(1, 2) @ evidence.tokens(evidence.output - probabilities @ evidence.value)
        if self.value_table.dim() == 2:
            moment, product = moment.sum(0, keepdim=True), product.sum(0, keepdim=True)
        self.value_table.copy_(solve_with_ridge(moment, product, 1e-3).view_as(self.value_table))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        shared: Places,
        *,
        scaling: float,
        dropout: float,
        causal: bool,
        return_probabilities: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (B, H, Q, D), and the probabilities (B, H, Q, K) or None.

        `mask` is additive, or boolean with True = attend; where positions are in order, `shared` replaces it.
        """
        # Autocast computes projections in half precision and leaves parameters alone.
        tables = [None if table is None else table.to(query.dtype) for table in (self.key_vectors(), self.value_table)]
        key_mask = shared.key_mask
        if shared.in_order:
            length = shared.keys.shape[-1]
            if length < key.shape[-2]:  # a static cache is longer than what it holds
                key, value = key[..., :length, :], value[..., :length, :]
            elif key_mask is not None:  # a sliding one holds the last keys only
                key_mask = key_mask[:, -key.shape[-2] :]
            if not return_probabilities and not self.key_query and not is_plain():
                mask = None if key_mask is None else key_mask.expand(len(query), -1)
                options = {"clip": self.clip, "causal": causal, "key_mask": mask, "dropout": dropout, "scale": scaling}
                return relative_attention(query, key, value, *tables, implementation=self.implementation, **options), None
            mask = None if key_mask is None else key_mask[:, None, None]
        if causal and (mask is None or shared.in_order):
            seen = shared.causal(key.shape[-2])[None, None]
            mask = seen if mask is None else mask & seen
        distances = shared.distances(key.shape[-2]).clamp(-self.clip, self.clip) + self.clip
        return attend_by_index(query, key, value, *tables, distances, mask, scaling, dropout, self.key_query)


def _project(signal: torch.Tensor, table: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Solve signal W / D ~ table for W, by weighted least squares over distances; (R, D), (G, R, D), (H, R) -> (G, D, D)."""
    weights = weights.sum(0, keepdim=True) if len(table) == 1 else weights
    weights = (weights / weights.mean(-1, keepdim=True))[..., None]
    size = signal.shape[-1]
    gram = signal.T @ (weights * signal) + 1e-3 * torch.eye(size).to(signal)
    return torch.linalg.solve(gram, signal.T @ (weights * table)) * size


def _in_order(positions: torch.Tensor, key_mask: torch.Tensor | None) -> bool:
    """Whether positions (B or 1, K) go up by one from key to key in every row; masked keys do not count."""
    low = high = positions - torch.arange(positions.shape[-1], device=positions.device)
    if key_mask is not None:
        low, high = low.masked_fill(~key_mask, low.max() + 1), high.masked_fill(~key_mask, high.min() - 1)
    return bool((low.amin(-1) >= high.amax(-1)).all())  # greater where a row has no keys


def attend_by_index(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_table: torch.Tensor,
    value_table: torch.Tensor | None,
    distances: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    key_query: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (B, H, Q, D) and the probabilities (B, H, Q, K), for any distances r (B or 1, Q, K) and any mask.

    q_i . a^K_r is one (Q, R) product for each head that is then spread over the keys, and the value term collects the
    probabilities by distance before one product with a^V: no (Q, K, D) tensor, but several of size Q x K.
    """
    index = distances[:, None].expand(query.shape[0], query.shape[1], -1, -1)
    query = query * scaling
    # Sums by distance, here and in the backward of `gather`, in float32: CUDA adds in the tensor's own dtype, and in bfloat16
    # the mass of many far keys stops growing.
    precise = torch.promote_types(query.dtype, torch.float32)
    by_distance = (query @ key_table.mT).to(precise)  # (B, H, Q, R)
    scores = by_distance.gather(-1, index) + query @ key.mT  # (B, H, Q, K)
    if key_query:
        scores = scores + (key * scaling @ key_table.mT).to(precise).gather(-1, index.mT).mT
    exact = weigh(scores, mask, dropout)
    probabilities = exact.to(value.dtype)
    output = probabilities @ value
    if value_table is not None:
        mass = torch.zeros_like(by_distance).scatter_add(-1, index, exact)  # (B, H, Q, R)
        output = output + mass.to(value.dtype) @ value_table
    return output, probabilities


def set_relative_implementation(model: nn.Module, implementation: str) -> None:
    """Choose how a model with relative positions computes attention: "auto", "fused", "window" or "triton".

    Copies and pickles of the model keep the choice, config.json does not: a model that is loaded, or swapped again, starts at
    "auto". Where `attend_by_index` is used, it has no effect. See `functional.relative_attention`.

    Raises:
        PosswapError: Another name, or a model without relative positions.
    """
    layers = [module for module in model.modules() if isinstance(module, RelativePositions)]
    if implementation not in IMPLEMENTATIONS:
        raise PosswapError(f"implementation={implementation!r} is not one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if not layers:
        raise PosswapError(f"{type(model).__name__} has no relative positions: call posswap.swap(model, 'relative') first")
    for layer in layers:
        layer.implementation = implementation


@dataclass(frozen=True, kw_only=True)
class Relative(Scheme):
    """Clipped relative positions in keys and values (Shaw et al. 2018), causal or bidirectional.

    Args:
        clip: Distances beyond it look alike; there are 2 * clip + 1 vectors a table.
        values: Also add a vector to the values; False is the key term alone.
        share_heads: One table for all heads of a layer, as in the paper.
        key_query: Also multiply key vectors with the keys (`relative_key_query` of transformers 4). Several times slower on
            long inputs, and without a closed form: `fit` can only take steps.
        vectors: "learned", or "sinusoidal" for key vectors that are projected sinusoids; value vectors stay learned.

    >>> Relative(clip=16, share_heads=True).to_dict()
    {'name': 'relative', 'clip': 16, 'values': True, 'share_heads': True, 'key_query': False, 'vectors': 'learned'}
    """

    clip: int = 64
    values: bool = True
    share_heads: bool = False
    key_query: bool = False
    vectors: Literal["learned", "sinusoidal"] = "learned"

    name: ClassVar[str] = "relative"
    in_attention: ClassVar = RelativePositions
    summary: ClassVar[str] = "Shaw's clipped relative vectors in keys and values"
    shift_invariant: ClassVar[bool] = True
    implementations: ClassVar[tuple[str, ...] | None] = ("eager", "sdpa")  # it reads the mask that these two get

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "clip", int, 1, most=65_536)
