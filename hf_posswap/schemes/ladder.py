"""The steps that lead to sinusoids: position codes that textbooks try first, and what is wrong with each.

For understanding, not for use: swap one into a real model and see what it costs. p is the position, N the model's longest
input, E its hidden size, n = ceil(log2 N) the bits needed to count to N.

| rung | S(p), its numbers | C, how many | what the next rung mends |
|---|---|---|---|
| `count` | p | 1 | grows without bound |
| `normalised` | p / (N - 1) | 1 | a step is smaller the longer the model |
| `binary` | b_j = floor(p / 2^j) mod 2, j = 0 ... n - 1 | n | never negative, and neighbours may differ everywhere: 7 and 8 |
| `centred` | 2 b_j - 1 | n | jumps, nothing between two positions |
| `dials` | sin(pi p / 2^j), j = 1 ... n: a hand for each bit | n | n has to fit N; rising or falling looks alike |
| `slowed` | sin(p w^(j/E)), j = 0 ... E - 1, w = 1e-4 | E | no cosine: a shift is no linear map |
| `posswap.Sinusoidal` | sin and cos of p w^(2i/E), i = 0 ... E/2 - 1 | E | |

Normalised by the text's own length instead of the model's, as some have it, a token's code would change with every token that
follows: padding and caches would be wrong.

`combine="add"`: the code is added to the word's vector, with zeros after its C numbers. A single number is added to all
dimensions, where layer norm removes it: BERT and GPT-2 do not see `count` and `normalised` at all (`hf-posswap check` says so).
`combine="concatenate"`: the code is put next to the word's vector x, and a linear map leads back to E dimensions,

    [x, S(p)] [I; W] = x + S(p) W,

where x is unchanged, since the pretrained layers expect it. So concatenating is the same as adding a projected code. W starts
at zero: no change, and no positions. A warm start fits it to the checkpoint's table instead, which shows how much of the table
each code can express.

The names follow the posts from which many learn this: Kernes 2021, "Master Positional Encoding"
(https://towardsdatascience.com/master-positional-encoding-part-i-63c05d90a0c3), and Kazemnejad 2019, "Transformer
Architecture: The Positional Encoding" (https://kazemnejad.com/blog/transformer_architecture_positional_encoding/).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from hf_posswap.errors import PosswapError
from hf_posswap.schemes.base import Geometry, PositionEmbedding, Scheme
from hf_posswap.schemes.sinusoidal import Code, ProjectedCode

RUNGS = ("count", "normalised", "binary", "centred", "dials", "slowed")


def rung_code(positions: torch.Tensor, rung: str, *, max_positions: int, size: int) -> torch.Tensor:
    """Return the code S(p) of positions (..., ) as float32 (..., C), see the table above; size is E.

    >>> rung_code(torch.arange(4), "binary", max_positions=4, size=8)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.],
            [1., 1.]])
    """
    device = torch.device("cpu") if positions.device.type == "mps" else positions.device  # Apple's GPUs have no float64
    bits = torch.arange(max(1, (max_positions - 1).bit_length()), dtype=torch.float64, device=device)
    p = positions.to(device=device, dtype=torch.float64)[..., None]
    if rung == "count":
        code = p
    elif rung == "normalised":
        code = p / max(1, max_positions - 1)
    elif rung == "binary":
        code = (p / 2**bits).floor() % 2
    elif rung == "centred":
        code = 2 * ((p / 2**bits).floor() % 2) - 1
    elif rung == "dials":
        code = torch.sin(math.pi * p / 2 ** (bits + 1))
    else:
        code = torch.sin(p * 1e-4 ** (torch.arange(size, dtype=torch.float64, device=device) / size))
    return code.to(device=positions.device, dtype=torch.float32)


def added(positions: torch.Tensor, rung: str, *, max_positions: int, size: int) -> torch.Tensor:
    """Return the code of positions (..., ) as (..., E): a single number in all dimensions, more with zeros behind them.

    >>> added(torch.tensor([3]), "centred", max_positions=8, size=5)
    tensor([[ 1.,  1., -1.,  0.,  0.]])
    """
    code = rung_code(positions, rung, max_positions=max_positions, size=size)
    if code.shape[-1] == 1:
        return code.expand(*positions.shape, size)
    return nn.functional.pad(code, (0, size - code.shape[-1]))


@dataclass(frozen=True, kw_only=True)
class Ladder(Scheme):
    """One rung of the ladder of absolute codes, for understanding: none of them is meant to be used.

    Args:
        rung: "count", "normalised", "binary", "centred", "dials" or "slowed"; the next one is `Sinusoidal`.
        combine: "add" the code as printed, or "concatenate" it, with a linear map back to the hidden size.

    >>> str(Ladder(rung="binary", combine="concatenate"))
    'ladder:rung=binary,combine=concatenate'
    """

    rung: Literal[RUNGS] = "count"
    combine: Literal["add", "concatenate"] = "add"

    name: ClassVar[str] = "ladder"
    resizable: ClassVar[bool] = False  # the code depends on N: what was learned for one N is wrong for another
    summary: ClassVar[str] = "counts, bits and dials: what textbooks try before sinusoids, for understanding"

    def check(self, geometry: Geometry) -> None:
        width = rung_code(torch.tensor(0), self.rung, max_positions=geometry.max_positions, size=geometry.hidden_size).shape[-1]
        if self.combine == "add" and width > geometry.hidden_size:
            what = f"ladder: {self.rung} takes {width} numbers to count to {geometry.max_positions}, and the hidden size is"
            raise PosswapError(f"{what} {geometry.hidden_size}: take fewer positions, or combine='concatenate'")

    def embedding_module(self, geometry: Geometry) -> PositionEmbedding:
        options = {"rung": self.rung, "max_positions": geometry.max_positions, "size": geometry.hidden_size}
        if self.combine == "add":
            return Code(geometry, partial(added, **options))
        code = partial(rung_code, **options)
        return ProjectedCode(geometry, code, code(torch.tensor(0)).shape[-1])
