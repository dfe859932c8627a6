"""Windows: how a model that reads `window` tokens at once reads longer text, each token from one window.

    B  sequences, L  tokens of the longest, W  windows of all sequences together, V  tokens of one window

Windows of a sequence start at 0, stride, 2 stride, ..., and the last one ends with it. A token stands in several of them. A
causal model's output for it comes from the first window that contains it, where it has the most tokens before it: V - stride or
more. An encoder's is taken from the window where it stands nearest the middle.
"""

from functools import cache
from typing import NamedTuple

import torch


class Windows(NamedTuple):
    """Windows of a batch (B, L), one after the other."""

    rows: torch.Tensor  # (W,), the sequence of each window
    places: torch.Tensor  # (W, V), places in that sequence
    chosen: torch.Tensor  # (W, V) bool: this token is taken from this window; true once for each token
    edges: torch.Tensor  # (W, V) bool: the first or the last token of its sequence

    def cut(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the windows of a batch: each (B, L) becomes (W, V)."""
        return {key: value[self.rows[:, None], self.places] for key, value in batch.items()}

    def put(self, windows: torch.Tensor, sequences: torch.Tensor) -> None:
        """Write the chosen tokens of windows (W, V, ...) into sequences (B, L, ...)."""
        rows = self.rows[:, None].expand_as(self.places)
        sequences[rows[self.chosen], self.places[self.chosen]] = windows[self.chosen]

    def split(self, tokens: int) -> list["Windows"]:
        """Return the windows in parts of at most so many tokens, or of one window."""
        count = max(1, tokens // self.places.shape[1])
        return [Windows(*parts) for parts in zip(*(part.split(count) for part in self), strict=True)]


def lay_windows(mask: torch.Tensor, window: int, stride: int, *, causal: bool) -> Windows:
    """Lay windows over sequences of `window` places or more, by their mask (B, L), which is false where there is padding.

    Each sequence begins at place 0. Only a sequence shorter than a window has padding in it.

    >>> found = lay_windows(torch.ones(1, 10, dtype=torch.bool), 4, 2, causal=True)
    >>> found.places[:, 0].tolist(), found.chosen.sum(1).tolist()
    ([0, 2, 4, 6], [4, 2, 2, 2])
    """
    lay_one, laid = cache(_lay_one), []
    for row, real in enumerate(mask):
        last = int(real.nonzero()[-1])
        places, chosen = lay_one(last + 1, len(real), window, stride, causal)
        edges = (places == 0) | (places == last)
        laid.append((torch.full((len(places),), row), places, chosen & real[places], edges))
    return Windows(*map(torch.cat, zip(*laid, strict=True)))


def _lay_one(end: int, length: int, window: int, stride: int, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places (W, V) of the windows of one sequence, and which tokens are taken from each of them."""
    starts = torch.tensor([*range(0, end - window, stride), max(0, end - window)])
    places = starts[:, None] + torch.arange(window)
    offsets = torch.arange(length) - starts[:, None]  # (W, L), places in each window
    far = offsets.float() if causal else (offsets - (window - 1) / 2).abs()
    far = far.masked_fill((offsets < 0) | (offsets >= window), -1.0 if causal else float("inf"))
    # A token stands furthest back in the first window that contains it.
    best = far.argmax(0) if causal else far.argmin(0)
    return places, best[places] == torch.arange(len(starts))[:, None]
