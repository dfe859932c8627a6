"""Hidden states of one model on all batches, kept on disk for the current layers only."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.attention import observe, visible
from hf_posswap.data.calibration import Batch
from hf_posswap.evaluating import outputs_of, watching
from hf_posswap.functional.closed_form import Evidence


class _Reached(Exception):
    """Raised to end a forward where all that is asked of it has been seen."""


class States:
    """The states of one model before its current layers ("states") and after one of them ("next"), batch by batch.

    `name` distinguishes the files of several models in one folder.
    """

    def __init__(self, model: PreTrainedModel, architecture: Architecture, batches: list[Batch], folder: Path, name: str):
        self.base, self.architecture = model.base_model, architecture
        self.batches, self.folder, self.name = batches, folder, name
        self.layers: list[nn.Module] = architecture.layers(self.base)
        self.attentions: list[nn.Module] = architecture.attention_of_layers(self.base)
        for i in range(len(batches)):
            self.write("states", i, self._call(i)[0])

    def run(self, indices: Iterable[int], i: int, what: str = "states") -> Iterator[torch.Tensor]:
        """Yield the output of one layer after the other on one batch, (B, L, E)."""
        _, args, kwargs = self._call(i)
        states = self.read(what, i)
        for index in indices:
            layer = self.layers[index]
            out = layer(states.to(next(layer.parameters())), *args, **kwargs)
            states = out[0] if isinstance(out, tuple) else out
            yield states

    @torch.no_grad()
    def last(self, i: int) -> torch.Tensor:
        """Return the last layer's output on one batch, with all layers as they are now."""
        with outputs_of(self.layers[-1:]) as seen:
            self._forward(i)
        return seen[-1]

    def observe(self, indices: range, i: int) -> Iterator[Evidence]:
        """Yield what the self-attention of each of these layers computes on one batch."""
        seen = []

        def see(place, attention, hidden_states, kwargs):
            seen.append((attention, hidden_states, kwargs.get("shared_positions")))
            if len(seen) == len(indices):  # most of a layer's work comes after its attention
                raise _Reached

        with watching((self.attentions[index] for index in indices), see), suppress(_Reached):
            list(self.run(indices, i))
        allowed = visible(self.batches[i]["attention_mask"], causal=self.architecture.is_causal(self.base.config))
        for attention, hidden_states, shared in seen:
            yield observe(attention, self.architecture, hidden_states, allowed.to(hidden_states.device), shared)

    def _call(self, i: int) -> tuple[torch.Tensor, tuple, dict]:
        """Run the model up to its first layer and return that layer's input: hidden states, other arguments, keywords.

        This is repeated for every batch and layer: it costs little, and the masks of all batches would not fit in memory.
        """
        seen = []

        def stop(layer, args, kwargs):
            kwargs = dict(kwargs)
            hidden_states = args[0] if args else kwargs.pop("hidden_states")
            seen.append((hidden_states.detach(), args[1:], kwargs))
            raise _Reached

        with self.layers[0].register_forward_pre_hook(stop, with_kwargs=True), suppress(_Reached), torch.no_grad():
            self._forward(i)
        return seen[0]

    def _forward(self, i: int) -> None:
        device = self.base.get_input_embeddings().weight.device
        self.base(**{key: value.to(device) for key, value in self.batches[i].items()}, use_cache=False)

    def write(self, what: str, i: int, states: torch.Tensor) -> None:
        """Write the states of one batch to disk."""
        save_file({"states": states.detach().cpu().contiguous()}, self._path(what, i))

    def read(self, what: str, i: int) -> torch.Tensor:
        """Return the states of one batch, on the CPU."""
        return load_file(self._path(what, i))["states"]

    def move_on(self) -> None:
        """Move on to the next layer: the states after this one are those before it."""
        for i in range(len(self.batches)):
            self._path("next", i).replace(self._path("states", i))

    def _path(self, what: str, i: int) -> Path:
        return self.folder / f"{self.name}-{what}-{i}.safetensors"
