"""Rows of a task: columns and labels that are found, splits that do not change, and tables that are refused."""

import os
from pathlib import Path

import datasets
import pandas
import pytest
from conftest import refused

from hf_posswap.data.tables import TableConfig, hold_out, hub_name, read_pairs, read_table, read_task

ROWS = [{"text": f"text number {n}", "label": n % 3} for n in range(30)]
PAIR = ("sentence1", "sentence2", "kind", "label")


def write_rows(path, rows):
    """Write rows in the format that the name asks for, compressed if it says so."""
    table, name = pandas.DataFrame(rows), path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        table.to_parquet(path)
    elif name.endswith((".csv", ".tsv")):
        table.to_csv(path, sep="\t" if name.endswith(".tsv") else ",", index=False)
    else:
        table.to_json(path, orient="records", lines=name.endswith(".jsonl"))
    return str(path)


@pytest.mark.parametrize(
    "name", ["t.csv", "t.tsv", "t.json", "t.jsonl", "t.parquet", "T.CSV", "t.csv.gz", "t.tsv.gz", "t.json.gz", "t.jsonl.gz"]
)
def test_formats_read_alike(tmp_path, name):
    """The same rows come out of every format; a tenth is held out and nothing is lost."""
    task = read_task(TableConfig(train_file=write_rows(tmp_path / name, ROWS)))
    assert task.label_names == ("0", "1", "2") and not task.is_regression and task.test is None
    assert (len(task.train), len(task.validation)) == (27, 3) and task.train.pairs is None
    read = dict(zip(task.train.texts + task.validation.texts, task.train.labels + task.validation.labels, strict=True))
    assert read == {row["text"]: row["label"] for row in ROWS}
    assert task.source == name


@pytest.mark.parametrize(
    ("columns", "text", "pair", "label", "given"),
    [
        (("id", "label", "title", "text"), "text", None, "label", {}),
        (("sentence", "labels"), "sentence", None, "labels", {}),
        (("sentence1", "sentence2", "label", "genre"), "sentence1", "sentence2", "label", {}),
        (("question", "sentence", "label"), "question", "sentence", "label", {}),
        (("premise", "hypothesis", "score"), "premise", "hypothesis", "score", {}),
        (PAIR, "sentence2", None, "kind", {"text_column": "sentence2", "label_column": "kind"}),
        (PAIR, "sentence2", "sentence1", "label", {"text_column": "sentence2", "text_pair_column": "sentence1"}),
    ],
)
def test_columns(tmp_path, columns, text, pair, label, given):
    """Names that data sets use are found, pairs before single texts; options win. Pairs that share one text are no copies."""
    own = [text] if pair else []
    rows = [{name: n % 2 if name == label else f"{name} {n * (name not in own)}" for name in columns} for n in range(20)]
    task = read_task(TableConfig(train_file=write_rows(tmp_path / "t.csv", rows), **given))
    assert task.train.texts[0].startswith(f"{text} ") and task.label_names == ("0", "1") and len(task.train) == 18
    assert (task.train.pairs is None) if pair is None else task.train.pairs[0].startswith(f"{pair} ")


def test_labels_have_one_numbering(tmp_path):
    """All splits number labels alike: by the sorted labels of the training rows, whatever type a file gives them."""
    train = write_rows(tmp_path / "train.csv", [{"text": "a", "label": label} for label in (10, 9, 10, 2)])
    validation = write_rows(tmp_path / "dev.json", [{"text": "b", "label": label} for label in ("9", "2")])
    test = write_rows(tmp_path / "test.csv", [{"text": "c", "label": label} for label in (2, 2, 10)])
    task = read_task(TableConfig(train_file=train, validation_file=validation, test_file=test))
    assert task.label_names == ("2", "9", "10")  # as numbers, not as text
    assert (task.train.labels, task.validation.labels, task.test.labels) == ([2, 1, 2, 0], [1, 0], [0, 0, 2])


def test_numbers_are_a_regression(tmp_path):
    """Numbers with a fraction are predicted as they are; whole ones on request. A few written as 1.0 could be either."""
    rows = [{"text": f"t {n}", "score": n / 4} for n in range(20)]
    task = read_task(TableConfig(train_file=write_rows(tmp_path / "t.csv", rows)))
    assert task.is_regression and set(task.train.labels) | set(task.validation.labels) == {n / 4 for n in range(20)}
    stars = write_rows(tmp_path / "s.csv", [{"text": f"t {n}", "label": n % 5} for n in range(20)])
    assert read_task(TableConfig(train_file=stars)).label_names == ("0", "1", "2", "3", "4")
    task = read_task(TableConfig(train_file=stars, task="regression", max_train_samples=None, data_seed=1))
    assert task.is_regression and all(isinstance(label, float) for label in task.train.labels)
    odd = write_rows(tmp_path / "p.csv", [{"text": f"t {n}", "label": n % 5 + 0.0} for n in range(20)])
    refused("holds 0.0, 1.0, .*numbers. Pass task=classification or", read_task, TableConfig(train_file=odd))
    assert read_task(TableConfig(train_file=odd, task="regression")).is_regression
    task = read_task(TableConfig(train_file=odd, validation_file=stars, task="classification"))
    assert task.label_names == ("0", "1", "2", "3", "4") and task.train.labels == task.validation.labels


def test_a_column_has_the_type_of_its_first_rows(tmp_path):
    """Of 32,768 in csv, 256 MiB of JSON: where the first fraction or word comes late among them, 01 stays 01."""
    (tmp_path / "t.csv").write_text("score,label\n" + "1,a\n" * 10_000 + "0.5,01\n")
    (tmp_path / "t.jsonl").write_text(f'{{"score": 1, "label": "{"a" * 11_000_000}"}}\n{{"score": 0.5, "label": "01"}}\n')
    assert [read_table(tmp_path / name)[-1] for name in ("t.csv", "t.jsonl")] == [{"score": 0.5, "label": "01"}] * 2


def test_words_that_mean_nothing_elsewhere(tmp_path):
    """In a csv, "null" and "NA" are text and labels like others."""
    rows = [{"text": text, "label": label} for text in ("null", "NA", "nan", "x") for label in ("None", "NA", "no")]
    task = read_task(TableConfig(train_file=write_rows(tmp_path / "t.csv", rows)))
    assert task.label_names == ("NA", "None", "no") and {"null", "NA", "nan"} <= {*task.train.texts, *task.validation.texts}


def test_what_is_drawn(tmp_path):
    """Drawn rows depend on data_seed alone, keep their order and do not overlap with those held out."""
    file = write_rows(tmp_path / "t.csv", [{"text": str(n) + " x", "label": n % 2} for n in range(100)])

    def read(**options):
        return read_task(TableConfig(train_file=file, max_train_samples=20, max_eval_samples=5, **options))

    task, other = read(), read(data_seed=1)
    assert read() == task and other.train != task.train and other.validation != task.validation
    assert (len(task.train), len(task.validation)) == (20, 5) and not set(task.train.texts) & set(task.validation.texts)
    numbers = [int(text.split()[0]) for text in task.train.texts]
    assert numbers == sorted(numbers) and numbers[-1] > 50 and task.train.labels == [n % 2 for n in numbers]
    parts = hold_out(range(50), seed=3)
    assert sorted(parts["train"] + parts["validation"]) == list(range(50)) and len(parts["validation"]) == 5
    assert parts != hold_out(range(50), seed=4)
    assert len(read_task(TableConfig(train_file=file, max_train_samples=99)).train) == 90
    copies = hold_out([*range(50), *range(50)], seed=3)  # of what is measured are not trained on
    assert not {place % 50 for place in copies["train"]} & {place % 50 for place in copies["validation"]}


GOOD = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(20))
VALIDATION = {"train_file": "good.csv", "validation_file": "t.csv"}


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("body,label\nx,1\n", {}, r"no column of a usual name \(text, .*it has \['body', 'label'\]: pass text_column"),
        ("text,kind\nx,1\n", {}, r"no column 'label'; it has \['text', 'kind'\]: pass label_column="),
        (GOOD, {"text_column": "texts"}, r"no column 'texts'; it has \['text', 'label'\]: pass text_column="),
        (GOOD, {"text_pair_column": "other"}, "no column 'other'.*pass text_pair_column="),
        (GOOD, {"label_column": "text"}, "different columns"),
        (GOOD, {"task": "regression", "label_column": "text", "text_column": "label"}, "holds .*int64.*, not text"),
        (GOOD, {"dataset": "glue/cola"}, "one of them"),
        (GOOD, {"dataset_config": "cola"}, "one of them"),
        (GOOD, {"validation_file": "missing.csv"}, "no such file: missing.csv"),
        (GOOD, {"validation_file": "./t.csv"}, "both to train on and to measure on"),
        (GOOD, {"train_file": None, "dataset": "/home/my/reviews"}, "no name on the Hub: give local data as files"),
        (GOOD, {"train_file": None, "dataset": "glue/cola", "validation_split": "train"}, "leave it out to hold out a tenth"),
        (GOOD, {"max_train_samples": 1}, "is the same in all 1 rows taken of the train part .* raise max_"),
        ("text,label\n" + "".join(f"x,{n % 15}.0\n" for n in range(60)), {}, r"holds 0.0, .*9.0, ...: .*Pass task=class"),
        (GOOD, {"validation_file": "."}, ". is a folder: give one file in it"),
        ("", {}, "t.csv has no rows"),
        ("text,label\n", {}, "t.csv has no rows"),
        ("text,label\n,1\nx,0\n,1\n", {}, r"column 'text' of the train part of t.csv has empty \(None\) rows, 2 from row 1"),
        ("text,label\nx,1\ny,\n", {}, "no label in row 2"),
        ("text,label\nx,1.5\ny,inf\n", {}, "no label in row 2"),
        (GOOD + "x,NaN\n", {}, "no label in row 21"),
        ("text,label\nx,1,2\n", {}, "more cells in its rows than names in its header"),
        ("text,label\nx,1\ny,1,2,3\n", {}, "cannot be read as csv"),
        ("text,label\n" + "x,1\n" * 20, {}, "is the same in all .* rows taken of the train part"),
        ("text,label\n" + "x,1.5\n" * 20, {}, "is the same in all .* rows taken of the train part"),
        ("text,label\nx,1\ny,0\n", {}, "2 rows are too few to hold a tenth out"),
        ("text,label\n" + "".join(f"x,word{n}\n" for n in range(20)), {}, "20 different labels in 20 rows"),
        (GOOD + "secret,-1\n", {}, "row 21 of the train part of t.csv has the label -1, .*drop such rows"),
        ("text,label\nx,one\ny,two\n", {"task": "regression"}, "the text 'one': give numbers"),
        # Files in unknown formats, and files that are not what their name says.
        ("x", {"train_file": "t.xlsx"}, "no table that can be read: give .csv"),
        ("x", {"train_file": "t.parquet.gz"}, "no table that can be read"),
        ("text,label\n", {"train_file": "t.csv.gz"}, "cannot be read as csv"),
        ("{nope", {"train_file": "t.json"}, "cannot be read as json"),
        ("text,label\n\xff,1\n", {}, "cannot be read as csv in UTF-8"),
        # Validation rows have the columns and labels of the training rows.
        ("text,label\nx,0\nx,7\n", VALIDATION, "row 2 of the validation part of t.csv has the label '7', .*known are 0, 1"),
        ("text,class\nx,1\n", VALIDATION, r"validation part of t.csv has no column 'label'; .*'class'\]: .* rename one"),
    ],
)
def test_bad_tables(tmp_path, monkeypatch, content, options, says):
    """An error says what is wrong with a table, and what is there."""
    monkeypatch.chdir(tmp_path)
    for name in ("t.csv", options.get("train_file") or "t.csv"):
        Path(name).write_text(content, encoding="latin-1")
    Path("good.csv").write_text(GOOD)
    refused(says, read_task, TableConfig(**{"train_file": "t.csv", **options}))


@pytest.mark.parametrize(
    ("train", "validation", "names", "labels"),
    [
        ("abc.parquet", "bc.parquet", "abc", [1, 2, 1]),
        ("abc.parquet", "bc.jsonl", "abc", [1, 2, 1]),
        ("abc.jsonl", "bc.parquet", "abc", [1, 2, 1]),
        ("abc.parquet", "d.parquet", None, None),
        ("231.parquet", "231.jsonl", "123", [1, 2, 0]),
        ("abc.parquet", "120.jsonl", "abc", [1, 2, 0]),
        ("120.jsonl", "abc.parquet", "012", [0, 1, 2]),  # other words for the same numbers
    ],
)
def test_each_file_numbers_its_labels_by_itself(tmp_path, train, validation, names, labels):
    """Numbers with names (parquet) mean the names, and a file without one of the labels counts otherwise."""
    for file in (train, validation):
        values = [int(one) if one.isdigit() else one for one in file.partition(".")[0]] * 12
        rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(12)], "label": values[:12]})
        if file.endswith("jsonl"):
            rows.to_json(tmp_path / file)
        else:
            rows.cast_column("label", datasets.Value("string")).class_encode_column("label").to_parquet(tmp_path / file)
    config = TableConfig(train_file=str(tmp_path / train), validation_file=str(tmp_path / validation))
    if names is None:
        refused("row 1 of the validation part of d.parquet has the label", read_task, config)
    else:
        task = read_task(config)
        assert "".join(task.label_names) == names and task.validation.labels[:3] == labels


def test_rows_that_pandas_has_picked(tmp_path):
    """A parquet file with the index of rows that were picked from more is read as any other."""
    pandas.DataFrame(ROWS)[5:].to_parquet(tmp_path / "picked.parquet", index=True)
    picked = pandas.DataFrame(ROWS).sample(20, random_state=0)
    picked.to_parquet(tmp_path / "t.parquet")
    task = read_task(TableConfig(train_file=str(tmp_path / "t.parquet"), validation_file=str(tmp_path / "picked.parquet")))
    assert task.train.texts == picked["text"].tolist() and len(task.validation) == 25


def test_the_file_of_that_name(tmp_path):
    """What a file holds is read, and not what one of its name and time held, nor one that its name matches as a pattern."""
    for word in ("cat", "sun"):
        (path := tmp_path / "t.csv").write_text(f"text\n{word}\n")
        os.utime(path, (0, 0))
        assert read_table(path)["text"] == [word]
    for name in (names := ("rows1.csv", "rows[1].csv", "*.csv", "rows?.json")):
        (tmp_path / name).write_text('{"text": "rows?.json"}' if name[-1] == "n" else f"text\n{name}\n")
    assert [read_table(tmp_path / name)["text"] for name in names] == [[name] for name in names]


def test_pairs_with_scores(tmp_path):
    """Pairs need two texts and a number each."""
    (path := tmp_path / "t.csv").write_text("sentence1,sentence2,label\na,b,1\nc,d,2.5\n")
    assert read_pairs(path) == (["a", "c"], ["b", "d"], [1.0, 2.5])
    wrong = {"a,,1": "'sentence2' .* has empty", "a,b,": "no label in row 2", "a,b,high": "give numbers", "": "one label"}
    for row, says in wrong.items():
        path.write_text(f"sentence1,sentence2,label\na,b,1\n{row}\n")
        refused(says, read_pairs, path)
    rows = [{"sentence1": "a", "sentence2": "b", "label": label} for label in ("1", "")]
    refused("no label in row 2", read_pairs, write_rows(tmp_path / "t.jsonl", rows))


def test_no_hub():
    """No network is an error, and so is no data set at all; hub_job.py reads some."""
    says = "cannot read the Hub data set nyu-mll/glue, cola: .*a local file needs no network"
    refused(says, read_task, TableConfig(dataset="glue/cola"))
    refused("glue/cola names a configuration, and mrpc is another", hub_name, "glue/cola:mrpc")
    refused("dataset.*train_file.*one of them", read_task, TableConfig())
