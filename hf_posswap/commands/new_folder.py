"""Output folders that appear when they are complete, or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_posswap.provenance import check_new


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, which is renamed to `output` at the end, or deleted after an error.

    If two processes write at once, the first one gets the name, and the second ends with an error.

    CheckpointError: `output` exists and is not empty, at the beginning or at the end.
    """
    check_new(output, "choose another --output")
    aside = output.absolute().with_name(f".{output.name}.{os.getpid()}.writing")
    aside.mkdir(parents=True)
    try:
        yield aside
        try:
            aside.rename(output)  # replaces an empty folder, and raises for one that is not empty
        except OSError:
            check_new(output, "choose another --output")
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
