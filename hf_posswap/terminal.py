"""Starting a command line: libraries quiet, and what users did wrong told in one paragraph, without a traceback."""

import logging
import os
from collections.abc import Callable

import torch
import typer
from huggingface_hub.errors import HTTPError
from rich.console import Console
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
