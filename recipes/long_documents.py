"""Does a scheme that reads more win on documents longer than the original's positions?

    python recipes/long_documents.py --config recipes/configs/movie_reviews.yaml --scheme original     # the first 512 tokens
    python recipes/long_documents.py --config recipes/configs/movie_reviews.yaml --scheme rotary --max-length 1024
    python recipes/long_documents.py --dataset stanfordnlp/imdb --validation-split test --scheme relative --max-length 2048

For the original, documents are cut at its own longest input, if --max-length is more: it cannot read more without a swap. A
swapped model reads --max-length tokens. Both see the same documents in the same order.

Figures without `_long` are of all validation documents. result.json says how many documents are long, and how many were cut.

Memory grows with --batch-size / --gradient-accumulation-steps, the documents read at once, and with --max-length.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from hf_posswap.architectures import longest_input
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.classification import ClassificationConfig, classify
from hf_posswap.experiments.recipe import ORIGINAL, load_family, main


@dataclass(frozen=True, kw_only=True)
class Config(ClassificationConfig):
    QUESTION = "Does reading more of a document help?"
    FIGURES = {"accuracy_long": "of the documents that the original cannot read as a whole; it is cut at what it can read"}

    max_length: Annotated[int, "Tokens of a document that a swapped model reads, such as 1024, 2048 or 4096."] = 1024
    eval_batch_size: Annotated[int, "Documents per process and batch in the evaluation."] = 8

    def __post_init__(self):
        super().__post_init__()
        if not (self.dataset or self.train_file):
            raise PosswapError("give documents with labels: --dataset or --train-file")


def run(config: Config, folder: Path, resume: bool) -> dict:
    trained = longest_input(load_family(config.model)[0])
    reads = min(trained, config.max_length) if config.scheme == ORIGINAL else config.max_length
    holds = trained if config.scheme == ORIGINAL else config.max_positions or max(reads, trained)
    config = replace(config, max_length=reads, max_positions=holds)
    return classify(config, folder, resume, split_at=trained)


if __name__ == "__main__":
    main(Config, run)
