"""Load your own schemes from modules and files that a command line names."""

import importlib
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_posswap.errors import PosswapError
from hf_posswap.schemes import SCHEMES, Scheme, nearest, parse_scheme


def load_scheme(source: str) -> Scheme | type[Scheme]:
    """Return the scheme that a string names: a registered one, or a class or instance in a module or a file.

    PosswapError: there is no such module or file, it cannot be imported, or what is named in it is no scheme.

    >>> load_scheme("hf_posswap.schemes:Rotary")
    <class 'hf_posswap.schemes.rotary.Rotary'>
    """
    if source.partition(":")[0].strip() in SCHEMES:
        return parse_scheme(source)
    place, name = (source, "") if _is_file(source) or ":" not in source else source.rsplit(":", 1)
    with _importing(place):
        found = runpy.run_path(place, run_name=Path(place).stem) if _is_file(place) else vars(_module(place))
    schemes = {key: value for key, value in found.items() if _is_scheme(value)}
    if name not in schemes:
        what = f"is {found[name]!r}, no scheme" if name in found else "is not there" if name else "does not say which scheme"
        raise PosswapError(f"{source} {what}: write {place}:NAME; schemes in it are {', '.join(schemes) or 'none'}")
    return schemes[name]


def import_schemes(place: str) -> list[str]:
    """Import a module or a Python file, and return the names of the schemes that it registers (`register_scheme`).

    They stay registered, and the folder of a file stays at the end of `sys.path` for what they import later. A module that was
    imported before is not run again.

    PosswapError: there is no such module or file, it cannot be imported, or it registers no scheme.
    """
    before = set(SCHEMES)
    if ":" in place and not _is_file(place):
        raise PosswapError(f"all schemes of a file are taken: give {place.partition(':')[0]!r}, without the name of one")
    if _is_file(place) and not Path(place).stem.isidentifier():
        raise PosswapError(f"{place} cannot be imported under the name {Path(place).stem!r}: give the file another one")
    with _importing(place) as folders:
        module = _module(Path(place).stem if _is_file(place) else place)
    if _is_file(place) and Path(module.__file__ or "").resolve() != Path(place).resolve():
        raise PosswapError(f"{place} has the name of another module, {module.__file__ or module}: give the file another one")
    own = {name for name, scheme in SCHEMES.items() if f"{scheme.__module__}.".startswith(f"{module.__name__}.")}
    if not own | set(SCHEMES) - before:
        raise PosswapError(f"{place} registers no scheme: decorate its class with @hf_posswap.register_scheme")
    sys.path += [folder for folder in folders if folder not in sys.path]
    return sorted(own | set(SCHEMES) - before)


@contextmanager
def _importing(place: str) -> Iterator[list[str]]:
    """Inside, modules in the current folder and next to the file can be imported; errors name `place`."""
    if _is_file(place) and not Path(place).is_file():
        raise PosswapError(f"there is no file {place}")
    folders = [*([str(Path(place).resolve().parent)] if _is_file(place) else []), str(Path.cwd())]
    sys.path[:0] = folders
    try:
        yield folders
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{place}.".startswith(f"{error.name}."):
            what = f"{place!r} is neither a scheme{nearest(place, SCHEMES)} nor a module, here or installed"
            known = f"schemes are {', '.join(SCHEMES)}"
            raise PosswapError(f"{what}; {known}: give a scheme, module, file.py, module:Name or file.py:Name") from None
        raise PosswapError(f"{place} cannot be imported, {type(error).__name__}: {error}") from error
    finally:
        for folder in folders:
            sys.path.remove(folder)


def _module(name: str) -> Any:
    importlib.invalidate_caches()  # a file may have been written a moment ago
    return importlib.import_module(name)


def _is_file(place: str) -> bool:
    return place.endswith(".py")


def _is_scheme(value: Any) -> bool:
    return isinstance(value, Scheme) or (isinstance(value, type) and issubclass(value, Scheme) and value is not Scheme)
