"""Embedded and user text: splits that do not overlap, formats that read alike, errors that say what is there."""

import csv
import json

import pytest

from hf_posswap import PosswapError
from hf_posswap.data.text import read_documents, split_of, stdlib_documents, stdlib_prose, token_blocks


def test_splits_are_disjoint_and_stable():
    """A module is in one split, by its name alone; about one name in ten is held out."""
    train, held_out = stdlib_documents("train"), stdlib_documents("validation")
    assert not train.keys() & held_out.keys()
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.2
    assert split_of("dataclasses") == "validation" and split_of("json.decoder") == "train"
    assert "dataclasses" in held_out and any(name.startswith("topic:") for name in train)


def test_prose_is_prose():
    """Paragraphs of docstrings and topics: no code, no duplicates."""
    prose = stdlib_prose("validation")
    assert len(prose) > 200 and len(set(prose)) == len(prose)
    assert not any(">>>" in paragraph or "def " in paragraph[:4] for paragraph in prose)


def test_formats_read_alike(tmp_path):
    """The same rows come out of csv, tsv, jsonl and parquet, split the same way."""
    rows = [f"document number {n} has some text" for n in range(40)]
    with open(tmp_path / "t.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], *([row] for row in rows)])
    with open(tmp_path / "t.tsv", "w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([["text"], *([row] for row in rows)])
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    import datasets

    datasets.Dataset.from_dict({"text": rows}).to_parquet(tmp_path / "t.parquet")
    for split in ("train", "validation"):
        read = [read_documents(tmp_path / f"t.{kind}", split=split) for kind in ("csv", "tsv", "jsonl", "parquet")]
        assert read[0] == [row for row in rows if split_of(row) == split] and read[0]
        assert all(other == read[0] for other in read)


def test_text_file_and_folder(tmp_path):
    """A text file is held out from its end; a folder of several by name."""
    (tmp_path / "one.txt").write_text("a" * 90 + "b" * 10)
    assert read_documents(tmp_path / "one.txt") == ["a" * 90]
    assert read_documents(tmp_path / "one.txt", split="validation") == ["b" * 10]
    assert read_documents(tmp_path, split="validation") == ["b" * 10]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", "", "has no text"),
        ("other.csv", "body\nhello\n", r"no column 'text'.*\['body'\]"),
        ("holes.json", '{"text": "x"}\n{"text": null}\n', "empty .None. rows"),
    ],
)
def test_bad_text(tmp_path, name, content, says):
    """What is wrong with a file is said."""
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(PosswapError, match=says):
        read_documents(tmp_path / name)


def test_blocks_are_wrapped_for_bert_and_joined_for_gpt2(bert_tokenizer, gpt2_tokenizer):
    """[CLS] and [SEP] around each block, or end-of-text between documents; every block is full."""
    documents = ["the cat sat on the mat"] * 8
    blocks = token_blocks(documents, bert_tokenizer, 10)
    assert blocks.shape == (6, 10)
    assert (blocks[:, 0] == bert_tokenizer.cls_token_id).all() and (blocks[:, -1] == bert_tokenizer.sep_token_id).all()
    stream = token_blocks(documents, gpt2_tokenizer, 7).flatten()
    assert (stream == gpt2_tokenizer.eos_token_id).sum() == 8 and stream[6] == gpt2_tokenizer.eos_token_id


def test_too_little_text_for_one_block(bert_tokenizer):
    """Fewer tokens than a block holds are an error, not an empty tensor."""
    with pytest.raises(PosswapError, match="fewer than one block"):
        token_blocks(["the cat"], bert_tokenizer, 128)
