"""Where a model family keeps its positions: names and quirks, no scheme."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

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
