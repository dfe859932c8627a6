"""Does a scheme that reads more win on documents longer than the original's positions?

    python recipes/long_documents.py --config recipes/configs/movie_reviews.yaml --scheme original     # the first 512 tokens
    python recipes/long_documents.py --config recipes/configs/movie_reviews.yaml --scheme rotary --max-length 1024
    python recipes/long_documents.py --dataset stanfordnlp/imdb --validation-split test --scheme relative --max-length 2048

The original is cut at its own positions, whatever --max-length says: that is what there is without a swap. A swapped model
reads --max-length tokens. Both see the same documents in the same order.

Figures are of all validation documents, and, with `_long` in their name, of those alone that the original cannot read as a
whole. The result file says how many documents are long and how many were cut.

Memory goes with --batch-size / --gradient-accumulation-steps documents of --max-length tokens at once.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from hf_posswap.errors import PosswapError
from hf_posswap.experiments.classification import ClassificationConfig, classify, trained_positions
from hf_posswap.experiments.comparison import ORIGINAL
from hf_posswap.experiments.recipe import main


@dataclass(frozen=True, kw_only=True)
class Config(ClassificationConfig):
    """Documents, and how much of them a swapped model reads."""

    QUESTION = "Does reading more of a document help?"
    FIGURES = {"accuracy_long": "of the documents that the original cannot read as a whole; it is cut at what it can read"}

    max_length: Annotated[int, "Tokens that a swapped model reads of a document: 1024, 2048, 4096."] = 1024
    eval_batch_size: Annotated[int, "Documents a process reads at once when it measures."] = 8

    def __post_init__(self):
        super().__post_init__()
        if not (self.dataset or self.train_file):
            raise PosswapError("give documents with labels: --dataset or --train-file")


def run(config: Config, folder: Path, resume: bool) -> dict:
    """Train and measure once, the original on what it can read."""
    trained = trained_positions(config)
    reads = min(trained, config.max_length) if config.scheme == ORIGINAL else config.max_length
    config = replace(config, max_length=reads, max_positions=reads)
    return classify(config, folder, resume, split_at=trained)


if __name__ == "__main__":
    main(Config, run)
