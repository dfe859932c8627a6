"""Rotary positions: Su et al. 2021, "RoFormer", section 3.2.2, equation 34 (https://arxiv.org/abs/2104.09864).

Each pair of dimensions (x, y) of queries and keys turns by the angle p * theta_m, theta_m = theta^(-2m / R):

    (x, y) -> (x cos(p theta_m) - y sin(p theta_m),  x sin(p theta_m) + y cos(p theta_m))

so that q.k depends on positions only through their distance. R = fraction * D dimensions turn, the rest stay (partial
rotary, as in GPT-NeoX). Keys are rotated before they enter the cache.

Layouts: `interleaved` pairs (2m, 2m + 1), as the paper and transformers' RoFormer; `half` pairs (m, m + R/2), as GPT-NeoX and
Llama. Dimension m of `half` is 2m of `interleaved`, and m + R/2 is 2m + 1: for a model that had no rotary positions the layouts
differ only by that permutation.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from hf_posswap.errors import PosswapError, UnknownSchemeError
from hf_posswap.functional.closed_form import balance, fit_kernel, kernel_moments, missing_scores, second_moment, write_kernel
from hf_posswap.schemes.base import AttentionPositions, Constant, Geometry, Scheme, check_number


class RotaryPositions(AttentionPositions):
    """Rotates queries and keys. It has no buffers that `.to(bfloat16)` or a checkpoint could change."""

    def __init__(self, scheme: "Rotary", geometry: Geometry):
        super().__init__()
        self.scheme, self.geometry = scheme, geometry
        self.rotary_dim = scheme.rotary_dim(geometry.head_dim)

    def frequencies(self, device: torch.device, length: int | torch.Tensor | None) -> tuple[torch.Tensor, float]:
        """Return theta_m as (R/2,) float64, fastest first, and the factor on cos and sin that yarn and longrope use."""
        scheme, scaling = self.scheme, self.scheme.scaling
        if scaling is None:
            planes = self.rotary_dim // 2
            slowest = -(planes - 1) / planes  # theta^0, theta^(-1/planes), ...
            return torch.logspace(0, slowest, planes, base=float(scheme.theta), dtype=torch.float64, device=device), 1.0
        # transformers is imported here only, for its published scalings; it computes them in float32.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        parameters = {"original_max_position_embeddings": self.geometry.trained_positions, **scaling}
        parameters["rope_theta"] = float(scheme.theta)
        # `dynamic` scales from this length; longrope derives a missing factor from it.
        dynamic = scaling["rope_type"] == "dynamic"
        length_now = self.geometry.trained_positions if dynamic else self.geometry.max_positions
        config = _RopeConfig(parameters, self.rotary_dim, length_now)
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, device, seq_len=length)
        return frequencies.double(), factor

    def angles(self, position_ids, length) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of the angles, each (B or 1, 1, Q, R/2) float32; angles in float64."""
        # float32 angles are off by 4.6e-3 rad at position 100,000. Apple's GPUs have no float64: compute those on the CPU.
        device = torch.device("cpu") if position_ids.device.type == "mps" else position_ids.device
        kind = (self.scheme.scaling or {}).get("rope_type")
        if kind == "dynamic" and length is None:
            length = int(position_ids.max()) + 1  # its frequencies depend on the current length
        frequencies, factor = self.frequencies(device, length)
        if kind == "longrope":  # short or long factors by the current length; torch.where, so that a trace has both
            trained = self.scheme.scaling.get("original_max_position_embeddings", self.geometry.trained_positions)
            short, long = (self.frequencies(device, length)[0] for length in (trained, trained + 1))
            frequencies = torch.where(position_ids.to(device).max() < trained, short, long)
        angles = position_ids.to(device=device, dtype=torch.float64)[:, None, :, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        return cos.to(position_ids.device, torch.float32), sin.to(position_ids.device, torch.float32)

    def prepare(self, position_ids, slots, length, key_positions, attention_mask=None) -> Any:
        """Return the angles in the form for the cheapest formula; `rotate` tells it by their number and shape.

        In eager mode complex numbers turn interleaved pairs in one pass over memory, much faster than split and stack; the
        compiler has no complex kernels, but fuses split and stack. For halves, a roll is cheaper than a cat in eager mode, and
        dearer when compiled.
        """
        cos, sin = self.angles(position_ids, length)
        if torch.compiler.is_compiling():
            return cos, sin
        if self.scheme.layout == "interleaved":
            return (torch.complex(cos, sin),)
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def rotate(self, states: torch.Tensor, shared: Any) -> torch.Tensor:
        """Turn (B, H, Q, D) states by the shared angles, in float32, rounded once to the model's dtype."""
        cos, sin = shared if len(shared) == 2 else (shared[0], None)
        turned = states if self.rotary_dim == states.shape[-1] else states[..., : self.rotary_dim]
        turned = turned.to(torch.promote_types(states.dtype, torch.float32))
        if cos.is_complex():
            if any(stride % 2 for stride in turned.stride()[:-1]):
                turned = turned.contiguous()  # view_as_complex needs even strides
            pairs = torch.view_as_complex(turned.view(*turned.shape[:-1], -1, 2))
            turned = torch.view_as_real(pairs * cos).flatten(-2)
        elif cos.shape[-1] == self.rotary_dim:  # halves, (x, y) cos + (y, x) (-sin, sin)
            turned = torch.addcmul(turned * cos, turned.roll(self.rotary_dim // 2, dims=-1), sin)
        elif self.scheme.layout == "half":
            x, y = turned.chunk(2, dim=-1)
            turned = torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)
        else:
            x, y = turned.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1).flatten(-2)
        turned = turned.to(states.dtype)
        if self.rotary_dim == states.shape[-1]:
            return turned
        return torch.cat([turned, states[..., self.rotary_dim :]], dim=-1)

    def planes(self) -> torch.Tensor:
        """Return the dimensions (x, y) of each plane, fastest first: (R/2, 2) int64."""
        dims = torch.arange(self.rotary_dim)
        return dims.view(2, -1).T if self.scheme.layout == "half" else dims.view(-1, 2)

    def dims_slow_to_fast(self) -> torch.Tensor:
        """Return the dimensions that never turn, then those of each plane from the slowest to the fastest, (D,) int64."""
        return torch.cat([torch.arange(self.rotary_dim, self.geometry.head_dim), self.planes().flip(0).flatten()])

    def solve(self, observe, query_key, scaling) -> None:
        """Balance the basis, then fit the function of distance that scores still miss; see `closed_form`."""
        moments = [0.0, 0.0]
        for evidence in observe():
            for side, states in enumerate((evidence.query, evidence.key)):
                moments[side] = moments[side] + second_moment(evidence.tokens(states)) * states.shape[0] * states.shape[2]
        balance(query_key, *moments, self.dims_slow_to_fast())  # a common scale of the moments does not matter
        for _ in range(2):  # the first pass disturbs scores of content a little; the second corrects for it
            self._solve_kernel(observe, query_key, scaling)

    def _solve_kernel(self, observe, query_key, scaling) -> None:
        equations, sums, count = [0.0, 0.0], [0.0, 0.0], 0
        for evidence in observe():
            length = evidence.query.shape[-2]
            position_ids = torch.arange(length, device=evidence.query.device)[None]
            shared = self.prepare(position_ids, position_ids, length, None)
            scores = self.rotate(evidence.query, shared) @ self.rotate(evidence.key, shared).transpose(-1, -2)
            frequencies, factor = self.frequencies(torch.device("cpu"), length)
            found = kernel_moments(*missing_scores(evidence, scores, scaling), frequencies)
            tokens = [evidence.tokens(states) for states in (evidence.query, evidence.key)]
            equations = [total + part for total, part in zip(equations, found, strict=True)]
            sums = [total + states.sum(1) for total, states in zip(sums, tokens, strict=True)]
            count += tokens[0].shape[1]
        change = fit_kernel(*equations) / factor**2
        write_kernel(query_key, *(total / count for total in sums), change, self.planes())


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


class _RopeConfig:  # no SimpleNamespace: torch.compile cannot make one
    """The config fields that ROPE_INIT_FUNCTIONS read, for a head of which every dimension turns."""

    def __init__(self, rope_parameters: dict[str, Any], rotary_dim: int, max_positions: int):
        self.rope_parameters = rope_parameters
        self.head_dim = self.hidden_size = rotary_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = max_positions

    def standardize_rope_params(self) -> None:
        pass


_SCALINGS = {  # kind -> the fields that it needs, and others that it takes
    "linear": ("factor", ""),
    "dynamic": ("factor", ""),
    "yarn": ("factor", "attention_factor beta_fast beta_slow mscale mscale_all_dim truncate"),
    "longrope": ("short_factor long_factor", "factor attention_factor"),
    "llama3": ("factor low_freq_factor high_freq_factor", ""),
}


@dataclass(frozen=True, kw_only=True)
class Rotary(Scheme):
    """Rotary position embedding (RoPE) in every attention layer; nothing is added to the embeddings.

    Args:
        theta: The base of the frequencies; larger means slower planes. "auto": see `posswap.choose`.
        fraction: The share of each head's dimensions that turn, in (0, 1], or "auto".
        layout: "interleaved" (the paper, RoFormer) or "half" (GPT-NeoX, Llama).
        scaling: What transformers' `rope_parameters` take, such as {"rope_type": "linear", "factor": 4.0}; types linear,
            dynamic, yarn, longrope, llama3. `dynamic` and `longrope` choose frequencies by the current length,
            as in transformers: keys cached before the trained length was passed keep the frequencies they had.
        mark_first: Keep the old table's row 0 for the first token (`Constant`). GPT-NeoX has no such vector: with False a GPT-2
            can be exported to that class (`posswap.export_native`), but loses its attention sink.

    >>> Rotary(theta=500_000).to_dict()
    {'name': 'rotary', 'theta': 500000, 'fraction': 1.0, 'layout': 'interleaved', 'scaling': None, 'mark_first': True}
    """

    theta: float | Literal["auto"] = 10_000
    fraction: float | Literal["auto"] = 1.0
    layout: Literal["interleaved", "half"] = "interleaved"
    scaling: dict[str, Any] | None = None
    mark_first: bool = True

    name: ClassVar[str] = "rotary"
    in_attention: ClassVar = RotaryPositions
    choices: ClassVar[dict[str, tuple]] = {"theta": (10_000, 1_000, 100, 100_000), "fraction": (1.0, 0.5, 0.25)}
    summary: ClassVar[str] = "RoPE, whole or partial, with transformers' length scalings"
    shift_invariant: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_number(self, "theta", float, 1, above=True)
        check_number(self, "fraction", float, 0, above=True)
        if self.fraction != "auto" and self.fraction > 1:
            raise PosswapError(f"rotary: fraction={self.fraction} must lie in (0, 1]")
        if self.scaling is not None:
            self._check_scaling()
            object.__setattr__(self, "scaling", copy.deepcopy(self.scaling))  # the caller may change its own dict
            if self.scaling["rope_type"] in ("dynamic", "longrope"):  # angles change with the length
                object.__setattr__(self, "shift_invariant", False)
            if self.scaling["rope_type"] == "longrope" and not self.scaling.keys() & {"factor", "attention_factor"}:
                object.__setattr__(self, "resizable", False)  # the missing factor comes from the longest input

    def _check_scaling(self) -> None:
        given = dict(self.scaling) if isinstance(self.scaling, dict) else {}
        kind = given.pop("rope_type", None)
        if not isinstance(kind, str) or kind not in _SCALINGS:
            known = ", ".join(_SCALINGS)
            raise UnknownSchemeError(f"rotary: scaling={self.scaling!r} must be a dict with a 'rope_type' out of {known}")
        needed, optional = (set(fields.split()) for fields in _SCALINGS[kind])
        if not needed <= set(given) <= needed | optional | {"original_max_position_embeddings"}:
            takes = f"{sorted(optional)} and 'original_max_position_embeddings'"
            what = f"rotary: {kind} scaling needs {sorted(needed)} and takes {takes}"
            raise UnknownSchemeError(f"{what}; given were {sorted(given)}")
        for key, value in given.items():
            if key in ("short_factor", "long_factor"):
                right, wanted = isinstance(value, list) and all(map(_positive, value)), "a list of numbers above 0"
            elif key == "truncate":
                right, wanted = isinstance(value, bool), "true or false"
            else:
                right, wanted = _positive(value), "a number above 0"
            if not right:
                raise PosswapError(f"rotary: {key}={value!r} of {kind} scaling must be {wanted}")

    def rotary_dim(self, head_dim: int) -> int:
        """Return R, the number of dimensions that turn."""
        return int(head_dim * self.fraction + 1e-6)  # a rounded third of 6 is 2

    def check(self, geometry: Geometry) -> None:
        super().check(geometry)
        dims = self.rotary_dim(geometry.head_dim)
        if dims % 2 or dims < 2:
            even = sorted({max(2, dims // 2 * 2), min(dims // 2 * 2 + 2, geometry.head_dim // 2 * 2)})
            choices = " or ".join(f"fraction={n / geometry.head_dim:.10g} ({n} dimensions)" for n in even if n)
            what = f"rotary: fraction={self.fraction:g} of head_dim {geometry.head_dim} is {dims} dimensions"
            raise PosswapError(f"{what}, and they turn in pairs: use {choices}")
        if dims < 4 and (self.scaling or {}).get("rope_type") == "dynamic":
            what = "rotary: dynamic scaling needs at least 4 dimensions that turn"
            raise PosswapError(f"{what}, fraction={self.fraction:g} leaves {dims}")
        for field in ("short_factor", "long_factor"):
            factors = (self.scaling or {}).get(field)
            if factors is not None and len(factors) != dims // 2:
                raise PosswapError(f"rotary: {field} must have {dims // 2} numbers, one a plane; it has {len(factors)}")

    def embedding_module(self, geometry: Geometry) -> Constant:
        return Constant(geometry, mark_first=self.mark_first)
