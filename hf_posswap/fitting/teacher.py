"""Hidden states of both models on all batches, kept on disk for the current layers only, and what the original teaches.

It reads batches longer than its input through windows (`measure.windows`), so a token's target depends on its place in the
window, not in the text. In a causal model, tokens after the first window stand in the last quarter of theirs. An encoder's
states depend strongly on their place, and targets would rise and fall along the text with the windows. So the mean state at
each place, over all windows, is replaced by its mean over places. The first and the last token of a text, [CLS] and [SEP], keep
their states.
"""

from collections.abc import Collection, Iterable, Iterator
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
from hf_posswap.measure.windows import Windows, lay_windows

_TOKENS_AT_ONCE = 4096  # in windows, in which a long text has four times its tokens


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


class Teacher:
    """The original's states of batches, whole or in windows of `window` tokens, and what each layer's output should be.

    `fitted` are the batches from whose windows an encoder's mean states are computed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        batches: list[Batch],
        fitted: Collection[int],
        folder: Path,
        window: int,
    ):
        self.causal = architecture.is_causal(model.config)
        self.fitted, self.window = fitted, window
        self.shapes = [batch["input_ids"].shape for batch in batches]
        # By batch: indices into `read`, with their windows; None where a batch is read whole.
        self.parts: list[list[tuple[int, Windows | None]]] = []
        read: list[Batch] = []
        for batch in batches:
            parts = [None]
            if batch["input_ids"].shape[1] > window:
                windows = lay_windows(batch["attention_mask"], window, max(1, window // 4), causal=self.causal)
                parts = windows.split(_TOKENS_AT_ONCE)
            self.parts.append([(len(read) + number, part) for number, part in enumerate(parts)])
            read += [batch if part is None else part.cut(batch) for part in parts]
        self.states = States(model, architecture, read, folder, "original")

    @torch.no_grad()
    def advance(self, indices: range) -> None:
        """Run these layers on all batches, and compute their outputs for every token."""
        for place, index in enumerate(indices):
            for number in range(len(self.states.batches)):
                (out,) = self.states.run([index], number, "next" if place else "states")
                self.states.write("next", number, out)
            self._say(place)

    def _say(self, place: int) -> None:
        """Write the outputs of the layer at this place, batch by batch; of windows each token's own."""
        windowed = [i for i, parts in enumerate(self.parts) if parts[0][1] is not None]
        traces = self._traces([i for i in windowed if i in self.fitted] or windowed) if windowed and not self.causal else None
        for i, parts in enumerate(self.parts):
            said = None
            for number, windows in parts:
                states = self.states.read("next", number)
                if windows is None:
                    said = states
                    break
                if traces is not None:
                    states = torch.where(windows.edges[..., None], states, (states - traces).to(states))
                if said is None:
                    said = states.new_zeros(*self.shapes[i], states.shape[-1])
                windows.put(states, said)
            self.states.write(f"said-{place}", i, said)

    def said(self, place: int, i: int) -> torch.Tensor:
        """Return the output of the current layer at this place for each token of one batch, (B, L, E) on the CPU."""
        return self.states.read(f"said-{place}", i)

    def _traces(self, batches: Collection[int]) -> torch.Tensor:
        """Return the mean states at each place in a window, less their mean over places, (V, E)."""
        total, count = 0.0, torch.zeros(self.window, 1, dtype=torch.float64)
        for i in batches:
            for number, windows in self.parts[i]:
                counts = (self.states.batches[number]["attention_mask"] & ~windows.edges)[..., None]  # (W, V, 1)
                states = self.states.read("next", number).double()
                total = total + torch.where(counts, states, 0.0).sum(0)
                count += counts.sum(0)
        means, seen = total / count.clamp(min=1), count[:, 0] > 0
        return torch.where(seen[:, None], means - means[seen].mean(0), 0.0)
