"""Output folders that are there as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_posswap.errors import CheckpointError


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Inside, a folder next to `output` to write into; afterwards it is `output`, or, after an error, gone.

    Of two that write at once the first keeps the name, and the second ends with an error.

    Raises:
        CheckpointError: There is something at `output`, before or since.
    """
    taken = CheckpointError(f"{output} exists already: choose another --output")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise taken
    aside = output.absolute().with_name(f".{output.name}.{os.getpid()}.writing")
    aside.mkdir(parents=True)
    try:
        yield aside
        try:
            aside.rename(output)  # onto an empty folder, too, and never onto one with something in it
        except OSError:
            if not output.exists():
                raise
            raise taken from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
