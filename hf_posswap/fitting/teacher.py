"""The original as a teacher: its layers' outputs on each batch, also on batches longer than its input.

It reads longer batches through windows (`measure.windows`), so a token's target depends on its place in the window, not in the
text. In a causal model, tokens after the first window stand in the last quarter of theirs. An encoder's states depend strongly
on their place, and targets would rise and fall along the text with the windows. So the mean state at each place, over all
windows, is replaced by its mean over places. The first and the last token of a text, [CLS] and [SEP], keep their states.
"""

from collections.abc import Collection
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.data.calibration import Batch
from hf_posswap.fitting.states import States
from hf_posswap.measure.windows import Windows, lay_windows

_TOKENS_AT_ONCE = 4096  # in windows, in which a long text has four times its tokens


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
                parts = windows.split(max(1, _TOKENS_AT_ONCE // window))
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
