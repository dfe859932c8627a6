"""Rows of files and Hub data sets, and the rows of a classification or regression task.

A task is a text or a pair of texts, and a label or a number. Columns are found by the names that data sets use, labels are
numbered in sorted order of the training set, and a table is checked in full before training starts.
"""

import glob
import gzip
import hashlib
import math
import os
import random
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from huggingface_hub.errors import HTTPError

from hf_posswap.errors import DataError
from hf_posswap.extras import extra

if TYPE_CHECKING:
    import datasets

KINDS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
PAIRS = (
    ("sentence1", "sentence2"), ("question1", "question2"), ("premise", "hypothesis"), ("question", "sentence"),
    ("text1", "text2"), ("text_a", "text_b"),
)  # fmt: skip
SINGLES = ("text", "sentence", "content", "document", "review")
LABELS = ("label", "labels", "score", "target")
TASKS = ("auto", "classification", "regression")
_SHORT_NAMES = {  # names that people write without an owner
    "glue": "nyu-mll/glue",
    "super_glue": "aps/super_glue",
    "imdb": "stanfordnlp/imdb",
    "wikitext": "Salesforce/wikitext",
}


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """Where the rows of a task come from; mixed into the configuration of a recipe."""

    LEAST = {"max_train_samples": 1, "max_eval_samples": 1}

    dataset: Annotated[str | None, "A Hub data set: owner/name, owner/name/config, or glue/cola."] = None
    dataset_config: Annotated[str | None, "Its configuration, if the name does not say it."] = None
    train_file: Annotated[str | None, "A csv, tsv, json, jsonl or parquet file; all but parquet may be .gz."] = None
    validation_file: Annotated[str | None, "Default: a tenth of the training rows is held out."] = None
    test_file: Annotated[str | None, "Measured too, at the end."] = None
    validation_split: Annotated[str | None, "Of a Hub data set. Default: validation, or a tenth of train."] = None
    text_column: Annotated[str | None, "Default: found by the usual names."] = None
    text_pair_column: Annotated[str | None, "The second text of a pair."] = None
    label_column: Annotated[str | None, "Default: label, labels, score or target."] = None
    task: Annotated[Literal[TASKS], "auto: numbers with a fraction are regression, all else classification."] = "auto"
    max_train_samples: Annotated[int | None, "Train on so many rows, drawn with data_seed."] = None
    max_eval_samples: Annotated[int | None, "Measure on so many rows, drawn with data_seed."] = None
    data_seed: Annotated[int, "Of what is drawn or held out: the same rows for every scheme and seed."] = 0

    REPLACES: ClassVar[dict[str, tuple[str, ...]]] = {  # so that local files can replace a Hub data set in a configuration
        "train_file": ("dataset", "dataset_config", "validation_split"),
        "dataset": ("dataset_config", "validation_split", "train_file", "validation_file", "test_file"),
    }


@dataclass(frozen=True)
class Rows:
    """Texts, their second texts if they are pairs, and a number for each: its label, or the value to predict."""

    texts: list[str]
    pairs: list[str] | None
    labels: list[int] | list[float]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Task:
    """The rows of each split, and the names of the labels in order of their numbers (empty in a regression)."""

    source: str
    train: Rows
    validation: Rows
    test: Rows | None
    label_names: tuple[str, ...]

    @property
    def is_regression(self) -> bool:
        return not self.label_names


def read_task(config: TableConfig) -> Task:
    """Read, check, hold out and draw the rows that a configuration asks for.

    Raises:
        DataError: No such file, data set or column; a split without rows; texts or labels that are missing or of another type;
            labels to measure on that are not in the training rows.
    """
    files = {split: file for split in ("train", "validation", "test") if (file := getattr(config, f"{split}_file"))}
    hub = any((config.dataset, config.dataset_config, config.validation_split))
    if hub == bool(files) or not (config.dataset or config.train_file):
        ways = "a Hub data set (dataset, dataset_config, validation_split), or files (train_file, validation_file, test_file)"
        raise DataError(f"give {ways}: one of them")
    if len({Path(file).resolve() for file in files.values()}) < len(files):
        raise DataError("a file is given both to train on and to measure on, or to measure on twice: leave one out")
    tables = {split: read_table(file) for split, file in files.items()} or _hub_tables(config)
    source = config.dataset or Path(config.train_file).name
    text, pair, label = _choose_columns(tables["train"], config, source)
    where = {split: f"the {split} part of {Path(files[split]).name if files else source}" for split in tables}
    if empty := [split for split, table in tables.items() if len(table) == 0]:
        raise DataError(f"{where[empty[0]]} has no rows")
    texts = {split: read_texts(table, text, where[split]) for split, table in tables.items()}
    pairs = {split: read_texts(table, pair, where[split], "text_pair_column") for split, table in tables.items() if pair}
    values = {split: _label_column(table, label, where[split]) for split, table in tables.items()}
    named = {split: getattr(table.features[label], "names", None) for split, table in tables.items()}  # of numbered labels
    different = set(values["train"])
    fractions = config.task == "auto" and all(isinstance(value, float) for value in different)
    if fractions and len(different) > 1 and all(value.is_integer() for value in different):  # as pandas writes class numbers
        few = ", ".join(map(str, sorted(different)[:10]))
        what = f"column {label!r} of {where['train']} holds {few}{', ...' * (len(different) > 10)}: classes, or numbers?"
        raise DataError(f"{what} Pass task=classification or task=regression")
    if config.task == "regression" or fractions:
        names, labels = (), {split: _numbers(values[split], label, where[split]) for split in values}
    else:
        names, labels = _number_labels(values, named, label, where)
    places = {split: list(range(len(table))) for split, table in tables.items()}
    if "validation" not in tables:
        places |= hold_out([*zip(texts["train"], (pairs or texts)["train"], strict=True)], config.data_seed)
    rows = {}
    for split, found in places.items():
        whole = "train" if split not in tables else split
        wanted = config.max_train_samples if split == "train" else config.max_eval_samples
        if wanted is not None and wanted < len(found):
            found = sorted(random.Random(config.data_seed).sample(found, wanted))
        rows[split] = Rows(*([of[whole][place] for place in found] if of else None for of in (texts, pairs, labels)))
        if len(set(rows[split].labels)) < 2 and (not names or split == "train"):
            what = f"column {label!r} is the same in all {len(found)} rows taken of {where[whole]}"
            raise DataError(f"{what}: nothing to tell apart; give more rows, or raise max_*_samples")
    return Task(source, rows["train"], rows["validation"], rows.get("test"), names)


def hold_out(rows: Sequence[Hashable], seed: int) -> dict[str, list[int]]:
    """Return the indices of a tenth of the rows to measure on, drawn with a seed, and of all rows but these and their copies.

    >>> hold_out(range(20), seed=0)["validation"]
    [12, 13]
    """
    count = len(rows)
    if count < 10:
        raise DataError(f"{count} rows are too few to hold a tenth out: give validation rows")
    held = sorted(random.Random(seed).sample(range(count), count // 10))
    measured = {rows[place] for place in held}
    return {"train": [place for place, row in enumerate(rows) if row not in measured], "validation": held}


def table_kind(path: Path) -> str | None:
    """Return the kind of table that a file name stands for, or None.

    >>> table_kind(Path("rows.jsonl")), table_kind(Path("rows.tsv.gz")), table_kind(Path("book.txt"))
    ('json', 'csv', None)
    """
    return KINDS.get(Path(path.name.lower().removesuffix(".gz")).suffix)


def read_table(path: str | Path) -> "datasets.Dataset":
    """Read a csv, tsv, json, jsonl or parquet file; all but parquet may be compressed, as .gz."""
    with extra():
        import datasets

    path = Path(os.path.expanduser(path))
    kind = table_kind(path)
    if not path.is_file():
        raise DataError(f"{path} is a folder: give one file in it" if path.is_dir() else f"no such file: {path}")
    if kind is None or (kind == "parquet" and path.suffix.lower() == ".gz"):
        raise DataError(f"{path} is no table that can be read: give {', '.join(KINDS)}, or all but .parquet with .gz")
    if not path.stat().st_size:  # what datasets says of it differs between versions
        raise DataError(f"{path} has no rows")
    # A column has the type that its first rows have together, to which later ones are cast: so many rows, or bytes of JSON, as
    # there is room for. Of more rows pandas would itself find the type in parts, and of some columns fail to join them.
    options = {"csv": {"chunksize": 1 << 15}, "json": {"chunksize": 1 << 28}}.get(kind, {})
    if kind == "csv":  # the words "null" and "NA" are text; only an empty cell is missing
        options |= {"keep_default_na": False, "na_values": [""]}
    if tabs := path.name.lower().removesuffix(".gz").endswith(".tsv"):
        options["delimiter"] = "\t"
    try:
        with path.open("rb") as file:  # to name the cache, which knows a file by its time alone: an archive may set that
            content = hashlib.file_digest(file, "sha256").hexdigest()[:16]
        # datasets takes names for patterns: rows[1].csv would read rows1.csv
        rows = datasets.load_dataset(kind, content, data_files=glob.escape(str(path)), split="train", **options)
    except (datasets.exceptions.DatasetsError, ValueError) as error:
        if type(error.__cause__).__name__ == "EmptyDataError" or "no data" in str(error):
            raise DataError(f"{path} has no rows") from None
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise DataError(f"{path} cannot be read as {kind} in UTF-8: {reason}") from None
    # pandas has taken the first cells for names of rows. In a parquet file such a column is the index that it saved.
    if kind == "csv" and any(name.startswith("__index_level_") for name in rows.column_names):
        what = f"{path} has more cells in its rows than names in its header"
        raise DataError(f'{what}: put texts with commas in quotes ("), and no comma at the end of a row')
    if tabs:  # one stray quote makes a cell of all that follows, to the next quote
        with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
            lines = sum(1 for line in file if line.strip(b"\r\n")) - 1
        if len(rows) < lines:
            what = f'{path} has {lines:,} lines below its header but {len(rows):,} rows: quotes (") span lines'
            raise DataError(f"{what}. Save it as .csv or .jsonl")
    return rows


def read_hub(name: str, config: str | None, split: str | None) -> "datasets.Dataset | datasets.DatasetDict":
    """Read a Hub data set, or one split of it; DataError without network or for a wrong name."""
    with extra():
        import datasets

    try:
        return datasets.load_dataset(name, config, split=split)
    # RuntimeError: a data set that is a script; HTTPError: a connection that breaks.
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError, HTTPError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        place = name + (f", {config}" if config else "")
        lacks = split == "validation" and "Unknown" in reason
        way = "give it as train_file, other text as validation_file" if lacks else "a local file needs no network"
        raise DataError(f"cannot read the Hub data set {place}: {reason}; {way}") from None


def read_texts(table: "datasets.Dataset", column: str, source, option: str = "text_column") -> list[str]:
    """Return a column of texts, which `option` has named; DataError says what the column holds instead."""
    texts = _column(table, column, source, option)
    empty = [number for number, text in enumerate(texts, 1) if text is None]
    if empty:
        raise DataError(f"column {column!r} of {source} has empty (None) rows, {len(empty)} from row {empty[0]} on: drop them")
    if not all(isinstance(text, str) for text in texts):
        raise DataError(f"column {column!r} of {source} holds {table.features[column]}, not text: pass {option}=")
    return texts


def read_pairs(path: str | Path) -> tuple[list[str], list[str], list[float]]:
    """Return the columns sentence1, sentence2 and label of a file: pairs with human scores (STS)."""
    table, columns = read_table(path), ("sentence1", "sentence2", "label")
    if missing := [name for name in columns if name not in table.column_names]:
        raise DataError(f"{path} has no column {missing[0]!r}: it needs {', '.join(columns)}")
    texts = [read_texts(table, name, path) for name in columns[:2]]
    labels = _numbers(_label_column(table, "label", path), "label", path)
    if len(set(labels)) < 2:
        raise DataError(f"all rows of {path} have one label, with which nothing correlates: give rows of two labels or more")
    return *texts, labels


def _column(table: "datasets.Dataset", column: str, source, option: str) -> list:
    if column not in table.column_names:
        raise DataError(f"{source} has no column {column!r}; it has {table.column_names}: pass {option}=, or rename one")
    return table[column][:]


def _hub_tables(config: TableConfig) -> dict[str, "datasets.Dataset"]:
    if config.validation_split == "train":
        raise DataError("validation_split=train: what is trained on cannot measure; leave it out to hold out a tenth of train")
    name, part = hub_name(config.dataset)
    if config.dataset.startswith(("/", "~")) or (config.dataset.startswith(".") and part):
        raise DataError(f"dataset={config.dataset} is no name on the Hub: give local data as files, such as train_file")
    if part and config.dataset_config:
        raise DataError(f"{config.dataset} names a configuration, and dataset_config={config.dataset_config} another: give one")
    splits = read_hub(name, part or config.dataset_config, None)
    held = config.validation_split or ("validation" if "validation" in splits else None)
    for split in ("train", held):
        if split and split not in splits:
            raise DataError(f"{config.dataset} has no split {split!r}; it has {sorted(splits)}: pass validation_split=")
    return {"train": splits["train"]} | ({"validation": splits[held]} if held else {})


def hub_name(name: str) -> tuple[str, str | None]:
    """Return (name, configuration) of a data set, from the name as people write it.

    >>> hub_name("glue/cola"), hub_name("nyu-mll/glue/cola"), hub_name("imdb"), hub_name("wikitext:wikitext-2-v1")
    (('nyu-mll/glue', 'cola'), ('nyu-mll/glue', 'cola'), ('stanfordnlp/imdb', None), ('Salesforce/wikitext', 'wikitext-2-v1'))
    """
    name, _, config = name.partition(":")
    first, *rest = name.split("/")
    parts = [*_SHORT_NAMES.get(first, first).split("/"), *rest]
    if config and parts[2:]:
        raise DataError(f"{name} names a configuration, and {config} is another: give one")
    return "/".join(parts[:2]), config or "/".join(parts[2:]) or None


def _choose_columns(table: "datasets.Dataset", config: TableConfig, source: str) -> tuple[str, str | None, str]:
    """Return the columns of the text, of its pair (None: single texts) and of the label."""
    there = table.column_names
    label = config.label_column or next((name for name in LABELS if name in there), LABELS[0])
    if config.text_column or config.text_pair_column:
        text, pair = config.text_column or SINGLES[0], config.text_pair_column
    else:
        known = [pair for pair in PAIRS if set(pair) <= set(there)] + [(name, None) for name in SINGLES if name in there]
        if not known:
            raise DataError(f"{source} has no column of a usual name ({', '.join(SINGLES)}); it has {there}: pass text_column=")
        text, pair = known[0]
    if len({text, pair, label}) < 3:
        raise DataError(f"text, its pair and the label are to be different columns, not {text!r}, {pair!r} and {label!r}")
    return text, pair, label


def _label_column(table: "datasets.Dataset", column: str, where: str) -> list:
    values = _column(table, column, where, "label_column")
    for number, value in enumerate(values, 1):
        # A program that writes "nan" had no label; a class of that name would be one more, without a word.
        if value is None or str(value).lower() in ("", "nan") or (isinstance(value, float) and not math.isfinite(value)):
            raise DataError(f"column {column!r} of {where} has no label in row {number}")
        if not isinstance(value, (int, float, str)):
            raise DataError(f"column {column!r} of {where} holds {table.features[column]}, not labels: pass label_column=")
    return values


def _numbers(values: list, column: str, where: str) -> list[float]:
    if (strange := next((value for value in values if isinstance(value, str)), None)) is not None:
        raise DataError(f"column {column!r} of {where} holds the text {strange!r}: give numbers")
    return [float(value) for value in values]


def _plain(value: int | float | str) -> str:
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _number_labels(
    values: dict[str, list], named: dict[str, list[str] | None], column: str, where: dict[str, str]
) -> tuple[tuple[str, ...], dict[str, list[int]]]:
    """Number the labels: the training rows' own numbers, if they have names, or else their sorted labels."""
    train, names = values["train"], named["train"]
    for split, own in named.items():  # each file numbers only the labels that it has: match them by name
        if own and (names or set(own) & set(map(str, train))):
            values[split] = [own[value] if 0 <= value < len(own) else value for value in values[split]]
        elif names:
            values[split] = [str(value) if str(value) in names else value for value in values[split]]
    if names:
        known = {name: number for number, name in enumerate(names)}
        known |= {number: number for number in range(len(names))}
    else:
        if {-1, 0} <= set(train):  # as in GLUE; classes -1 and 1 are accepted
            place = f"row {train.index(-1) + 1} of {where['train']}"
            raise DataError(f"{place} has the label -1, which often hides a label: drop such rows, or give the class a name")
        kinds = {isinstance(value, str) for value in train}
        different = sorted({_plain(value) for value in train}) if len(kinds) > 1 else sorted(set(train))
        if len(different) > max(10, len(train) // 2):
            found = f"{len(different)} different labels in {len(train)} rows"
            raise DataError(f"column {column!r} of {where['train']} holds {found}: give another, or task=regression")
        # Compared as text: 1 in a csv and "1" in a json file are one label, as is 1.0, which pandas makes of 1 beside gaps.
        values = {split: [_plain(value) for value in labels] for split, labels in values.items()}
        names = [_plain(value) for value in different]
        known = {name: number for number, name in enumerate(names)}
    for split, labels in values.items():
        if (strange := next((value for value in labels if value not in known), None)) is not None:
            place = f"row {labels.index(strange) + 1} of {where[split]}"
            known = ", ".join(map(str, list(known)[:20]))
            raise DataError(f"{place} has the label {strange!r}, out of range (-1 often hides a label): known are {known}")
    return tuple(names), {split: [known[value] for value in labels] for split, labels in values.items()}
