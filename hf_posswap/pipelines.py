"""Pipelines of sentence-transformers: a transformers model with its tokenizer, pooling and prompts.

Only this file knows them. `find_target` asks `unwrap` for the model inside, a swap sets how many tokens a pipeline reads, and
commands ask `kind_of` what a folder holds. It never imports sentence-transformers, and knows its versions 5.4 to 6.
"""

import copy
import json
import sys
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from hf_posswap.errors import CheckpointError, PosswapError, UnsupportedModelError

KINDS = {  # class -> the Hub's name for what it does
    "SentenceTransformer": "sentence-similarity",
    "CrossEncoder": "text-ranking",
    "SparseEncoder": "feature-extraction",
    "MultiVectorEncoder": "feature-extraction",  # from version 6 on
}


def is_pipeline(model) -> bool:
    """Whether this is a SentenceTransformer, or another of `KINDS`."""
    library = sys.modules.get("sentence_transformers")
    return isinstance(model, tuple(getattr(library, kind) for kind in KINDS if hasattr(library, kind)))


def unwrap(model):
    """Return the transformers or PEFT model inside a pipeline; return anything else as it is."""
    if not is_pipeline(model):
        return model
    inner = getattr(model[0], "auto_model", None)
    if not isinstance(inner, nn.Module):
        what = f"{type(model).__name__} begins with {type(model[0]).__name__}, which holds no PyTorch model"
        raise UnsupportedModelError(
            f"this {what}: give one that begins with a Transformer of backend='torch'; in a Router, swap each "
            "one's auto_model, and set its tokenizer.model_max_length to the new longest input"
        )
    return inner


def tokenizer_of(model) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of a pipeline; a plain model has none."""
    return getattr(model[0], "tokenizer", None) if is_pipeline(model) else None


def around(pipeline, model):
    """Return a copy of a pipeline with another model inside; the model itself is not copied."""
    return copy.deepcopy(pipeline, {id(unwrap(pipeline)): model})


def limit(model) -> int | None:
    """Return how many tokens a pipeline reads of a text; None: a plain model, or no limit."""
    return getattr(tokenizer_of(model), "model_max_length", None)


def settings(model) -> dict:
    """Return what a swap changes of a pipeline around the model; {}: a plain model.

    How many tokens it reads of a text and, if that is set apart, of a document (None: no limit), and the card that it was
    loaded with, which it saves again (None: sentence-transformers writes a new one).
    """
    if not is_pipeline(model):
        return {}
    card = getattr(model, "_model_card_text", None)
    return {"text": limit(model), "document": getattr(model[0], "document_length", None), "card": card}


def change(model, *, text: int | None = None, document: int | None = None, card: str | None = None) -> None:
    """Set that; by default the card goes, and limits stay. What evaluators have noted goes, too: it was of other weights."""
    if not is_pipeline(model):
        return
    model._model_card_text, about = card, model.model_card_data
    about.eval_results_dict, about.training_logs = {}, []
    if text is not None:
        tokenizer_of(model).model_max_length = text
    if document is not None and settings(model)["document"] is not None:
        model[0].document_length = document


def reads(model, longest: int) -> int:
    """Return how many tokens are read by a model that takes `longest`, if a pipeline around it may cut texts shorter."""
    return min(longest, limit(model) or longest)


def check_reads(model, longest: int | None) -> None:
    """Raise if a pipeline cannot batch texts, or reads more than `longest` tokens (None: a swap is about to set that)."""
    if not is_pipeline(model):
        return
    if tokenizer_of(model) is None or tokenizer_of(model).pad_token is None:
        raise PosswapError("the tokenizer has no padding token, to batch texts: set model.tokenizer.pad_token to its eos_token")
    options = getattr(model[0], "processing_kwargs", None) or {}
    if any((options.get(part) or {}).get("max_length") for part in ("text", "common")):  # which overrules every other limit
        raise PosswapError("processing_kwargs of this pipeline cut texts by max_length: take that out, and set max_seq_length")
    if longest is not None and (given := reads(model, sys.maxsize)) > longest:
        more = f"max_seq_length={given:,} is more than the {longest:,} tokens that the swapped model would take"
        raise PosswapError(f"{more}: pass max_positions={given}, or lower max_seq_length first")


def kind_of(source: str | Path) -> str | None:
    """Return which of `KINDS` a folder or a repository of the Hub holds, by its files; None: a plain model, or nothing."""
    if _read(source, "modules.json") is None:  # before version 5.4 a CrossEncoder saved only config.json
        return "CrossEncoder" if "sentence_transformers" in (_read(source, "config.json") or ()) else None
    about = _read(source, "config_sentence_transformers.json")
    kind = (about if isinstance(about, dict) else {}).get("model_type", "SentenceTransformer")
    if kind not in KINDS:
        raise CheckpointError(f"{source} holds a {kind!r:.50} of sentence-transformers: known are {', '.join(KINDS)}")
    return kind


def _read(source: str | Path, name: str):
    names = ("gated_repo", "missing_entries", "connection_errors")
    path = cached_file(str(source), name, **{f"_raise_exceptions_for_{what}": False for what in names})
    try:
        return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{name} of {source} cannot be read ({error}): copy or download it again") from None
