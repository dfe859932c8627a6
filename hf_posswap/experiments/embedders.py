"""Embedders for recipes: load a pipeline of sentence-transformers, give it the positions of a run, measure it on STS."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from accelerate import PartialState

from hf_posswap.architectures import longest_input
from hf_posswap.assets import model_source
from hf_posswap.data.calibration import text_batches
from hf_posswap.data.tables import read_pairs
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.comparison import ORIGINAL
from hf_posswap.experiments.models import give_positions, longest_text
from hf_posswap.experiments.opening import one_line
from hf_posswap.experiments.options import SwapOptions
from hf_posswap.experiments.text_tasks import TextOptions
from hf_posswap.extras import extra
from hf_posswap.measure.retrieval import Way
from hf_posswap.pipelines import check_reads, unwrap

with extra():
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator


@dataclass(frozen=True, kw_only=True)
class EmbedderOptions(TextOptions, SwapOptions):
    """What recipes of embedders share."""

    FORBIDDEN_STARTS = {"scratch": "an embedder from scratch finds nothing"}
    LEAST = {"window": 1, "chunk": 3}  # a token between [CLS] and [SEP]

    window: Annotated[int, "Window of the original in the fit, in tokens: the length that it was tuned at."] = 128
    read: Annotated[Way, "How the original reads a document; a swapped model reads it whole."] = "truncated"
    chunk: Annotated[int | None, "Tokens that the original reads at once. Default: its longest input."] = None
    sts: Annotated[str | None, "A table of sentence1, sentence2 and label."] = None

    def __post_init__(self):
        super().__post_init__()
        if self.save_model and self.scheme == ORIGINAL and self.read != "whole":
            raise PosswapError(f"save_model: a saved model would not read as read={self.read} says: leave one of them out")
        if self.sts:
            read_pairs(self.sts)  # not only after all training


def load_embedder(name: str) -> SentenceTransformer:
    """Load a pipeline, or a plain encoder with mean pooling."""
    with one_line(f"{name} cannot be loaded as an embedder", "give the folder or Hub id of one, or of an encoder"):
        embedder = SentenceTransformer(model_source(name), device=str(PartialState().device))
    check_reads(embedder, None)
    try:
        embedder.encode("a")
    except KeyError:
        raise PosswapError(f"{name} makes no vector of a text: give one whose modules pool, such as Pooling") from None
    return embedder


def swap_embedder(
    embedder: SentenceTransformer, config: EmbedderOptions, texts: Sequence[str], *, tokens: int, longest: int = 0
) -> None:
    """Give an embedder the positions of a run, in place; it then reads at least `longest` and `tokens`.

    For the start `fit` it is fitted on texts of up to `tokens`, which the original reads in windows of --window.
    """
    longest = longest_text(config, max(tokens, longest), longest_input(unwrap(embedder).config))
    window = config.window if config.window < tokens else None
    options = {"tokens": config.fit_tokens, "window": window, "seed": config.seed}
    batches = partial(text_batches, list(texts), embedder.tokenizer, tokens, **options)
    give_positions(embedder, config, longest, batches, window=window)


def sts(embedder: SentenceTransformer, path: str) -> float:
    """Return Spearman's rho between cosines and human scores, for a table with columns sentence1, sentence2 and label."""
    evaluator = EmbeddingSimilarityEvaluator(*read_pairs(path), similarity_fn_names=["cosine"], write_csv=False)
    return evaluator(embedder)["spearman_cosine"]
