"""What runs before each forward of a swapped model: positions, length check, and what layers share.

It then calls the headless model's own forward, with `position_ids` filled in and with one more keyword, `shared_positions`: see
`PositionedAttention`.
"""

import functools
import inspect
import warnings

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from hf_posswap import span_mask
from hf_posswap.architectures import Inputs
from hf_posswap.attention import CACHE, Shared, Tokens, check_implementation, key_positions, let_carry, to_digits
from hf_posswap.errors import PosswapError, SequenceTooLongError
from hf_posswap.schemes.base import is_traced, transforms
from hf_posswap.span_cache import keep_span
from hf_posswap.surgery import check_edits, state_of

_FAR = 8  # an input of more than this many times the fitted length gives a warning


def positioned_forward(base_class: type):
    """Return a forward for the headless model: positions and lengths first, then the family's own."""
    names = list(inspect.signature(base_class.forward).parameters)[1:]

    @functools.wraps(base_class.forward)
    def forward(self, *args, **kwargs):
        arguments = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
        given = arguments.pop("past_key_values", None)
        if given is not None and arguments.get(CACHE) is None:
            arguments[CACHE] = given
        inputs = Inputs(*(arguments.get(name) for name in Inputs._fields))
        if (inputs.input_ids is None) == (inputs.inputs_embeds is None):
            return base_class.forward(self, **arguments)  # transformers says what is wrong
        scheme, span, implementation = state_of(self).scheme, state_of(self).span, self.config._attn_implementation
        check_implementation(scheme, span, implementation)
        mask = inputs.attention_mask
        if isinstance(mask, torch.Tensor) and mask.dim() == 3 and mask.shape == inputs.shape:  # rows of choices, as ids
            inputs = inputs._replace(attention_mask=mask.flatten(0, 1))
            mask = arguments["attention_mask"] = inputs.attention_mask
        if isinstance(mask, torch.Tensor) and mask.dim() == 4:
            if mask.dtype != torch.bool and not mask.is_floating_point():  # ones and zeros would be added to scores
                raise PosswapError(f"a 4D attention mask must be boolean or floating point, this one is {mask.dtype}")
            if implementation != "sdpa" and mask.dtype == torch.bool:
                # Eager and flex attention add masks: True would count as 1.0, where sdpa takes it for "attend".
                arguments["attention_mask"] = span_mask.additive(mask, self)
        past, slots = _slots(arguments.get(CACHE), inputs)
        if span is not None:
            span_mask.check_mask(inputs, past, arguments.get(CACHE))
            asked, causal = arguments.get("is_causal"), self.architecture.is_causal(self.config)
            if asked is not None and asked != causal:  # the family's forward writes it into the config, too late for a span
                raise PosswapError(f"with a span, is_causal={asked} belongs in the config: set model.config.is_causal")
        ids = arguments.get("position_ids")
        arguments["position_ids"], positions = _positions(self, inputs, ids, past, slots)
        tokens = Tokens(positions, slots, past, ids is not None)
        _check_length(self, scheme, tokens)
        if hasattr(self.architecture.self_attentions(self)[0], "positions"):
            arguments |= _share(self, arguments, tokens)
        return base_class.forward(self, **arguments)

    return forward


def _slots(cache, inputs: Inputs) -> tuple[int | torch.Tensor, torch.Tensor]:
    """Return how many tokens are cached, and the places of the new ones behind them, (1, L)."""
    # The paged cache of generate_batch, which is none of these, comes with position_ids.
    past = cache.get_seq_length() if isinstance(cache, Cache) else 0
    # Not added in place: a static cache returns its own counter, which the first layer then advances.
    slots = torch.arange(inputs.shape[-1], device=inputs.device)[None] + past
    if isinstance(past, torch.Tensor) and past.device.type == "cpu" and not torch.compiler.is_compiling():
        past = int(past)
    return past, slots


def _positions(base, inputs: Inputs, given, past, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids as the family counts them, and the positions that they mean, counted from 0; each (B or 1, L)."""
    first_id, padding = base.architecture.first_id(base.config), base.architecture.first_row(base.config) > 0
    if padding and hasattr(base.architecture.table(base), "base_layer"):  # what an adapter adds would be of other positions
        raise PosswapError("an adapter on these positions, which count from 0, reads the family's ids: adapt other modules")
    ids = base.architecture.position_ids(base, inputs, past) if given is None else _check_ids(given, inputs.shape[-1])
    if ids is None:
        return slots + first_id if first_id else slots, slots
    return ids, (ids - first_id).clamp(min=0) if padding else ids


def _check_ids(position_ids: torch.Tensor, length: int) -> torch.Tensor:
    if position_ids.shape[-1] != length or position_ids.dtype not in (torch.int64, torch.int32):
        what = f"position_ids of shape {tuple(position_ids.shape)} and type {position_ids.dtype} do not fit an input of"
        raise PosswapError(f"{what} {length} tokens: they must be integers of shape (batch or 1, {length})")
    return position_ids.view(-1, length)


def _check_length(base, scheme, tokens: Tokens) -> None:
    positions, slots, past, _ = tokens
    check_edits(base)
    limit = base.architecture.longest_input(base.config)
    # While a CUDA graph is captured, as generate_batch does, no value may be read, and a row may hold many short texts.
    captured = tokens.length is None and positions.is_cuda and not torch.compiler.is_compiling()
    captured = captured and torch.cuda.is_current_stream_capturing()
    needed = past + slots.shape[-1] if isinstance(past, int) and not captured else 0
    # Values are read only where that costs nothing: not while tracing, and not where it would wait for a GPU, unless there are
    # more tokens than positions, as in a row of several texts. Under vmap there are none to read.
    look = tokens.length is None and positions.numel() and (positions.device.type == "cpu" or needed > limit)
    if look and not torch.compiler.is_compiling() and "Vmap" not in transforms():
        needed = int(positions.max()) + 1
        if int(positions.min()) < 0:
            raise PosswapError(f"position_ids must not be negative, the smallest is {int(positions.min())}")
    state, fitted = state_of(base), base.config.position_scheme.get("fitted_length")
    if needed > limit:
        near = f", span={state.span.span}, first={state.span.first}" if state.span else ""
        again = ", which starts from the original, and fit it again" * bool(fitted and state.undo)
        what = f"the input reaches {needed} positions and this model with {scheme.name} positions was set up for {limit}"
        way = f"posswap.swap(model, {str(scheme)!r}, max_positions={needed}{near}){again}"
        raise SequenceTooLongError(f"{what}: call {way}, or truncate the input")
    far = fitted and needed > _FAR * fitted and any(kind.span is None for kind in state.kinds)
    if far and not torch.compiler.is_compiling():
        what = f"this model was fitted to texts of at most {fitted} tokens, and reads more than {_FAR} times as many"
        way = "swap with span=, or fit on longer text (text_batches(..., max_length=, window=))"
        warnings.warn(f"{what}: {way}", stacklevel=3)


def _share(base, arguments: dict, tokens: Tokens) -> dict:
    """Return the arguments to replace: what layers share of positions, by kind, the mask and the cache."""
    state, causal = state_of(base), base.architecture.is_causal(base.config)
    mask, cache, past = arguments.get("attention_mask"), arguments.get(CACHE), tokens.past
    attentions = base.architecture.self_attentions(base)
    modules = [attention.positions for attention in attentions]
    kinds = [state.kinds[module.kind] for module in modules]
    firsts = [modules[kind.first] for kind in state.kinds]
    # With a span every layer needs the positions of its keys; without, those of a kind's first layer serve all of them.
    carriers = [
        layer
        for layer, (module, kind) in enumerate(zip(modules, kinds, strict=True))
        if kind.span or (module.needs_key_positions and layer == kind.first)
    ]
    let_carry(cache, carriers, state.geometry.head_dim)
    if state.span is not None:
        use_cache = arguments.get("use_cache")
        use_cache = getattr(base.config, "use_cache", False) if use_cache is None else use_cache
        use_cache = use_cache and getattr(attentions[0], "layer_idx", None) is not None  # an ESM has no cache
        if cache is None and causal and use_cache and not base.training:  # the model itself would make one that keeps all keys
            crossing = arguments.get("encoder_hidden_states") is not None
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if crossing else DynamicCache()
    if causal and cache is not None:
        if (numbers := [attentions[layer].layer_idx for layer in carriers]) != carriers:
            what = f"layers were deleted or moved, and a cache would know layers {carriers} as {numbers}"
            raise PosswapError(f"{what}: set layer_idx of each self-attention to its place, or pass use_cache=False")
        # Values are read here, once for all layers, and only where a cache asks for them.
        look = state.span is not None and not is_traced()
        whole = look and (mask is None or bool(mask.all()))
        hidden = look and not whole and mask.dim() == 2 and isinstance(past, int) and not bool(mask[:, :past].all())
        spans, in_order = [kind.span for kind in kinds], whole and tokens.as_counted
        cache = keep_span(cache, spans, counted=tokens.counted, in_order=in_order, hidden=hidden)
    shared = tuple(_share_kind(base, first, kind, tokens, mask, cache) for first, kind in zip(firsts, state.kinds, strict=True))
    given = {"shared_positions": shared, "attention_mask": mask} | ({} if cache is None else {CACHE: cache})
    if all(one.mask is not None for one in shared) and not base.architecture.embeddings_read_mask:
        given["attention_mask"] = shared[0].mask  # of 4 dimensions, passed on as it is: the model makes no (Q, K) mask
    return given


def _share_kind(base, first, kind, tokens: Tokens, mask, cache, blocks: bool = True) -> Shared:
    """Return what layers of a kind share; `first` is the scheme's module in the first of them."""
    (positions, slots, past, _), given = tokens, mask
    causal, head_dim = base.architecture.is_causal(base.config), state_of(base).geometry.head_dim
    written = keys = span = key_mask = own = None
    if first.needs_key_positions or kind.span is not None:
        written = positions
        keys = key_positions(cache, positions, slots, past, head_dim, kind.first)
    if kind.span is not None:
        written = span_mask.with_padding(tokens, mask)
        seen = key_positions(cache, written, slots, past, head_dim, kind.first)  # as `keys`, but for padding
        if causal:
            span_mask.check_keys(seen, mask, tokens)
        # A text no longer than the span needs no mask for it, if its positions have no gaps. A program may read longer ones.
        program = torch.compiler.is_exporting() or torch.jit.is_tracing()
        if program or not (tokens.counted and tokens.fresh) or keys.shape[-1] > kind.span.span:
            if blocks and span_mask.in_blocks(base, tokens, mask):
                span, key_mask = kind.span, None if mask is None else mask.bool()
                mask = own = None if mask is None else key_mask[:, None, None]
            else:
                keys, seen = (span_mask.of_the_whole_cache(one, cache, slots) for one in (keys, seen))
                mask = own = span_mask.near_mask(base, kind.span, tokens, seen, mask)
    elif state_of(base).span is not None and mask is None and tokens.fresh and tokens.given:
        # Layers with a span keep packed texts apart, so those without one do, too.
        own = span_mask.near_mask(base, span_mask.FAR_SPAN, tokens, span_mask.of_the_whole_cache(positions, cache, slots), None)
    shared = first.prepare(positions, slots, tokens.length, keys, mask if isinstance(mask, torch.Tensor) else None)
    read = () if first.bias is None or first.attend is not None else ("causal", "in_order", "block")
    if not all(hasattr(shared, name) for name in read):
        way = f"has a `bias`, so its `prepare` must return Places, as super().prepare(...) does, not {type(shared).__name__}"
        raise PosswapError(f"{type(first).__name__} {way}")
    if span is not None and first.attend is not None and not hasattr(shared, "block"):  # it cannot be cut into blocks
        return _share_kind(base, first, kind, tokens, given, cache, blocks=False)
    if span is None and first.key_mask(shared) is not None:
        own = first.key_mask(shared)[:, None, None]
    written = None if written is None else to_digits(written)  # here, once for all layers
    return Shared(shared, written, kind.first if kind.span is None else None, span, key_mask, own)
