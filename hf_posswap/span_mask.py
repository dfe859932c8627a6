"""Masks of attention with a span, for each way that tokens come: with padding, a cache, or several texts in a row.

B batch, Q query length, K key length. Keys that nobody may see have the position `PADDING`.
"""

import math

import torch
from transformers.cache_utils import StaticCache

from hf_posswap.architectures import Inputs
from hf_posswap.attention import Tokens, self_cache
from hf_posswap.errors import PosswapError
from hf_posswap.functional.banded import Span
from hf_posswap.schemes.base import is_traced
from hf_posswap.span_cache import CHANGED_MASK, PADDING

FAR_SPAN = Span(PADDING, 0)  # as far as positions go


def additive(mask: torch.Tensor, base) -> torch.Tensor:
    """Return a bool mask, True = attend, as numbers to add to scores."""
    dtype = base.get_input_embeddings().weight.dtype  # `base.dtype` asks parameters, and replicas of DataParallel have none
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def check_mask(inputs: Inputs, past: int | torch.Tensor, cache) -> None:
    """Raise PosswapError unless a mask has 4 dimensions, or 2 and a column for each token so far (a static cache: or more)."""
    mask, batch, total = inputs.attention_mask, math.prod(inputs.shape[:-1]), past + inputs.shape[-1]
    if mask is None or mask.dim() == 4 or not isinstance(past, int):
        return
    fits, longer = mask.dim() == 2 and mask.shape[0] in (1, batch), isinstance(self_cache(cache), StaticCache)
    if not fits or mask.shape[-1] < total or (mask.shape[-1] > total and not longer):
        what = f"attention_mask of shape {tuple(mask.shape)} does not fit {batch} row(s) of {total} tokens"
        raise PosswapError(f"{what}, of which {past} are cached: give it 2 dimensions and a column for each")


def with_padding(tokens: Tokens, mask: torch.Tensor | None) -> torch.Tensor:
    """Return positions (B or 1, Q) with `PADDING` where a mask hides tokens, as keys take them into a span cache."""
    if mask is not None and mask.dim() == 4:  # a token that no query of this call sees
        mask = (mask if mask.dtype == torch.bool else mask > -1e3).any(1).any(1)
        mask = None if isinstance(tokens.past, int) and mask.shape[-1] < tokens.past + tokens.slots.shape[-1] else mask
    if mask is None or mask.dim() != 2:
        return tokens.positions
    return tokens.positions.masked_fill(~mask[:, tokens.slots[0]].bool(), PADDING)


def check_keys(keys: torch.Tensor, mask: torch.Tensor | None, tokens: Tokens) -> None:
    """Raise PosswapError if a span cannot serve these keys (B or 1, K), with `PADDING`: texts in a row, or a changed mask."""
    if is_traced() or not isinstance(tokens.past, int):
        return
    if not tokens.counted and (tokens.past or mask is not None) and (mask is None or mask.dim() != 4):
        real = keys.masked_fill(keys == PADDING, -1)
        if bool(((real[:, 1:] >= 0) & (real[:, 1:] <= real.cummax(-1).values[:, :-1])).any()):
            way = "without a cache and without a 2D attention_mask, which keeps the texts apart, or give each text its own row"
            raise PosswapError(f"position_ids go back, as for several texts in a row: with a span, read such rows {way}")
    # A 2D mask must say of cached keys what it said when they were read; once some are forgotten, nobody can tell.
    if tokens.past and mask is not None and mask.shape == keys.shape and bool(((keys == PADDING) == mask.bool()).any()):
        raise PosswapError(CHANGED_MASK)


def in_blocks(base, tokens: Tokens, mask: torch.Tensor | None) -> bool:
    """Whether attention can go block by block: sdpa, an empty cache, positions 0, 1, 2, ..., padding on the right only."""
    if base.config._attn_implementation != "sdpa" or is_traced() or not tokens.fresh:
        return False
    if mask is None or mask.dim() != 2:
        return mask is None and tokens.as_counted
    real = mask[:, : tokens.slots.shape[-1]].bool()  # RoBERTa and OPT give padding other positions
    return bool((real.int().diff(dim=-1) <= 0).all() and ((tokens.positions == tokens.slots) | ~real).all())


def of_the_whole_cache(keys: torch.Tensor, cache, slots: torch.Tensor) -> torch.Tensor:
    """Return the positions of keys, with `PADDING` where a static cache has not been written to."""
    cache = self_cache(cache)
    if not isinstance(cache, StaticCache):
        return keys
    size = cache.layers[0].max_cache_len
    keys = torch.nn.functional.pad(keys, (0, size - keys.shape[-1]), value=PADDING)
    return keys.masked_fill(torch.arange(size, device=keys.device) > slots[:, -1:], PADDING)


def near_mask(base, span: Span, tokens: Tokens, keys: torch.Tensor, mask) -> torch.Tensor:
    """Return the whole mask, (B or 1, 1, Q, K): within the span, no padding, and in packed texts the own text only.

    It is bool, or additive for eager attention and where the given one is.
    """
    positions, causal = tokens.positions, base.architecture.is_causal(base.config)
    allowed = (span.allowed(positions, keys, causal=causal) & (keys != PADDING)[:, None])[:, None]
    if causal and not tokens.counted:  # positions may go back, which a trace does not see: no key may stand behind its query
        ends = torch.arange(keys.shape[-1] - positions.shape[-1], keys.shape[-1], device=keys.device)
        last = torch.minimum(ends, tokens.slots)  # slots: in a static cache, which is longer; less, if keys were forgotten
        allowed = allowed & (torch.arange(keys.shape[-1], device=keys.device) <= last[0, :, None])
    if mask is not None and mask.dim() == 4:
        if mask.shape[-1] != keys.shape[-1]:
            what = f"attention_mask has {mask.shape[-1]} columns for {keys.shape[-1]} keys"
            raise PosswapError(f"{what}: with a span a cache forgets keys, so give it a mask of 2 dimensions")
        if mask.dtype != torch.bool:  # added as it is, as without a span, in the model's dtype
            dtype = base.get_input_embeddings().weight.dtype
            return torch.where(allowed, mask, torch.finfo(mask.dtype).min).clamp(min=torch.finfo(dtype).min).to(dtype)
        allowed = allowed & mask
    elif mask is not None and mask.shape[-1] == keys.shape[-1]:
        allowed = allowed & mask.bool()[:, None, None]
    if mask is None and tokens.fresh and tokens.given:
        text = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        among = torch.nn.functional.pad(text, (0, keys.shape[-1] - text.shape[-1]), value=-1)  # a static cache is longer
        allowed = allowed & (text[:, :, None] == among[:, None])[:, None]
    return additive(allowed, base) if base.config._attn_implementation == "eager" else allowed
