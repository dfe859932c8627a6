"""Attention with clipped relative positions in O(L * block) memory, forward and backward: the formula of `relative_attention`.

Written out it takes (Q, K, D) tensors. Two identities leave O(L * clip) work beyond plain attention; both are exact:

1. Softmax does not see a constant that is added to a row. So every bias is taken relative to the far left, r = 0: keys
   there need none. Keys at the far right, r = 2 * clip, all have the same, q_i . (a^K_2clip - a^K_0), which shifts their
   log-sum-exp. Only the band |j - i| < clip has a bias for each pair, read from one (Q, R) product.
2. Probabilities of a row sum to one. So a^V_0 is added to the output once; the others are taken relative to it, their
   probabilities collected by distance, and one more product with the table does the rest.

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
from itertools import count

import torch

from hf_posswap.functional.first_order import first_order

LOG2_E = math.log2(math.e)

# torch's fused CPU kernel with its log-sum-exp, (B, H, L, D) -> (B, H, L, D), (B, H, L); scaled_dot_product_attention has only
# the first of the two.
plain_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
plain_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Plan:
    """How one call is divided into blocks."""

    queries: int
    keys: int
    clip: int
    causal: bool
    dropout: float
    scale: float
    far: str  # "fused": far parts by the fused kernel; "window": the window is the whole row
    block: int  # queries at a time
    heads: int  # heads at a time, of one sequence or of several

    def blocks(self) -> Iterator["Block"]:
        for start in range(0, self.queries, self.block):
            yield Block(self, start, min(self.queries, start + self.block))

    @property
    def band(self) -> int:
        """Distances with a vector of their own, not counting the far left and the far right."""
        return self.clip if self.causal else 2 * self.clip - 1

    def groups(self, batch: int, heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield (sequences, heads) that are worked on at a time: some heads of one sequence or all heads of some."""
        sequences = max(1, self.heads // heads)
        step = math.ceil(heads / math.ceil(heads / self.heads))  # even groups
        for sequence in range(0, batch, sequences):
            for head in range(0, heads, step):
                yield slice(sequence, sequence + sequences), slice(head, head + step)


class Block:
    """A block of queries: which keys its window holds, and where things lie in the scratch tensor of its scores.

    Scratch has a column for every place that the band of any row reaches, also before the first and after the last key, so that
    the band is a strided view; such columns hold -inf.
    """

    def __init__(self, plan: Plan, start: int, stop: int):
        self.rows = slice(start, stop)
        self.size = stop - start
        offset = plan.keys - plan.queries
        seen = min(plan.keys, stop + offset) if plan.causal else plan.keys  # keys that any of the rows may see
        first = start + offset - plan.clip + 1  # the leftmost key in the band of the first row
        last = stop + offset if plan.causal else stop + offset + plan.clip - 1  # after the rightmost in that of the last row
        self.keys = slice(0, seen)
        if plan.far == "fused":
            self.keys = slice(max(0, first), min(seen, last))
        self.left, self.right = slice(0, self.keys.start), slice(self.keys.stop, seen)  # what the fused kernel does
        origin = min(self.keys.start, first)
        self.width = max(self.keys.stop, last) - origin
        self.columns = slice(self.keys.start - origin, self.keys.stop - origin)  # those of `keys`
        self.band_column = first - origin
        # Right of the band: a triangle that is far right (or masked, when causal) for each row but the last, then keys
        # that are far right for all rows.
        self.triangle = slice(first - origin + plan.band, last - origin)
        self.beyond = slice(min(self.triangle.stop, self.columns.stop), self.columns.stop)

    def far_parts(self) -> list[tuple[slice, bool]]:
        """Return the keys on the left and on the right of the window that any row may see, and whether it is the right."""
        return [(part, part is self.right) for part in (self.left, self.right) if part.start < part.stop]

    def band(self, scratch: torch.Tensor, band: int) -> torch.Tensor:
        """Return the band as a view (G, rows, band): row a of it starts a columns further right."""
        heads, rows, width = scratch.shape
        start = scratch.storage_offset() + self.band_column
        return scratch.as_strided((heads, rows, band), (rows * width, width + 1, 1), start)


def dense(states: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a last stride of 1."""
    return states if states.stride(-1) == 1 else states.contiguous()


class Group:
    """Some heads of S sequences (`where`, of `Plan.groups`), flattened to (G, ...): tensors, and the steps of both passes."""

    def __init__(self, plan: Plan, where, query, key, value, key_table, value_table, first_value, key_mask, spare):
        self.plan, self.shape, self.spare = plan, query[where].shape, spare

        def table(rows):  # (H or 1, N, D) -> (G, N, D)
            if rows is not None:
                rows = rows[where[1]] if rows.shape[0] > 1 else rows
                return rows.expand(*self.shape[:2], -1, -1).flatten(0, 1)

        # (S, H, L, D) for the fused kernel, (G, L, D) for products.
        self.apart = query[where], key[where], value[where]
        if plan.far == "fused":
            # It reads keys and values once for every 64 queries: a quarter faster if contiguous. It assumes without a check
            # that the last stride of queries is 1.
            self.apart = dense(self.apart[0]), *(states.contiguous() for states in self.apart[1:])
        self.query, self.key, self.value = (states.flatten(0, 1) for states in self.apart)
        self.key_table, self.value_table, self.first_value = map(table, (key_table, value_table, first_value))
        # The dtype of sums, exponentials and totals over blocks: float32 at least.
        self.precise = torch.promote_types(query.dtype, torch.float32)
        # Likewise products that become scores: rounded to bfloat16, a score of 64 is off by a quarter.
        self.for_scores = [states.to(self.precise) for states in (self.query, self.key, self.key_table)]
        self.mask = None
        if key_mask is not None:
            lowest = torch.finfo(self.precise).min / 2  # not -inf: a row without keys must not become NaN
            mask = torch.zeros(key_mask[where[0]].shape, dtype=self.precise, device=query.device)
            self.mask = mask.masked_fill_(~key_mask[where[0]], lowest)[:, None, None]  # (S, 1, 1, K)
        block = min(plan.block, plan.queries)
        self.triangle = torch.ones(block, block - 1, dtype=self.precise, device=query.device).triu_()

    def scores(self, block: Block, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores of the block's window, in scratch columns, and those of the far right (G, rows, 1).

        They are in units of log 2, for exp2: torch.exp takes many times as long where it underflows.
        """
        plan, (query, key, key_table) = self.plan, self.for_scores
        query = query[:, block.rows]
        by_distance = _product(query, key_table.mT, self.precise, plan.scale * LOG2_E)  # (G, rows, R - 1)
        scores = self.spread(block, scratch, query, key, by_distance, plan.scale * LOG2_E, -math.inf)
        if plan.causal:
            scores[..., block.triangle].masked_fill_(self.triangle[: block.size, : block.size - 1] > 0, -math.inf)
        if self.mask is not None:
            shape = (*self.shape[:2], *scores.shape[1:])
            scores.view(shape)[..., block.columns].add_(self.mask[..., block.keys])
        return scores, by_distance[..., -1:]

    def spread(self, block: Block, scratch, rows, near, by_distance, scale: float, outside: float) -> torch.Tensor:
        """Return scale * rows . near for the keys of the window, plus what belongs to their distances."""
        plan, shape = self.plan, (len(self.query), block.size, block.width)
        window = scratch[: math.prod(shape)].view(shape)
        product_into(window[..., block.columns], rows, near[:, block.keys].mT, scale)
        window[..., : block.columns.start] = outside
        window[..., block.columns.stop :] = outside
        if by_distance is not None:
            block.band(window, plan.band).add_(by_distance[..., : plan.band])
            if not plan.causal:
                triangle = self.triangle[: block.size, : block.size - 1]
                window[..., block.triangle].addcmul_(by_distance[..., -1:], triangle)
                window[..., block.beyond].add_(by_distance[..., -1:])
        return window

    def by_distance(self, block: Block, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Collect a window's weights by distance, the transpose of `spread`: band (G, rows, band), far right (G, rows, 1).

        The band is a view where nothing is rounded.
        """
        dtype = self.query.dtype
        band = block.band(weights, self.plan.band).to(dtype)
        if self.plan.causal:
            return band, None
        triangle = weights[..., block.triangle]
        spare = self.spare[: triangle.numel()].view(triangle.shape)
        far = torch.mul(triangle, self.triangle[: block.size, : block.size - 1], out=spare).sum(-1, keepdim=True)
        return band, far.add_(weights[..., block.beyond].sum(-1, keepdim=True)).to(dtype)

    def fused_mask(self, block: Block, part: slice) -> torch.Tensor | None:
        """Return the mask of some keys as the fused kernel takes it, additive (S, 1, rows, keys); None if there is none."""
        if self.mask is None:
            return None
        dtype = self.query.dtype
        mask = self.mask[..., part].clamp(min=torch.finfo(dtype).min).to(dtype)
        return mask.expand(-1, -1, block.size, -1)

    def fused(self, block: Block, part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return plain attention with some keys, (G, rows, D), and its log-sum-exp in units of log 2, (G, rows, 1)."""
        query, key, value = self.apart
        tensors = query[:, :, block.rows], key[:, :, part], value[:, :, part]
        states, log = plain_attention(*tensors, 0.0, False, attn_mask=self.fused_mask(block, part), scale=self.plan.scale)
        return states.flatten(0, 1).to(self.precise), log.flatten(0, 1)[..., None] * LOG2_E

    def drop(self, weights: torch.Tensor, seed: int | None, number: int) -> torch.Tensor | None:
        """Return what multiplies the probabilities of block `number`; the same in both passes."""
        if seed is None:
            return None
        generator = torch.Generator(weights.device).manual_seed(seed + number)
        kept = torch.empty_like(weights).bernoulli_(1 - self.plan.dropout, generator=generator)
        return kept.div_(1 - self.plan.dropout)


class WindowedAttention(torch.autograd.Function):
    """(B, H, Q, D), (B, H, K, D) twice, tables relative to the far left (H or 1, N, D), a^V_0 -> (B, H, Q, D), log-sum-exps.

    `seed` is that of dropout; every block derives its own from it.
    """

    @staticmethod
    def forward(query, key, value, key_table, value_table, first_value, key_mask, plan, seed):
        batch, heads, queries, head_dim = query.shape
        # In the layout of the projection that follows, which then needs no copy.
        output = query.new_empty(batch, queries, heads, head_dim).transpose(1, 2)
        precise = torch.promote_types(query.dtype, torch.float32)
        logsumexp = torch.empty(batch, heads, queries, dtype=precise, device=query.device)
        scratch, spare = (_scratch(plan, batch, heads, precise, query.device) for _ in range(2))
        numbers = count()  # of blocks, over all groups
        for where in plan.groups(batch, heads):
            group = Group(plan, where, query, key, value, key_table, value_table, first_value, key_mask, spare)
            for block in plan.blocks():
                weights, far_right = group.scores(block, scratch)
                highest = weights.amax(-1, keepdim=True)
                weights.sub_(highest).exp2_()
                total = weights.sum(-1, keepdim=True)
                kept = group.drop(weights, seed, next(numbers))
                if kept is not None:
                    weights.mul_(kept)
                part = _product(weights[..., block.columns].to(query.dtype), group.value[:, block.keys], precise)
                if value_table is not None:
                    _add_table(part, group.by_distance(block, weights), group.value_table)
                log_total = total.log2_().add_(highest)  # (G, rows, 1)
                far = []  # the parts beside the window, each with its log-sum-exp
                for keys, is_right in block.far_parts():
                    states, log = group.fused(block, keys)
                    if is_right:  # all of them have one bias, and one vector for values
                        log += far_right
                        states = states if value_table is None else states.add_(group.value_table[:, -1:])
                    log_total = torch.logaddexp2(log_total, log)
                    far.append((states, log))
                part.mul_(highest.sub_(log_total).exp2_())
                for states, log in far:
                    part.addcmul_(states, log.sub_(log_total).exp2_())
                if first_value is not None:
                    part.add_(group.first_value)
                output[where][:, :, block.rows] = part.view(*group.shape[:2], *part.shape[1:])
                logsumexp[where][:, :, block.rows] = log_total.view(*group.shape[:2], -1)
        empty = _rows_without_keys(key_mask, plan)
        if empty is not None:
            output.masked_fill_(empty, 0)
        return output, logsumexp

    @staticmethod
    def setup_context(ctx, inputs, output):  # apart from forward, for torch.func
        *tensors, ctx.plan, ctx.seed = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @first_order
    def backward(ctx, grad_output, _):
        query, key, value, key_table, value_table, first_value, key_mask, output, logsumexp = ctx.saved_tensors
        plan, precise = ctx.plan, logsumexp.dtype
        batch, heads, _, _ = query.shape
        empty = _rows_without_keys(key_mask, plan)
        if empty is not None:
            grad_output = grad_output.masked_fill(empty, 0)
        grads = [query.new_zeros(states.shape, dtype=precise) for states in (query, key, value)]
        grad_tables = [query.new_zeros(batch, heads, *key_table.shape[1:], dtype=precise) for _ in range(2)]
        scratch, grad_scratch, spare = (_scratch(plan, batch, heads, precise, query.device) for _ in range(3))
        numbers = count()  # of blocks, over all groups
        for where in plan.groups(batch, heads):
            group = Group(plan, where, query, key, value, key_table, value_table, first_value, key_mask, spare)
            grad_query, grad_key, grad_value = (grad[where].flatten(0, 1) for grad in grads)  # views: grads are contiguous
            grad_key_table, grad_value_table = (grad[where].flatten(0, 1) for grad in grad_tables)
            grad_apart, output_apart = dense(grad_output[where]), output[where]
            group_grad = grad_apart.flatten(0, 1)
            far_key = None
            for block in plan.blocks():
                rows, keys, columns = block.rows, block.keys, block.columns
                block_query, block_grad = group.query[:, rows], group_grad[:, rows]
                block_output = output_apart[:, :, rows].flatten(0, 1)
                if first_value is not None:
                    block_output = block_output - group.first_value
                delta = (block_grad.to(precise) * block_output).sum(-1, keepdim=True)  # sum_j p_ij dp_ij, of the whole row
                log = logsumexp[where][:, :, rows]
                weights = group.scores(block, scratch)[0].sub_(log.flatten(0, 1)[..., None]).exp2_()
                kept = group.drop(weights, ctx.seed, next(numbers))
                # Gradients of the probabilities ...
                by_distance = None if value_table is None else _product(block_grad, group.value_table.mT, precise)
                window = group.spread(block, grad_scratch, block_grad, group.value, by_distance, 1.0, 0.0)
                dropped = weights
                if kept is not None:
                    window.mul_(kept)
                    dropped = kept.mul_(weights)
                _add_product(grad_value[:, keys], dropped[..., columns].to(query.dtype).mT, block_grad)
                # ... and of the scores.
                window.sub_(delta).mul_(weights)
                of_scores = window[..., columns].to(query.dtype)
                _add_product(grad_query[:, rows], of_scores, group.key[:, keys], plan.scale)
                _add_product(grad_key[:, keys], of_scores.mT, block_query, plan.scale)
                sums = group.by_distance(block, window)
                _add_table(grad_query[:, rows], sums, group.key_table, plan.scale)
                _add_table_gradient(grad_key_table, sums, block_query, plan.scale)
                if value_table is not None:
                    _add_table_gradient(grad_value_table, group.by_distance(block, dropped), block_grad)
                for part, is_right in block.far_parts():
                    part_key, part_output = group.apart[1], block_output
                    if is_right:  # one vector for all keys; that for all values acts through delta alone
                        if far_key is None:
                            far_key = part_key + group.key_table[:, -1:].view(*group.shape[:2], 1, -1)
                        part_key = far_key
                        if value_table is not None:
                            part_output = part_output - group.value_table[:, -1:]
                    states = group.apart[0][:, :, rows], part_key[:, :, part], group.apart[2][:, :, part]
                    part_output = part_output.view(*group.shape[:2], *part_output.shape[1:])
                    options = {"attn_mask": group.fused_mask(block, part), "scale": plan.scale}
                    of_query, of_key, of_value = plain_attention_backward(
                        grad_apart[:, :, rows], *states, part_output, log * math.log(2), 0.0, False, **options
                    )
                    grad_query[:, rows] += of_query.flatten(0, 1)
                    of_key, of_value = of_key.flatten(0, 1), of_value.flatten(0, 1)
                    grad_key[:, part] += of_key
                    grad_value[:, part] += of_value
                    if is_right:
                        grad_key_table[:, -1] += of_key.sum(1, dtype=precise)
                        grad_value_table[:, -1] += of_value.sum(1, dtype=precise)

        def table(grad, like):
            return None if like is None else grad.sum(0).sum_to_size(like.shape).to(like.dtype)

        grad_first = None
        if first_value is not None:  # probabilities sum to one
            grad_first = grad_output.sum((0, 2), dtype=precise)[:, None].sum_to_size(first_value.shape).to(first_value.dtype)
        grads = [grad.to(query.dtype) for grad in grads]
        return *grads, table(grad_tables[0], key_table), table(grad_tables[1], value_table), grad_first, None, None, None


def _scratch(plan: Plan, batch: int, heads: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for the scores of any block; allocating it for each block would take longer than some of the work."""
    most = max(block.size * block.width for block in plan.blocks())
    return torch.empty(min(plan.heads, batch * heads) * most, dtype=dtype, device=device)


def _rows_without_keys(key_mask: torch.Tensor | None, plan: Plan) -> torch.Tensor | None:
    """Return True for queries whose keys are all masked, (B, 1, Q or 1, 1)."""
    if key_mask is None:
        return None
    seen = key_mask.cumsum(-1)[:, -plan.queries :] if plan.causal else key_mask.sum(-1, keepdim=True)
    return (seen == 0)[:, None, :, None]


def _product(left, right, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """Return scale * left @ right, (G, N, M), in `dtype`."""
    out = torch.empty(len(left), left.shape[1], right.shape[2], dtype=dtype, device=left.device)
    product_into(out, left, right, scale)
    return out


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Write scale * left @ right, (G, N, M), into `out`, in its dtype."""
    if out.dtype == left.dtype:
        # beta=0: the input is not read.
        torch.baddbmm(out.new_empty(1, 1, 1), left, right, beta=0, alpha=scale, out=out)
    else:
        torch.mul(torch.bmm(left, right), scale, out=out)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=scale)
    else:
        total.add_(torch.bmm(left * scale if scale != 1 else left, right))


def _add_table(total: torch.Tensor, sums: tuple, table: torch.Tensor, scale: float = 1.0) -> None:
    """Add scale * (weights by distance) @ table to (G, rows, D)."""
    band, far = sums
    _add_product(total, band, table[:, : band.shape[2]], scale)
    if far is not None:
        total.addcmul_(far.to(total.dtype), table[:, -1:].to(total.dtype), value=scale)


def _add_table_gradient(total: torch.Tensor, sums: tuple, rows: torch.Tensor, scale: float = 1.0) -> None:
    """Add scale * (weights by distance)^T @ rows to (G, N, D)."""
    band, far = sums
    _add_product(total[:, : band.shape[2]], band.mT, rows, scale)
    if far is not None:
        _add_product(total[:, -1:], far.mT, rows, scale)
