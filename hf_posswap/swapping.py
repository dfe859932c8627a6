"""Swap the positions of a model, restore the original, or get the original as a second model."""

import copy
import operator
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_posswap import checkpoint, scheme_entry, surgery
from hf_posswap.architectures import Architecture
from hf_posswap.attention import MOST_POSITIONS, check_implementation
from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import PosswapError
from hf_posswap.functional.banded import Span
from hf_posswap.functional.closed_form import balance, wide
from hf_posswap.pipelines import change, check_reads, is_pipeline, settings
from hf_posswap.scheme_entry import on_hub
from hf_posswap.schemes import SCHEMES, Constant, Scheme, check_class, parse_scheme
from hf_posswap.surgery import Undo, is_part, state_of, undo_of
from hf_posswap.target import check_not_in_composite, find_target, has_adapters
from hf_posswap.warm_start import balanced_order, query_key_moments


def swap(
    model: PreTrainedModel,
    scheme: Scheme | str,
    *,
    max_positions: int | None = None,
    warm_start: bool = True,
    span: int | None = None,
    first: int | None = None,
) -> PreTrainedModel:
    """Replace the learned absolute positions of a pretrained model by another scheme, in place; return the model.

    Args:
        model: A transformers model of a supported family (`ARCHITECTURES`), with any head; a PEFT model around one; or a
            sentence-transformers pipeline that begins with one, which then reads `max_positions` tokens.
        scheme: An instance such as `Rotary(theta=500_000)`, or a string such as "rotary:theta=500000,fraction=0.5".
        max_positions: The longest input of the swapped model, in tokens; by default the checkpoint's own.
        warm_start: Start as close to the original as its weights allow: project sinusoids onto the old table, keep the
            table's mean vector and row 0, give rotary a balanced basis in encoders. False drops the table.
        span: Attend only to keys at a distance below this, in tokens; None: to all. Reading then takes linear time and memory,
            and each generated token constant ones (`functional.banded`); but see `Mixed`.
        first: With a span, how many tokens at the beginning all tokens also attend to. By default 4 in causal models, and 1 in
            encoders, [CLS]; in these they attend to all, too.

    `posswap.fit` wins back most of what a warm start loses, in minutes for a small model. A second swap starts from the
    original again, not from the first swap. Weights that an optimizer holds stay the same objects, but new parameters appear:
    make the optimizer after the swap.

    Raises:
        PosswapError: The model, the scheme or an option cannot be used. The message says why; the model is unchanged.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    >>> _ = swap(model, "relative:clip=8", max_positions=1024)
    >>> model.position_scheme
    Relative(clip=8, values=True, share_heads=False, key_query=False, vectors='learned')
    """
    if torch.is_inference_mode_enabled():
        raise PosswapError("a swap inside torch.inference_mode() would make parameters that can never be trained: swap outside")
    scheme = parse_scheme(scheme)
    check_class(type(scheme))
    if SCHEMES.get(scheme.name, type(scheme)) is not type(scheme):
        what = f"{type(scheme).__name__} is named {scheme.name!r} like {SCHEMES[scheme.name].__name__}"
        raise PosswapError(f"{what}, and a saved model of it would load as that one: give it a name of its own")
    scheme_entry.check_options(scheme)
    target, architecture = find_target(model)
    if is_part(target):
        raise PosswapError("this is the inner part of a swapped model, whose config names the scheme: swap the whole model")
    check_not_in_composite(target)
    check_implementation(scheme, span, target.config._attn_implementation)
    undo = undo_of(target)
    if undo is not None:
        _check_layers(target, architecture, undo)
    if undo is not None and undo.fingerprint != surgery.fingerprint(target, architecture):
        why = "trained, cast, loaded, or adapters were added"
        what = f"this model's weights have changed since it was swapped to {target.position_scheme} ({why})"
        way = "call posswap.restore(model) to swap the original, or save and load the model to swap it as it is"
        raise PosswapError(f"{what}: {way}")
    start = surgery.take_snapshot(target, architecture, weights=False) if undo is None else undo.snapshot
    if undo is None and start.state is None:
        if (rows := len(architecture.trained_rows(target.base_model))) != start.max_positions:
            what = f"the config says {start.max_positions} positions, and the table has {rows}"
            raise PosswapError(f"{what}: let the config say what the table has, and give swap another length as max_positions")
    elif undo is None:
        surgery.check_edits(target)
        if any(hasattr(one, "modules_to_save") for one in surgery.position_modules(target, architecture)):
            raise PosswapError("PEFT keeps a copy of these positions (modules_to_save): swap after merge_and_unload()")
    asked, held, most = max_positions, start.max_positions, MOST_POSITIONS
    max_positions = held if asked is None else _integer("max_positions", asked, held, most, f"; the model holds {held:,} now")
    check_reads(model, max_positions if asked is None else None)
    # A loaded swapped model knows how long its original's table was; any other one has that table.
    trained = start.max_positions if start.state is None else start.state.geometry.trained_positions
    geometry = surgery.geometry_of(target.config, max_positions, trained)
    scheme.check(geometry)
    near = _check_span(span, first, max_positions, architecture.is_causal(target.config))
    if near is not None and not any(spans for _, spans in scheme.kinds()):
        raise PosswapError(f"span={span} holds in no layer of {scheme}: take span=false out of an entry, or leave out span")
    orders = balanced_order(target, architecture, scheme, geometry, start) if warm_start else None
    # Three snapshots: `start` is what is swapped, `before` where an error goes back to, `original` where `restore` does.
    before = surgery.take_snapshot(target, architecture, weights=orders is not None or start.query_keys is not None)
    if start.attention_weights is not None:  # fitted since: going back to the original undoes that
        before.attention_weights = surgery.copy_attention_weights(architecture.self_attentions(target.base_model))
    try:
        if undo is not None:
            _revert(target, architecture, undo)
        # Query and key weights are kept only when they are about to be rewritten: restore touches nothing else.
        original = surgery.take_snapshot(target, architecture, weights=orders is not None)
        _install(target, architecture, scheme, geometry, near, warm_start, orders)
        beside, known = surgery.weights_beside_positions(target, architecture), {} if undo is None else undo.weights
        state_of(target).undo = Undo(
            snapshot=original,
            fingerprint=surgery.fingerprint(target, architecture),
            # What was trained between two swaps is no original: its record stays that of the first. Attention is as it was.
            # A record of another shape, of a vocabulary that was resized meanwhile, says nothing.
            weights={
                name: old if not inside and (old := known.get(name)) and old.shape == one.shape else surgery.Weight(one)
                for name, (one, inside) in beside.items()
            },
            config_fields=copy.deepcopy(vars(target.config)),
            name_or_path=target.name_or_path if undo is None else undo.name_or_path,
            pipeline=(undo and undo.pipeline) or settings(model),
        )
        own = (p for module in surgery.position_modules(target, architecture) for p in module.parameters())
        if has_adapters(target) and any(p.requires_grad for p in own):
            what = "the new positions train beside the adapters, and PEFT's save_pretrained leaves them out"
            warnings.warn(f"{what}: freeze them, or swap, save and load the model before PEFT", stacklevel=2)
    except BaseException:
        surgery.revert(target, architecture, before)
        raise
    reads = None if asked is None else max_positions
    change(model, text=reads, document=reads)
    _set_name(target, "")  # the path holds the original: an adapter saved with it as its base would load onto that
    return model


def _set_name(target: PreTrainedModel, name: str) -> None:
    """Set where a model was loaded from, also for adapters around it, which save that as their base."""
    target.name_or_path = name
    for adapter in (getattr(target, "peft_config", None) or {}).values():
        adapter.base_model_name_or_path = name or None


def _install(target, architecture: Architecture, scheme: Scheme, geometry, span: Span | None, warm_start: bool, orders):
    """Write the config that names the scheme, put the scheme in and warm it up; `orders` are those of `balanced_order`."""
    table = _rows(target, architecture)
    if not torch.isfinite(table).all():
        raise PosswapError("the position table holds NaN or infinite numbers: the checkpoint is broken, load it again")
    attentions = architecture.self_attentions(target.base_model)
    moments = [] if orders is None else query_key_moments(target, architecture)
    state = state_of(target)
    same = warm_start and state is not None and state.scheme == scheme
    if same and not scheme.resizable and geometry.max_positions != state.geometry.max_positions:
        what = f"{scheme} was made for {state.geometry.max_positions} positions"
        raise PosswapError(f"{what}, and its weights do not fit {geometry.max_positions}: swap the original model instead")
    kept = [architecture.table(target.base_model), *(getattr(a, "positions", None) for a in attentions)]
    config = copy.deepcopy(target.config)
    # A swapped model that was loaded knows its base model; any other model is the base model.
    base_model = config.position_scheme.get("base_model") if isinstance(target, SwappedModel) else on_hub(config.name_or_path)
    config.__class__ = checkpoint.CONFIG_CLASSES[architecture.model_type]
    architecture.set_longest_input(config, geometry.max_positions)
    lengths = geometry.trained_positions, geometry.max_positions
    config.position_scheme = scheme_entry.config_entry(scheme, *lengths, base_model, span)
    if same and "fitted_length" in target.config.position_scheme:  # what was fitted stays, and what it was fitted to
        config.position_scheme["fitted_length"] = target.config.position_scheme["fitted_length"]
    config._name_or_path = ""
    classes = checkpoint.SWAPPED_CLASSES | checkpoint.READER_CLASSES
    embedding = surgery.install(target, architecture, scheme, geometry, span=span, classes=classes, config=config)
    if same and not embedding.keeps_table:
        # A loaded model that only gets another length keeps what it has learned.
        for new, old in zip([embedding, *(getattr(a, "positions", None) for a in attentions)], kept, strict=True):
            if None not in (new, old):  # a scheme without a module in attention has one for a span
                weights = {name: value for name, value in old.state_dict().items() if name != scheme_entry.DIGEST}
                new.load_state_dict(weights)
    elif warm_start or embedding.keeps_table:
        with torch.no_grad():
            embedding.fit_table(table)
            if type(embedding) is type(kept[0]) is Constant:  # whose mean is known, not that of its rows
                embedding.mean.copy_(kept[0].mean)
    own = scheme_entry.digest(scheme, geometry.trained_positions, span)
    scheme_entry.sign(embedding, own.to(embedding.weight.device))
    for attention, (query, key), order in zip(attentions, moments, orders or (), strict=orders is not None):
        if order is not None:
            balance(architecture.query_key(attention), query, key, order)
    # A model that this one becomes a part of initialises what has no such mark: an EncoderDecoderModel, a class of the user's.
    for module in (part for one in surgery.position_modules(target, architecture) for part in one.modules()):
        module._is_hf_initialized = True


def restore(model: PreTrainedModel, *, keep_training: bool = False) -> PreTrainedModel:
    """Undo all swaps of this model in this process, in place: positions, classes and config as they were, bit for bit.

    Weights that a swap or a fit rewrote (positions, self-attention) get their old values back; all others stay as they are. If
    those were trained since the swap, or an adapter was merged into them, the result would be a mixture: an error unless
    `keep_training`.

    Raises:
        PosswapError: The model is not swapped; or it was loaded from a swapped checkpoint, which lacks the original; or other
            weights have changed since the swap; or it is a part of another model, such as an EncoderDecoderModel.
    """
    target, architecture = find_target(model)
    check_not_in_composite(target)
    undo = undo_of(target)
    if undo is None:
        if isinstance(target, SwappedModel):
            why = "this model was loaded from a swapped checkpoint, or is a part of the model that was swapped"
            way = "Load the original checkpoint, or restore the whole model"
            raise PosswapError(f"the original positions are not here: {why}. {way}")
        raise PosswapError(f"this {type(target).__name__} is not swapped: there is nothing to restore")
    _check_layers(target, architecture, undo)
    attentions, kept = architecture.self_attentions(target.base_model), undo.snapshot
    own = kept.query_keys is None or surgery.can_write_query_keys(attentions, architecture)
    if not (own and surgery.can_write_attention_weights(attentions, kept.attention_weights)):
        what = "the projections of attention have been pruned, parametrized or replaced since the swap or fit"
        raise PosswapError(f"{what}, and their old weights do not fit: undo that first")
    if not keep_training:
        _check_mixture(target, architecture, undo)
    _revert(target, architecture, undo)
    _set_name(target, undo.name_or_path)
    if undo.pipeline:
        change(model, **undo.pipeline)
    return model


def _check_layers(target: PreTrainedModel, architecture: Architecture, undo: Undo) -> None:
    if [one for one, *_ in undo.snapshot.attentions] != architecture.self_attentions(target.base_model):
        what = "layers were deleted, added or moved since the swap, and the original's attention fits none of these"
        raise PosswapError(f"{what}: put them back first, or save the model and load it: what is saved is as it is now")


def _revert(target: PreTrainedModel, architecture: Architecture, undo: Undo) -> None:
    """Put the original back; fields that the user has set since (vocabulary size, labels, attention implementation) stay."""
    before, written = undo.config_fields, ("architectures", "dtype", "position_scheme")  # save_pretrained writes two of them
    own, other = undo.snapshot.config, copy.copy(undo.snapshot.config)
    architecture.set_longest_input(other, undo.snapshot.max_positions + 1)
    length = {k for k, v in vars(other).items() if vars(own).get(k) != v}  # fields that belong to the original's table
    kept = {k: v for k, v in vars(target.config).items() if k not in length and k not in written}
    surgery.revert(target, architecture, undo.snapshot)
    vars(target.config).update({k: v for k, v in kept.items() if k not in before or before[k] != v})


def _check_mixture(target: PreTrainedModel, architecture: Architecture, undo: Undo) -> None:
    put_back = undo.snapshot.attention_weights is not None and not undo.trained  # a fit keeps a copy of all of attention
    changed = [name for name, of_attention in _changed(target, architecture, undo) if not (of_attention and put_back)]
    if changed:
        which = "positions and self-attention" if put_back else "positions, and queries and keys that the swap rewrote,"
        raise PosswapError(
            f"{len(changed)} weights changed since the swap (trained, rounded by a cast to half precision and back, or an "
            f"adapter was merged; {changed[0]} is one), and only {which} can be put back: it would be a mixture. Load the "
            "original checkpoint, which fit takes as original_model=, or keep what was trained in it: "
            "posswap.restore(model, keep_training=True)"
        )


def _changed(target: PreTrainedModel, architecture: Architecture, undo: Undo) -> Iterator[tuple[str, bool]]:
    """Yield each weight that is no longer what it was after the swap, by name, and whether it is of self-attention."""
    for name, (weight, of_attention) in surgery.weights_beside_positions(target, architecture).items():
        before = undo.weights.get(name)  # None: a new one, added on purpose
        if before is not None and not before.is_of(weight):
            yield name, of_attention


def original(model: PreTrainedModel, *, share_weights: bool = False, keep_training: bool = False) -> PreTrainedModel:
    """Return the original of a swapped model as a second model: a teacher without a download.

    It is a copy in evaluation mode, without gradients: of a pipeline the whole, of a PEFT model without its adapters. With
    `share_weights`, for use under `torch.no_grad()`, it shares all weights but those of self-attention with the swapped model:
    this saves memory, and is right as long as only attention changes. `keep_training`: see `restore`.

    Raises:
        PosswapError: The original is not kept: the model is not swapped, or was loaded from a swapped checkpoint.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = swap(GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64)), "rotary")
    >>> type(original(model)).__name__, type(model).__name__
    ('GPT2Model', 'PosswapGPT2Model')
    """
    target, architecture = find_target(model)
    own = {id(p) for attention in architecture.self_attentions(target.base_model) for p in attention.parameters()}
    shared = {id(p): p for p in target.parameters() if share_weights and id(p) not in own}
    tuned = hasattr(model, "unload")  # a PEFT model: its adapters are no part of the original
    with torch.inference_mode(False):  # a copy made inside could not be restored; what is in its memo deepcopy does not copy
        twin = copy.deepcopy(model if tuned or is_pipeline(model) else target, shared)
    for one in twin.modules() if tuned else ():
        if isinstance(getattr(one, "modules_to_save", None), torch.nn.ModuleDict):  # PEFT's `unload` keeps the trained copy
            one.modules_to_save.update({name: one.original_module for name in one.modules_to_save})
    twin = twin.unload() if tuned else twin
    restore(twin, keep_training=keep_training)
    return twin.eval() if share_weights else twin.eval().requires_grad_(False)


@contextmanager
def rewriting_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, self-attention weights may be rewritten: `restore` still returns to those of the original.

    If the body raises or is interrupted, they are put back.
    """
    target, architecture = find_target(model, dispatched=True)
    attentions = architecture.self_attentions(target.base_model)
    fresh, before, undo = is_unchanged(target), surgery.copy_attention_weights(attentions), undo_of(target)
    trained = undo is not None and any(of_attention for _, of_attention in _changed(target, architecture, undo))
    try:
        yield
    except BaseException:
        surgery.write_attention_weights(attentions, before)
        raise
    if undo is not None:
        if undo.snapshot.attention_weights is None:  # only a first fit starts from the original's weights
            undo.trained = trained
            undo.snapshot.attention_weights = [
                {name: value for name, value in weights.items() if not name.startswith("positions.")} for weights in before
            ]
        if fresh:  # what was trained before it was fitted still counts as trained
            undo.fingerprint = surgery.fingerprint(target, architecture)


def is_unchanged(model: PreTrainedModel) -> bool:
    """Whether positions and self-attention are as the last swap or fit in this process left them; False for a loaded model."""
    target, architecture = find_target(model, dispatched=True)
    undo = undo_of(target)
    return undo is not None and undo.fingerprint == surgery.fingerprint(target, architecture)


def _integer(name: str, given: Any, least: int, most: int, note: str) -> int:
    """Return an integer of any type, such as NumPy's, as a plain one; for anything else, or one out of range, PosswapError."""
    with suppress(TypeError):
        if not isinstance(given, bool) and least <= operator.index(given) <= most:
            return operator.index(given)
    raise PosswapError(f"{name}={given!r} must be an integer from {least:,} to {most:,}{note}")


def usual_first(causal: bool) -> int:
    """Return how many tokens at the beginning all others attend to if none are asked for."""
    return 4 if causal else 1


def _check_span(span: int | None, first: int | None, max_positions: int, causal: bool) -> Span | None:
    if span is None:
        if first is not None:
            raise PosswapError(f"first={first!r} is about a span, of which there is none: give span, too, or leave first out")
        return None
    note = ", the longest input: choose another, or a larger max_positions"
    if first is None:
        first = min(usual_first(causal), max_positions)
    return Span(_integer("span", span, 1, max_positions, note), _integer("first", first, 0, max_positions, note))


def _rows(target: PreTrainedModel, architecture: Architecture) -> torch.Tensor:
    """Return what a table, or the module in its place, adds at each position that was trained: (P, E) float64."""
    base, state = target.base_model, state_of(target)
    with torch.no_grad():
        if state is None:
            return wide(architecture.trained_rows(base))
        longer = architecture.table(base).keeps_table  # all rows of an extended table may have been trained
        count = state.geometry.max_positions if longer else state.geometry.trained_positions
        ids = torch.arange(count, device=base.device)[None] + architecture.first_id(base.config)
        return wide(architecture.table(base)(ids)[0])
