"""Run a command line: quiet libraries, users' errors in one line, and tables and Markdown in the terminal."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import gettempdir
from typing import NoReturn

import torch
import typer
from huggingface_hub.errors import HTTPError
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Column, Table
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from hf_posswap.errors import Interrupted, PosswapError
from hf_posswap.extras import extra


def begin() -> None:
    """Silence the progress bars and advice of libraries, and let SIGTERM and a closed terminal stop a command as Ctrl-C does.

    Otherwise they would leave its files on the way: hidden states, folders half written. A terminal that lacks a character,
    such as ±, gets a question mark, not an error.
    """
    # Python has none where it is closed, as a service may have it.
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's have no such method
            stream.reconfigure(errors="replace")
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):  # Windows has no SIGHUP
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, signal.default_int_handler)
    if not os.environ.get("COLUMNS", "").strip("0"):  # a terminal that does not know its width; rich would print nothing
        os.environ.pop("COLUMNS", None)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)


def checked(arguments: list[str]) -> list[str]:
    """Return arguments with the home folder for the ~ of --output=~/runs, as the shell does it in --output ~/runs already.

    PosswapError: one is empty. As a path it would be the working directory.
    """
    result = []
    for before, argument in pairwise(["the command", *arguments]):
        name, _, value = argument.partition("=")
        option = name.startswith("--")
        if not argument or (option and argument == f"{name}="):
            given = argument or f"the argument after {before}"
            raise PosswapError(f"{given} is empty, as a variable of the shell that is not set: give a value, or leave it out")
        result.append(f"{name}={os.path.expanduser(value)}" if option and value.startswith("~") else argument)
    return result


def run_program(program: str, command: Callable) -> None:
    """Run a command such as a recipe; its error messages begin with `program`.

    Exits with 2 after an error of the user's or the machine's, and with 130 after an interrupt, as shells do.
    """
    begin()
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    try:
        sys.argv[1:] = checked(sys.argv[1:])
        app()
    except SystemExit as stop:
        if not stop.code and torch.distributed.is_initialized():
            torch.distributed.barrier()  # the main process may still write, and a launcher ends all when one ends badly
        raise
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        end(program, error)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def end(program: str, error: Exception) -> NoReturn:
    """Exit with one line for an error of the user's or the machine's; raise any other, which is a bug of ours, again."""
    try:
        with extra():
            raise error
    except Exception as told:
        error, words = told, str(told)
    if "allocate memory" in words or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        words = "there is not enough memory for this: take smaller batches, fewer positions, shorter text or a smaller model"
    elif "No space left" in words and not getattr(error, "filename", None):
        words += f": free some, where the command writes (--output) or in {gettempdir()}, where a fit keeps states (TMPDIR)"
    # HTTPError: a connection to the Hub that breaks. SafetensorError: a disk that is full, a file that is cut off.
    elif not isinstance(error, (PosswapError, OSError, HTTPError, SafetensorError)):
        raise error
    console = Console(stderr=True, soft_wrap=not sys.stderr.isatty(), emoji=False)  # a path may hold :b:
    console.print(f"{program}: {words}", style="red", highlight=False, markup=False)
    raise SystemExit(130 if isinstance(error, Interrupted) else 2) from None


def say(stage: str) -> None:
    """Print the next stage on stderr: a run whose output goes to a file must not look dead."""
    print(stage, file=sys.stderr, flush=True)


def as_text(*parts: Table | str, width: int) -> str:
    """Return tables and sentences, each from a new line on, as plain text of at most `width` columns."""
    console = Console(width=width, highlight=False, markup=False, emoji=False, color_system=None, force_jupyter=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def number_table(heads: Sequence[str], rows: Iterable[Sequence[str | float]], digits: int, *, first="left", **look) -> Table:
    """Return a table without lines, whose numbers have so many digits and stand on the right, below their heads."""
    columns = [Column(head, justify="right" if place else first) for place, head in enumerate(heads)]
    found = Table(*columns, box=None, pad_edge=False, **look)
    for row in rows:
        found.add_row(*(cell if isinstance(cell, str) else f"{cell:.{digits}f}" for cell in row))
    return found


def print_markdown(console: Console, text: str) -> None:
    """Print Markdown; a table that is wider than the terminal comes in parts, each with the first column."""
    blocks = []
    for table, found in groupby(text.splitlines(), key=lambda line: line.startswith("|")):
        lines = list(found)
        blocks += narrow_tables(lines, console.width) if table else ["\n".join(lines)]
    console.print(Markdown("\n\n".join(blocks)))


def narrow_tables(lines: list[str], width: int) -> list[str]:
    """Return the lines of a Markdown table as tables that fit into `width`, unless a column alone does not.

    >>> print(*narrow_tables(["| scheme | loss | tokens |", "|---|---:|---:|", "| rotary | 1.25 | 100 |"], 20), sep="\\n--\\n")
    | scheme | loss |
    | --- | ---: |
    | rotary | 1.25 |
    --
    | scheme | tokens |
    | --- | ---: |
    | rotary | 100 |
    """
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if len(rows) < 2 or len({len(cells) for cells in rows}) > 1:  # a | in a cell: better wide than wrong
        return ["\n".join(lines)]
    widths = [max(map(len, (head, *cells))) + 2 for head, _, *cells in zip(*rows, strict=True)]  # a space on each side
    parts = [[0]]
    for place in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[one] for one in parts[-1]) + widths[place] + 2 > width:
            parts.append([0])
        parts[-1].append(place)
    return ["\n".join(f"| {' | '.join(cells[place] for place in part)} |" for cells in rows) for part in parts]
