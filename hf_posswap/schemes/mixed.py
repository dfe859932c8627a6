"""A scheme for each layer, as in SWAN-GPT (Puvvada et al. 2025: https://arxiv.org/abs/2504.08719): rotary layers that look no
further than a span, between layers without positions that read everything. SWAN's scaling of scores by the length is not here.

Layer l has scheme layers[l mod n]: the n entries repeat from the first layer to the last, and the last repeat may end early.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_posswap.errors import PosswapError, UnknownSchemeError
from hf_posswap.schemes.base import Constant, Geometry, PositionEmbedding, Scheme


@dataclass(frozen=True, kw_only=True)
class Mixed(Scheme):
    """Layers with different schemes, in a pattern that repeats.

    Args:
        layers: Schemes that work in attention, or none; each a string, an instance, or its entry of config.json. They may have
            one more option, `span=false`: with `posswap.swap(..., span=)` this layer reads everything all the same. A cache
            then keeps all keys of these layers. In a string, several options stand in braces.

    Modules of layers are counted: those that share their weights, as ALBERT's do, are one.

    >>> from hf_posswap.schemes import parse_scheme
    >>> parse_scheme("mixed:layers=[rotary, rotary:{theta=100,fraction=0.5}, none:span=false]")
    Mixed(layers=('rotary', 'rotary:theta=100,fraction=0.5', 'none:span=false'))

    Raises:
        PosswapError: There is no entry, one of them is no scheme, is itself mixed, or has an option that is "auto".
    """

    layers: tuple[str, ...] = ("none:span=false", "rotary")

    name: ClassVar[str] = "mixed"
    summary: ClassVar[str] = "a scheme for each layer, in a pattern that repeats"

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.layers, (list, tuple)) or not self.layers:
            raise PosswapError(f"mixed: layers={self.layers!r} must be a list of schemes, such as [rotary, none:span=false]")
        read = [(str(scheme), spans) for scheme, spans in map(_read, self.layers)]
        written = (name if spans else f"{name}{',' if ':' in name else ':'}span=false" for name, spans in read)
        object.__setattr__(self, "layers", tuple(written))
        schemes = [scheme for scheme, _ in self.kinds()]
        allowed = [set(scheme.implementations) for scheme in schemes if scheme.implementations is not None]
        for claim, holds in (
            ("shift_invariant", all(scheme.shift_invariant for scheme in schemes)),
            ("resizable", all(scheme.resizable for scheme in schemes)),
            ("implementations", tuple(sorted(set.intersection(*allowed))) if allowed else None),
        ):
            object.__setattr__(self, claim, holds)

    def kinds(self) -> list[tuple[Scheme, bool]]:
        return [_read(entry) for entry in dict.fromkeys(self.layers)]

    def kind_of(self, layer: int) -> int:
        return list(dict.fromkeys(self.layers)).index(self.layers[layer % len(self.layers)])

    def check(self, geometry: Geometry) -> None:
        if geometry.num_layers is not None and len(self.layers) > geometry.num_layers:
            what = f"mixed: {len(self.layers)} entries are too many for a model of {geometry.num_layers} layers"
            raise PosswapError(f"{what} (those that share their weights, as ALBERT's, are one): give at most one for each")
        for scheme, _ in self.kinds():
            scheme.check(geometry)
            if not isinstance(scheme.embedding_module(geometry), Constant):
                what = f"mixed: {scheme} adds vectors to the embeddings, which all layers get"
                raise PosswapError(f"{what}: mix schemes of attention (rotary, relative, alibi, buckets and the like) and none")

    def embedding_module(self, geometry: Geometry) -> PositionEmbedding:
        """Build what is left of the table; its row 0 is dropped if any entry drops it."""
        found = [scheme.embedding_module(geometry) for scheme, _ in self.kinds()]
        return Constant(geometry, mark_first=all(one.first is not None for one in found))

    def to_dict(self) -> dict[str, Any]:
        read = (_read(entry) for entry in self.layers)
        return {"name": self.name, "layers": [scheme.to_dict() | ({} if spans else {"span": False}) for scheme, spans in read]}

    def __str__(self) -> str:
        parts = (entry.partition(":") for entry in self.layers)
        return f"mixed:layers=[{', '.join(f'{name}:{{{options}}}' if options else name for name, _, options in parts)}]"


def _read(entry: Any) -> tuple[Scheme, bool]:
    """Return the scheme of an entry, and whether a span holds in its layers."""
    from hf_posswap.schemes import options_in, scheme_from_dict  # not above: that module lists this one's scheme

    if isinstance(entry, Scheme):
        entry = str(entry)
    if isinstance(entry, str):
        entry = options_in(entry)
    elif isinstance(entry, dict) and len(entry) == 1 and "name" not in entry:
        # So YAML reads rotary:theta=100 and rotary:{theta=100,fraction=0.5} in a list.
        [(name, options)] = entry.items()
        name, _, option = str(name).partition(":")
        given = options if isinstance(options, dict) else {str(options): None}  # rotary: 5, which has no such option
        entry = {"name": name} | ({option: options} if option else given)
    if not isinstance(entry, dict):
        raise PosswapError(f"mixed: {entry!r} in layers is no scheme: write for example [rotary, none:span=false]")
    options = dict(entry)
    spans = options.pop("span", True)
    if not isinstance(spans, bool):
        raise PosswapError(f"mixed: span={spans!r} in layers must be true or false; how far it is, is swap's span=")
    try:
        scheme = scheme_from_dict(options)
    except UnknownSchemeError as error:
        braces = "several options stand in braces, rotary:{theta=100,fraction=0.5}"
        raise UnknownSchemeError(f"mixed: {error}; {braces}") from None
    if isinstance(scheme, Mixed) or scheme.open_options():
        what = f"mixed: {scheme} cannot be part of a mix: write the entries of a mix in one list"
        raise PosswapError(f"{what}, and numbers for 'auto', such as posswap.choose finds for the entry alone")
    return scheme, spans
