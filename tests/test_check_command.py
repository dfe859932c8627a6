"""`hf-posswap check`, and the schemes that it and others import: from strings, modules and files."""

import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import fails, refused, works

import hf_posswap as posswap
from hf_posswap.contract import report
from hf_posswap.contract.report import check_scheme
from hf_posswap.schemes.importing import import_schemes

MINE = """
from dataclasses import dataclass
from typing import ClassVar
import beside
from hf_posswap import PosswapError
from hf_posswap.schemes import Scheme, register_scheme

@register_scheme
@dataclass(frozen=True, kw_only=True)
class Mine(Scheme):
    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = beside.WHO

@dataclass(frozen=True, kw_only=True)
class Small(Mine):
    size: int
    name: ClassVar[str] = "small"

    def check(self, geometry):
        raise PosswapError("too small a model")

class Undecorated(Scheme):
    name = "undecorated"

small, number = Small(size=3), 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a module `mine`, and the same in a folder below, each with a neighbour that it imports."""
    for place, who in ((tmp_path, "one"), (tmp_path / "below", "two")):
        place.mkdir(exist_ok=True)
        (place / "mine.py").write_text(MINE)
        (place / "beside.py").write_text(f"WHO = {who!r}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with patch.dict(posswap.SCHEMES):
        yield tmp_path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_command_passes(program, monkeypatch):
    """A built-in scheme, as a string with options, passes: the table, and exit status 0."""
    monkeypatch.setattr(report, "check_scheme", partial(check_scheme, models=[("gpt2", "eager")]))
    assert works(program, "check", "learned:extend=tile").startswith("Learned(extend='tile') passes")


@pytest.mark.parametrize("source", ["mine:small", "below/mine.py:small"])
def test_command_fails(program, folder, source):
    """An instance in a module or a file that fails: the reason in one line, and exit status 1."""
    code, out, _ = program("check", source)
    assert code == 1 and out.startswith("Small(size=3) FAILS")
    assert "builds, gpt2: with eager, too small a model\n" in out and out.count("not run, as it does not build") == 1


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("rotray", "'rotray' is neither a scheme (did you mean 'rotary'?) nor a module"),
        ("no_such_module:Mine", "'no_such_module' is neither a scheme"),
        ("hf_posswap.no_such:Mine", "'hf_posswap.no_such' is neither a scheme"),
        ("rotary:thta=5", "did you mean 'theta'"),
        ("below/none.py:Mine", "there is no file below/none.py"),
        ("below/mine.py", "below/mine.py does not say which scheme: write below/mine.py:NAME; schemes in it are Mine, Small"),
        ("mine:None", "mine:None is not there: write mine:NAME; schemes in it are Mine, Small, Undecorated, small"),
        ("mine:number", "mine:number is 5, no scheme: write"),
        ("mine:Scheme", "no scheme: write"),
        ("mine:Undecorated", "Undecorated is no dataclass: decorate it with @dataclass(frozen=True, kw_only=True)"),
        ("mine:Small", "'size'; give each option a default that fits, or check an instance"),
        ("import no_such_library", "file.py cannot be imported, ModuleNotFoundError: No module named 'no_such_library'"),
        ("1 / 0", "file.py cannot be imported, ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(0)", "file.py cannot be imported, SystemExit: 0"),
    ],
)
def test_command_refuses(program, folder, source, says):
    """What is not there, or is no scheme, is said in one paragraph, with exit status 2 and nothing left on the path."""
    if " " in source:
        Path("file.py").write_text(source)
        source = "file.py:Mine"
    path = list(sys.path)
    code, out, err = program("check", source)
    assert code == 2 and says in err and "Traceback" not in err and out == ""
    assert sys.path == path


def test_schemes_of_a_file_stay_known(folder):
    """Schemes of an imported file can be named; files of a taken name, and files without a scheme, are refused."""
    for _ in range(2):
        assert import_schemes("below/mine.py") == ["mine"]
    assert posswap.SCHEMES["mine"].summary == "two" and sys.path.count(str(folder / "below")) == 1
    assert "rotary" in import_schemes("hf_posswap")
    for place, text, says in (
        ("mine.py", MINE, "has the name of another module"),
        ("empty_schemes.py", "", "registers no scheme: decorate"),
        ("broken_schemes.py", "1 / 0", "cannot be imported, ZeroDivisionError"),
        ("my.schemes.py", "", "give the file another one"),
        ("no_such_module", None, "nor a module"),
        ("no_such_file.py", None, "there is no file"),
        ("below/mine.py:Mine", None, "give 'below/mine.py', without the name"),
    ):
        if text is not None:
            (folder / place).write_text(text)
        refused(says, import_schemes, place)


def test_commands_know_schemes_of_a_file(program, folder, save):
    """Any command knows the schemes of the file that is named before it; compare, whose recipes are processes, after it."""
    made = ("swap", save("gpt2"), "--scheme", "mine", "--output", folder / "made")
    fails("unknown scheme 'mine'", program, *made)
    fails("write --schemes-from after compare", program, "--schemes-from", "mine.py", "compare")
    fails("--schemes-from= is empty", program, "--schemes-from", "", "describe", "made")
    fails(f"no file {Path.home()}/none.py", program, "--schemes-from=~/none.py", "describe", "made")
    works(program, "--schemes-from", "mine.py", *made)
    del posswap.SCHEMES["mine"], sys.modules["mine"]  # as in another process
    fails("unknown scheme 'mine'", program, "describe", folder / "made")
    assert "learned -> mine" in works(program, "--schemes-from", "mine", "describe", folder / "made")
