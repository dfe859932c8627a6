"""Attention with a bias by distance in O(L * block) memory, forward and backward.

    s_ij = scale * q_i . k_j + b_(j - i),   z_i = sum_j softmax(s_i)_j v_j

With keys in reversed order, key L - 1 - c is at distance L - 1 - (i + c) from query i: each row of the bias is the row before,
a step further on. So torch's fused CPU kernel gets it as a view of 2 L - 1 values. The kernel gives no gradient of a mask, and
the way that does holds L x L tensors; so the backward pass is our own, a block of queries at a time (the same five products).
There the sum over pairs of one distance is a sum over rows, each written one column further right than the row before.
"""

import math

import torch

from hf_posswap.functional.first_order import first_order
from hf_posswap.functional.relative_window import LOG2_E, dense, plain_attention, product_into

BLOCK = 128  # queries at a time
SCORES = 2**19  # at a time: of some heads, so that they stay in the processor's cache


def attend_by_distance(query, key, value, bias: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Return attention (B, H, L, D) of L queries on as many keys, on a CPU.

    `bias` (H, 2 L - 1) holds the values for distances from L - 1 (the last key, seen by the first query) down to 1 - L.
    """
    if causal:
        ahead = torch.arange(bias.shape[-1], device=bias.device) < query.shape[-2] - 1
        bias = bias.masked_fill(ahead, torch.finfo(bias.dtype).min)
    return DistanceAttention.apply(dense(query), key.flip(-2), value.flip(-2), bias, scale, causal)[0]


class DistanceAttention(torch.autograd.Function):
    """(B, H, L, D), keys and values in reversed order, bias (H, 2 L - 1) -> (B, H, L, D), log-sum-exps."""

    @staticmethod
    def forward(query, key, value, bias, scale, causal):
        mask = bias.unfold(-1, query.shape[-2], 1)[None]
        return plain_attention(query, key, value, 0.0, False, attn_mask=mask, scale=scale)

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart from forward, for torch.func
        *tensors, ctx.scale, ctx.causal = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_order
    def backward(ctx, grad_output, _):
        *tensors, bias, output, logsumexp = ctx.saved_tensors
        batch, heads, length, _ = output.shape
        precise = torch.promote_types(output.dtype, torch.float32)
        grads = [output.new_zeros(states.shape, dtype=precise) for states in tensors]
        grad_bias = output.new_zeros(bias.shape, dtype=precise)
        bias = bias.to(precise) * LOG2_E
        block = min(BLOCK, length)
        step = min(heads, math.ceil(SCORES / (block * length)))
        scratch = [bias.new_empty(step * block * (length + block - 1)) for _ in range(2)]
        for sequence, head in ((sequence, head) for sequence in range(batch) for head in range(0, heads, step)):
            where = sequence, slice(head, head + step)
            query, key, value, states, grad = (t[where].to(precise) for t in (*tensors, output, grad_output))
            grad_query, grad_key, grad_value = (grad[where] for grad in grads)
            delta = (states * grad).sum(-1, keepdim=True)
            log = logsumexp[where][..., None] * LOG2_E
            for start in range(0, length, block):
                rows = slice(start, min(length, start + block))
                size = rows.stop - rows.start
                keys = slice(length - rows.stop if ctx.causal else 0, length)  # reversed: the last ones are the first
                seen = length - keys.start
                width = seen + size - 1
                places = slice(start + keys.start, start + keys.start + width)  # in the bias
                weights, shifted = (part[: len(query) * size * width].view(-1, size, width) for part in scratch)
                weights = weights[..., :seen]
                product_into(weights, query[:, rows], key[:, keys].mT, ctx.scale * LOG2_E)
                weights.add_(bias[where[1], places].unfold(-1, seen, 1)).sub_(log[:, rows]).exp2_()
                grad_value[:, keys].baddbmm_(weights.mT, grad[:, rows])
                # Of the scores: row a begins at column a.
                of_scores = shifted.zero_().as_strided(weights.shape, (size * width, width + 1, 1), shifted.storage_offset())
                product_into(of_scores, grad[:, rows], value[:, keys].mT, 1.0)
                of_scores.sub_(delta[:, rows]).mul_(weights)
                grad_query[:, rows].baddbmm_(of_scores, key[:, keys], alpha=ctx.scale)
                grad_key[:, keys].baddbmm_(of_scores.mT, query[:, rows], alpha=ctx.scale)
                grad_bias[where[1], places] += shifted.sum(-2)
        grads = [grad.to(output.dtype) for grad in (*grads, grad_bias)]
        return *grads, None, None
