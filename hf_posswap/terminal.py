"""Starting a command line, with libraries quiet and what users did wrong told in a paragraph; printing Markdown."""

import logging
import os
from collections.abc import Callable
from itertools import groupby

import torch
import typer
from huggingface_hub.errors import HTTPError
from rich.console import Console
from rich.markdown import Markdown
from transformers.utils import logging as transformers_logging

from hf_posswap.errors import Interrupted, PosswapError


def run_program(program: str, command: Callable | typer.Typer) -> None:
    """Run a command, or an app of several, under the name that errors begin with.

    Exits with 2 after an error of the user's or the machine's, and with 130 after an interrupt, as shells do.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    app = command
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        app.command()(command)
    try:
        app()
    except SystemExit as end:
        if not end.code and torch.distributed.is_initialized():
            torch.distributed.barrier()  # the main process may still write, and a launcher ends all when one ends badly
        raise
    except (PosswapError, OSError, HTTPError) as error:  # the last: a connection to the Hub that breaks
        Console(stderr=True).print(f"{program}: {error}", style="red", highlight=False, markup=False)
        raise SystemExit(130 if isinstance(error, Interrupted) else 2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


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
    |---|---:|
    | rotary | 1.25 |
    --
    | scheme | tokens |
    |---|---:|
    | rotary | 100 |
    """
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    if len(rows) < 2 or len({len(cells) for cells in rows}) > 1:  # a | in a cell: better wide than wrong
        return ["\n".join(lines)]
    columns = list(zip(*rows, strict=True))
    widths = [max(len(cell) for cell in (head, *cells)) + 2 for head, _, *cells in columns]  # a space on each side
    parts = [[0]]
    for place in range(1, len(columns)):
        if len(parts[-1]) > 1 and sum(widths[one] for one in parts[-1]) + widths[place] + 2 > width:
            parts.append([0])
        parts[-1].append(place)

    def row(cells: list[str]) -> str:
        return f"|{'|'.join(cells)}|" if set("".join(cells)) <= set(":-") else f"| {' | '.join(cells)} |"

    return ["\n".join(row([columns[one][number] for one in part]) for number in range(len(lines))) for part in parts]
