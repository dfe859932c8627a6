"""Where text comes from: the standard library of Python, files, or Hub data sets.

The embedded text is the standard library itself: the sources of its modules and the reference documentation that
`help()` shows (`pydoc_data.topics`). It needs no download, and it is real prose and code by many authors. Held-out documents
are chosen by a hash of their name, so the split is the same on every machine and Python version. Left out is what is not in
every installation, and `encodings`, `pydoc_data` and tests (`_LEFT_OUT`). Documents are in the order of their names.
"""

import ast
import hashlib
import os
import re
import sysconfig
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase

from hf_posswap.data.tables import hub_name, read_hub, read_table, read_texts, table_kind
from hf_posswap.errors import DataError

Split = Literal["train", "validation"]

# Not in every installation (Debian packages them separately), removed in newer versions, or tables of numbers.
_LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "lib2to3", "distutils",
    "ensurepip", "encodings", "pydoc_data", "__phello__", "msilib", "pip", "setuptools", "lib-dynload",
}  # fmt: skip


def split_of(name: str) -> Split:
    """Return the split of a document: one name in ten is held out, where the first byte of its SHA-256 is below 26.

    >>> split_of("json.decoder"), split_of("argparse")
    ('train', 'train')
    """
    return "validation" if hashlib.sha256(name.encode()).digest()[0] < 26 else "train"


def stdlib_documents(split: Split) -> dict[str, str]:
    """Return the embedded documents of one split, name -> text: modules of the standard library and `help()` topics.

    >>> documents = stdlib_documents("validation")
    >>> len(documents) > 20 and all(split_of(name) == "validation" for name in documents)
    True
    """
    from pydoc_data.topics import topics

    documents = {f"topic:{name}": text.strip() + "\n" for name, text in topics.items() if split_of(f"topic:{name}") == split}
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - _LEFT_OUT  # to walk through site-packages would take longer than all else
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            left_out = _LEFT_OUT.intersection(parts) or parts[0].startswith(("_sysconfigdata", "config-"))
            if not left_out and split_of(name := ".".join(parts)) == split:
                documents[name] = path.read_text(encoding="utf-8", errors="replace")
    return {name: text for name, text in sorted(documents.items()) if text.strip()}


def stdlib_prose(split: Split) -> list[str]:
    """Return the English of the embedded text: paragraphs of docstrings and of the reference documentation."""
    paragraphs = []
    for name, text in stdlib_documents(split).items():
        for passage in [text] if name.startswith("topic:") else _docstrings(text):
            for paragraph in re.split(r"\n\s*\n", passage):
                words = paragraph.split()
                # Prose, not code, tables or signatures: mostly plain words, and some length.
                if len(words) >= 8 and sum(w.strip(".,;:()\"'").isalpha() for w in words) > 0.8 * len(words):
                    paragraphs.append(" ".join(words))
    return list(dict.fromkeys(paragraphs))


def sentences_of(paragraphs: list[str]) -> list[str]:
    """Return the sentences of English paragraphs, each once."""
    found = (sentence.strip() for text in paragraphs for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text))
    return list(dict.fromkeys(found))


def embedded_documents(split: Split, *, causal: bool) -> list[str]:
    """Return the embedded text of one split as documents: for an encoder the English, for a causal model the code, too."""
    return list(stdlib_documents(split).values()) if causal else ["\n".join(stdlib_prose(split))]


def _docstrings(source: str) -> list[str]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a file for another Python version
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [doc for node in ast.walk(tree) if isinstance(node, owners) and (doc := ast.get_docstring(node))]


def read_documents(source: str | Path, *, split: Split | None = "train", text_column: str = "text") -> list[str]:
    """Read documents from a text, csv, tsv, json or parquet file, a folder of .txt files, or a Hub dataset id.

    A plain text file is one document, and held-out text is its last tenth; a table has one document a row, and rows, as files
    of a folder, are held out by a hash of their text; a Hub dataset ("name" or "name:config") uses its own splits.
    `split=None` reads all.
    """
    if not str(source):  # Path("") is the working directory
        raise DataError("the name of the text is empty: give a file, a folder of .txt files or a Hub dataset id")
    path = Path(os.path.expanduser(source))  # Path's own raises for the home of a user who is not there
    if table_kind(path) and path.is_file():
        texts = read_texts(read_table(path), text_column, source)
        documents = [text for text in texts if split in (None, split_of(text))]
    elif path.exists():
        files = _text_files(path) if path.is_dir() else [path]
        if not files:
            raise DataError(f"no .txt file in {path}; give a file, a folder of .txt files or a Hub dataset id")
        texts = [_read_text(file) for file in files]
        if len(texts) > 1:
            documents = [text for text in texts if split in (None, split_of(text))]  # a copy is in the same part
        else:
            (text,) = texts
            cut = len(text) * 9 // 10
            documents = [{"train": text[:cut], "validation": text[cut:], None: text}[split]]
    elif re.search(r"^[./~]|^\w:|/$|\\|^[^:]*\.[a-zA-Z]\w*$", str(source)) or len(path.parts) > 3:
        raise DataError(f"no such file or folder: {source}")
    else:
        documents = read_texts(read_hub(*hub_name(str(source)), split or "all"), text_column, source)
    documents = [text for text in documents if text.strip()]
    if not documents:
        part = "" if split is None else f" in its {split!r} part"
        other = "held-out text as validation_file" if split == "validation" else "another text_column"
        raise DataError(f"{source} has no text{part}; give more text, or {other}")
    return documents


def _text_files(folder: Path) -> list[Path]:
    """Return the .txt files in a folder: names in capitals too, but none of the copies that other programs hide there."""
    shown = [one for one in folder.rglob("*") if not any(part.startswith(".") for part in one.relative_to(folder).parts)]
    read = {folder.resolve(), *(one.resolve() for one in shown if not one.is_symlink())}  # links back into these are no loss
    beyond = (one for one in shown if one.is_dir() and one.resolve() not in read)
    if linked := next((one for one in beyond if any(file.suffix.lower() == ".txt" for file in one.rglob("*"))), None):
        raise DataError(f"{linked} is a link to a folder with text, and is not followed: put its files here, or remove it")
    found = [one for one in shown if one.suffix.lower() == ".txt" and not one.is_dir()]
    return sorted(found, key=lambda one: one.parts)  # paths themselves sort without case on Windows


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without the mark that some editors put in front
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error}): convert it first") from None


def token_blocks(documents: list[str], tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Tokenize documents into one stream and cut it: (N, length) token ids, nothing padded.

    Tokenizers with [CLS] and [SEP], or CLIP's with its own two, get them around every block, as these models were trained;
    others get the end-of-text token between documents.
    """
    return cut_blocks(token_lists(documents, tokenizer), tokenizer, length)


def token_lists(documents: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of each document that has any; the end-of-text token ends it where blocks get no [CLS] and [SEP]."""
    end = [] if wraps(tokenizer) or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # verbose=False: these are cut later, so a warning about sequences beyond the model's length would mislead.
    return [ids + end for ids in tokenizer(list(documents), add_special_tokens=False, verbose=False)["input_ids"] if ids]


def cut_blocks(tokens: list[list[int]], tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Join lists of tokens and cut them into blocks, as `token_blocks` does with documents."""
    stream = [token for ids in tokens for token in ids]
    wrap = wraps(tokenizer)
    body = length - 2 if wrap else length
    count = len(stream) // body
    if count == 0:
        raise DataError(f"the text has {len(stream)} tokens, fewer than one block of {body}: give more text")
    blocks = torch.tensor(stream[: count * body]).view(count, body)
    return _wrap(blocks, tokenizer) if wrap else blocks


def split_tokens(documents: list[list[int]], least: int) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Split tokenized documents into three parts, to fit on, to select by and to report on: about 8 : 1 : 1.

    Documents stay whole, unless they are longer than a twentieth of all the text or reach past the end of a part: those are cut
    into contiguous stretches. They are dealt in one random order, the same each time, first to report, then to select by, and
    stand in each part in the order of the text; copies go where the first went. So parts never overlap. None has fewer than
    `least` tokens.

    >>> [sum(map(len, part)) for part in split_tokens([list(range(60)), list(range(60, 100))], 8)]
    [80, 10, 10]
    """
    total = sum(map(len, documents))
    if total < 3 * least:
        raise DataError(f"{total:,} tokens are too few to fit, select and report: give {3 * least:,}, or shorter blocks")
    share = max(total // 10, least)
    size = max(1, share // 2)
    pieces = [ids[start : start + size] for ids in documents for start in range(0, len(ids), size)]
    dealt: list[list[tuple[int, list[int]]]] = [[], [], []]
    room, cuts = [total - 2 * share, share, share], {}
    for number in torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0)).tolist():
        piece = tuple(pieces[number])
        if piece not in cuts:
            last = min(len(piece), max(0, room[2]))
            cuts[piece] = [(2, 0, last), (1, last, last + max(0, room[1])), (0, last + max(0, room[1]), len(piece))]
        for part, start, end in cuts[piece]:
            if some := list(piece[start:end]):
                dealt[part].append((number, some))
                room[part] -= len(some)
    if (few := sum(len(ids) for _, ids in dealt[0])) < least:
        what = f"{few:,} tokens are left to fit on, since copies of a text stay together"
        raise DataError(f"{what}: give {least:,} that have no copy, or shorter blocks")
    return tuple([ids for _, ids in sorted(part)] for part in dealt)


def shorter_blocks(blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Cut each row of `token_blocks` into shorter rows of the same tokens.

    The rest of a row is dropped; there is none if one length divides the other and blocks get no special tokens.
    """
    edge = 1 if wraps(tokenizer) else 0
    bodies = blocks[:, edge : blocks.shape[1] - edge].unfold(1, length - 2 * edge, length - 2 * edge).flatten(0, 1)
    return _wrap(bodies, tokenizer) if edge else bodies


def spread(blocks: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return about `tokens` tokens of blocks (N, L), at least one: first, last, evenly between."""
    count = min(len(blocks), max(1, tokens // blocks.shape[1]))
    return blocks[torch.linspace(0, len(blocks) - 1, count).long()]


def wraps(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether blocks of this tokenizer get a token at either end."""
    return len(_edges(tokenizer)) == 2


def _edges(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what the tokenizer puts around a text: [CLS] and [SEP], or CLIP's two; a GPT-2 may name such tokens, unused."""
    return tokenizer("")["input_ids"]


def _wrap(bodies: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    first, last = (torch.full((len(bodies), 1), edge) for edge in _edges(tokenizer))
    return torch.cat([first, bodies, last], dim=1)
