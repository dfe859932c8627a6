"""Warm starts in closed form: a new scheme in a pretrained model without training.

What needs only the replaced table is in the embedding-side module (`fit_table`). Here is the part in attention, which uses
three facts:

- softmax shift: a constant added to all scores of a query changes nothing;
- change of basis: nor does q -> A q with k -> A^-T k, for any invertible A, since only q.k counts;
- an error d in scores costs, to second order, a Kullback-Leibler divergence of half its variance over keys, weighted by the
  probabilities p: sum_j p_ij (d_ij - sum_k p_ik d_ik)^2 / 2.

Balanced basis (rotary). Write the second moments E[q q^T] = L_q L_q^T and E[k k^T] = L_k L_k^T (Cholesky), and
take the singular value decomposition L_k^T L_q = U S V^T. Then A = S^(-1/2) U^T L_k^T gives both sides the same diagonal
moments S: the directions that carry q.k, sorted by importance. The most important go to the dimensions that do not turn or turn
slowest, the least important to the fastest plane. Each direction's sign is free, and rounding decides it: two machines may give
two models, of which neither is nearer to the original.

Kernel (rotary). Written as complex numbers, a plane's part of q_i.k_j is Re(conj(z_q) z_k e^(i theta (j - i))). The product of
the means of q and k is therefore a function of distance alone, sum_m Re(Z_m e^(i theta_m (j - i))), Z = conj(mean z_q) mean
z_k: fit that, and row constants (softmax shift), to the missing scores by least squares, weighted as `missing_scores` says, and
write it into the biases. That disturbs scores of content a little, so it is done twice.

Relative vectors. With missing scores R_ij and weights w, minimise over a and the row constants c (softmax shift)
sum_ij w_ij (q_i . a_r(j-i) - R_ij + c_i)^2 + ridge. a depends only on sums over the keys at one distance, so the normal
equations have the size (query, distance), not (query, key); conjugate gradients solve them. The value vectors then solve an
ordinary ridge regression of the missing output on the attention mass by distance.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from hf_posswap.errors import PosswapError


class Evidence(NamedTuple):
    """What one self-attention computes on one batch; queries and keys are those before any rotation.

    A fit has queries, keys and values of the swapped model, and the probabilities and the output of the original.
    """

    query: torch.Tensor  # (B, H, L, D)
    key: torch.Tensor
    value: torch.Tensor
    probabilities: torch.Tensor  # (B, H, L, L)
    output: torch.Tensor  # (B, H, L, D)
    allowed: torch.Tensor  # (B, 1, L, L) bool: which keys a query may see; rows of padding see none

    def tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Return the rows of (B, H, L, ...) that are not padding: (H, T, ...) float64."""
        return wide(states.transpose(0, 1)[:, self.allowed[:, 0].any(-1)])


def second_moment(states: torch.Tensor) -> torch.Tensor:
    """Return E[x x^T] of each head over tokens, (H, T, D) -> (H, D, D) float64."""
    states = wide(states)
    return states.transpose(1, 2) @ states / states.shape[1]


@torch.no_grad()
def balance(query_key, query_moment: torch.Tensor, key_moment: torch.Tensor, dims_slow_to_fast: torch.Tensor) -> None:
    """Rewrite one layer's query and key projections in the balanced basis of each head; q.k is unchanged."""
    num_heads, head_dim, _ = query_moment.shape
    factors = [_factor(moment) for moment in (query_moment, key_moment)]
    if not all(torch.isfinite(factor).all() for factor in factors):
        raise PosswapError("query or key weights are not finite: pass warm_start=False")
    left, strengths, _ = torch.linalg.svd(factors[1].transpose(1, 2) @ factors[0])
    change = strengths.rsqrt()[..., None] * (left.transpose(1, 2) @ factors[1].transpose(1, 2))  # A: (H, D, D)
    inverse = torch.linalg.inv(change).transpose(1, 2)  # A^-T
    order = dims_slow_to_fast.to(change.device)
    tensors = query_key.tensors()
    for matrix, (weight, bias) in ((change, tensors[:2]), (inverse, tensors[2:])):
        placed = torch.empty_like(matrix)
        placed[:, order] = matrix  # row i, the i-th in importance, goes to dimension order[i]
        weight.copy_((placed @ wide(weight).view(num_heads, head_dim, -1)).flatten(0, 1))
        bias.copy_((placed @ wide(bias).view(num_heads, head_dim, 1)).flatten())


def missing_scores(evidence: Evidence, scores: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights w and the scores R that a layer still misses, centred over keys; both (B, H, L, L).

    `scores` are q.k without `scaling`. The original's scores are the logarithm of its probabilities, up to a row constant
    that the softmax does not see. Weights are its probabilities plus 0.02, shared evenly among the keys that a query may see:
    so keys that it ignores count a little.
    """
    allowed = evidence.allowed
    weights = evidence.probabilities + 0.02 * allowed / allowed.sum(-1, keepdim=True).clamp_min(1)
    weights = weights.masked_fill(~allowed, 0)
    # A probability that underflows float32 counts as 1e-30 = e^-69.
    missing = evidence.probabilities.clamp_min(1e-30).log() / scaling - scores
    missing = missing.masked_fill(~allowed, 0)
    mean = (weights * missing).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    return weights, (missing - mean).masked_fill(~allowed, 0)


def distance_index(scores: torch.Tensor, reach: int) -> torch.Tensor:
    """Return clip(j - i, -reach, reach) + reach for each query i and key j of scores (..., L, L), in their shape."""
    steps = torch.arange(scores.shape[-1], device=scores.device)
    return ((steps[None, :] - steps[:, None]).clamp(-reach, reach) + reach).expand(scores.shape)


def sum_keys_by_distance(values: torch.Tensor, reach: int) -> torch.Tensor:
    """Sum (B, H, L, L) over the keys at each distance, those from `reach` on together: (B, H, L, 2 * reach + 1)."""
    summed = values.new_zeros(*values.shape[:-1], 2 * reach + 1)
    return summed.scatter_add_(-1, distance_index(values, reach), values)


def sum_diagonals(values: torch.Tensor) -> torch.Tensor:
    """Sum (B, H, L, L) over batch and diagonals: (H, 2 L - 1) float64, distance j - i from -(L - 1) to L - 1."""
    length = values.shape[-1]
    index = distance_index(values[0, 0], length - 1).flatten()
    summed = wide(values.sum(0).flatten(1))
    return summed.new_zeros(len(summed), 2 * length - 1).index_add_(1, index.to(summed.device), summed)


def kernel_moments(weights: torch.Tensor, missing: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the normal equations, (H, 2 planes, 2 planes) and (H, 2 planes), of a kernel with constants c for rows:

        sum_ij w_ij (sum_m Re(Z_m e^(i theta_m (j - i))) + c_i - R_ij)^2

    `weights` w and `missing` R are (B, H, L, L), `frequencies` (planes,). Without c, each row would pull the kernel towards
    zero mean over its visible keys.
    """
    length = weights.shape[-1]
    weights, missing = wide(weights), wide(missing)
    frequencies = frequencies.to(weights)
    steps = torch.arange(length, dtype=torch.float64, device=weights.device)
    angles = torch.arange(1 - length, length, dtype=torch.float64, device=weights.device)[:, None] * frequencies
    features = torch.cat([angles.cos(), -angles.sin()], dim=-1)  # Re(Z e^ia) = x cos - y sin
    turns = torch.exp(1j * steps[:, None] * frequencies)
    rows = (weights.to(turns.dtype) @ turns) * turns.conj()  # each query's sum over keys, (B, H, L, planes)
    rows = torch.cat([rows.real, -rows.imag], dim=-1)
    total = weights.sum(-1, keepdim=True).clamp_min(1e-30)
    gram = torch.einsum("nf,hn,ng->hfg", features, sum_diagonals(weights), features)
    gram = gram - torch.einsum("bhif,bhig->hfg", rows / total, rows)
    target = sum_diagonals(weights * missing) @ features
    return gram, target - torch.einsum("bhif,bhi->hf", rows / total, (weights * missing).sum(-1))


def solve_with_ridge(gram: torch.Tensor, target: torch.Tensor, ridge: float) -> torch.Tensor:
    """Solve (G + s 1) x = y for each head, (H, N, N) and (H, N, ...), with s = `ridge` times the mean of G's diagonal."""
    strength = ridge * gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-30)[:, None, None]
    return torch.linalg.solve(gram + strength * torch.eye(gram.shape[-1]).to(gram), target)


def fit_kernel(gram: torch.Tensor, target: torch.Tensor, *, ridge: float = 0.1) -> torch.Tensor:
    """Solve the normal equations of `kernel_moments`, summed over batches: Z, (H, planes) complex128.

    The ridge is needed, and no small one: over N positions the slowest planes are nearly collinear, and what the data say of
    their difference is noise.
    """
    return torch.complex(*solve_with_ridge(gram, target, ridge).chunk(2, dim=-1))


def write_kernel(
    query_key, query_mean: torch.Tensor, key_mean: torch.Tensor, change: torch.Tensor, planes: torch.Tensor
) -> None:
    """Change the biases so that the means of q and k give Z + change instead of Z, plane by plane.

    `query_mean` and `key_mean` are (H, D), `change` (H, planes) complex, `planes` (planes, 2) the dimensions x and y of each.
    Of all pairs of means with that product, both get the length sqrt|Z| and the direction nearest to their old one.
    """
    means = [torch.complex(*wide(mean)[:, planes].unbind(-1)) for mean in (query_mean, key_mean)]
    product = means[0].conj() * means[1] + change
    turn = torch.polar(torch.ones_like(product.real), product.angle())
    direction = means[0] + means[1] * turn.conj()
    direction = torch.where(direction.abs() > 0, direction / direction.abs().clamp_min(1e-300), torch.ones_like(direction))
    wanted = product.abs().sqrt() * direction
    for bias, mean, new in zip((query_key.query_bias, query_key.key_bias), means, (wanted, wanted * turn), strict=True):
        moved = torch.view_as_real(new - mean)  # (H, planes, 2)
        addition = moved.new_zeros(query_mean.shape)
        addition[:, planes.flatten()] = moved.flatten(1)
        bias.add_(addition.flatten().to(bias))


def fit_relative_keys(
    queries: torch.Tensor, masses: torch.Tensor, targets: torch.Tensor, *, shared: bool, ridge=1e-3, tolerance=1e-2
) -> torch.Tensor:
    """Solve for key vectors a of R distances: (H, R, D), or (1, R, D) when heads share them; float64.

    `queries` (H, T, D) are all queries, `masses` (H, T, R) their weights summed over the keys at each distance, `targets`
    (H, T, R) the weighted missing scores summed likewise. With t = q.a at each distance, the row constant drops out:

        sum_tr m_tr (t_tr - (sum_s m_ts t_ts) / (sum_s m_ts)) q_t = sum_t y_tr q_t

    and conjugate gradients, preconditioned by the (D, D) blocks of each distance, solve it with a ridge.
    """
    total = masses.sum(-1, keepdim=True).clamp_min(1e-30)

    def collect(parts: torch.Tensor) -> torch.Tensor:
        summed = parts.transpose(1, 2) @ queries  # (H, R, D)
        return summed.sum(0, keepdim=True) if shared else summed

    blocks = torch.stack([(queries * masses[..., r, None]).transpose(1, 2) @ queries for r in range(masses.shape[-1])], dim=1)
    blocks = blocks.sum(0, keepdim=True) if shared else blocks  # (H, R, D, D)
    strength = ridge * blocks.diagonal(dim1=-2, dim2=-1).mean((-1, -2)).clamp_min(1e-30)[:, None, None]  # (H, 1, 1)
    inverse = torch.linalg.inv(blocks + strength[..., None] * torch.eye(queries.shape[-1]).to(blocks))

    def apply(tables: torch.Tensor) -> torch.Tensor:
        scores = queries @ tables.transpose(1, 2)  # (H, T, R)
        mean = torch.einsum("htr,htr->ht", masses, scores)[..., None] / total
        return collect(scores.sub_(mean).mul_(masses)) + strength * tables

    def precondition(residual: torch.Tensor) -> torch.Tensor:
        return (inverse @ residual[..., None])[..., 0]

    return _conjugate_gradients(apply, precondition, collect(targets), tolerance)


def _conjugate_gradients(apply: Callable, precondition: Callable, target: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Solve apply(x) = target for each head, until the preconditioned residual has shrunk by `tolerance`."""
    solution, residual = torch.zeros_like(target), target
    direction = precondition(residual)
    strength = (residual * direction).sum((1, 2), keepdim=True)
    enough = tolerance**2 * strength
    for _ in range(1000):
        if bool((strength <= enough).all()):
            break
        image = apply(direction)
        length = strength / (direction * image).sum((1, 2), keepdim=True).clamp_min(1e-300)
        solution, residual = solution + length * direction, residual - length * image
        preconditioned = precondition(residual)
        before, strength = strength, (residual * preconditioned).sum((1, 2), keepdim=True)
        direction = preconditioned + strength / before.clamp_min(1e-300) * direction
    return solution


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return it in float64, on the CPU if the device has no float64 (Apple's GPUs)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def _factor(moment: torch.Tensor) -> torch.Tensor:
    # A little on the diagonal, relative to its size: heads of real checkpoints have nearly dead directions. Or are zero: as 1.
    size = moment.diagonal(dim1=1, dim2=2).mean(-1)
    floor = torch.where(size > 0, 1e-6 * size, 1)
    factor, failed = torch.linalg.cholesky_ex(moment + floor[:, None, None] * torch.eye(moment.shape[-1]).to(moment))
    return factor.masked_fill((failed != 0)[:, None, None], torch.nan)
