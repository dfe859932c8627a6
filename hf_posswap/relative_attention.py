"""Exact attention with clipped relative positions (Shaw et al. 2018, section 3.2) at nearly the cost of plain attention.

    s_ij = scale * q_i . (k_j + a^K_r),   z_i = sum_j softmax(s_i)_j (v_j + a^V_r),   r = clip(j - i, -clip, clip) + clip

Written out this takes (Q, K, D) tensors. Two identities leave O(L * clip) work beyond plain attention; both are exact:

1. Softmax does not see a constant that is added to a row. So every bias is taken relative to the far left, r = 0: keys
   there need none. Keys at the far right, r = 2 * clip, all have q_i . (a^K_2clip - a^K_0), which is what plain attention gives
   for the keys k_j + (a^K_2clip - a^K_0). Only the band |j - i| < clip has a bias of its own, read from one (Q, R) product.
2. Probabilities of a row sum to one. So a^V_0 goes into all values; at the far right v_j + (a^V_2clip - a^V_0) is attended
   to; in the band the probabilities are collected by distance and meet the table in one more product.

A block of queries therefore needs plain attention with the far left and the far right, and a window around the diagonal
that holds the band. Far parts go to the fused kernel (`far="fused"`) and are merged by log-sum-exp; or the window is the
whole row (`far="window"`), on every device and with dropout. The backward pass computes the window again and uses each part
with the log-sum-exp of the whole, as ring attention does. Nothing of size Q x K outlives its block.

Inside a window the band lies along diagonals: seen with a row stride that is one longer it is a rectangle, so it is read
and written as a strided view, without an index.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from hf_posswap.errors import PosswapError

IMPLEMENTATIONS = ("auto", "fused", "window", "triton")

# torch's fused CPU kernel with its log-sum-exp, (B, H, L, D) -> (B, H, L, D), (B, H, L); scaled_dot_product_attention has only
# the first of the two.
_plain_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_plain_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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

    Differentiable once, in all five tensors. A row whose keys are all masked gives zeros.

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
        implementation: "window" (all devices), "fused" (CPU, no dropout), "triton" (CUDA, no dropout), or "auto".

    Raises:
        PosswapError: Shapes, dtypes or devices that do not fit together, or an implementation that cannot run here.

    >>> query, key, value = torch.randn(3, 1, 2, 5, 8).unbind()
    >>> relative_attention(query, key, value, torch.zeros(2, 7, 8), clip=3).shape
    torch.Size([1, 2, 5, 8])
    """
    _check(query, key, value, key_table, value_table, clip, key_mask, dropout, implementation)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if implementation == "triton":
        from hf_posswap.relative_triton import fused_relative_attention

        return fused_relative_attention(
            query, key, value, key_table, value_table, clip=clip, causal=causal, key_mask=key_mask, scale=scale
        )
    if query.shape[2] == 1 and implementation == "auto":
        return _single_query(query, key, value, key_table, value_table, clip, key_mask, dropout, scale)
    plan = _plan(query, key, clip, causal, dropout, scale, implementation)
    # The far left is the reference of all distances (identity 1).
    relative_keys = _relative_to_far_left(key_table, query.dtype)
    relative_values = first_value = None
    if value_table is not None:
        relative_values = _relative_to_far_left(value_table, query.dtype)
        first_value = value_table[..., :1, :]
    return _WindowedAttention.apply(query, key, value, relative_keys, relative_values, first_value, key_mask, plan)


def _relative_to_far_left(table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return rows 1 ... R - 1 minus row 0, with a dimension for heads; differences are rounded once."""
    table = table if table.dim() == 3 else table[None]
    precise = table.to(torch.promote_types(dtype, torch.float32))
    return (precise[:, 1:] - precise[:, :1]).to(dtype)


def _check(query, key, value, key_table, value_table, clip, key_mask, dropout, implementation) -> None:
    tensors = {"query": query, "key": key, "value": value, "key_table": key_table}
    if value_table is not None:
        tensors["value_table"] = value_table
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        raise PosswapError(f"query, key and value must be (batch, heads, length, head_dim); given were {shapes}")
    batch, heads, queries, head_dim = query.shape
    if key.shape != value.shape or key.shape[:2] != (batch, heads) or key.shape[3] != head_dim:
        raise PosswapError(f"query, key and value must have the same batch, heads and head_dim; given were {shapes}")
    if queries > key.shape[2] or queries < 1:
        raise PosswapError(f"queries are the last places of the sequence, so 1 or more and no more than keys: {shapes}")
    if isinstance(clip, bool) or not isinstance(clip, int) or clip < 1:
        raise PosswapError(f"clip={clip!r} must be an integer of at least 1")
    rows = 2 * clip + 1
    for name in ("key_table", "value_table"):
        if name in tensors and tensors[name].shape not in ((heads, rows, head_dim), (rows, head_dim)):
            raise PosswapError(
                f"{name} must be (heads, 2 * clip + 1, head_dim) = ({heads}, {rows}, {head_dim}), or ({rows}, {head_dim}) for "
                f"all heads; with clip={clip} given were {shapes}"
            )
    if not query.is_floating_point() or len({(tensor.dtype, tensor.device) for tensor in tensors.values()}) > 1:
        kinds = ", ".join(f"{name} {tensor.dtype} on {tensor.device}" for name, tensor in tensors.items())
        raise PosswapError(f"all tensors must share one floating-point dtype and one device; given were {kinds}")
    if key_mask is not None:
        wanted = (batch, key.shape[2])
        if key_mask.shape != wanted or key_mask.dtype != torch.bool or key_mask.device != query.device:
            raise PosswapError(
                f"key_mask must be boolean, of shape (batch, keys) = {wanted}, on {query.device}; given was "
                f"{key_mask.dtype} of shape {tuple(key_mask.shape)} on {key_mask.device}. A mask for each pair of query and "
                "key is not taken here: eager attention has that"
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
        from hf_posswap.relative_triton import why_not

        if reason := why_not(query):
            raise PosswapError(f"implementation='triton' cannot run here: {reason}; use 'auto' or 'window'")


@dataclass(frozen=True)
class _Plan:
    """How one call is cut up."""

    queries: int
    keys: int
    clip: int
    causal: bool
    dropout: float
    scale: float
    far: str  # "fused": far parts by the fused kernel; "window": the window is the whole row
    block: int  # queries at a time
    heads: int  # heads at a time, of one sequence or of several

    def blocks(self) -> Iterator["_Block"]:
        for start in range(0, self.queries, self.block):
            yield _Block(self, start, min(self.queries, start + self.block))

    @property
    def band(self) -> int:
        """Distances with a vector of their own, not counting the far left and the far right."""
        return self.clip if self.causal else 2 * self.clip - 1

    def groups(self, batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield (sequences, heads) that are worked on at a time: some heads of one sequence or all heads of some."""
        if self.heads < heads:
            step = math.ceil(heads / math.ceil(heads / self.heads))  # even groups
            for sequence in range(batch):
                for head in range(0, heads, step):
                    yield slice(sequence, sequence + 1), slice(head, head + step)
        else:
            step = self.heads // heads
            for sequence in range(0, batch, step):
                yield slice(sequence, sequence + step), slice(0, heads)


# Scores that are held at a time, for each thread: what fits into a core's second-level cache next to keys and values.
# Results in recipes/results/attention: with twice or half of it the CPU is slower.
_SCORES_PER_THREAD = 400_000


def _plan(query, key, clip, causal, dropout, scale, implementation) -> _Plan:
    """Choose by shape, from measurements on CPUs (recipes/benchmark_attention.py); other devices take the same blocks.

    Far parts pay for the fused kernel once they are longer than the window.
    """
    queries, keys = query.shape[2], key.shape[2]
    fused = query.device.type == "cpu" and not dropout and keys >= 1024 and queries >= 256
    far = implementation if implementation != "auto" else "fused" if fused else "window"
    block = 256 if far == "fused" else 128
    width = min(keys, block + 2 * clip) if far == "fused" else keys
    threads = torch.get_num_threads() if query.device.type == "cpu" else 64
    heads = max(1, _SCORES_PER_THREAD * threads // (min(queries, block) * width))
    return _Plan(queries, keys, clip, causal, dropout, scale, far, block, heads)


class _Block:
    """A block of queries: which keys its window holds, and where things lie in the scratch tensor of its scores.

    Columns of scratch run over all keys that the band of some row would reach, also those before the first and after the
    last key, so that the band is a strided view; such columns hold -inf.
    """

    def __init__(self, plan: _Plan, start: int, stop: int):
        self.rows = slice(start, stop)
        self.size = stop - start
        offset = plan.keys - plan.queries
        self.seen = min(plan.keys, stop + offset) if plan.causal else plan.keys  # keys that any of the rows may see
        first = start + offset - plan.clip + 1  # the leftmost key in the band of the first row
        last = stop + offset if plan.causal else stop + offset + plan.clip - 1  # after the rightmost in that of the last row
        if plan.far == "fused":
            self.left, self.right = max(0, first), min(self.seen, last)
        else:
            self.left, self.right = 0, self.seen
        self.beyond = min(self.right, last)  # keys of the window from here on are far right for all rows
        origin = min(self.left, first)
        self.width = max(self.right, last) - origin
        self.near_columns = slice(self.left - origin, self.beyond - origin)
        self.beyond_columns = slice(self.beyond - origin, self.right - origin)
        self.band_column = first - origin
        # Right of the band: a triangle that is far right (or masked, when causal) for each row but the last.
        self.triangle = slice(first - origin + plan.band, last - origin)

    def band(self, scratch: torch.Tensor, band: int) -> torch.Tensor:
        """Return the band as a view (G, rows, band): row a of it starts a columns further right."""
        heads, rows, width = scratch.shape
        start = scratch.storage_offset() + self.band_column
        return scratch.as_strided((heads, rows, band), (rows * width, width + 1, 1), start)


class _Group:
    """One group of heads, flattened to (G, ...): its tensors, and the steps that both passes share."""

    def __init__(self, plan: _Plan, where, query, key, value, key_table, value_table, first_value, key_mask):
        def flat(states):
            return states[where].flatten(0, 1)  # contiguous; (B, L, H, D) is how projections lie in memory

        def table(rows):  # (H or 1, N, D) -> (G, N, D)
            sequences = range(*where[0].indices(query.shape[0]))
            heads = query[where].shape[1]
            rows = rows[where[1]] if rows.shape[0] > 1 else rows
            return rows.expand(len(sequences), heads, -1, -1).flatten(0, 1)

        self.plan = plan
        self.query, self.key, self.value = flat(query), flat(key), flat(value)
        count = plan.band + (0 if plan.causal else 1)
        self.key_table = table(key_table)[:, :count]
        self.value_table = None
        if value_table is not None:
            self.value_table = table(value_table)[:, :count]
            self.value = self.value + table(first_value)
        self.far_key = self.far_value = None
        if not plan.causal:
            self.far_key = self.key + self.key_table[:, -1:]
            self.far_value = self.value if value_table is None else self.value + self.value_table[:, -1:]
        # Sums, exponentials and what is added up over blocks: in float32 at least.
        self.precise = torch.promote_types(query.dtype, torch.float32)
        self.mask = None
        if key_mask is not None:
            lowest = torch.finfo(self.precise).min / 2  # not -inf: a row without keys must not become NaN on the way
            mask = torch.zeros(key_mask[where[0]].shape, dtype=self.precise, device=query.device)
            mask = mask.masked_fill_(~key_mask[where[0]], lowest)[:, None, :]
            self.mask = mask.expand(-1, query[where].shape[1], -1).flatten(0, 1)[:, None]  # (G, 1, K)
        block = min(plan.block, plan.queries)
        self.triangle = torch.ones(block, block - 1, dtype=self.precise, device=query.device).triu_()

    def scratch(self) -> torch.Tensor:
        """Return memory for the scores of any block; fresh memory for each would cost more than some of the work on it."""
        most = max(block.size * block.width for block in self.plan.blocks())
        return torch.empty(len(self.query) * most, dtype=self.precise, device=self.query.device)

    def window(self, block: _Block, scratch: torch.Tensor) -> torch.Tensor:
        return scratch[: len(self.query) * block.size * block.width].view(len(self.query), block.size, block.width)

    def scores(self, block: _Block, scratch: torch.Tensor) -> torch.Tensor:
        """Return the scores of the block's window, in scratch columns."""
        plan, scores = self.plan, self.window(block, scratch)
        query = self.query[:, block.rows]
        self.products(block, scores, query, self.key, self.far_key, plan.scale, -math.inf)
        by_distance = _product(query, self.key_table.mT, self.precise, plan.scale)  # (G, rows, band + 1)
        block.band(scores, plan.band).add_(by_distance[..., : plan.band])
        triangle = self.triangle[: block.size, : block.size - 1]
        if plan.causal:
            scores[..., block.triangle].masked_fill_(triangle > 0, -math.inf)
        else:
            scores[..., block.triangle].addcmul_(by_distance[..., plan.band :], triangle)
        if self.mask is not None:
            scores[..., block.near_columns].add_(self.mask[..., block.left : block.beyond])
            scores[..., block.beyond_columns].add_(self.mask[..., block.beyond : block.right])
        return scores

    def products(self, block: _Block, out, rows, near, far, scale: float, outside: float) -> None:
        """Write rows . near (or far, where keys are far right for all rows) to the window."""
        _product_into(out[..., block.near_columns], rows, near[:, block.left : block.beyond].mT, scale)
        if block.beyond < block.right:
            _product_into(out[..., block.beyond_columns], rows, far[:, block.beyond : block.right].mT, scale)
        out[..., : block.near_columns.start] = outside
        out[..., block.beyond_columns.stop :] = outside

    def by_distance(self, block: _Block, weights: torch.Tensor) -> torch.Tensor:
        """Collect a window's weights by distance, (G, rows, band + 1); the last, unless causal, is the far right."""
        plan = self.plan
        sums = weights.new_empty(len(weights), block.size, self.key_table.shape[1])
        sums[..., : plan.band] = block.band(weights, plan.band)
        if not plan.causal:
            triangle = self.triangle[: block.size, : block.size - 1].to(weights.dtype)
            sums[..., plan.band] = (weights[..., block.triangle] * triangle).sum(-1)
        return sums

    def far_parts(self, block: _Block) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice, torch.Tensor | None]]:
        """Yield keys, values, where they lie, and the mask, of the parts that the window leaves to the fused kernel."""
        for keys, values, part in (
            (self.key, self.value, slice(0, block.left)),
            (self.far_key, self.far_value, slice(block.right, block.seen)),
        ):
            if part.start < part.stop:
                mask = None
                if self.mask is not None:
                    mask = self.mask[:, None, :, part].clamp(min=torch.finfo(keys.dtype).min).to(keys.dtype)
                    mask = mask.expand(-1, -1, block.size, -1)
                yield keys[:, None, part], values[:, None, part], part, mask

    def drop(self, weights: torch.Tensor, seed: int | None, number: int) -> torch.Tensor | None:
        """Return what multiplies the probabilities of block `number`; the same in both passes."""
        if seed is None:
            return None
        generator = torch.Generator(weights.device).manual_seed(seed + number)
        kept = torch.empty_like(weights).bernoulli_(1 - self.plan.dropout, generator=generator)
        return kept.div_(1 - self.plan.dropout)


class _WindowedAttention(torch.autograd.Function):
    """(B, H, Q, D), (B, H, K, D) twice, tables relative to the far left (H or 1, R - 1, D), a^V_0 -> (B, H, Q, D)."""

    @staticmethod
    def forward(ctx, query, key, value, key_table, value_table, first_value, key_mask, plan):
        batch, heads, queries, head_dim = query.shape
        # As the projection that follows reads it; no copy then.
        output = query.new_empty(batch, queries, heads, head_dim).transpose(1, 2)
        precise = torch.promote_types(query.dtype, torch.float32)
        logsumexp = torch.empty(batch, heads, queries, dtype=precise, device=query.device)
        # One draw from the caller's generator; every block then has its own seed.
        seed = int(torch.randint(2**62, ())) if plan.dropout else None
        number = 0
        for where in plan.groups(batch, heads):
            group = _Group(plan, where, query, key, value, key_table, value_table, first_value, key_mask)
            scratch = group.scratch()
            for block in plan.blocks():
                weights = group.scores(block, scratch)
                highest = weights.amax(-1, keepdim=True)
                weights.sub_(highest).exp_()
                total = weights.sum(-1, keepdim=True)
                kept = group.drop(weights, seed, number)
                number += 1
                if kept is not None:
                    weights.mul_(kept)
                weights = weights.to(query.dtype)
                part = _product(weights[..., block.near_columns], group.value[:, block.left : block.beyond], precise)
                if block.beyond < block.right:
                    _add_product(part, weights[..., block.beyond_columns], group.far_value[:, block.beyond : block.right])
                if group.value_table is not None:
                    _add_product(part, group.by_distance(block, weights), group.value_table)
                log_total = total.log().add_(highest)  # (G, rows, 1)
                fused = [
                    (states[:, 0], log[:, 0, :, None])
                    for keys, values, _, mask in group.far_parts(block)
                    for states, log in [
                        _plain_attention(
                            group.query[:, None, block.rows], keys, values, 0.0, False, attn_mask=mask, scale=plan.scale
                        )
                    ]
                ]
                for _, log in fused:
                    log_total = torch.logaddexp(log_total, log)
                part.mul_(highest.sub_(log_total).exp_())
                for states, log in fused:
                    part.addcmul_(states.to(precise), log.sub(log_total).exp_())
                shape = output[where][:, :, block.rows].shape
                output[where][:, :, block.rows] = part.view(shape)
                logsumexp[where][:, :, block.rows] = log_total.view(shape[:-1])
        empty = _rows_without_keys(key_mask, plan)
        if empty is not None:
            output.masked_fill_(empty, 0)
        ctx.save_for_backward(query, key, value, key_table, value_table, first_value, key_mask, output, logsumexp)
        ctx.plan, ctx.seed = plan, seed
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        query, key, value, key_table, value_table, first_value, key_mask, output, logsumexp = ctx.saved_tensors
        plan, precise = ctx.plan, logsumexp.dtype
        batch, heads, _, head_dim = query.shape
        empty = _rows_without_keys(key_mask, plan)
        if empty is not None:
            grad_output = grad_output.masked_fill(empty, 0)
        grad_query, grad_key, grad_value = (torch.empty_like(states) for states in (query, key, value))
        grad_tables = [torch.zeros(heads, key_table.shape[1], head_dim, dtype=precise, device=query.device) for _ in "kv"]
        number = 0
        for where in plan.groups(batch, heads):
            group = _Group(plan, where, query, key, value, key_table, value_table, first_value, key_mask)
            grads = _group_backward(
                group,
                grad_output[where].flatten(0, 1),
                output[where].flatten(0, 1),
                logsumexp[where].flatten(0, 1)[..., None],
                ctx.seed,
                number,
            )
            number += len(list(plan.blocks()))
            shape = query[where].shape
            grad_query[where] = grads[0].view(shape)
            shape = key[where].shape
            grad_key[where] = grads[1].view(shape)
            grad_value[where] = grads[2].view(shape)
            for total, part in zip(grad_tables, grads[3:], strict=True):
                total[where[1], : part.shape[1]] += part.view(*shape[:2], *part.shape[1:]).sum(0)
        shared = key_table.shape[0] == 1
        grad_key_table, grad_value_table = (total.sum(0, keepdim=True) if shared else total for total in grad_tables)
        grad_first = None
        if value_table is None:
            grad_value_table = None
        else:
            grad_first = grad_value.sum((0, 2), dtype=precise)[:, None]
            grad_first = grad_first.sum(0) if first_value.dim() == 2 else grad_first
            grad_first, grad_value_table = grad_first.to(query.dtype), grad_value_table.to(query.dtype)
        return grad_query, grad_key, grad_value, grad_key_table.to(query.dtype), grad_value_table, grad_first, None, None


def _group_backward(group: _Group, grad_output, output, logsumexp, seed, number):
    """Return the gradients of query, key, value, key table and value table for one group of heads."""
    plan, query = group.plan, group.query
    delta = (grad_output.to(logsumexp.dtype) * output).sum(-1, keepdim=True)  # sum_j p_ij dp_ij, of the whole row
    grad_query = torch.zeros(query.shape, dtype=group.precise, device=query.device)
    grad_key, grad_value, grad_far_key, grad_far_value = (
        torch.zeros(group.key.shape, dtype=group.precise, device=query.device) for _ in range(4)
    )
    grad_tables = [torch.zeros(group.key_table.shape, dtype=group.precise, device=query.device) for _ in "kv"]
    scratch, grad_scratch = group.scratch(), group.scratch()
    for block in plan.blocks():
        rows, near, beyond = block.rows, slice(block.left, block.beyond), slice(block.beyond, block.right)
        block_query, block_grad = query[:, rows], grad_output[:, rows]
        weights = group.scores(block, scratch).sub_(logsumexp[:, rows]).exp_()
        kept = group.drop(weights, seed, number)
        number += 1
        # Gradients of the probabilities ...
        grads = group.window(block, grad_scratch)
        group.products(block, grads, block_grad, group.value, group.far_value, 1.0, 0.0)
        if group.value_table is not None:
            by_distance = _product(block_grad, group.value_table.mT, group.precise)
            block.band(grads, plan.band).add_(by_distance[..., : plan.band])
            if not plan.causal:
                triangle = group.triangle[: block.size, : block.size - 1]
                grads[..., block.triangle].addcmul_(by_distance[..., plan.band :], triangle)
        dropped = weights
        if kept is not None:
            grads.mul_(kept)
            dropped = kept.mul_(weights)
        dropped = dropped.to(query.dtype)
        _add_product(grad_value[:, near], dropped[..., block.near_columns].mT, block_grad)
        if block.beyond < block.right:
            _add_product(grad_far_value[:, beyond], dropped[..., block.beyond_columns].mT, block_grad)
        if group.value_table is not None:
            _add_product(grad_tables[1], group.by_distance(block, dropped).mT, block_grad)
        # ... and of the scores.
        grads = grads.sub_(delta[:, rows]).mul_(weights).to(query.dtype)
        by_distance = group.by_distance(block, grads)
        _add_product(grad_tables[0], by_distance.mT, block_query, plan.scale)
        _add_product(grad_query[:, rows], by_distance, group.key_table, plan.scale)
        _add_product(grad_query[:, rows], grads[..., block.near_columns], group.key[:, near], plan.scale)
        _add_product(grad_key[:, near], grads[..., block.near_columns].mT, block_query, plan.scale)
        if block.beyond < block.right:
            _add_product(grad_query[:, rows], grads[..., block.beyond_columns], group.far_key[:, beyond], plan.scale)
            _add_product(grad_far_key[:, beyond], grads[..., block.beyond_columns].mT, block_query, plan.scale)
        for keys, values, part, mask in group.far_parts(block):
            left = part.start == 0 and part.stop == block.left
            of_query, of_key, of_value = _plain_attention_backward(
                block_grad[:, None],
                block_query[:, None],
                keys,
                values,
                output[:, None, rows],
                logsumexp[:, None, rows, 0],
                0.0,
                False,
                attn_mask=mask,
                scale=plan.scale,
            )
            grad_query[:, rows] += of_query[:, 0]
            (grad_key if left else grad_far_key)[:, part] += of_key[:, 0]
            (grad_value if left else grad_far_value)[:, part] += of_value[:, 0]
    if not plan.causal:
        # Far-right keys and values are keys and values plus one vector.
        grad_tables[0][:, -1] += grad_far_key.sum(1)
        grad_tables[1][:, -1] += grad_far_value.sum(1)
        grad_key += grad_far_key
        grad_value += grad_far_value
    return grad_query, grad_key, grad_value, *grad_tables


def _rows_without_keys(key_mask: torch.Tensor | None, plan: _Plan) -> torch.Tensor | None:
    """Return True for queries whose keys are all masked, (B, 1, Q or 1, 1)."""
    if key_mask is None:
        return None
    seen = key_mask.cumsum(-1)[:, -plan.queries :] if plan.causal else key_mask.sum(-1, keepdim=True)
    return (seen == 0)[:, None, :, None]


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return scale * left @ right, (G, N, M), in `dtype`."""
    out = torch.empty(len(left), left.shape[1], right.shape[2], dtype=dtype, device=left.device)
    _product_into(out, left, right, scale)
    return out


def _product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    if out.dtype == left.dtype:
        torch.baddbmm(out.new_empty(1, 1, 1), left, right, beta=0, alpha=scale, out=out)  # beta=0: the input is not read
    else:
        torch.mul(torch.bmm(left, right), scale, out=out)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=scale)
    else:
        total.add_(torch.bmm(left, right), alpha=scale)


def _single_query(query, key, value, key_table, value_table, clip, key_mask, dropout, scale) -> torch.Tensor:
    """One query at the last place, as in generation: distances run along the keys, so plain slices do."""
    keys = key.shape[2]
    near = min(clip, keys)  # keys at distance 0 ... clip - 1; all others are far left
    band = slice(clip + 1 - near, clip + 1)
    query = query * scale
    by_distance = query @ key_table[..., : clip + 1, :].mT  # (B, H, 1, clip + 1)
    scores = query @ key.mT
    bias = by_distance[..., band]
    if near < keys:
        bias = torch.cat([by_distance[..., :1].expand(*scores.shape[:-1], keys - near), bias], dim=-1)
    scores = scores + bias
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    weights = torch.nn.functional.dropout(weights, dropout)
    output = weights @ value
    if value_table is not None:
        output = output + weights[..., keys - near :] @ value_table[..., band, :]
        if near < keys:
            output = output + weights[..., : keys - near].sum(-1, keepdim=True) * value_table[..., :1, :]
    if key_mask is not None:
        output = output.masked_fill(~key_mask.any(-1)[:, None, None, None], 0)
    return output
