"""Warm starts without data: when to balance the basis of queries and keys, and from which moments."""

import warnings

import torch
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.evaluating import evaluating, exactly, watching
from hf_posswap.functional.closed_form import second_moment
from hf_posswap.schemes import Geometry, Scheme
from hf_posswap.surgery import Snapshot, can_write_query_keys


def balances(architecture: Architecture, config) -> bool:
    """Whether the balanced basis is part of the default warm start of this model.

    In the embedded encoder it removes much of the damage. In the embedded causal model it makes the rotation harmless but also
    useless, so projections are left alone. tests/test_warm_start.py shows both.
    """
    return not architecture.is_causal(config)


@torch.no_grad()
def query_key_moments(model: PreTrainedModel, architecture: Architecture) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return E[q q^T] and E[k k^T] of every self-attention, each (H, D, D) float64, while the model reads random tokens.

    Tokens drawn uniformly from the vocabulary, the same 16 rows of 128 each time, need no data, and come close to what real
    text gives. One that layers share has the sum over them: for a balanced basis the scale does not matter.
    """
    base = model.base_model
    config = model.config
    shape = 16, min(128, architecture.longest_input(config))
    generator = torch.Generator(device="cpu").manual_seed(0)
    tokens = torch.randint(config.vocab_size, shape, generator=generator, device="cpu")
    attentions = architecture.self_attentions(base)
    moments = [(0.0, 0.0)] * len(attentions)

    def record(index, attention, hidden_states, keywords):
        states = architecture.project(attention, hidden_states)[:2]
        found = [second_moment(one.transpose(0, 1).flatten(1, 2)) for one in states]
        moments[index] = tuple(total + one for total, one in zip(moments[index], found, strict=True))

    with exactly(base), evaluating(base), watching(attentions, record):
        base(input_ids=tokens.to(base.get_input_embeddings().weight.device))
    return moments


def balanced_order(
    target: PreTrainedModel, architecture: Architecture, scheme: Scheme, geometry: Geometry, start: Snapshot
) -> list[torch.Tensor | None] | None:
    """Return each layer's order of dimensions for a balanced basis; None where the warm start leaves projections alone."""
    modules = [own.attention_module(geometry) for own, _ in scheme.kinds()]
    order = [None if one is None else one.dims_slow_to_fast() for one in modules]
    # In a layer that is rotary already, directions are in the right planes.
    rotated = [p is not None and p.dims_slow_to_fast() is not None for *_, p in start.attentions]
    orders = [None if turns else order[scheme.kind_of(layer)] for layer, turns in enumerate(rotated)]
    if all(one is None for one in orders) or not balances(architecture, target.config):
        return None
    if not plain_projections(target, architecture):
        what = "query and key projections are wrapped by adapters, parametrized, pruned or shared"
        way = "so the balanced basis is left out of the warm start; swap before adding adapters to have it"
        warnings.warn(f"{what}, {way}", stacklevel=3)
        return None
    return orders


def plain_projections(target: PreTrainedModel, architecture: Architecture) -> bool:
    """Whether query and key weights are plain: no adapters, parametrizations, pruning or shared weights."""
    attentions = list(dict.fromkeys(architecture.self_attentions(target.base_model)))  # ALBERT's are one module
    weights = [weight for attention in attentions for weight in attention.parameters()]
    plain = all(architecture.query_key(one).plain for one in attentions) and can_write_query_keys(attentions, architecture)
    return plain and len(set(weights)) == len(weights)
