"""The verbs: swap the positions of a model, restore the original, have it next to the swapped model."""

import copy
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.attention import check_implementation
from hf_posswap.checkpoint import (
    CONFIG_CLASSES,
    SWAPPED_CLASSES,
    SwappedModel,
    config_entry,
    mark_part,
    on_hub,
    read_config_entry,
)
from hf_posswap.errors import PosswapError
from hf_posswap.functional.closed_form import balance
from hf_posswap.schemes import SCHEMES, Scheme, parse_scheme
from hf_posswap.surgery import (
    Snapshot,
    can_write_attention_weights,
    copy_attention_weights,
    geometry_of,
    install,
    revert,
    set_config,
    take_snapshot,
    write_attention_weights,
)
from hf_posswap.target import find_target
from hf_posswap.warm_start import balanced_order, query_key_moments


@dataclass
class _Record:
    """Kept on a swapped model: how to give the original back, and what it was right after the swap."""

    original: Snapshot
    fingerprint: int
    config_fields: dict
    name_or_path: str


def swap(
    model: PreTrainedModel, scheme: Scheme | str, *, max_positions: int | None = None, warm_start: bool = True
) -> PreTrainedModel:
    """Replace the learned absolute positions of a pretrained model by another scheme, in place; return the model.

    Args:
        model: A BERT or GPT-2 model of transformers, with any head, or a PEFT model around one.
        scheme: An instance such as `Rotary(theta=500_000)`, or a string such as "rotary:theta=500000,fraction=0.5".
        max_positions: The longest input the swapped model shall take; the checkpoint's own length by default.
        warm_start: Start as close to the original as its weights allow: project sinusoids onto the old table, keep the
            table's mean vector and row 0, give rotary a balanced basis in encoders. False drops the table cold.

    What a warm start loses, `posswap.fit` wins most of back, in minutes. A second swap starts from the original again, not
    from the first swap. Weights that an optimizer holds stay the same objects, but new parameters appear: make the
    optimizer after the swap.

    Raises:
        PosswapError: Something does not fit; the message says what, and the model is as it was before the call.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    >>> _ = swap(model, "relative:clip=8", max_positions=1024)
    >>> describe(model).new
    Relative(clip=8, values=True, share_heads=False, key_query=False, vectors='learned')
    """
    if torch.is_inference_mode_enabled():
        raise PosswapError("a swap inside torch.inference_mode() would make parameters that can never be trained: swap outside")
    scheme = parse_scheme(scheme)
    if SCHEMES.get(scheme.name, type(scheme)) is not type(scheme):
        raise PosswapError(
            f"{type(scheme).__name__} is named {scheme.name!r} like {SCHEMES[scheme.name].__name__}, and a saved model of it "
            "would load as that one: give it a name of its own"
        )
    target, architecture = find_target(model)
    if vars(target).get("_posswap_part"):
        raise PosswapError("this is the inner part of a swapped model, whose config names the scheme: swap the whole model")
    check_implementation(scheme.implementations, target.config._attn_implementation, scheme.name)
    record: _Record | None = vars(target).get("_posswap_record")
    if record is not None and record.fingerprint != _fingerprint(target, architecture):
        raise PosswapError(
            f"this model's weights have changed since it was swapped to {target.base_model.position_scheme} (trained, cast "
            "or loaded), and another swap would start from the original's positions: call posswap.restore(model) first, "
            "or save the model and load it again to swap from where it is now"
        )
    start = take_snapshot(target, architecture, weights=False) if record is None else record.original
    max_positions = _check_max_positions(max_positions, start)
    geometry = geometry_of(target.config, max_positions, _trained_positions(start))
    scheme.check(geometry)
    order = balanced_order(target, architecture, scheme, geometry, start) if warm_start else None
    before = take_snapshot(target, architecture, weights=order is not None or start.query_keys is not None)
    if start.attention_weights is not None:  # fitted since: going back to the original undoes that
        before.attention_weights = copy_attention_weights(architecture.self_attentions(target.base_model))
    try:
        if record is not None:
            revert(target, architecture, start)
        # Query and key weights are kept only when they are about to be rewritten: restore touches nothing else.
        original = take_snapshot(target, architecture, weights=order is not None)
        _install(target, architecture, scheme, geometry, warm_start, order)
    except BaseException:
        revert(target, architecture, before)
        raise
    fields = copy.deepcopy(vars(target.config))
    name = target.name_or_path if record is None else record.name_or_path
    vars(target)["_posswap_record"] = _Record(original, _fingerprint(target, architecture), fields, name)
    # The checkpoint it came from holds the original: an adapter that named it as its base would load onto that one.
    target.name_or_path = ""
    return model


def _install(target, architecture: Architecture, scheme: Scheme, geometry, warm_start: bool, order: torch.Tensor | None):
    owner, name = architecture.table_owner(target.base_model)
    table = _rows(getattr(owner, name), geometry.trained_positions)
    if not torch.isfinite(table).all():
        raise PosswapError("the position table holds NaN or infinite numbers: the checkpoint is broken, load it again")
    moments = None if order is None else query_key_moments(target, architecture)
    attentions = architecture.self_attentions(target.base_model)
    same = getattr(target.base_model, "position_scheme", None) == scheme
    if same and not scheme.resizable and geometry.max_positions != target.config.max_position_embeddings:
        raise PosswapError(
            f"{scheme} was made for {target.config.max_position_embeddings} positions, and what it has learned means nothing "
            f"for {geometry.max_positions}: swap the original model instead"
        )
    kept = [getattr(owner, name), *(getattr(a, "positions", None) for a in attentions)] if same else []
    embedding = install(target, architecture, scheme, geometry)
    if same and not embedding.keeps_table:
        # A loaded model that only gets another length: what it has learned stays.
        for new, old in zip([embedding, *(getattr(a, "positions", None) for a in attentions)], kept, strict=True):
            if new is not None:
                new.load_state_dict(old.state_dict())
    elif warm_start or embedding.keeps_table:
        with torch.no_grad():
            embedding.fit_table(table)
    if order is not None:
        for attention, (query, key) in zip(attentions, moments, strict=True):
            balance(architecture.query_key(attention), query, key, order)
    config = copy.deepcopy(target.config)
    # A loaded swapped model knows what it was made from, any other one is that.
    base_model = config.position_scheme.get("base_model") if isinstance(target, SwappedModel) else on_hub(config.name_or_path)
    config.__class__ = CONFIG_CLASSES[architecture.model_type]
    config.max_position_embeddings = geometry.max_positions
    config.position_scheme = config_entry(scheme, geometry.trained_positions, geometry.max_positions, base_model)
    config._name_or_path = ""
    set_config(target, config, config)
    base = target.base_model
    base.__class__ = SWAPPED_CLASSES.get(type(base), type(base))
    target.__class__ = SWAPPED_CLASSES.get(type(target), type(target))
    mark_part(target)


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo all swaps of this model in this process, in place: positions, classes and config as they were, bit for bit.

    Weights that a swap rewrote get their old values back. Other weights stay as they are now: a model that was trained
    since keeps that training, next to positions that it was not trained with.

    Raises:
        PosswapError: The model is not swapped, or was loaded from a swapped checkpoint, where the original is gone.
    """
    target, architecture = find_target(model)
    record: _Record | None = vars(target).get("_posswap_record")
    if record is None:
        if isinstance(target, SwappedModel):
            raise PosswapError(
                "the original positions are not here: this model was loaded from a swapped checkpoint, or is a part of the "
                "model that was swapped. Load the original checkpoint, or restore the whole model"
            )
        raise PosswapError(f"this {type(target).__name__} is not swapped: there is nothing to restore")
    if not can_write_attention_weights(architecture.self_attentions(target.base_model), record.original.attention_weights):
        raise PosswapError(
            "the projections of attention have been pruned, parametrized or replaced since the fit, and their old weights "
            "have no place: undo that first"
        )
    config = target.config
    # Fields that were set since (a resized vocabulary, labels, an attention implementation) are the user's: they stay.
    # Not theirs is what save_pretrained writes down.
    since = {
        k: v
        for k, v in vars(config).items()
        if k not in ("architectures", "dtype") and (k not in record.config_fields or record.config_fields[k] != v)
    }
    revert(target, architecture, record.original)
    vars(target.base_model).pop("_posswap_part", None)
    if isinstance(target, SwappedModel):  # what the first swap found was a loaded swapped model
        mark_part(target)
    vars(target.config).update(since)
    target.name_or_path = record.name_or_path
    del vars(target)["_posswap_record"]
    return model


def original(model: PreTrainedModel, *, share_weights: bool = False) -> PreTrainedModel:
    """Return the model that a swapped one was made from, as a second model next to it: a teacher without a download.

    It is a copy without gradients, in evaluation mode. With `share_weights` it shares all weights but those of self-attention
    with the swapped model, which saves memory as long as only attention is changed.

    Raises:
        PosswapError: The original is not kept: the model is not swapped, or was loaded from a swapped checkpoint.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = swap(GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64)), "rotary")
    >>> describe(original(model)).new, describe(model).new
    (Learned(extend=None), Rotary(theta=10000, fraction=1.0, layout='interleaved', scaling=None, mark_first=True))
    """
    target, architecture = find_target(model)
    own = {id(p) for attention in architecture.self_attentions(target.base_model) for p in attention.parameters()}
    shared = {id(p): p for p in target.parameters() if share_weights and id(p) not in own}
    twin = copy.deepcopy(target, shared)  # what deepcopy finds in its memo, it does not copy
    restore(twin)
    return twin.eval() if share_weights else twin.eval().requires_grad_(False)


@contextmanager
def rewriting_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let the weights of self-attention be rewritten inside: `restore` still gives the original's back afterwards.

    When the body raises, or is interrupted, all of them are as before.
    """
    target, architecture = find_target(model, dispatched=True)
    attentions = architecture.self_attentions(target.base_model)
    fresh, before = is_unchanged(target), copy_attention_weights(attentions, positions=True)
    try:
        yield
    except BaseException:
        write_attention_weights(attentions, before)
        raise
    record: _Record | None = vars(target).get("_posswap_record")
    if record is not None:
        if record.original.attention_weights is None:  # a second fit starts from the first, but the original stays the original
            record.original.attention_weights = [
                {name: value for name, value in weights.items() if not name.startswith("positions.")} for weights in before
            ]
        if fresh:  # what was trained before it was fitted still counts as trained
            record.fingerprint = _fingerprint(target, architecture)


def is_unchanged(model: PreTrainedModel) -> bool:
    """Whether positions and self-attention are as the last swap or fit in this process left them; False for a loaded model."""
    target, architecture = find_target(model, dispatched=True)
    record: _Record | None = vars(target).get("_posswap_record")
    return record is not None and record.fingerprint == _fingerprint(target, architecture)


def _check_max_positions(max_positions: int | None, start: Snapshot) -> int:
    if max_positions is None:
        return start.max_positions
    if not isinstance(max_positions, int) or isinstance(max_positions, bool) or max_positions < start.max_positions:
        raise PosswapError(
            f"max_positions={max_positions!r} must be an integer of at least {start.max_positions}, what the model holds now"
        )
    return max_positions


def _trained_positions(start: Snapshot) -> int:
    if isinstance(start.table, nn.Embedding):
        return start.table.num_embeddings
    return read_config_entry(start.config)[1]


def _rows(table: nn.Module, trained_positions: int) -> torch.Tensor:
    """Return what a table, or the module in its place, adds at each trained position: (P, E) float64."""
    device = next((t.device for t in (*table.parameters(), *table.buffers())), torch.device("cpu"))
    with torch.no_grad():
        return table(torch.arange(trained_positions, device=device)[None])[0].double()


def _fingerprint(target: PreTrainedModel, architecture: Architecture) -> int:
    """A checksum of the weights that positions work with: the table's place and every self-attention."""
    base = target.base_model
    owner, name = architecture.table_owner(base)
    checksum = 0
    for module in (getattr(owner, name), *architecture.self_attentions(base)):
        for parameter in module.parameters():
            data = parameter.detach().cpu().contiguous().flatten().view(torch.uint8)
            checksum = zlib.crc32(data.numpy(), checksum)
    return checksum
