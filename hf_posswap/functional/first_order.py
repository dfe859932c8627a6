"""Attention with a written-out backward pass: it has first derivatives, and says so where second ones are asked."""

from collections.abc import Callable
from functools import wraps

import torch

from hf_posswap.errors import PosswapError


def first_order(backward: Callable) -> Callable:
    """Let a Function's `backward` raise PosswapError under create_graph=True: its gradients have no graph.

    torch's `once_differentiable` raises in `.backward()`, but not in `autograd.grad`, and not at all where the gradient of the
    output is a constant: then, too, the gradients of q, k and v depend on q, k and v.
    """

    @wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            what = "this attention has first derivatives only"
            raise PosswapError(f"{what}: for second ones call model.set_attn_implementation('eager')")
        return backward(ctx, *grads)

    return checked
