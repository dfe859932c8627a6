"""The one place where families and schemes meet: self-attention with positions.

The family's attention class is subclassed and reached by setting `__class__` of the existing module, so that weights,
hooks and adapters stay where they are: LoRA on the projections is rotated like the projections themselves. Keys are
rotated before they enter the cache. A function registered with transformers' AttentionInterface would not do: it is
switched off by `set_attn_implementation`, leaves padding unmasked under a new name, and sees cached keys
without their positions.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache

from hf_posswap.architectures import Architecture
from hf_posswap.errors import PosswapError


class PositionedAttention(nn.Module):
    """Mixin in front of a family's self-attention; `positions` holds the scheme's module for this layer."""

    architecture: Architecture

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        *,
        shared_positions,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Do what the family's own forward does, with the scheme's `rotate` and `attend` in it."""
        query, key, value = self.architecture.project(self, hidden_states)
        query = self.positions.rotate(query, shared_positions)  # one after the other: the memory of one serves the other
        key = self.positions.rotate(key, shared_positions)
        if past_key_values is not None:
            if isinstance(past_key_values, EncoderDecoderCache):
                past_key_values = past_key_values.self_attention_cache
            key, value = past_key_values.update(key, value, self.layer_idx)
        if self.positions.attend is not None and kwargs.get("cache") is not None:
            raise PosswapError("these positions compute attention themselves and do not run with a paged cache: use generate()")
        dropout = self.architecture.dropout(self) if self.training else 0.0
        if self.positions.attend is None:
            output, probabilities = self.architecture.backend(self)(
                self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
            )
            output = output.flatten(-2)
        else:
            output, probabilities = self.positions.attend(
                query,
                key,
                value,
                attention_mask,
                shared_positions,
                scaling=self.scaling,
                dropout=dropout,
                causal=self.is_causal and getattr(self.config, "is_causal", True),
                return_probabilities=self.config._attn_implementation == "eager",  # as sdpa: only eager attention does
            )
            output = output.transpose(1, 2).flatten(-2)
        return self.architecture.output(self, output), probabilities


class Observation(NamedTuple):
    """The inside of one self-attention module; queries and keys are those before any rotation."""

    query: torch.Tensor  # (B, H, L, D)
    key: torch.Tensor
    value: torch.Tensor
    probabilities: torch.Tensor  # (B, H, L, L)
    output: torch.Tensor  # (B, H, L, D)


def visible(attention_mask: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """Return which keys a query may see, (B, 1, L, L) bool, from a (B, L) bool mask; padding sees nothing and is not seen."""
    allowed = attention_mask[:, None, None, :] & attention_mask[:, None, :, None]
    return allowed & torch.ones_like(allowed[0, 0]).tril() if causal else allowed


def observe(
    attention: nn.Module, architecture: Architecture, hidden_states: torch.Tensor, allowed: torch.Tensor, shared_positions
) -> Observation:
    """Compute what a self-attention module computes, swapped or not, and return all of it; `allowed` is (B, 1, L, L) bool.

    Whatever attention implementation the model is set to: this is for looking, not for speed.
    """
    query, key, value = architecture.project(attention, hidden_states)
    positions = getattr(attention, "positions", None)
    if positions is not None and positions.attend is not None:
        output, probabilities = positions.attend(
            query,
            key,
            value,
            allowed,
            shared_positions,
            scaling=attention.scaling,
            dropout=0.0,
            causal=attention.is_causal and getattr(attention.config, "is_causal", True),
            return_probabilities=True,
        )
        return Observation(query, key, value, probabilities, output)
    turned = [states if positions is None else positions.rotate(states, shared_positions) for states in (query, key)]
    scores = turned[0] @ turned[1].transpose(-1, -2) * attention.scaling
    probabilities = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num()  # padding sees nothing: zeros
    return Observation(query, key, value, probabilities, probabilities @ value)


POSITIONED_CLASSES: dict[str, type[nn.Module]] = {}  # by model_type; filled when a family is registered


def add_positioned_class(architecture: Architecture) -> None:
    """Make the family's self-attention class with positions, importable from here so that it can be pickled."""
    base = architecture.attention_class
    name = f"Positioned{base.__name__}"
    namespace = {"__module__": __name__, "__doc__": base.__doc__, "architecture": architecture}
    globals()[name] = POSITIONED_CLASSES[architecture.model_type] = type(name, (PositionedAttention, base), namespace)


def check_implementation(implementations: tuple[str, ...] | None, current: str, scheme: str) -> None:
    """Raise when the model is set to an attention implementation that the scheme cannot honour."""
    if implementations is not None and current not in implementations:
        raise PosswapError(
            f"{scheme} positions run with attention implementation {' or '.join(map(repr, implementations))}, the model is "
            f"set to {current!r}: call model.set_attn_implementation({implementations[-1]!r})"
        )
