"""Attention with a written-out backward pass: it has first derivatives, and says so where second ones are asked."""

from collections.abc import Callable
from functools import wraps

import torch

from hf_posswap.errors import PosswapError


def first_order(backward: Callable) -> Callable:
    """Let a Function's `backward` raise PosswapError where its gradients are differentiated, instead of giving wrong ones.

    torch's `once_differentiable` raises in `.backward()`, but not in `autograd.grad`, and not at all where the gradient of the
    output is a constant: then, too, the gradients of q, k and v depend on q, k and v.
    """

    @wraps(backward)
    def checked(ctx, *grads):
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        inputs = [one for one in (*ctx.saved_tensors, *grads) if isinstance(one, torch.Tensor) and one.requires_grad]
        return tuple(one if one is None else _Once.apply(one, *inputs) for one in found)

    return checked


class _Once(torch.autograd.Function):
    """Pass a gradient (...) on as it is, and raise where it is differentiated with respect to `inputs`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient, *inputs):
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, _):
        what = "this attention has first derivatives only"
        raise PosswapError(f"{what}: for second ones call model.set_attn_implementation('eager')")
