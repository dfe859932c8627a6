"""What a position scheme is: a frozen dataclass of options that builds at most two modules.

Shapes, for all schemes: B batch, H heads, L length (Q of queries, K of keys), D head_dim, E hidden size. Relative distance is
key position minus query position.
"""

from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin

import torch
from torch import nn

from hf_posswap.errors import PosswapError, UnknownSchemeError


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that a scheme's modules are built for."""

    hidden_size: int  # of the table's vectors
    num_heads: int
    head_dim: int
    max_positions: int  # the longest input of the swapped model
    trained_positions: int  # rows of the original's table
    num_layers: int | None = None  # modules of self-attention; None where there is no model


class Positions(nn.Module):
    """What both modules of a scheme have."""

    shown = ""  # the scheme as a string, for those who print the model; set by the swap

    def extra_repr(self) -> str:
        return self.shown

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return what parameters start from when there is neither a table nor a checkpoint: zeros."""
        return {name: torch.zeros_like(parameter) for name, parameter in self.named_parameters()}


class PositionEmbedding(Positions):
    """Embedding-side module: position_ids (B, L) -> vectors (B, L, E), in the place of the learned table.

    The empty buffer `weight` is a guard: a stock class looks for `position_embeddings.weight` of shape (max_positions, E),
    finds (0, E) and refuses to load. Without it, a scheme without parameters would leave no trace in a checkpoint, and the
    stock model would load it silently with a random table.
    """

    keeps_table: ClassVar[bool] = False  # True: the scheme is the table, so a cold start calls `fit_table`, too

    def __init__(self, geometry: Geometry):
        super().__init__()
        self.register_buffer("weight", torch.empty(0, geometry.hidden_size))

    def fit_table(self, table: torch.Tensor) -> None:
        """Warm start: come as close as the scheme allows to the trained rows of the replaced table, (P, E) float64."""

    def guard(self) -> None:
        """With a span, give `weight` a shape that stock classes refuse, since they ignore spans; (0, E) is one already."""


class Constant(PositionEmbedding):
    """What is left of a table when its positions are taken away: one vector for all, another for position 0.

    A table's mean is not positional, yet the network has learned to expect it. Row 0 is an outlier in real tables: BERT's
    [CLS] always sits there, and GPT-2 hangs its attention sink on it. It marks the first token, and says nothing about
    the others. A warm start keeps both vectors, zeros drop them. They are added where the table was added, so
    `inputs_embeds` and untied heads see what they saw. Without `mark_first` all positions get the mean.
    """

    def __init__(self, geometry: Geometry, *, mark_first: bool = True):
        super().__init__(geometry)
        self.first = nn.Parameter(torch.zeros(geometry.hidden_size)) if mark_first else None
        self.mean = nn.Parameter(torch.zeros(geometry.hidden_size))

    def fit_table(self, table: torch.Tensor) -> None:
        if self.first is not None:
            self.first.copy_(table[0])
        self.mean.copy_(table.mean(0))

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        if self.first is None:
            return self.mean.expand(*position_ids.shape, -1)
        return torch.where(position_ids[..., None] == 0, self.first, self.mean)  # (B, L, E)


class Places(NamedTuple):
    """Where the queries and keys of one forward are. A tuple, so that accelerate moves its tensors to each layer's device."""

    queries: torch.Tensor  # positions, (B or 1, Q)
    slots: torch.Tensor  # places in the sequence or cache, (1, Q)
    keys: torch.Tensor | None  # positions of all keys so far, (B or 1, K); None where the scheme does not need them
    key_mask: torch.Tensor | None = None  # (B, K) bool, True = attend; None if there is none, or it has another shape
    in_order: bool = False  # positions of attended keys go up by one, and only `key_mask` and causality hide keys
    measured: torch.Tensor | None = None  # of a single query: what a scheme computes from distances for all layers

    def distances(self, key_length: int, queries: slice = slice(None)) -> torch.Tensor:
        """Return key position minus query position, (B or 1, Q, K), of all queries or of a slice."""
        if self.keys is None:
            raise PosswapError("distances need the positions of keys: set `needs_key_positions = True` in the module's class")
        # A static cache is longer than what it holds, the rest is masked; a sliding one holds the last keys only.
        keys, room = self.keys[:, -key_length:], key_length - self.keys.shape[-1]
        keys = nn.functional.pad(keys, (0, room)) if room > 0 else keys
        return keys[:, None, :] - self.queries[:, queries, None]

    def block(self, queries: slice, keys: torch.Tensor) -> "Places":
        """Return the places of a slice of the queries and of keys by index, without a mask."""
        return Places(self.queries[:, queries], self.slots[:, queries], self.keys[:, keys])

    def causal(self, key_length: int) -> torch.Tensor:
        """Return which keys stand at or before each query in the sequence, (Q, K) bool."""
        first = (self.slots[0, -1] + 1 - key_length).clamp(min=0)  # a sliding cache has forgotten those before
        return first + torch.arange(key_length, device=self.slots.device) <= self.slots[0, :, None]


def is_traced() -> bool:
    """Whether values cannot be read: this code is traced, for later use with other lengths and positions, or mapped (vmap)."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or "Vmap" in transforms()


def transforms() -> list[str]:
    """Return what `torch.func`, or `forward_ad`, is doing to this code: "Vmap", "Grad", "Jvp"; nothing while compiling."""
    if torch.compiler.is_compiling():
        return []
    forward = ["Jvp"] * (torch.autograd.forward_ad._current_level >= 0)
    return forward + [one.key().name for one in torch._C._functorch.get_interpreter_stack() or ()]


def is_plain() -> bool:
    """Whether attention must be made of torch's own operations."""
    return is_traced() or bool(transforms())


def weigh(scores: torch.Tensor, mask: torch.Tensor | None, dropout: float) -> torch.Tensor:
    """Return attention probabilities (B, H, Q, K), float32 or wider; a mask is additive, or boolean with True = attend."""
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    return nn.functional.dropout(scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)), dropout)


class AttentionPositions(Positions):
    """Attention-side module, one for each layer; its parameters, if any, belong to that layer.

    A scheme overrides the hooks it needs: `rotate` turns queries and keys, `bias` is added to the scores of whatever attention
    implementation the model is set to, and `attend` replaces attention itself.
    """

    # Whether `prepare` wants the positions of keys; those of cached keys then travel inside the cache.
    needs_key_positions: ClassVar[bool] = False
    kind = 0  # of `Scheme.kinds`, set by the swap

    def forward(self, hook: str, *arguments, **options) -> Any:
        """Call one of the hooks below. Models call the module, so that hooks on modules (offloading) run."""
        return getattr(self, hook)(*arguments, **options)

    def prepare(
        self,
        position_ids: torch.Tensor,
        slots: torch.Tensor,
        length: int | None,
        key_positions: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        """Compute once for each forward what all layers of a kind share; called on the first one's module.

        `position_ids` (B or 1, Q) are the positions of the queries, `slots` (1, Q) their places in the sequence or
        cache, `length` the sequence length where it is known without looking at values (else None), `key_positions` (B or 1, K)
        those of all keys so far if `needs_key_positions`, `attention_mask` what the model was given, or a span has made of it.

        A scheme with a `bias` returns `Places`, or an object with the same `causal`, `in_order` and `block`. With a span,
        attention runs block by block, in linear time, if the scheme has no `attend` or this object has a `block`; otherwise the
        span becomes a mask, and `prepare` is called twice.
        """
        # The same tensor as `slots`: no positions were given and nothing is cached, so keys stand one after the other.
        return Places(position_ids, slots, key_positions, in_order=key_positions is slots and not is_traced())

    def key_mask(self, shared: Any) -> torch.Tensor | None:
        """Return the (B, K) bool mask that `attend` reads from `shared`; the model then makes no (Q, K) mask from it."""
        return None

    def rotate(self, states: torch.Tensor, shared: Any) -> torch.Tensor:
        """Transform (B, H, Q, D) queries, and keys before they enter the cache."""
        return states

    def dims_slow_to_fast(self) -> torch.Tensor | None:
        """Return the head's dimensions, (D,) int64, those that positions disturb least first; None when all are alike."""
        return None

    def solve(self, observe: Callable[[], Iterable], query_key: Any, scaling: float) -> None:
        """Set this layer's parameters in closed form, as near to the original's attention as possible; by default do nothing.

        `observe()` yields the layer's `closed_form.Evidence`, batch by batch, computed with the projections of that moment;
        `query_key` holds views of the query and key projections.
        """

    # bias(shared, key_length) -> (1 or B, H, Q, K): what a scheme adds to scaled scores; `shared.distances(key_length)` helps.
    bias: Callable[[Any, int], torch.Tensor] | None = None

    # by_distance(distances) -> (H, N): the bias of distances (N,), where that is all it depends on: time and memory are saved.
    by_distance: Callable[[torch.Tensor], torch.Tensor] | None = None

    # attend(...): for a scheme that does not hand q, k and v to the attention backend; see `RelativePositions`.
    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None = None


class Scheme(ABC):
    """Base of all schemes. Subclasses are frozen keyword-only dataclasses that check their own fields."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for tables and --help
    # Options that may be "auto", and the values that `posswap.choose` tries for them, the usual one first.
    choices: ClassVar[dict[str, tuple]] = {}
    # Claimed here and checked by `hf-posswap check`: adding one number to all positions changes no output.
    shift_invariant: ClassVar[bool] = False
    # Whether learned parameters stay valid when a model is loaded with another longest input.
    resizable: ClassVar[bool] = True
    # Attention implementations the scheme works with; None: whatever the model is set to.
    implementations: ClassVar[tuple[str, ...] | None] = None
    in_attention: ClassVar[type[AttentionPositions] | None] = None  # made by `attention_module`, of a scheme and a Geometry

    def __post_init__(self):
        """Check options declared as bool or Literal (not as strings); subclasses with checks of their own call this first."""
        for option in (one for one in fields(self) if one.init):
            choices = (True, False) if option.type is bool else get_args(option.type) * (get_origin(option.type) is Literal)
            choices += ("auto",) * bool(choices and option.name in self.choices)
            given = getattr(self, option.name)
            if choices and not any(given == one and isinstance(given, bool) == isinstance(one, bool) for one in choices):
                raise UnknownSchemeError(f"{self.name}: {option.name}={given!r} is not one of {', '.join(map(repr, choices))}")

    def check(self, geometry: Geometry) -> None:
        """Raise PosswapError when the options do not fit the model."""
        if self.open_options():
            way = "swap to what posswap.choose(model, scheme, batches) returns, or pass --fit to `hf-posswap swap`"
            raise PosswapError(f"{self.name}: {self.open_options()[0]}='auto' is settled by looking at text: {way}")

    def open_options(self) -> list[str]:
        """Return the options that are "auto"."""
        return [name for name in self.choices if getattr(self, name) == "auto"]

    def distances(self, geometry: Geometry) -> str:
        """Say for `describe` what becomes of distances, where that follows from the lengths."""
        return ""

    def embedding_module(self, geometry: Geometry) -> PositionEmbedding:
        """Build the module that takes the table's place."""
        return Constant(geometry)

    def attention_module(self, geometry: Geometry) -> AttentionPositions | None:
        """Build one layer's attention-side module, or None to leave attention as it is; by default of class `in_attention`."""
        return None if self.in_attention is None else self.in_attention(self, geometry)

    def kinds(self) -> "list[tuple[Scheme, bool]]":
        """Return the schemes that layers have, and whether a span holds in those layers; one, except in a mix."""
        return [(self, True)]

    def kind_of(self, layer: int) -> int:
        """Return which of `kinds` a layer has."""
        return 0

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, defaults included, as config.json stores them."""
        return {"name": self.name, **asdict(self)}

    def __str__(self) -> str:
        changed = {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}
        options = ",".join(f"{name}={'null' if value is None else value}" for name, value in changed.items())
        return f"{self.name}:{options}" if options else self.name


LARGEST = 1e30  # upper bound of all options: values near the largest float would overflow


def check_number(scheme: Scheme, field: str, kind: type, minimum: float, *, above: bool = False, most: float = LARGEST) -> None:
    """Raise unless the field holds a number of its kind, at least (or above) the minimum and at most the maximum."""
    given = getattr(scheme, field)
    if given == "auto" and field in scheme.choices:
        return
    right = isinstance(given, (int, float) if kind is float else int) and not isinstance(given, bool)
    if not right or not (given > minimum if above else given >= minimum) or not given <= most:
        bound = f"{'above' if above else 'of at least'} {minimum}" + ("" if most == LARGEST else f" and at most {most:,}")
        raise PosswapError(f"{scheme.name}: {field}={given!r} must be {'an integer' if kind is int else 'a number'} {bound}")
