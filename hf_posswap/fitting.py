"""Warm starts in closed form: how a new scheme enters a pretrained model with as little damage as weights alone allow.

What needs only the replaced table is done by the embedding-side module (`fit_table`: a projection of sinusoids, or the
mean vector). Here is what needs the query and key projections.

Balanced basis (rotary). Attention sees queries and keys only through q.k, and q.k is unchanged by q -> A q, k -> A^-T k
for any invertible A, head by head. Write the covariances as C_q = L_q L_q^T and C_k = L_k L_k^T (Cholesky), and take the
singular value decomposition L_k^T L_q = U S V^T. Then A = S^(-1/2) U^T L_k^T gives both sides the same diagonal
covariance S: the directions that carry q.k, sorted by importance. The most important go to the dimensions that do not
turn or turn slowest, the least important to the fastest plane, so that rotation disturbs what matters least.

Covariances from weights alone: the input of a projection is a layer norm's output, g * u + b with u of unit
covariance, so C = W diag(g^2) W^T + m m^T with m = W b + bias.
"""

import torch
from torch import nn

from hf_posswap.architectures import Architecture, QueryKey
from hf_posswap.errors import PosswapError


def balances(architecture: Architecture, config) -> bool:
    """Whether the balanced basis is part of the default warm start of this model.

    Measured: in an encoder it takes most of the damage away; in a causal model it makes the rotation harmless but also
    useless, and a cold start is better. It needs the bias kernel that only calibration data can give.
    """
    return not architecture.is_causal(config)


@torch.no_grad()
def balance(query_key: QueryKey, norm: nn.LayerNorm, num_heads: int, dims_slow_to_fast: torch.Tensor) -> None:
    """Rewrite one layer's query and key projections in the balanced basis of each head; q.k stays what it was."""
    gain, offset = norm.weight.double(), norm.bias.double()
    query, query_bias, key, key_bias = (tensor.double() for tensor in query_key.tensors())
    head_dim = query.shape[0] // num_heads
    order = dims_slow_to_fast.to(query.device)
    for head in range(num_heads):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        factors = [_covariance_factor(w[rows], b[rows], gain, offset) for w, b in ((query, query_bias), (key, key_bias))]
        left, strengths, _ = torch.linalg.svd(factors[1].T @ factors[0])
        change = strengths.rsqrt()[:, None] * (left.T @ factors[1].T)  # A, most important direction first
        inverse = torch.linalg.inv(change).T  # A^-T
        if not (torch.isfinite(change).all() and torch.isfinite(inverse).all()):
            raise PosswapError(
                "the query and key weights of a head are not finite or of deficient rank: pass warm_start=False"
            )
        place = torch.empty_like(change), torch.empty_like(inverse)
        place[0][order], place[1][order] = change, inverse
        query[rows], query_bias[rows] = place[0] @ query[rows], place[0] @ query_bias[rows]
        key[rows], key_bias[rows] = place[1] @ key[rows], place[1] @ key_bias[rows]
    for target, value in zip(query_key.tensors(), (query, query_bias, key, key_bias), strict=True):
        target.copy_(value)


def _covariance_factor(weight, bias, gain, offset) -> torch.Tensor:
    scaled = weight * gain
    mean = weight @ offset + bias
    covariance = scaled @ scaled.T + torch.outer(mean, mean)
    # A little on the diagonal, relative to its size: heads of real checkpoints have nearly dead directions.
    covariance += 1e-6 * covariance.diagonal().mean() * torch.eye(len(weight), dtype=weight.dtype, device=weight.device)
    return torch.linalg.cholesky(covariance)
