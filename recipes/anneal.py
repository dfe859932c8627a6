"""Annealing, an experiment of heal.py: the old table fades out of a swapped model while the new scheme fades in.

At strength s the model adds (1 - s) * old table + s * new embedding, turns rotary queries and keys by s times their angles
and multiplies relative tables by s. At 0 it is the original, up to rounding; at 1 it is the swapped model.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from hf_posswap.errors import PosswapError
from hf_posswap.schemes.relative import RelativePositions
from hf_posswap.schemes.rotary import RotaryPositions


@dataclass
class Strength:
    """One number that all parts of a model look at."""

    value: float = 0.0


class FadingEmbedding(nn.Module):
    """In the table's place: the old table, frozen, and the new module, weighted."""

    def __init__(self, old: nn.Module, new: nn.Module, strength: Strength):
        super().__init__()
        self.old, self.new, self.strength = copy.deepcopy(old).requires_grad_(False), new, strength

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum at (B, L) positions: (B, L, E)."""
        strength = self.strength.value
        return (1 - strength) * self.old(position_ids) + strength * self.new(position_ids)


class ScaledTable(nn.Module):
    """A parametrization: the layer reads its table times the strength."""

    def __init__(self, strength: Strength):
        super().__init__()
        self.strength = strength

    def forward(self, table: torch.Tensor) -> torch.Tensor:
        """Return the table as attention sees it."""
        return self.strength.value * table


class Annealing:
    """Holds a freshly swapped model between its original and itself, in place, until `finish` takes all of this off it."""

    def __init__(self, model: PreTrainedModel, original: PreTrainedModel):
        self.strength = Strength()
        owner, self.name = model.architecture.table_owner(model.base_model)
        old_owner, name = model.architecture.table_owner(original.base_model)
        self.owner, self.new = owner, getattr(owner, self.name)
        attentions = model.architecture.self_attentions(model.base_model)
        self.positions = [attention.positions for attention in attentions if hasattr(attention, "positions")]
        for positions in self.positions:
            if not isinstance(positions, (RotaryPositions, RelativePositions)):
                raise PosswapError(
                    f"{model.base_model.position_scheme} positions cannot be annealed, rotary and relative ones and those that "
                    "are added to embeddings can: choose another --start"
                )
            if isinstance(positions, RotaryPositions) and positions.frequencies(torch.device("cpu"), 1)[1] != 1:
                raise PosswapError(
                    f"{model.base_model.position_scheme} multiplies queries and keys by a factor that does not fade in: choose "
                    "another --start, or a scaling without one"
                )
        setattr(owner, self.name, FadingEmbedding(getattr(old_owner, name), self.new, self.strength))
        for positions in self.positions:
            if isinstance(positions, RelativePositions):
                for table, _ in list(positions.named_parameters()):
                    parametrize.register_parametrization(positions, table, ScaledTable(self.strength))
            else:
                positions.prepare = self._slowed(positions)

    def _slowed(self, positions: RotaryPositions):
        def prepare(position_ids, *others):
            return RotaryPositions.prepare(positions, position_ids * self.strength.value, *others)

        return prepare

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """Put the model at another strength for a while, such as 1 to measure what is being made."""
        before, self.strength.value = self.strength.value, strength
        try:
            yield
        finally:
            self.strength.value = before

    def finish(self) -> None:
        """Leave the swapped model alone, with the parameters that it has trained meanwhile; again changes nothing."""
        self.strength.value = 1.0
        setattr(self.owner, self.name, self.new)
        for positions in self.positions:
            vars(positions).pop("prepare", None)
            if parametrize.is_parametrized(positions):
                for table in list(positions.parametrizations):
                    parametrize.remove_parametrizations(positions, table, leave_parametrized=False)
