"""Where a model family keeps its positions: names and quirks, no scheme."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


class Architecture(ABC):
    """One family. Stateless: an instance describes the family, and every method is handed the modules it looks at."""

    model_type: ClassVar[str]  # as in config.json
    config_class: ClassVar[type[PreTrainedConfig]]
    base_class: ClassVar[type[PreTrainedModel]]  # the headless model inside every head
    attention_class: ClassVar[type[nn.Module]]  # the self-attention that schemes patch
    # Classes that transformers has but its Auto mappings do not list.
    further_classes: ClassVar[tuple[type[PreTrainedModel], ...]] = ()

    # -- where things are ------------------------------------------------------------------------------------------

    @abstractmethod
    def table_owner(self, base: PreTrainedModel) -> tuple[nn.Module, str]:
        """Return the module that holds the position table and the attribute's name."""

    @abstractmethod
    def layers(self, base: PreTrainedModel) -> list[nn.Module]:
        """Return the layers, first one first; each takes hidden states as its first argument and returns new ones."""

    @abstractmethod
    def self_attentions(self, base: PreTrainedModel) -> list[nn.Module]:
        """Return the self-attention modules, first layer first; never cross-attention."""

    def resize(self, base: PreTrainedModel, max_positions: int) -> None:
        """Make everything but the table fit another length (the config is not this method's business)."""

    # -- how positions are counted ---------------------------------------------------------------------------------

    def first_row(self, config: PreTrainedConfig) -> int:
        """Return which row of the table is position 0; rows before it (padding) hold no position."""
        return 0

    def position_ids(self, base: PreTrainedModel, inputs: "Inputs", past: int | torch.Tensor) -> torch.Tensor | None:
        """Return the ids (B or 1, L) that the family's own forward makes up where none are given, rows of its table.

        `past` tokens are cached. None: they count on from the cache, one a token.
        """
        return None

    def trained_rows(self, base: PreTrainedModel) -> torch.Tensor:
        """Return the rows of an unswapped model's table that are positions, first one first, (P, E)."""
        owner, name = self.table_owner(base)
        return getattr(owner, name).weight[self.first_row(base.config) :]

    def longest_input(self, config: PreTrainedConfig) -> int:
        """Return how many positions the config speaks of."""
        return config.max_position_embeddings - self.first_row(config)

    def set_longest_input(self, config: PreTrainedConfig, positions: int) -> None:
        """Write it into the config."""
        config.max_position_embeddings = positions + self.first_row(config)

    # -- inside one self-attention module --------------------------------------------------------------------------

    @abstractmethod
    def project(self, attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, each (B, H, L, D), as the family's own forward computes them."""

    @abstractmethod
    def output(self, attention: nn.Module, attention_output: torch.Tensor) -> torch.Tensor:
        """Map (B, L, H * D) to what the family's own forward returns first."""

    @abstractmethod
    def dropout(self, attention: nn.Module) -> float:
        """Return the dropout rate on attention probabilities while training."""

    @abstractmethod
    def backend(self, attention: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the attention function that the family's own forward would call."""

    # -- for warm starts -------------------------------------------------------------------------------------------

    @abstractmethod
    def query_key(self, attention: nn.Module) -> "QueryKey":
        """Return views of the query and key projections; of the layers beneath where adapters wrap them."""

    def is_causal(self, config: PreTrainedConfig) -> bool:
        """Whether self-attention looks only to the left."""
        return False


class Inputs(NamedTuple):
    """What a model was asked to read; one of the first two is None."""

    input_ids: torch.Tensor | None  # (B, L)
    inputs_embeds: torch.Tensor | None  # (B, L, E)
    attention_mask: torch.Tensor | None  # as given

    @property
    def shape(self) -> torch.Size:
        """(B, L)."""
        return self.input_ids.shape if self.inputs_embeds is None else self.inputs_embeds.shape[:-1]

    @property
    def device(self) -> torch.device:
        return (self.input_ids if self.inputs_embeds is None else self.inputs_embeds).device


@dataclass(frozen=True)
class QueryKey:
    """Views of one layer's query and key projections as (H * D, E) matrices; writing to them writes to the model."""

    query: torch.Tensor
    query_bias: torch.Tensor
    key: torch.Tensor
    key_bias: torch.Tensor
    plain: bool  # False: adapters, parametrizations or shared weights; these tensors do not tell all

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.query_bias, self.key, self.key_bias
