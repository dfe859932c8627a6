"""Sinusoidal positions: Vaswani et al. 2017, "Attention Is All You Need", section 3.5 (https://arxiv.org/abs/1706.03762).

    PE(p, 2i)     = sin(p / base^(2i / E))
    PE(p, 2i + 1) = cos(p / base^(2i / E))

Layouts: `interleaved` as printed; `cosine_first` has each pair the other way round, and `halves` all sines before all
cosines, the same numbers; `tensor2tensor` is what the authors' code computes (get_timing_signal_1d): halves, with E/2 - 1
steps from wavelength 2 pi to base * 2 pi, so the frequencies differ from the printed ones, by up to 15 % at E = 128.

Such rows have the norm sqrt(E / 2), 19.6 at E = 768, far above a trained network's table: dropped in as printed they
destroy a pretrained model. `project=True` puts a linear map behind them, fitted to the table (see `fit_table`).
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.schemes.base import Geometry, PositionEmbedding, Scheme, check_number


def sinusoids(positions: torch.Tensor, size: int, *, base: float = 10_000.0, layout: str = "interleaved") -> torch.Tensor:
    """Return the sinusoids of positions (..., ) as (..., size), computed in float64 and returned in float32.

    >>> sinusoids(torch.arange(2), 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    pairs = size // 2
    # float32 angles are off by 4.6e-3 rad at position 100,000. Apple's GPUs have no float64: compute those on the CPU.
    device = torch.device("cpu") if positions.device.type == "mps" else positions.device
    index = torch.arange(pairs, dtype=torch.float64, device=device)
    exponents = index / max(pairs - 1, 1) if layout == "tensor2tensor" else 2 * index / size
    angles = positions.to(device=device, dtype=torch.float64)[..., None] * torch.exp(-math.log(base) * exponents)
    waves = [angles.sin(), angles.cos()]
    if layout == "cosine_first":
        waves.reverse()
    signal = torch.cat(waves, dim=-1) if layout in ("halves", "tensor2tensor") else torch.stack(waves, dim=-1).flatten(-2)
    return nn.functional.pad(signal, (0, size - 2 * pairs)).to(device=positions.device, dtype=torch.float32)


class Code(PositionEmbedding):
    """A formula's vectors, computed for whatever positions are asked for; no parameters."""

    def __init__(self, geometry: Geometry, code: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(geometry)
        self.code = code  # positions (..., ) -> float32 (..., C), here with C = E; it must be picklable

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return self.code(position_ids).to(self.weight.dtype)


class ProjectedCode(PositionEmbedding):
    """A formula's vectors of any width C behind a linear map, S(p) W / C + b, with W (C, E) and b (E).

    It equals a concatenation with a linear map that keeps x: [x, S(p)] [I; W / C] = x + S(p) W / C.

    Position 0 has a vector of its own. Row 0 of a trained table is an outlier (see `Constant`): no smooth function fits it and
    its neighbours, and one fitted to it is wrong at all early positions.

    Adam moves every entry of W by about its learning rate, and each output sums over C of them: the factor 1 / C makes the step
    as small as a table's. Without it, the first steps of tuning destroy the positions.
    """

    def __init__(self, geometry: Geometry, code: Callable[[torch.Tensor], torch.Tensor], width: int):
        super().__init__(geometry)
        self.code, self.width = code, width
        self.max_positions = geometry.max_positions
        self.projection = nn.Parameter(torch.zeros(width, geometry.hidden_size))
        self.bias = nn.Parameter(torch.zeros(geometry.hidden_size))
        self.first = nn.Parameter(torch.zeros(geometry.hidden_size))

    def fit_table(self, table: torch.Tensor) -> None:
        """Keep row 0; fit the projected code to the other rows by weighted least squares, in float64.

        min_W  sum_p w_p |S_p W - (P_p - mean)|^2 + 1e-3 |W|^2 + 1e-3 |S' W|^2, with S centred like P, so that the mean
        stays exact. w_p = 1 / (p + 4), scaled to a mean of 1, counts every octave of positions alike: all texts have a
        tenth token, few have a five-hundredth. S' are the positions from the trained length to the longest input: without that
        last term the fit is closer on the table, and explodes beyond it.
        """
        count = min(4096, self.max_positions - len(table))
        beyond = torch.linspace(len(table), self.max_positions - 1, count, dtype=torch.float32).round()
        positions = torch.cat([torch.arange(len(table)), beyond]).to(table.device)
        signal = self.code(positions).double()
        weights = 1 / (torch.arange(len(table), device=table.device, dtype=table.dtype) + 4)
        weights[0] = 0
        weights = (weights / weights.mean())[:, None]
        mean, centre = (weights * table).mean(0), (weights * signal[: len(table)]).mean(0)
        signal = signal - centre
        trained, untrained = signal[: len(table)], signal[len(table) :]
        gram = trained.T @ (weights * trained) + 1e-3 * (untrained.T @ untrained + torch.eye(self.width).to(signal))
        projection = torch.linalg.solve(gram, trained.T @ (weights * (table - mean)))
        self.projection.copy_(projection * self.width)
        self.bias.copy_(mean - centre @ projection)
        self.first.copy_(table[0])

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        signal = self.code(position_ids)
        # The sum has large terms of both signs: also under autocast it is taken in float32, and rounded once.
        kind = signal.device.type
        with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():  # not on meta
            projected = (signal / self.width @ self.projection.float() + self.bias.float()).to(self.projection.dtype)
        return torch.where(position_ids[..., None] == 0, self.first, projected)


class ProjectedSinusoids(ProjectedCode):
    """Sinusoids behind a linear map, which without a table starts as the identity."""

    def __init__(self, geometry: Geometry, code: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__(geometry, code, geometry.hidden_size)
        for name, value in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(value))

    def initial_values(self) -> dict[str, torch.Tensor]:
        identity, zeros = torch.eye(self.width) * self.width, torch.zeros(self.width)
        return {"projection": identity, "bias": zeros, "first": self.code(torch.tensor(0))}


@dataclass(frozen=True, kw_only=True)
class Sinusoidal(Scheme):
    """Sinusoidal absolute positions, of any length.

    Args:
        base: The longest wavelength is base * 2 pi (roughly, see the layouts).
        layout: "interleaved" as printed, "cosine_first", "halves", or "tensor2tensor" as the authors' code has it.
        project: Fit a linear map from the sinusoids to the checkpoint's table and keep its row 0; False is the table as
            printed.

    >>> Sinusoidal(layout="halves").to_dict()
    {'name': 'sinusoidal', 'base': 10000, 'layout': 'halves', 'project': True}
    """

    base: float = 10_000
    layout: Literal["interleaved", "cosine_first", "halves", "tensor2tensor"] = "interleaved"
    project: bool = True

    name: ClassVar[str] = "sinusoidal"
    summary: ClassVar[str] = "sines and cosines, projected onto the checkpoint's table or as printed"

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "base", float, 1, above=True)

    def check(self, geometry: Geometry) -> None:
        if geometry.hidden_size % 2 and self.layout != "tensor2tensor":
            raise PosswapError(f"sinusoidal: hidden size {geometry.hidden_size} is odd; only layout='tensor2tensor' pads it")

    def embedding_module(self, geometry: Geometry) -> PositionEmbedding:
        code = partial(sinusoids, size=geometry.hidden_size, base=self.base, layout=self.layout)
        return (ProjectedSinusoids if self.project else Code)(geometry, code)
