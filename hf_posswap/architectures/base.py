"""Where a model family keeps its positions: names and quirks, no scheme."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Architecture(ABC):
    """One family. Stateless: an instance describes the family, and every method is handed the modules it looks at.

    A family has `config_class`, `base_class`, `attention_class`, `output`, and dotted names: `table_name` and `layers_name`
    lead from the `reader` to the table and the list of layers, `attention_name` from a layer to its self-attention.

    Its attention modules have a `config`, and its layers pass keywords that they do not know on to them. Whether a description
    is right shows in `hf_posswap.contract.report.check_scheme("learned", models=[(model_type, "sdpa")])`, and with "rotary" and
    "relative" in place of "learned".
    """

    config_class: ClassVar[type[PreTrainedConfig]]
    base_class: ClassVar[type[PreTrainedModel]]  # the headless model inside every head
    attention_class: ClassVar[type[nn.Module]]  # the self-attention that schemes patch
    table_name: ClassVar[str]
    layers_name: ClassVar[str]
    attention_name: ClassVar[str]
    file_prefix: ClassVar[str | None] = None  # before names of its weights in files; None: its `base_model_prefix`
    table_class: ClassVar[type[nn.Embedding]] = nn.Embedding  # if it takes more than ids, it takes `position_ids=`
    projections: ClassVar[tuple[str, str, str]] = ("query", "key", "value")  # names in self-attention
    # Whether embeddings use the attention mask, too: then it must stay as it was given, (B, L).
    embeddings_read_mask: ClassVar[bool] = False
    reader_class: ClassVar[type[PreTrainedModel] | None] = None  # of `reader`; None: it is the headless model
    # Classes that transformers has but its Auto mappings do not list.
    further_classes: ClassVar[tuple[type[PreTrainedModel], ...]] = ()

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return self.config_class.model_type

    def reader(self, base: PreTrainedModel) -> PreTrainedModel:
        """Return the module that all heads call, with ids and mask; `base` may be this module already, here and below."""
        return base

    def table_owner(self, base: PreTrainedModel) -> tuple[nn.Module, str]:
        """Return the module that holds the position table and the attribute's name."""
        *owner, name = self.table_name.split(".")
        return _inside(self.reader(base), owner), name

    def table(self, base: PreTrainedModel) -> nn.Module:
        """Return the position table, or what a swap has put in its place."""
        return getattr(*self.table_owner(base))

    def layers(self, base: PreTrainedModel) -> list[nn.Module]:
        """Return the layers in the order in which they run, each as often as it does; they map hidden states to new ones."""
        return list(_inside(self.reader(base), self.layers_name.split(".")))

    def self_attentions(self, base: PreTrainedModel) -> list[nn.Module]:
        """Return the self-attention modules, first layer first, each once; never cross-attention."""
        return [_inside(layer, self.attention_name.split(".")) for layer in self.layers(base)]

    def attention_of_layers(self, base: PreTrainedModel) -> list[nn.Module]:
        """Return the self-attention of each of `layers`: one that they share is there as often as it runs."""
        own = set(self.self_attentions(base))
        return [next(module for module in layer.modules() if module in own) for layer in self.layers(base)]

    def own_layers(self, config: PreTrainedConfig) -> int:
        """Return how many `self_attentions` a model of this config has."""
        return config.num_hidden_layers

    def resize(self, base: PreTrainedModel, max_positions: int) -> None:
        """Make everything but the table and the config fit another length."""

    def embedding_size(self, config: PreTrainedConfig) -> int:
        """Return the size of the table's vectors."""
        return config.hidden_size

    def first_row(self, config: PreTrainedConfig) -> int:
        """Return which row of the table is position 0; rows before it (padding) hold no position."""
        return 0

    def first_id(self, config: PreTrainedConfig) -> int:
        """Return the value in `position_ids` that means position 0: as a rule ids are rows of the table."""
        return self.first_row(config)

    def position_ids(self, base: PreTrainedModel, inputs: "Inputs", past: int | torch.Tensor) -> torch.Tensor | None:
        """Return the ids (B or 1, L) that the family's own forward computes if none are given.

        `past` tokens are cached. None: ids count on from the cache, one per token.
        """
        return None

    def trained_rows(self, base: PreTrainedModel) -> torch.Tensor:
        """Return the rows of an unswapped model's table that are positions, first one first, (P, E)."""
        return self.table(base).weight[self.first_row(base.config) :]

    def longest_input(self, config: PreTrainedConfig) -> int:
        """Return the longest input in tokens that the config allows."""
        return config.max_position_embeddings - self.first_id(config)

    def set_longest_input(self, config: PreTrainedConfig, positions: int) -> None:
        config.max_position_embeddings = positions + self.first_id(config)

    def project(self, attention: nn.Module, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, each (B, H, L, D), as the family's own forward computes them, not scaled."""
        config = attention.config
        shape = (*hidden_states.shape[:-1], -1, config.hidden_size // config.num_attention_heads)
        return tuple(getattr(attention, name)(hidden_states).view(shape).transpose(1, 2) for name in self.projections)

    def scaling(self, attention: nn.Module) -> float:
        """Return what scores are multiplied by."""
        return attention.scaling

    @abstractmethod
    def output(self, attention: nn.Module, attention_output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map (B, L, H * D) to what the family's own forward returns first; `hidden_states` (B, L, E) are what it was given."""

    def dropout(self, attention: nn.Module) -> float:
        """Return the dropout rate on attention probabilities while training."""
        return getattr(attention.dropout, "p", attention.dropout)

    def backend(self, attention: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """Return the attention function that the family's own forward would call."""
        eager = sys.modules[self.attention_class.__module__].eager_attention_forward
        return ALL_ATTENTION_FUNCTIONS.get_interface(attention.config._attn_implementation, eager)

    def query_key(self, attention: nn.Module) -> "QueryKey":
        """Return views of the query and key projections; under adapters, of the wrapped layers."""
        layers = [getattr(attention, name) for name in self.projections[:2]]
        # PEFT's layers call what they wrap `base_layer`.
        query, key = (getattr(layer, "base_layer", layer) for layer in layers)
        plain = all(type(layer) is nn.Linear for layer in layers) and query.weight is not key.weight
        # For a missing bias, zeros; what is written to them is lost.
        biases = [layer.weight.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in (query, key)]
        return QueryKey(query.weight, biases[0], key.weight, biases[1], plain)

    def is_causal(self, config: PreTrainedConfig) -> bool:
        """Whether self-attention looks only to the left: `is_causal` in the config takes that away from any model."""
        return False


def _inside(module: nn.Module, names: list[str]) -> nn.Module:
    for name in names:  # not `get_submodule`, where torch.compile breaks the graph
        module = getattr(module, name)
    return module


class Inputs(NamedTuple):
    """The inputs of a forward; one of the first two is None."""

    input_ids: torch.Tensor | None  # (B, L); GPT-2 takes rows of choices, too, (B, C, L)
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
    plain: bool  # False: adapters, parametrizations or shared weights; these tensors are not the whole projection

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.query_bias, self.key, self.key_bias
