"""Run the checks on a scheme, your own or a built-in one, and say what fails, by how much, and what the usual cause is.

Nothing is trained or downloaded. Random state and registered schemes of the process stay as they are.
"""

import inspect
import textwrap
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, is_dataclass
from itertools import product
from typing import Annotated

import torch
import typer
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from hf_posswap.contract.checks import CHECKS, builds
from hf_posswap.contract.subject import BACKENDS, FAMILIES, Failure, NotApplicable, Subject, backends_of
from hf_posswap.errors import PosswapError
from hf_posswap.schemes import Scheme, parse_scheme
from hf_posswap.schemes.importing import load_scheme
from hf_posswap.terminal import as_text

MODELS = tuple((family, backend) for family in FAMILIES for backend in BACKENDS)


@dataclass(frozen=True)
class CheckResult:
    """The result of one check in one family."""

    check: str
    family: str
    passed: bool | None  # None: the check does not apply
    detail: str = ""  # what differs, by how much and where, or why the check does not apply


@dataclass(frozen=True)
class Conformance:
    """The results of `check_scheme`; `print` shows a table, with reasons below it."""

    scheme: Scheme
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        return all(result.passed is not False for result in self.results)

    def __str__(self) -> str:
        families = dict.fromkeys(result.family for result in self.results)
        table = Table("check", *families, "what it means", box=None, pad_edge=False)
        reasons, notes = [], {}
        for check in CHECKS:
            meaning, advice = inspect.getdoc(check).split("\n\n")
            row = {result.family: result for result in self.results if result.check == name_of(check)}
            said = {True: "ok", False: "FAILS", None: "-"}
            table.add_row(name_of(check), *(said[row[family].passed] for family in families), meaning)
            failed = [f"{result.check}, {result.family}: {result.detail}" for result in row.values() if result.passed is False]
            reasons += [*failed, "    " + " ".join(advice.split())] if failed else []
            for result in row.values():
                if result.passed is None:
                    notes.setdefault(result.detail, {})[result.check] = None  # a dict as an ordered set
        notes = [f"- {', '.join(names)}: {detail}" for detail, names in notes.items()]
        lines = [textwrap.fill(text, 120, subsequent_indent="    ") for text in (*reasons, *notes)]
        return "\n".join([f"{self.scheme!r} {'passes' if self.passed else 'FAILS'}", as_text(table, width=120), *lines])


def check_scheme(scheme: Scheme | type[Scheme] | str, *, models: Sequence[tuple[str, str]] = MODELS) -> Conformance:
    """Run every check on a scheme: in a BERT encoder, a BERT decoder and a GPT-2, with eager attention and with sdpa.

    Args:
        scheme: An instance, a class whose options have defaults, or a string such as "rotary:theta=500". It need not be
            registered.
        models: (family, attention backend) of each model to check the scheme in.

    A check that raises any exception has failed, with the exception as the reason. The whole run takes some seconds.

    Raises:
        PosswapError: Not a subclass of Scheme, not a dataclass, a class with options without defaults, or an unknown string.

    >>> found = check_scheme("none")
    >>> found.passed, [result.family for result in found.results if result.check == "cache" and result.passed]
    (True, ['bert-decoder', 'gpt2'])
    """
    scheme = _instance(scheme)
    families = {family: [] for family, _ in models}
    results = []
    with (
        torch.random.fork_rng(devices=[]),
        # A device mode slows every call of torch, so only where another device than the CPU is the default.
        nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        ExitStack() as after,
    ):
        if transformers_logging.is_progress_bar_enabled():  # one for every model that is saved or loaded
            after.callback(transformers_logging.enable_progress_bar)
            transformers_logging.disable_progress_bar()
        for family, backend in models:
            if backend in backends_of(scheme):
                families[family].append(Subject(scheme, family, backend))
        if not (families and all(families.values())):
            raise PosswapError(f"{scheme.name} runs with {' or '.join(backends_of(scheme))}: name models with these backends")
        broken = set()
        for family, check in tqdm([*product(families, CHECKS)], desc="check", unit="check", disable=None):
            if family in broken:
                results.append(CheckResult(name_of(check), family, None, "not run, as it does not build"))
                continue
            results.append(_run(check, families[family]))
            if check is builds and not results[-1].passed:
                broken.add(family)
    return Conformance(scheme, tuple(results))


def name_of(check: Callable[[Subject], None]) -> str:
    """Return the name of a check in the report."""
    return check.__name__.replace("_", " ")


def _instance(scheme: Scheme | type[Scheme] | str) -> Scheme:
    if isinstance(scheme, str):
        return parse_scheme(scheme)
    kind = scheme if isinstance(scheme, type) else type(scheme)
    if not issubclass(kind, Scheme) or kind is Scheme:
        raise PosswapError(f"{scheme!r} is no scheme: pass a subclass of posswap.Scheme, or an instance of one")
    if not is_dataclass(kind):
        raise PosswapError(f"{kind.__name__} is no dataclass: decorate it with @dataclass(frozen=True, kw_only=True)")
    try:
        return scheme() if isinstance(scheme, type) else scheme
    except (Exception, SystemExit) as error:
        said = f"{kind.__name__}() raises {type(error).__name__}: {error}"
        raise PosswapError(f"{said}; give each option a default that fits, or check an instance") from error


def _run(check: Callable[[Subject], None], subjects: list[Subject]) -> CheckResult:
    """Run a check with each backend; it passes only if no backend fails."""
    passed, detail = True, ""
    for subject in subjects:
        try:
            check(subject)
        except NotApplicable as reason:
            passed, detail = None, str(reason)
        except (Exception, SystemExit) as error:  # whatever a scheme raises is a finding
            said = str(error) if isinstance(error, (Failure, PosswapError)) else f"{type(error).__name__}: {error}"
            passed, detail = False, textwrap.shorten(f"with {subject.backend}, {said}", 500)
            break
    return CheckResult(name_of(check), subject.family, passed, detail)


_SOURCE_HELP = "module:Name, path/to/file.py:Name (a class or an instance), or a string such as rotary:theta=500."


def check(scheme: Annotated[str, typer.Argument(help=_SOURCE_HELP)]):
    """Check a position scheme, your own or a built-in one, against the contract. Exits with status 1 if a check fails."""
    found = check_scheme(load_scheme(scheme))
    typer.echo(found)
    if not found.passed:
        raise typer.Exit(1)
