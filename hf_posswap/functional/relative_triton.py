"""Clipped relative attention (schemes/relative.py: Shaw et al. 2018, section 3.2, https://arxiv.org/abs/1803.02155) as fused
Triton kernels in the manner of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691), exact, forward and backward:
the formula of `relative_attention`.

With the two identities of `relative_window`, there is nothing to add far to the left, and one number per query far to the
right; only tiles on the band between look anything up. Such a lookup, and what the band sums up, is a "band" of W numbers per
query: column c belongs to r = c + 1, the last column to everything far to the right. Causal, W = clip and no key is on the
right; otherwise W = 2 * clip. No (Q, K) tensor exists and nothing is added up atomically: memory is O(Q * W), results are the
same in every run.

Shapes: B batch, H heads, Q query length, K key length, D head_dim, R = 2 * clip + 1. The kernels take queries, keys and
values as (B, length, H, D), which is how transformers' projections lie in memory, bands as (H, B, Q, W), and one number per
query as (H, B, Q). The grid is (tiles, H, B). A kernel's PART says where its tile lies: 0 far left, 1 on the band, 2 far right.
In the helpers for tiles `queries` and `keys` are (n, 1) and (1, m), or the other way round.

Triton is optional. Without it this module can be imported, and `why_not` says so.
"""

from __future__ import annotations  # without triton there is no tl.constexpr

import torch

from hf_posswap.errors import PosswapError
from hf_posswap.functional.first_order import first_order

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_HEAD_DIM = 256


def why_not(query: torch.Tensor) -> str | None:
    """Return None if `fused_relative_attention` can run on this tensor (..., D), otherwise the reason."""
    if triton is None:
        return "triton is not installed"
    interpreted = not isinstance(_forward, triton.JITFunction)  # TRITON_INTERPRET=1 when this module was imported
    if not interpreted and query.device.type != "cuda":
        return f"triton needs a CUDA device, the tensors are on {query.device}"
    if not interpreted and torch.version.hip is None and torch.cuda.get_device_capability(query.device) < (8, 0):
        return "triton needs a GPU of compute capability 8.0 or above"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernel is for float16, bfloat16 and float32, not {query.dtype}"
    if interpreted and query.dtype == torch.bfloat16:
        return "triton's interpreter multiplies the bits of bfloat16 matrices as integers"
    if query.shape[-1] > MAX_HEAD_DIM:
        return f"head_dim {query.shape[-1]} is above {MAX_HEAD_DIM}"
    return None


def fused_relative_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_table: torch.Tensor, value_table: torch.Tensor | None,
    clip: int, causal: bool, key_mask: torch.Tensor | None, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return z as (B, H, Q, D), differentiable once in all five tensors.

    Arguments are those of `relative_attention`, which has asked `why_not`.
    """
    # No distance reaches key_length: a longer table would only make the bands wider.
    reach = min(clip, key.shape[-2])
    width = reach if causal else 2 * reach
    rows = slice(clip - reach, clip - reach + width + 1)
    if query.shape[-2] * width >= 2**31:
        raise PosswapError(f"{query.shape[-2]} queries times {width} distances are too many: the kernel counts in 32 bits")
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    heads = query.shape[2]

    from_far_left = _relative_to_first_row(key_table[..., rows, :], heads)  # (H, W, D)
    biases = torch.einsum("bqhd,hwd->hbqw", query, from_far_left)
    if value_table is None:
        return _BandAttention.apply(query, key, value, biases, key_mask, reach, causal, scale, False)[0].transpose(1, 2)
    value = value + value_table[..., rows.start, :]
    output, masses = _BandAttention.apply(query, key, value, biases, key_mask, reach, causal, scale, True)
    from_far_left = _relative_to_first_row(value_table[..., rows, :], heads)
    return (output + torch.einsum("hbqw,hwd->bqhd", masses, from_far_left)).transpose(1, 2)


def _relative_to_first_row(table: torch.Tensor, heads: int) -> torch.Tensor:
    return (table[..., 1:, :] - table[..., :1, :]).expand(heads, -1, -1)


class _BandAttention(torch.autograd.Function):
    """Attention with scores scale * (q_i . k_j + biases[i, column of j - i]).

    Returns the output (B, Q, H, D) and, with `values`, the probabilities summed by column (H, B, Q, W), else None.
    The tables are left to autograd, which also provides the gradient of those sums.
    """

    @staticmethod
    def forward(ctx, query, key, value, biases, key_mask, clip, causal, scale, values):
        query, key, value, biases = (tensor.contiguous() for tensor in (query, key, value, biases))
        key_mask = None if key_mask is None else key_mask.contiguous()
        batch, length, heads, _ = query.shape
        output = torch.empty_like(query)
        masses = torch.zeros_like(biases) if values else None  # no key has the columns beyond either end of the sequence
        log_sums = query.new_empty(biases.shape[:-1], dtype=torch.float32)
        numbers = (length, key.shape[1], clip, float(scale), causal)
        constants = _constants(query)
        with torch.cuda.device_of(query):  # triton launches on the current device
            grid = (triton.cdiv(length, constants["BLOCK_Q"]), heads, batch)
            _forward[grid](query, key, value, biases, key_mask, output, masses, log_sums, *numbers, **constants)
        ctx.save_for_backward(query, key, value, biases, key_mask, output, masses, log_sums)
        ctx.numbers, ctx.constants = numbers, constants
        return output, masses

    @staticmethod
    @first_order
    def backward(ctx, d_output, d_masses):
        query, key, value, biases, key_mask, output, masses, log_sums = ctx.saved_tensors
        d_output = d_output.contiguous()
        d_masses = None if masses is None else d_masses.contiguous()
        d_query, d_key, d_value = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        d_biases, deltas = torch.zeros_like(biases), torch.empty_like(log_sums)
        batch, length, heads, _ = query.shape
        with torch.cuda.device_of(query):
            inputs = (query, key, value, biases, key_mask, d_output, d_masses, log_sums, deltas)
            grid = (triton.cdiv(length, ctx.constants["BLOCK_Q"]), heads, batch)
            _backward_queries[grid](*inputs, output, masses, d_query, d_biases, *ctx.numbers, **ctx.constants)
            grid = (triton.cdiv(key.shape[1], ctx.constants["BLOCK_K"]), heads, batch)
            _backward_keys[grid](*inputs, d_key, d_value, *ctx.numbers, **ctx.constants)
        return d_query, d_key, d_value, d_biases, None, None, None, None, None


def _constants(query: torch.Tensor) -> dict[str, int]:
    head_dim = query.shape[-1]
    block_d = max(16, triton.next_power_of_2(head_dim))  # tl.dot takes powers of two from 16
    block_q, block_k, warps = _tiles(block_d, query.dtype)
    # Fused multiply-adds are triton's default up to 3.9, which warns who does not choose.
    return dict(D=head_dim, BLOCK_Q=block_q, BLOCK_K=block_k, BLOCK_D=block_d, num_warps=warps, enable_fp_fusion=True)


def _tiles(block_d: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return queries per tile, keys per tile, warps.

    Not tuned on a GPU: as large as the compiler (for capability 8.0 and 9.0) keeps in registers with few spills or none,
    and in 99 KB of shared memory, which every GPU since then has.
    """
    if dtype == torch.float32:
        return (32, 32, 8) if block_d <= 64 else (16, 16, 4)
    if block_d <= 128:
        return 64, 32, 4 if block_d <= 64 else 8
    return 32, 32, 8


def _jit(function):
    return function if triton is None else triton.jit(function)


@_jit
def _this_band(pointer, query_length, width):
    """The first number of this batch row and head in (H, B, Q, width)."""
    return pointer + (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * query_length * width


@_jit
def _vectors(pointer, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Addresses of the vectors `rows` of this batch row and head in (B, length, H, D), and which of them exist."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    first = (tl.program_id(2).to(tl.int64) * length * tl.num_programs(1) + tl.program_id(1)) * D
    return pointer + first + rows.to(tl.int64)[:, None] * (tl.num_programs(1) * D) + dims, (rows < length)[:, None] & (dims < D)


@_jit
def _load_vectors(pointer, rows, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    addresses, exists = _vectors(pointer, rows, length, D, BLOCK_D)
    return tl.load(addresses, mask=exists, other=0.0)


@_jit
def _store_vectors(pointer, rows, length, vectors, D: tl.constexpr, BLOCK_D: tl.constexpr):
    addresses, exists = _vectors(pointer, rows, length, D, BLOCK_D)
    tl.store(addresses, vectors.to(pointer.dtype.element_ty), mask=exists)


@_jit
def _look_up(band, queries, columns, query_length, width, PART: tl.constexpr):
    """The band's number for each query and key, 0 far to the left."""
    found = 0.0
    if PART > 0:
        # A column of numbers, not one: the interpreter of triton 3.9 refuses masks that a scalar's comparison went into.
        column = tl.minimum(columns, width - 1) if PART == 1 else queries * 0 + width - 1
        found = tl.load(band + (queries * width + column), mask=(queries < query_length) & (column >= 0), other=0.0)
    return found


@_jit
def _store_band(band, tile, queries, columns, query_length, width, CAUSAL: tl.constexpr):
    """Write the tile's numbers to their columns, but for those that share the last one far to the right."""
    own = (columns >= 0) & (columns < (width if CAUSAL else width - 1)) & (queries < query_length)
    tl.store(band + (queries * width + columns), tile.to(band.dtype.element_ty), mask=own)


@_jit
def _sum_far_right(tile, columns, width, PART: tl.constexpr):
    """The sum over the keys far to the right, one for each row of the tile."""
    total = 0.0
    if PART > 0:
        total = tl.sum(tl.where(columns >= width - 1, tile, 0.0) if PART == 1 else tile, 1)
    return total


@_jit
def _scores(
    left, right, queries, keys, biases, key_mask, query_length, key_length, clip, scale,
    CAUSAL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The scores left @ right^T + biases in units of log 2, -inf where a key is not attended, and the column of each.

    A column is below 0 far to the left, and from the last one on, far to the right; in causal models none is attended there.
    """
    columns = keys - queries - (key_length - query_length) + clip - 1
    scores = tl.dot(left, tl.trans(right), input_precision="ieee")
    scores += _look_up(biases, queries, columns, query_length, clip if CAUSAL else 2 * clip, PART)
    scores *= scale * 1.4426950408889634
    if key_mask is not None or PART > 0:  # a tile far to the left has all its keys
        attended = keys < key_length
        if key_mask is not None:
            attended = tl.load(key_mask + tl.program_id(2).to(tl.int64) * key_length + keys, mask=attended, other=0) != 0
        if CAUSAL and PART > 0:
            attended = attended & (columns < clip)
        scores = tl.where(attended, scores, float("-inf"))
    return scores, columns


@_jit
def _range(first, before, after, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    """From where to where a tile of SIZE, which begins at `first`, visits blocks: before its band (0), on it (1), after it (2).

    The band of its first row begins `before` earlier, that of its last row ends `after` later.
    """
    start = tl.maximum(first - before, 0) // BLOCK * BLOCK
    end = tl.minimum(tl.cdiv(tl.maximum(first + SIZE + after, 0), BLOCK) * BLOCK, length)
    if PART == 0:
        start, end = 0, start
    elif PART == 2:
        start, end = end, length
    return start, end


@_jit
def _forward(
    query, key, value, biases, key_mask, output, masses, log_sums,
    query_length, key_length, clip, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program makes a tile of outputs, its masses by column and log-sum-exp, by the online softmax."""
    width = clip if CAUSAL else 2 * clip
    biases = _this_band(biases, query_length, width)
    first_query = tl.program_id(0) * BLOCK_Q
    first_place, after = first_query + key_length - query_length, 0 if CAUSAL else clip - 1
    rows = first_query + tl.arange(0, BLOCK_Q)
    queries = rows[:, None]
    q = _load_vectors(query, rows, query_length, D, BLOCK_D)

    # A finite start: a query without keys has no exp(-inf + inf).
    top = tl.full([BLOCK_Q], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    far_right = tl.zeros([BLOCK_Q], tl.float32)
    z = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for PART in tl.static_range(2 if CAUSAL else 3):
        start, end = _range(first_place, clip - 1, after, key_length, BLOCK_Q, BLOCK_K, PART)
        for first_key in range(start, end, BLOCK_K):
            places = first_key + tl.arange(0, BLOCK_K)
            keys = places[None, :]
            k = _load_vectors(key, places, key_length, D, BLOCK_D)
            s, columns = _scores(q, k, queries, keys, biases, key_mask, query_length, key_length, clip, scale, CAUSAL, PART)
            new_top = tl.maximum(top, tl.max(s, 1))
            p = tl.exp2(s - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            if masses is not None and not CAUSAL:
                far_right *= shrink
                far_right += _sum_far_right(p, columns, width, PART)
            v = _load_vectors(value, places, key_length, D, BLOCK_D)
            z = tl.dot(p.to(v.dtype), v, z * shrink[:, None], input_precision="ieee")
            top = new_top

    some = total > 0.0
    total = tl.where(some, total, 1.0)
    log_sum = tl.where(some, top + tl.log2(total), float("inf"))  # exp2(s - inf) = 0 in all that follows
    _store_vectors(output, rows, query_length, z / total[:, None], D, BLOCK_D)
    tl.store(_this_band(log_sums, query_length, 1) + rows, log_sum, mask=rows < query_length)
    if masses is not None:
        masses = _this_band(masses, query_length, width)
        if not CAUSAL:
            last = masses + (rows * width + width - 1)
            tl.store(last, (far_right / total).to(masses.dtype.element_ty), mask=rows < query_length)
        # The band's tiles once more, now that their sum is known.
        start, end = _range(first_place, clip - 1, after, key_length, BLOCK_Q, BLOCK_K, 1)
        for first_key in range(start, end, BLOCK_K):
            places = first_key + tl.arange(0, BLOCK_K)
            keys = places[None, :]
            k = _load_vectors(key, places, key_length, D, BLOCK_D)
            s, columns = _scores(q, k, queries, keys, biases, key_mask, query_length, key_length, clip, scale, CAUSAL, 1)
            p = tl.exp2(s - log_sum[:, None])
            _store_band(masses, p, queries, columns, query_length, width, CAUSAL)


@_jit
def _backward_queries(
    query, key, value, biases, key_mask, d_output, d_masses, log_sums, deltas, output, masses, d_query, d_biases,
    query_length, key_length, clip, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program makes the gradients of a tile of queries and of its biases, and leaves the deltas to _backward_keys."""
    width = clip if CAUSAL else 2 * clip
    biases, d_biases = _this_band(biases, query_length, width), _this_band(d_biases, query_length, width)
    first_query = tl.program_id(0) * BLOCK_Q
    first_place, after = first_query + key_length - query_length, 0 if CAUSAL else clip - 1
    rows = first_query + tl.arange(0, BLOCK_Q)
    queries = rows[:, None]
    q = _load_vectors(query, rows, query_length, D, BLOCK_D)
    dz = _load_vectors(d_output, rows, query_length, D, BLOCK_D)
    z = _load_vectors(output, rows, query_length, D, BLOCK_D)
    log_sum = tl.load(_this_band(log_sums, query_length, 1) + rows, mask=rows < query_length, other=float("inf"))

    # delta_i = sum_j p_ij dp_ij, by what the forward pass has summed already.
    delta = tl.sum(dz.to(tl.float32) * z.to(tl.float32), 1)
    if masses is not None:
        masses, d_masses = _this_band(masses, query_length, width), _this_band(d_masses, query_length, width)
        for first_column in range(0, width, BLOCK_K):
            columns = first_column + tl.arange(0, BLOCK_K)[None, :]
            numbers = queries * width + columns
            exists = (queries < query_length) & (columns < width)
            mass = tl.load(masses + numbers, mask=exists, other=0.0).to(tl.float32)
            delta += tl.sum(mass * tl.load(d_masses + numbers, mask=exists, other=0.0).to(tl.float32), 1)
    tl.store(_this_band(deltas, query_length, 1) + rows, delta, mask=rows < query_length)

    dq = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    far_right = tl.zeros([BLOCK_Q], tl.float32)
    for PART in tl.static_range(2 if CAUSAL else 3):
        start, end = _range(first_place, clip - 1, after, key_length, BLOCK_Q, BLOCK_K, PART)
        for first_key in range(start, end, BLOCK_K):
            places = first_key + tl.arange(0, BLOCK_K)
            keys = places[None, :]
            k = _load_vectors(key, places, key_length, D, BLOCK_D)
            v = _load_vectors(value, places, key_length, D, BLOCK_D)
            s, columns = _scores(q, k, queries, keys, biases, key_mask, query_length, key_length, clip, scale, CAUSAL, PART)
            dp = tl.dot(dz, tl.trans(v), input_precision="ieee")
            if d_masses is not None:
                dp += _look_up(d_masses, queries, columns, query_length, width, PART)
            ds = tl.exp2(s - log_sum[:, None]) * (dp - delta[:, None]) * scale
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
            if PART == 1:
                _store_band(d_biases, ds, queries, columns, query_length, width, CAUSAL)
            if not CAUSAL:
                far_right += _sum_far_right(ds, columns, width, PART)

    _store_vectors(d_query, rows, query_length, dq, D, BLOCK_D)
    if not CAUSAL:
        last = d_biases + (rows * width + width - 1)
        tl.store(last, far_right.to(d_biases.dtype.element_ty), mask=rows < query_length)


@_jit
def _backward_keys(
    query, key, value, biases, key_mask, d_output, d_masses, log_sums, deltas, d_key, d_value,
    query_length, key_length, clip, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program makes the gradients of a tile of keys and values. Its tiles are (keys, queries)."""
    width = clip if CAUSAL else 2 * clip
    biases = _this_band(biases, query_length, width)
    log_sums, deltas = _this_band(log_sums, query_length, 1), _this_band(deltas, query_length, 1)
    if d_masses is not None:
        d_masses = _this_band(d_masses, query_length, width)
    first_key = tl.program_id(0) * BLOCK_K
    first_place, before = first_key - (key_length - query_length), 0 if CAUSAL else clip - 1
    places = first_key + tl.arange(0, BLOCK_K)
    keys = places[:, None]
    k = _load_vectors(key, places, key_length, D, BLOCK_D)
    v = _load_vectors(value, places, key_length, D, BLOCK_D)

    dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for PART in tl.static_range(2 if CAUSAL else 3):
        # The band of queries around these keys; behind it, the keys are far to the left.
        start, end = _range(first_place, before, clip - 1, query_length, BLOCK_K, BLOCK_Q, 2 - PART)
        for first_query in range(start, end, BLOCK_Q):
            rows = first_query + tl.arange(0, BLOCK_Q)
            queries = rows[None, :]
            q = _load_vectors(query, rows, query_length, D, BLOCK_D)
            dz = _load_vectors(d_output, rows, query_length, D, BLOCK_D)
            log_sum = tl.load(log_sums + rows, mask=rows < query_length, other=float("inf"))
            delta = tl.load(deltas + rows, mask=rows < query_length, other=0.0)
            s, columns = _scores(k, q, queries, keys, biases, key_mask, query_length, key_length, clip, scale, CAUSAL, PART)
            p = tl.exp2(s - log_sum[None, :])
            dv = tl.dot(p.to(dz.dtype), dz, dv, input_precision="ieee")
            dp = tl.dot(v, tl.trans(dz), input_precision="ieee")
            if d_masses is not None:
                dp += _look_up(d_masses, queries, columns, query_length, width, PART)
            ds = p * (dp - delta[None, :]) * scale
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")

    _store_vectors(d_key, places, key_length, dk, D, BLOCK_D)
    _store_vectors(d_value, places, key_length, dv, D, BLOCK_D)
