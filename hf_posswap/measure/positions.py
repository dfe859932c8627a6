"""A scheme's or a model's positions as numbers: vectors, frequencies, and the matrix of a shift."""

import torch
from transformers import PreTrainedModel

from hf_posswap.checkpoint import SwappedModel
from hf_posswap.describing import describe
from hf_posswap.errors import PosswapError
from hf_posswap.schemes import AttentionPositions, Constant, Geometry, Scheme, Sinusoidal
from hf_posswap.schemes.sinusoidal import sinusoids
from hf_posswap.surgery import geometry_of
from hf_posswap.target import find_target

TURNING = "schemes that turn pairs of dimensions (sinusoidal, rotary)"


def one_head(size: int, positions: int) -> Geometry:
    """Return the sizes of a model that consists of one head, for looking at schemes without a model."""
    return Geometry(hidden_size=size, num_heads=1, head_dim=size, max_positions=positions, trained_positions=positions)


def scheme_of(model: PreTrainedModel) -> tuple[Scheme, Geometry]:
    """Return the scheme that a model has now, swapped or not, and the sizes it is built for."""
    told = describe(model)
    return told.new, geometry_of(model.config, told.max_positions, told.trained_positions)


@torch.no_grad()
def position_table(source: Scheme | PreTrainedModel, positions: int | None = None, size: int = 64) -> torch.Tensor:
    """Return the vectors that a scheme by its formula, or a model as it is, adds at each position: (P, E).

    `positions` are P, by default 64 or all that the model holds; `size` is E, for schemes alone.

    >>> position_table(Sinusoidal(), positions=2, size=4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])

    PosswapError: the scheme has no vectors, or none without a checkpoint; or the model has fewer positions.
    """
    if positions is not None and positions < 1:
        raise PosswapError(f"positions={positions} must be at least 1")
    if isinstance(source, Scheme):
        scheme, geometry, first_id = source, one_head(size, positions or 64), 0
        scheme.check(geometry)
        module = scheme.embedding_module(geometry)
        if getattr(module, "keeps_table", False):
            raise PosswapError(f"{scheme} is whatever a checkpoint has learned: name a model, such as minilm")
    else:
        target, architecture = find_target(source)
        scheme, geometry = scheme_of(target)
        module, first_id = architecture.table(target.base_model), architecture.first_id(target.config)
    if isinstance(module, Constant):
        others = f"`plot wavelengths`, `translation` take {TURNING}"
        raise PosswapError(f"{scheme} adds no vectors: see `plot attention MODEL {scheme}`; {others}")
    count = positions or geometry.max_positions
    if count > geometry.max_positions:
        raise PosswapError(f"{count} positions were asked for, and the model holds {geometry.max_positions}")
    if isinstance(source, Scheme) or isinstance(target, SwappedModel):
        device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), None)
        table = module(torch.arange(count, device=device)[None] + first_id)[0]
    else:  # a family's own table counts in its own way
        table = architecture.trained_rows(target.base_model)[:count].detach().clone()
    if not table.any():
        raise PosswapError(f"{scheme} is all zeros until it is fitted to a checkpoint: swap a model, and look at that")
    return table


def frequencies(scheme: Scheme, geometry: Geometry) -> torch.Tensor:
    """Return the angles by which pairs of dimensions turn from one position to the next: (pairs,) float64, fastest first.

    >>> frequencies(Sinusoidal(), one_head(4, 8))
    tensor([1.0000, 0.0100], dtype=torch.float64)

    PosswapError: the scheme turns nothing.
    """
    scheme.check(geometry)
    attention = scheme.attention_module(geometry)
    if hasattr(attention, "frequencies"):
        return attention.frequencies(torch.device("cpu"), geometry.trained_positions)[0]
    if not isinstance(scheme, Sinusoidal):
        raise PosswapError(f"only {TURNING} have wavelengths; {scheme} has none")
    layout = "tensor2tensor" if scheme.layout == "tensor2tensor" else "halves"  # the others are permutations of halves
    pairs = geometry.hidden_size // 2
    sines, cosines = sinusoids(torch.tensor(1), 2 * pairs, base=scheme.base, layout=layout).double().chunk(2)
    return torch.atan2(sines, cosines)


def pair_rotation(angles: torch.Tensor) -> torch.Tensor:
    """Return the matrix that turns pairs (sin, cos) by angles (pairs,): (2 pairs, 2 pairs).

    sin(a + b) = cos b sin a + sin b cos a, and cos(a + b) = -sin b sin a + cos b cos a.

    >>> pair_rotation(torch.tensor([0.5], dtype=torch.float64))
    tensor([[ 0.8776,  0.4794],
            [-0.4794,  0.8776]], dtype=torch.float64)
    """
    cos, sin = angles.cos(), angles.sin()
    return torch.block_diag(*torch.stack([torch.stack([cos, sin], -1), torch.stack([-sin, cos], -1)], -2))


@torch.no_grad()
def translation(scheme: Scheme, shift: int, size: int) -> tuple[torch.Tensor, float]:
    """Return T (E, E) with PE(t + shift) = T PE(t), and its error relative to |PE(t + shift) - PE(t)|.

    For a scheme that turns queries and keys T is that rotation, for sinusoids the rotation of each pair. For other vectors it
    is the least-squares solution over 4,096 positions; where no such matrix exists, the error is large.

    >>> matrix, missed = translation(Sinusoidal(), 3, 4)
    >>> [round(x, 2) for x in matrix[0, :2].tolist()], missed < 1e-5  # sin(t + 3) = cos 3 sin t + sin 3 cos t
    ([-0.99, 0.14], True)

    PosswapError: the scheme neither turns nor adds anything, or the shift is less than 1.
    """
    if shift < 1:
        raise PosswapError(f"shift={shift} must be at least 1")
    geometry = one_head(size, 4096 + shift)
    scheme.check(geometry)
    attention = scheme.attention_module(geometry)
    if attention is not None and type(attention).rotate is not AttentionPositions.rotate:
        turned = []
        for places in (torch.full((1, size), shift), torch.zeros(1, size, dtype=torch.long)):
            shared = attention.prepare(places, places, geometry.max_positions, None)
            turned.append(attention.rotate(torch.eye(size)[None, None], shared)[0, 0].T)
        return turned[0] / turned[1].norm(dim=0), 0.0  # without the factor of yarn, which all positions have
    if isinstance(scheme, Sinusoidal):
        matrix = torch.zeros(size, size)
        turned = pair_rotation(shift * frequencies(scheme, geometry))
        pairs = torch.arange(len(turned)).view(-1, 2)
        orders = {"interleaved": pairs, "cosine_first": pairs.flip(1)}
        order = orders.get(scheme.layout, pairs.T).flatten()  # halves: all sines, then all cosines
        matrix[: len(turned), : len(turned)] = turned[order][:, order]
        return matrix, 0.0
    table = position_table(scheme, geometry.max_positions, size).double()
    before, after = table[:-shift], table[shift:]
    solution = torch.linalg.lstsq(before, after, driver="gelsd").solution
    return solution.T.float(), float((before @ solution - after).norm() / (after - before).norm())
