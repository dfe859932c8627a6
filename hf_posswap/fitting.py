"""Warm starts in closed form: how a new scheme enters a pretrained model with as little damage as weights alone allow.

What needs only the replaced table is done by the embedding-side module (`fit_table`: a projection of sinusoids, or the
mean vector and row 0). Here is what needs the query and key projections.

Balanced basis (rotary). Attention sees queries and keys only through q.k, and q.k is unchanged by q -> A q, k -> A^-T k
for any invertible A, head by head. Write the second moments E[q q^T] = L_q L_q^T and E[k k^T] = L_k L_k^T (Cholesky), and
take the singular value decomposition L_k^T L_q = U S V^T. Then A = S^(-1/2) U^T L_k^T gives both sides the same diagonal
moments S: the directions that carry q.k, sorted by importance. The most important go to the dimensions that do not
turn or turn slowest, the least important to the fastest plane, so that rotation disturbs what matters least.

The moments are those of the original model reading tokens drawn uniformly from its vocabulary: that needs no data, and
comes close to what real text gives.
"""

import torch
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture, QueryKey
from hf_posswap.errors import PosswapError


def balances(architecture: Architecture, config) -> bool:
    """Whether the balanced basis is part of the default warm start of this model.

    In the embedded encoder it takes much of the damage away; in the embedded causal model it makes the rotation harmless but
    also useless, and projections are better left alone. tests/test_warm_start.py shows both.
    """
    return not architecture.is_causal(config)


@torch.no_grad()
def query_key_moments(
    model: PreTrainedModel, architecture: Architecture, *, rows: int = 16, length: int = 128
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return E[q q^T] and E[k k^T] of every layer, each (H, D, D) float64, while the model reads random tokens."""
    base = model.base_model
    config = model.config
    length = min(length, config.max_position_embeddings)
    generator = torch.Generator(device="cpu").manual_seed(0)
    tokens = torch.randint(config.vocab_size, (rows, length), generator=generator, device="cpu")
    moments = []

    def record(attention, args, kwargs):
        hidden_states = args[0] if args else kwargs["hidden_states"]
        query, key, _ = architecture.project(attention, hidden_states)
        flat = [states.transpose(0, 1).flatten(1, 2).double() for states in (query, key)]  # (H, B * L, D)
        moments.append(tuple(states.transpose(1, 2) @ states / states.shape[1] for states in flat))

    modes = {module: module.training for module in base.modules()}
    hooks = [a.register_forward_pre_hook(record, with_kwargs=True) for a in architecture.self_attentions(base)]
    try:
        base.eval()
        base(input_ids=tokens.to(base.get_input_embeddings().weight.device))
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return moments


@torch.no_grad()
def balance(query_key: QueryKey, query_moment: torch.Tensor, key_moment: torch.Tensor, dims_slow_to_fast: torch.Tensor) -> None:
    """Rewrite one layer's query and key projections in the balanced basis of each head; q.k stays what it was."""
    query, query_bias, key, key_bias = (tensor.double() for tensor in query_key.tensors())
    num_heads, head_dim, _ = query_moment.shape
    factors = [_factor(moment) for moment in (query_moment, key_moment)]
    if not all(torch.isfinite(factor).all() for factor in factors):
        raise PosswapError("query or key weights are not finite, or a head of them is zero: pass warm_start=False")
    left, strengths, _ = torch.linalg.svd(factors[1].transpose(1, 2) @ factors[0])
    change = strengths.rsqrt()[..., None] * (left.transpose(1, 2) @ factors[1].transpose(1, 2))  # A: (H, D, D)
    inverse = torch.linalg.inv(change).transpose(1, 2)  # A^-T
    order = dims_slow_to_fast.to(query.device)
    placed = torch.empty_like(change), torch.empty_like(inverse)
    placed[0][:, order], placed[1][:, order] = (
        change,
        inverse,
    )  # row i, the i-th in importance, goes to dimension order[i]
    for matrix, weight, bias in ((placed[0], query, query_bias), (placed[1], key, key_bias)):
        weight.copy_((matrix @ weight.view(num_heads, head_dim, -1)).flatten(0, 1))
        bias.copy_((matrix @ bias.view(num_heads, head_dim, 1)).flatten())
    for target, value in zip(query_key.tensors(), (query, query_bias, key, key_bias), strict=True):
        target.copy_(value)


def _factor(moment: torch.Tensor) -> torch.Tensor:
    # A little on the diagonal, relative to its size: heads of real checkpoints have nearly dead directions.
    floor = 1e-6 * moment.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(torch.finfo(moment.dtype).tiny)
    eye = torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)
    factor, failed = torch.linalg.cholesky_ex(moment + floor[:, None, None] * eye)
    return factor.masked_fill((failed != 0)[:, None, None], torch.nan)
