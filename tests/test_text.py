"""Embedded and user text: splits that do not overlap, formats that read alike, errors that say what is there."""

import random
from unittest.mock import call, patch

import pytest
import torch
from conftest import refused
from transformers import CLIPTokenizer

from hf_posswap import text_batches
from hf_posswap.data.tables import read_table
from hf_posswap.data.text import read_documents, split_of, stdlib_documents, stdlib_prose, token_blocks, wraps
from hf_posswap.errors import DataError
from hf_posswap.provenance import input_hashes


def test_splits_are_disjoint_and_stable():
    """A module is in one split, by its name alone; about one name in ten is held out."""
    train, held_out = stdlib_documents("train"), stdlib_documents("validation")
    assert not train.keys() & held_out.keys()
    assert 0.05 < len(held_out) / (len(train) + len(held_out)) < 0.2
    assert split_of("profile") == "validation" and split_of("asyncio.base_events") == "train"  # next to the limit
    assert "profile" in held_out and any(name.startswith("topic:") for name in train)


def test_prose_is_prose():
    """The prose holds its split's docstrings and topics, hardly any code (by the Python that runs) and no duplicates."""
    with patch("hf_posswap.data.text.stdlib_documents", side_effect=stdlib_documents) as documents:
        prose = stdlib_prose("validation")
        documents.side_effect = lambda split: {"topic:one": f"of the {split} split " * 3}
        assert stdlib_prose("train") == [("of the train split " * 3).strip()]
    assert len(prose) > 200 and len(set(prose)) == len(prose)
    assert sum(">>>" in paragraph or "def " in paragraph[:4] for paragraph in prose) < len(prose) / 200


def test_text_file_and_folder(tmp_path):
    """A text file is held out from its end; of a folder of several, some are, and with them their copies."""
    (tmp_path / "one.txt").write_text("\ufeff" + "a" * 90 + "b" * 10)  # a byte order mark is no text
    assert read_documents(tmp_path / "one.txt") == ["a" * 90]
    assert read_documents(tmp_path / "one.txt", split="validation") == ["b" * 10]
    assert read_documents(tmp_path, split="validation") == ["b" * 10]
    for number in range(80):
        (tmp_path / f"copy-{number}.txt").write_text(f"text {number // 2}")
    train, held = (read_documents(tmp_path, split=split) for split in ("train", "validation"))
    assert len(train) + len(held) == 81 and held and not set(train) & set(held)
    (tmp_path / "few").mkdir()
    for number in (0, 1):
        (tmp_path / "few" / f"{number}.txt").write_text(train[number])
    refused("held-out text as validation_file", read_documents, tmp_path / "few", split="validation")


def test_what_else_a_folder_holds(tmp_path):
    """Text with a name in capitals is read; hidden files and folders with such a name are not; a broken link is an error."""
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "folder.txt").mkdir()
    for name in ("A.TXT", "folder.txt/b.txt", "._A.txt", ".ipynb_checkpoints/a.txt"):
        (tmp_path / name).write_text(name)
    assert read_documents(tmp_path, split=None) == ["A.TXT", "folder.txt/b.txt"]
    (tmp_path / "link.txt").symlink_to("nowhere.txt")
    refused("link.txt", read_documents, tmp_path, split=None, error=FileNotFoundError)
    (tmp_path / "link.txt").unlink()
    (tmp_path / "again").symlink_to(tmp_path)  # of what is read anyway
    assert read_documents(tmp_path, split=None)
    (tmp_path.parent / "elsewhere").mkdir()
    (tmp_path / "more").symlink_to(tmp_path.parent / "elsewhere")
    assert read_documents(tmp_path, split=None)
    (tmp_path.parent / "elsewhere" / "B.TXT").write_text("more")
    refused("more is a link to a folder with text", read_documents, tmp_path, split=None)
    for name in "books/ data/my/books/ data/my/old/books my.txt C:/my/rows.csv".split():  # no names of data sets on the Hub
        refused(f"no such file or folder: {name}", read_documents, name)
    with patch("hf_posswap.data.text.read_hub", side_effect=DataError("asked the Hub")) as hub:
        refused("asked the Hub", read_documents, "nyu-mll/glue/cola")  # owner, name and configuration
        refused("asked the Hub", read_documents, "owner/data-1.5:2023.simple")
    hub.assert_has_calls([call("nyu-mll/glue", "cola", "train"), call("owner/data-1.5", "2023.simple", "train")])


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.txt", "", "has no text"),
        ("other.csv", "body\nhello\n", r"no column 'text'.*\['body'\]"),
        ("stray.tsv", 'text\n"one\ntwo"\nthree\n', "3 lines below its header but 2 rows: quotes"),
        ("holes.json", '{"text": "x"}\n{"text": null}\n', "empty .None. rows"),
    ],
)
def test_bad_text(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_text(content)
    refused(says, read_documents, tmp_path / name)


def test_names_of_folders(tmp_path, monkeypatch):
    """An empty name, as of a shell's variable that is not set, does not read the working directory; "~" is one's home."""
    (tmp_path / "notes.txt").write_text("private")
    (tmp_path / "rows.csv").write_text("text\nmine\n")
    monkeypatch.chdir(tmp_path)
    refused("is empty", read_documents, "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [read_documents(f"~/{name}", split=None) for name in ("notes.txt", "rows.csv")] == [["private"], ["mine"]]
    assert "notes.txt" in input_hashes({"train_file": "~/notes.txt"})["train_file"]  # what is read is noted
    for read in (read_documents, read_table):  # the home of somebody who is not there
        refused("no such file", read, "~nobody-here/rows.csv")


def test_blocks_are_wrapped_for_bert_and_joined_for_gpt2(bert_tokenizer, gpt2_tokenizer):
    """[CLS] and [SEP] around each block, or end-of-text between documents; every block is full."""
    documents = ["the cat sat on the mat"] * 8
    blocks = token_blocks(documents, bert_tokenizer, 10)
    assert blocks.shape == (6, 10)
    assert (blocks[:, 0] == bert_tokenizer.cls_token_id).all() and (blocks[:, -1] == bert_tokenizer.sep_token_id).all()
    stream = token_blocks(["", *documents], gpt2_tokenizer, 7).flatten()
    assert (stream == gpt2_tokenizer.eos_token_id).sum() == 8 and stream[6] == gpt2_tokenizer.eos_token_id
    gpt2_tokenizer.cls_token = gpt2_tokenizer.sep_token = gpt2_tokenizer.eos_token  # named, and put nowhere
    assert not wraps(gpt2_tokenizer)


class Numbers:
    """A tokenizer of numbers: each word is its own token, so that a shared stretch of text is a shared number."""

    eos_token_id = None

    def __init__(self, cls: int | None):
        self.edge = cls

    def __call__(self, documents, **options):
        if documents == "":
            return {"input_ids": [self.edge, self.edge] if self.edge is not None else []}
        return {"input_ids": [[int(word) for word in document.split()] for document in documents]}


def numbers(*sizes: int) -> list[str]:
    """Documents of so many words, no word twice."""
    words = iter(range(1, sum(sizes) + 1))
    return [" ".join(str(next(words)) for _ in range(size)) for size in sizes]


TEXTS = {"one": (40_000,), "a few": (15_000, 200, 9_000, 16_000), "many": (100,) * 400, "few": (400,), "twice": (170,) * 200}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("causal", [True, False])
def test_parts_share_no_text(name, causal):
    """No token is in two parts; each has all lengths, as many blocks (causal) or tokens of each; only the draw has a seed."""
    documents, tokenizer = numbers(*TEXTS[name]) * (2 if name == "twice" else 1), Numbers(None if causal else 0)
    made = [text_batches(documents, tokenizer, 128, tokens=4_000, causal=causal, window=32, seed=seed) for seed in (0, 1)]
    parts = [made[0], made[0].select, made[0].report]
    words = [{word for blocks in part for word in blocks.flatten().tolist()} - {0} for part in parts]
    assert not (words[0] & words[1] or words[0] & words[2] or words[1] & words[2])
    lengths = [32, 128] if causal else [16, 32, 128]
    assert all([blocks.shape[1] for blocks in part] == lengths for part in parts)
    tokens = [sum(blocks.numel() for blocks in part) for part in parts]
    if name != "few":
        assert tokens == pytest.approx([3_200, 400, 400], rel=0.4)
        assert not torch.equal(made[0][0], made[1][0])
        counts = [blocks.shape[0] if causal else blocks.numel() for blocks in made[0]]
        assert max(counts) < 1.15 * min(counts), counts
    for ours, theirs in ((made[0].select, made[1].select), (made[0].report, made[1].report)):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_what_is_no_text_or_too_little():
    """One string is no list of its letters, nothing and a list with a gap are no text, and three blocks are the least."""
    for documents in ("one text", [], ["text", None], {"a name": "a text"}):
        refused("must be a list of texts", text_batches, documents, Numbers(None), 32, causal=True)
    for lengths in ({"max_length": 0}, {"max_length": 64, "window": 0}):
        refused("must be at least 1", text_batches, numbers(400), Numbers(None), causal=True, **lengths)
    made = text_batches(numbers(384), Numbers(None), 128, causal=True)
    assert [part[0].shape for part in (made, made.select, made.report)] == [(1, 128)] * 3
    refused("383 tokens are too few.*give 384, or shorter blocks", text_batches, numbers(383), Numbers(None), 128, causal=True)
    refused("0 tokens are left to fit on, since copies", text_batches, numbers(50) * 40, Numbers(None), 32, causal=True)


def test_texts_of_clip():
    """They begin and end as CLIP's tokenizer begins and ends texts, at all lengths: it reads a text's vector off the end."""
    words = [*"abcd", *(f"{letter}</w>" for letter in "abcd"), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    letters = random.Random(0).choices("abcd", k=4_000)
    made = text_batches([" ".join(letters)], tokenizer, 128, tokens=2_000, causal=True, window=77)
    assert [blocks.shape[1] for blocks in made] == [16, 32, 77, 128]
    for blocks in made:
        assert (
            (blocks[:, 0] == 8).all() and (blocks[:, -1] == 9).all() and ((blocks[:, 1:-1] >= 4) & (blocks[:, 1:-1] < 8)).all()
        )
