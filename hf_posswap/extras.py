"""What `pip install hf_posswap` leaves out: libraries of the extra `recipes`, and the line that says so.

Swapping, fitting, saving, loading, exporting and sharing need none of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hf_posswap.errors import PosswapError

RECIPES = ("accelerate", "datasets", "evaluate", "matplotlib", "scipy", "sklearn", "tensorboard")


class MissingExtraError(PosswapError, ImportError):
    """A library of an extra is not installed."""


@contextmanager
def extra() -> Iterator[None]:
    """Around imports: name the extra that a missing library comes with.

    >>> with extra():
    ...     import scipy
    """
    try:
        yield
    except ImportError as error:
        library = (error.name or "").partition(".")[0]
        if library not in RECIPES or isinstance(error, MissingExtraError):
            raise
        raise MissingExtraError(f'this needs {library}, which is not installed: pip install "hf_posswap[recipes]"') from None
