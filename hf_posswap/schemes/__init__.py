"""The position schemes. They need torch only: no scheme knows a model family."""

import difflib
from dataclasses import MISSING, fields
from typing import Any

import yaml

from hf_posswap.errors import PosswapError, UnknownSchemeError
from hf_posswap.schemes.base import AttentionPositions, Constant, Geometry, Places, PositionEmbedding, Scheme
from hf_posswap.schemes.distance_bias import Alibi, Buckets
from hf_posswap.schemes.ladder import Ladder
from hf_posswap.schemes.learned import Learned
from hf_posswap.schemes.mixed import Mixed
from hf_posswap.schemes.none import NoPositions
from hf_posswap.schemes.relative import Relative, set_relative_implementation
from hf_posswap.schemes.rotary import Rotary
from hf_posswap.schemes.self_extend import SelfExtend
from hf_posswap.schemes.sinusoidal import Sinusoidal

__all__ = [
    "SCHEMES", "Alibi", "AttentionPositions", "Buckets", "Constant", "Geometry", "Ladder", "Learned", "Mixed",
    "NoPositions", "Places", "PositionEmbedding", "Relative", "Rotary", "Scheme", "SelfExtend", "Sinusoidal", "parse_scheme",
    "register_scheme", "scheme_from_dict", "set_relative_implementation",
]  # fmt: skip

SCHEMES: dict[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (Learned, Sinusoidal, Relative, Rotary, SelfExtend, Alibi, Buckets, NoPositions, Mixed, Ladder)
}

# What config.json holds beside a scheme's name and options: see `scheme_entry.config_entry`.
ABOUT_THE_MODEL = "format trained_positions made_for_positions base_model edited span guarded fitted_length".split()


def register_scheme(scheme: type[Scheme]) -> type[Scheme]:
    """Make a scheme known by its `name`, for strings, the command line and saved checkpoints; usable as a decorator.

    A scheme passed as an instance needs no registration until a checkpoint of it is loaded. The same class, defined again as in
    a notebook, takes the place of its earlier version. PosswapError: another class has the name.
    """
    check_class(scheme)
    known = SCHEMES.get(scheme.name, scheme)
    if (known.__module__, known.__qualname__) != (scheme.__module__, scheme.__qualname__):
        raise PosswapError(f"a scheme named {scheme.name!r} exists already ({known}): choose another name")
    SCHEMES[scheme.name] = scheme
    return scheme


def check_class(scheme: type[Scheme]) -> None:
    """Raise PosswapError unless saved models of this class of schemes can be loaded again, once it is registered."""
    name = getattr(scheme, "name", None)
    plain = isinstance(name, str) and name.replace("-", "_").isidentifier()
    if not (isinstance(scheme, type) and issubclass(scheme, Scheme) and "__dataclass_fields__" in vars(scheme) and plain):
        raise PosswapError(f"{scheme!r} must be a dataclass, a subclass of Scheme, with a `name` of letters, digits, - or _")
    if taken := [option.name for option in fields(scheme) if option.name in ABOUT_THE_MODEL]:
        raise PosswapError(f"{scheme.name}: config.json keeps something else under the name {taken[0]!r}: rename that option")


def parse_scheme(scheme: Scheme | str) -> Scheme:
    """Return the scheme itself, or the one a string names: "rotary" or "rotary:theta=500000,fraction=0.5".

    >>> parse_scheme("relative:clip=16,values=false")
    Relative(clip=16, values=False, share_heads=False, key_query=False, vectors='learned')
    """
    if isinstance(scheme, Scheme):
        return scheme
    if not isinstance(scheme, str):
        what = f"{scheme!r} is no scheme: pass an instance such as posswap.Rotary(theta=10_000)"
        raise UnknownSchemeError(f"{what}, or a string such as 'rotary:theta=500000'; names are {', '.join(SCHEMES)}")
    return scheme_from_dict(options_in(scheme))


def options_in(scheme: str) -> dict[str, Any]:
    """Return the name and the options that a string holds, as config.json would; their values are not checked."""
    name, _, options = scheme.partition(":")
    # A YAML flow mapping reads numbers, booleans, null and nested scalings alike.
    text = "{" + options.replace("=", ": ") + "}"
    try:
        given = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # ValueError: a date that is none
        given = None
    read = isinstance(given, dict) and all(isinstance(option, str) for option in given)
    if not read or len(given) < len(yaml.compose(text).value) or "name" in given:
        form = "name:option=value,option=[value, value]"
        raise UnknownSchemeError(f"cannot read the options of {scheme!r}; write {form}, each once, and lists in brackets")
    return {"name": name.strip(), **given}


def scheme_from_dict(entry: dict[str, Any]) -> Scheme:
    """Build a scheme from its name and options, as config.json holds them."""
    options = dict(entry)
    name = options.pop("name", None)
    if not isinstance(name, str) or name not in SCHEMES:
        known = f"known are {', '.join(SCHEMES)}, and one of your own once its module is imported (hf-posswap --schemes-from)"
        raise UnknownSchemeError(f"unknown scheme {name!r}{nearest(name, SCHEMES)}; {known}")
    known = {field.name: field for field in fields(SCHEMES[name])}
    for option, value in options.items():
        if option not in known:
            there = ", ".join(known) or "none"
            raise UnknownSchemeError(f"{name} has no option {option!r}{nearest(option, known)}; it has {there}")
        # YAML reads 1e4 as a string: the dot is missing. A number is meant where the default is one.
        default = known[option].default
        settled_later = value == "auto" and option in SCHEMES[name].choices
        if isinstance(value, str) and not settled_later and default is not MISSING and type(default) in (int, float):
            try:
                number = float(value) if "." in value or "e" in value.lower() else int(value)
                options[option] = int(number) if number == number // 1 else number  # 5e2 is 500, in a saved config too
            except ValueError:
                raise UnknownSchemeError(f"{name}: {option}={value!r} must be a number") from None
    needed = {option for option, field in known.items() if field.init and field.default is field.default_factory is MISSING}
    if lost := sorted(needed - options.keys()):
        raise UnknownSchemeError(f"{name} needs {', '.join(lost)}: write {name}:{lost[0]}=value")
    return SCHEMES[name](**options)


# Names that are used elsewhere.
_ELSEWHERE = {"rope": "rotary", "shaw": "relative", "nope": "none", "absolute": "learned", "sin": "sinusoidal", "t5": "buckets"}


def nearest(given: Any, known) -> str:
    """Return a hint, in brackets, at the known name that an unknown one may mean; or an empty string."""
    word = str(given).lower()
    if _ELSEWHERE.get(word) in known:
        return f" (it is {_ELSEWHERE[word]!r} here)"
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""
