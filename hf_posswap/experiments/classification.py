"""Fine-tune a swapped model on texts with labels, and measure it: what the classification recipes share.

Shapes: N rows, L tokens in a text, C labels (1 for a regression).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from accelerate import PartialState
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import longest_input
from hf_posswap.data.calibration import text_batches
from hf_posswap.data.tables import Rows, TableConfig, Task, read_task
from hf_posswap.data.text import embedded_documents, stdlib_prose
from hf_posswap.errors import DataError, PosswapError
from hf_posswap.experiments.comparison import ORIGINAL
from hf_posswap.experiments.items import averaged
from hf_posswap.experiments.models import cost, load_family, load_model, load_tokenizer
from hf_posswap.experiments.options import RecipeConfig
from hf_posswap.measure.word_order import word_order_examples
from hf_posswap.training import TrainingRun, pad, predict, train
from hf_posswap.training.run_log import announce

WORD_ORDER = {"train": 4000, "validation": 1000}  # examples of the embedded task, unless max_*_samples are given


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(TableConfig, RecipeConfig):
    """A model, a scheme, a budget, and rows of a table; without a data set, the embedded word-order task."""

    LEAST = {"max_length": 3, "eval_steps": 0, "eval_batch_size": 1}

    metric: Annotated[str | None, "The main metric. Default: accuracy, or spearman if labels are numbers."] = None
    max_length: Annotated[int | None, "Cut texts after this many tokens. Default: as many as the model reads."] = None
    eval_steps: Annotated[int, "Also measure every N steps; 0: only at the end."] = 0
    eval_batch_size: Annotated[int, "Texts per process and batch in the evaluation."] = 32


@dataclass(frozen=True)
class Encoded:
    """The token ids of one split, and how many of its texts were cut."""

    rows: list[dict]  # input_ids (L,), labels (), and token_type_ids (L,) for pairs
    lengths: list[int]  # before they were cut
    truncated: int

    def sizes(self, split_at: int | None) -> dict:
        sizes = {"rows": len(self.rows), "longest": max(self.lengths), "truncated": self.truncated}
        sizes["truncated_share"] = self.truncated / len(self.rows)
        return sizes if split_at is None else sizes | {"long": sum(length > split_at for length in self.lengths)}


def classify(config: ClassificationConfig, folder: Path, resume: bool = False, *, split_at: int | None = None) -> dict:
    """Read the rows, train on them, measure; return {"figures", "cost", ...} for the result file of a recipe.

    With `split_at`, there are also figures of only those texts with more tokens than that (`accuracy_long`). `folder` keeps
    checkpoints, so that a run can be resumed.

    PosswapError: data, options or model are invalid; raised before training starts.
    """
    from hf_posswap.measure.metrics import compute_metrics, metric_names  # imports `evaluate`, which takes seconds

    with PartialState().main_process_first():  # it downloads into the cache that the others read
        task = read_labelled(config)
    tokenizer, (family, causal) = load_tokenizer(config.model), load_family(config.model)
    trained = longest_input(family)
    held = config.max_positions or trained  # what the scheme will hold
    longest = config.max_length or held
    if longest > held:
        raise PosswapError(f"max_length={longest}, but the model will read {held} tokens: raise max_positions, or lower it")
    metrics = metric_names(len(task.label_names))
    main = config.metric or metrics[0]
    if main not in metrics:
        kind = "a regression" if task.is_regression else f"{len(task.label_names)} labels"
        raise PosswapError(f"metric={main!r} does not fit {kind}; there are {', '.join(metrics)}")
    metrics = tuple(sorted(metrics, key=lambda name: name != main))  # the main one first
    if len(task.train) < config.batch_size:
        raise DataError(f"{len(task.train)} training rows do not fill one batch of {config.batch_size}")
    parts = {"train": task.train, "validation": task.validation} | ({"test": task.test} if task.test else {})
    if family.pad_token_id is None and tokenizer.pad_token_id is None:
        raise PosswapError(f"{config.model}: its tokenizer has no token to pad batches with: set pad_token, and save it")
    encoded = {split: encode(rows, tokenizer, longest, split, causal=causal) for split, rows in parts.items()}

    names = dict(enumerate(task.label_names))
    options = {"id2label": names, "label2id": {name: number for number, name in names.items()}}
    options |= {"problem_type": "single_label_classification"}
    if task.is_regression:
        options = {"num_labels": 1, "problem_type": "regression"}
    reads = min(trained, held)
    enough = sum(encoded["train"].lengths) >= max(config.fit_tokens, 3 * reads)

    def fit_batches() -> list[torch.Tensor]:
        texts = [*task.train.texts, *(task.train.pairs or [])] if enough else embedded_documents("train", causal=causal)
        return text_batches(texts, tokenizer, reads, tokens=config.fit_tokens, causal=causal, seed=config.seed)

    texts = {"fit_batches": fit_batches, "tokenizer": tokenizer}
    model = load_model(config, AutoModelForSequenceClassification, **texts, **options)
    pad_token_id, validation = model.config.pad_token_id, encoded["validation"]

    def measure(model: PreTrainedModel, rows: list[dict]) -> dict:
        """Return figures; those that are means over rows as their values (N,)."""
        logits = predict(model, rows, pad_token_id, config.eval_batch_size)  # (N, C)
        labels = torch.stack([row["labels"] for row in rows])
        if task.is_regression:
            guesses, loss = logits[:, 0], functional.mse_loss(logits[:, 0], labels, reduction="none")
        else:
            guesses, loss = logits.argmax(-1), functional.cross_entropy(logits, labels, reduction="none")
        figures = compute_metrics(metrics, guesses.tolist(), labels.tolist())
        return figures | ({"accuracy": guesses == labels} if "accuracy" in figures else {}) | {"loss": loss}

    def look(model: PreTrainedModel, run: TrainingRun) -> None:
        step = len(run.losses)
        if step % config.eval_steps == 0 and step < config.max_steps:
            figures = averaged(measure(model, validation.rows))["figures"]
            run.points.append({"step": step, "tokens": run.tokens, "seconds": run.seconds, **figures})

    model, run = train(
        model,
        encoded["train"].rows,
        config,
        collate=lambda rows: pad(rows, pad_token_id),
        after_step=look if config.eval_steps else None,
        output=folder,
        resume=resume,
    )
    announce("measuring")
    fitted = config.start == "fit" and config.scheme != ORIGINAL
    figures = measure(model, validation.rows)
    point = {"step": len(run.losses), "tokens": run.tokens, "seconds": run.seconds, **averaged(figures)["figures"]}
    if task.test:
        figures |= {f"test_{name}": value for name, value in measure(model, encoded["test"].rows).items()}
    long = [row for row, n in zip(validation.rows, validation.lengths, strict=True) if split_at is not None and n > split_at]
    if long:
        figures |= {f"{name}_long": value for name, value in measure(model, long).items()}
    return {
        **averaged(figures),
        "metric": main,
        "cost": cost(model, run),
        "model": model,
        "curve": [*run.points, point],
        "losses": run.losses,
        "data": {
            "source": task.source,
            "labels": list(task.label_names),
            "max_length": longest,
            "splits": {split: part.sizes(split_at) for split, part in encoded.items()},
        },
        "fitted_on": ("the training texts" if enough else "the embedded text") if fitted else None,
    }


def read_labelled(config: TableConfig) -> Task:
    """Read the data that a configuration names; without any, make the embedded word-order task."""
    if config.dataset or config.train_file or config.validation_file or config.test_file:
        return read_task(config)
    parts = {}
    for split, wanted in (("train", config.max_train_samples), ("validation", config.max_eval_samples)):
        count = wanted or WORD_ORDER[split]
        texts, labels = word_order_examples(stdlib_prose(split), max(2, count), seed=config.data_seed)
        parts[split] = Rows(texts, None, labels)
    return Task("word order", parts["train"], parts["validation"], None, ("intact", "swapped"))


def encode(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, longest: int, split: str = "train", *, causal: bool = False
) -> Encoded:
    """Turn texts into at most `longest` token ids; in a pair, the longer text is cut first.

    Where the tokenizer puts nothing between the texts of a pair (GPT-2), the end-of-text token separates them. Only encoders
    get token types: a GPT-2 with a tokenizer of BERT would add the vectors of words 0 and 1 for them.
    """
    pairs = rows.pairs
    if pairs is not None and tokenizer.sep_token_id is None and tokenizer.eos_token is not None:
        pairs = [tokenizer.eos_token + text for text in pairs]  # before the second, as texts are cut at their ends
    kinds = pairs is not None and tokenizer.sep_token_id is not None and not causal

    def tokenize(**options) -> dict:
        texts = [part for part in (rows.texts, pairs) if part is not None]
        return tokenizer(*texts, return_token_type_ids=kinds, return_attention_mask=False, verbose=False, **options)

    lengths = [len(ids) for ids in tokenize()["input_ids"]]
    if 0 in lengths:
        raise DataError(f"row {lengths.index(0) + 1} of the {split} texts has no token: remove empty texts")
    cut = tokenize(truncation=True, max_length=longest)
    encoded = [{name: torch.tensor(values[place]) for name, values in cut.items()} for place in range(len(rows))]
    for row, label in zip(encoded, rows.labels, strict=True):
        row["labels"] = torch.tensor(label)  # int64 for a class, float32 for a number
    return Encoded(encoded, lengths, sum(length > longest for length in lengths))
