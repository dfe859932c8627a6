"""Optional libraries, and the error that names the extra to install when one is missing.

Swapping, fitting, saving, loading, exporting and sharing need none of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hf_posswap.errors import PosswapError

RECIPES = ("accelerate", "datasets", "evaluate", "matplotlib", "scipy", "sklearn", "tensorboard")
EXTRAS = dict.fromkeys(RECIPES, "recipes") | {"sentence_transformers": "sentence-transformers"}  # library -> extra


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
        if library not in EXTRAS:
            raise
        line = f'this needs {library}, which is not installed: pip install "hf_posswap[{EXTRAS[library]}]"'
        raise MissingExtraError(line) from None
