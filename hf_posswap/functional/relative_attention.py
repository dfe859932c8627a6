"""Exact attention with clipped relative positions (Shaw et al. 2018, section 3.2) at nearly the cost of plain attention.

    s_ij = scale * q_i . (k_j + a^K_r),   z_i = sum_j softmax(s_i)_j (v_j + a^V_r),   r = clip(j - i, -clip, clip) + clip

`relative_attention` is a function of tensors and knows no models. It chooses by shape: plain slices for one query at the end of
a cache, `relative_triton` on GPUs that it was written for, `relative_window` for all else.
"""

import math

import torch

from hf_posswap.errors import PosswapError
from hf_posswap.functional.relative_window import Plan, WindowedAttention

IMPLEMENTATIONS = ("auto", "fused", "window", "triton")


@torch.compiler.disable  # with dynamic shapes, compiled writes to strided views are wrong
def relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_table: torch.Tensor,
    value_table: torch.Tensor | None = None,
    *,
    clip: int,
    causal: bool = False,
    key_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    implementation: str = "auto",
) -> torch.Tensor:
    """Return attention with Shaw's clipped relative positions, (B, H, Q, D); see the formula at the top of this module.

    Differentiable once, in all five tensors, which share a dtype and a device. A row whose keys are all masked gives zeros. A
    masked key or value must be finite: NaN times zero is NaN, as in torch's own attention.

    Args:
        query: (B, H, Q, D), the last Q places of the sequence: query i sits at place i + K - Q. Q <= K.
        key: (B, H, K, D).
        value: (B, H, K, D).
        key_table: a^K, (H, R, D) or one for all heads (R, D), with R = 2 * clip + 1.
        value_table: a^V, of the same shape; None leaves the value term out.
        clip: Distances beyond it look alike.
        causal: Attend only to keys at or before the query's place.
        key_mask: (B, K) bool, True where a key may be attended to.
        dropout: The share of probabilities that are dropped; not with "fused" and "triton".
        scale: Of the scores; 1 / sqrt(D) by default.
        implementation: "window" (all devices), "fused" (CPU, no dropout), "triton" (CUDA, no dropout), or "auto",
            which takes "triton" where that runs.

    Raises:
        PosswapError: Tables that do not fit `clip`, more queries than keys, or an implementation that cannot run here.

    >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    >>> relative_attention(query, key, value, torch.zeros(2, 7, 8), clip=3).shape
    torch.Size([1, 2, 5, 8])
    """
    _check(query, key, value, key_table, value_table, clip, key_mask, dropout, implementation)
    if not query.numel():
        return torch.zeros_like(query)  # no queries
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if query.shape[2] == 1 and implementation == "auto":
        return _single_query(query, key, value, key_table, value_table, clip, key_mask, dropout, scale)
    if implementation == "triton" or (implementation == "auto" and _takes_kernel(query, min(clip, key.shape[2]), dropout)):
        from hf_posswap.functional.relative_triton import fused_relative_attention

        return fused_relative_attention(query, key, value, key_table, value_table, clip, causal, key_mask, scale)
    # No distance reaches the number of keys: table rows beyond it would only make windows wider.
    reach = min(clip, key.shape[2])
    key_table, value_table = (
        table if table is None else table[..., clip - reach : clip + reach + 1, :] for table in (key_table, value_table)
    )
    plan = _plan(query, key, reach, causal, dropout, scale, implementation)
    # The far left is the reference of all distances (identity 1).
    relative_keys = _relative_to_far_left(key_table, reach, causal, query.dtype)
    relative_values = first_value = None
    if value_table is not None:
        relative_values = _relative_to_far_left(value_table, reach, causal, query.dtype)
        first_value = value_table[..., :1, :] if value_table.dim() == 3 else value_table[None, :1]
        if dropout:  # what is kept of a row does not sum to one
            value, first_value = value + first_value, None
    seed = int(torch.randint(2**62, (), device="cpu")) if dropout else None  # one draw from the caller's generator
    return WindowedAttention.apply(query, key, value, relative_keys, relative_values, first_value, key_mask, plan, seed)[0]


def _relative_to_far_left(table: torch.Tensor, clip: int, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return rows 1 ... 2 * clip (clip, when causal) minus row 0, (H or 1, N, D); differences are rounded once."""
    precise = (table if table.dim() == 3 else table[None]).to(torch.promote_types(dtype, torch.float32))
    return (precise[:, 1 : clip + 1 if causal else None] - precise[:, :1]).to(dtype)


def _check(query, key, value, key_table, value_table, clip: int, key_mask, dropout: float, implementation: str) -> None:
    tables = [table for table in (key_table, value_table) if table is not None]
    sizes = {(2 * clip + 1, heads) for heads in (1, query.shape[1])}
    fits = clip > 0 and all((table.shape[-2], len(table) if table.dim() == 3 else 1) in sizes for table in tables)
    fits &= key.shape[:2] == query.shape[:2] and key.shape[:3] == value.shape[:3] and query.shape[2] <= key.shape[2]
    if not fits or (key_mask is not None and key_mask.shape != key.shape[::2]):
        rows, shapes = 2 * clip + 1, ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, *tables))
        raise PosswapError(
            f"with clip={clip} tables must be (heads, {rows}, head_dim) or ({rows}, head_dim), clip at least 1, values as many "
            f"as keys, a mask (batch, keys), and queries, the last places, no more than keys: these are {shapes}"
        )
    if not 0 <= dropout < 1:
        raise PosswapError(f"dropout={dropout!r} must lie in [0, 1)")
    if implementation not in IMPLEMENTATIONS:
        raise PosswapError(f"implementation={implementation!r} is not one of {', '.join(map(repr, IMPLEMENTATIONS))}")
    if implementation in ("fused", "triton") and dropout:
        raise PosswapError(f"implementation={implementation!r} has no dropout, given was {dropout}: use 'auto' or 'window'")
    if implementation == "fused" and query.device.type != "cpu":
        raise PosswapError(f"implementation='fused' runs on CPU, the tensors are on {query.device}: use 'auto' or 'window'")
    if implementation == "triton":
        from hf_posswap.functional.relative_triton import why_not

        if reason := why_not(query):
            raise PosswapError(f"implementation='triton' cannot run here: {reason}; use 'auto' or 'window'")


# Numbers in the kernel's table of scores by distance: half a gigabyte in 16 bits, and another where there are value tables.
_LARGEST_BAND = 2**28


def _takes_kernel(query: torch.Tensor, reach: int, dropout: float) -> bool:
    """Whether "auto" takes the Triton kernel, 18 to 25 times as fast as the window on an H100 (recipes/results)."""
    if query.device.type != "cuda" or dropout or math.prod(query.shape[:3]) * 2 * reach > _LARGEST_BAND:
        return False
    from hf_posswap.functional.relative_triton import why_not

    return why_not(query) is None


# Scores that are held at a time, for each thread: about what fits into a core's second-level cache. Twice or half of it
# makes little difference; all heads of a long sequence at once, a fifth.
_SCORES_PER_THREAD = 600_000


def _plan(query, key, clip, causal, dropout, scale, implementation) -> Plan:
    """Choose by shape, from measurements on CPUs (recipes/benchmark_attention.py); other devices take the same blocks.

    Far parts pay for the fused kernel once they are longer than the window.
    """
    queries, keys = query.shape[2], key.shape[2]
    fused = query.device.type == "cpu" and not dropout and keys >= 1024 and queries >= 256
    far = implementation if implementation != "auto" else "fused" if fused else "window"
    block = 256 if far == "fused" else 128
    width = min(keys, block + 2 * clip) if far == "fused" else keys
    # With dropout, blocks are those of one thread: each block draws its own numbers, and a seed must determine them.
    threads = 1 if dropout else torch.get_num_threads() if query.device.type == "cpu" else 64
    heads = max(1, _SCORES_PER_THREAD * threads // (min(queries, block) * width))
    return Plan(queries, keys, clip, causal, dropout, scale, far, block, heads)


def _single_query(query, key, value, key_table, value_table, clip, key_mask, dropout, scale) -> torch.Tensor:
    """Attention of one query at the last place, as in generation: distances go up by one, so slices suffice."""
    keys = key.shape[2]
    near = min(clip, keys)  # keys at distance 0 ... clip - 1; all others are far left
    here = slice(keys - near, keys)
    band = slice(clip + 1 - near, clip + 1)
    query = query * scale
    scores = query @ key.mT
    by_distance = query @ key_table[..., : clip + 1, :].mT  # (B, H, 1, clip + 1)
    if near < keys:
        scores[..., : keys - near].add_(by_distance[..., :1])
    scores[..., here].add_(by_distance[..., band])
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    output = weights @ value
    if value_table is not None:
        output = output + weights[..., here] @ value_table[..., band, :]
        if near < keys:
            output = output + weights[..., : keys - near].sum(-1, keepdim=True) * value_table[..., :1, :]
    if key_mask is not None:
        output = output.masked_fill(~key_mask.any(-1)[:, None, None, None], 0)
    return output
