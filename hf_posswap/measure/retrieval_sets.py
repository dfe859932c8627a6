"""Retrieval sets for sentence-transformers' evaluator: queries, corpus, and each query's answers.

`passkeys` and `needles` are the two synthetic sets of LongEmbed (Zhu et al. 2024, https://arxiv.org/abs/2404.12096), drawn
anew: 100 documents of one length, 50 of which answer a query. Each states one fact about a person, once, at any depth. Unlike
LongEmbed, names, numbers and facts are drawn from lists, and the text around a needle is the user's or the standard library's.
"""

import csv
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hf_posswap.errors import DataError
from hf_posswap.measure.passkey import FILLER

DOCUMENTS, QUERIES = 100, 50

_FIRST = "Ada Ben Carla Dmitri Elena Farid Greta Hugo Ines Jonas Kira Liam Mona Nils Olga Pavel Rosa Sven Tara Viktor".split()
_LAST = "Abbott Baker Castro Duarte Ekman Fisher Garcia Hansen Ito Jensen Keller Lopez Moreau Novak Okafor".split()
_THINGS = "fish, bread, cheese, soup, rice, plums, honey, walnuts, coffee, cider, cherries, beans".split(", ")
_PLACES = "Lisbon, Oslo, Kyoto, Quito, Dublin, Prague, Cairo, Lima, Hanoi, Athens, Tunis, Perth".split(", ")


class RetrievalSet(NamedTuple):
    """Texts by their ids."""

    queries: dict[str, str]
    corpus: dict[str, str]
    relevant: dict[str, set[str]]  # query -> documents


def passkeys(tokenizer: PreTrainedTokenizerBase, length: int, seed: int = 0) -> RetrievalSet:
    """Hide each person's pass key in five short sentences that repeat, in documents of `length` tokens; DataError: no room."""
    generator = random.Random(f"passkey-{length}-{seed}")
    keys = {name: generator.randrange(10_000, 100_000) for name in _names(generator)}
    facts = {
        f"What is the pass key for {name}?": f"{name}'s pass key is {key}. Remember it. {key} is the pass key for {name}."
        for name, key in keys.items()
    }
    return _hide(facts, FILLER, tokenizer, length, generator)


def needles(tokenizer: PreTrainedTokenizerBase, length: int, text: Sequence[str], seed: int = 0) -> RetrievalSet:
    """Hide a fact about each person between sentences of a text that starts at another place in each document.

    DataError: the length leaves no room, or there is no text.
    """
    generator = random.Random(f"needle-{length}-{seed}")
    sentences = [sentence.strip() + "." for one in text for sentence in one.split(". ") if sentence.strip()]
    facts = {}
    for name in _names(generator):
        thing, place = generator.choice(_THINGS), generator.choice(_PLACES)
        facts[f"What does {name} buy in {place}?"] = f"Whenever {name} is in {place}, the first thing to be bought is {thing}."
    return _hide(facts, sentences, tokenizer, length, generator)


def _names(generator: random.Random) -> list[str]:
    return generator.sample([f"{first} {last}" for first in _FIRST for last in _LAST], DOCUMENTS)


def _hide(facts: dict[str, str], sentences: Sequence[str], tokenizer, length: int, generator: random.Random) -> RetrievalSet:
    def count(text: str) -> int:  # at the start of a document, or behind a space, which BPE counts otherwise
        return max(len(tokenizer(one, add_special_tokens=False, verbose=False)["input_ids"]) for one in (text, f" {text}"))

    sized = [(text, size) for text in sentences if (size := count(text)) <= length // 4]
    if not sized:
        raise DataError(f"the text has no sentence, up to '. ', of at most {length // 4} tokens: give text of such sentences")
    room = length - tokenizer.num_special_tokens_to_add() - max(map(count, facts.values()))
    if room < max(size for _, size in sized):
        raise DataError(f"documents of {length} tokens have no room for a fact in a text of sentences: ask for longer ones")
    queries, corpus = {}, {}
    for number, (question, fact) in enumerate(facts.items()):
        left, place, told = room, generator.randrange(len(sized)), []
        while (left := left - sized[place % len(sized)][1]) >= 0:
            told.append(sized[place % len(sized)][0])
            place += 1
        told.insert(generator.randint(0, len(told)), fact)
        corpus[f"d{number}"] = " ".join(told)
        if number < QUERIES:
            queries[f"q{number}"] = question
    return RetrievalSet(queries, corpus, {f"q{number}": {f"d{number}"} for number in range(QUERIES)})


def read_beir(folder: str | Path, split: str = "test") -> RetrievalSet:
    """Read a folder in BEIR's format: corpus.jsonl, queries.jsonl (_id, title, text) and qrels/SPLIT.tsv.

    DataError: a file is missing or broken, or no query has an answer.
    """
    folder = Path(folder)
    texts = []
    for name in ("corpus.jsonl", "queries.jsonl"):
        try:
            lines = [json.loads(line) for line in (folder / name).read_text(encoding="utf-8-sig").split("\n") if line.strip()]
            texts.append({str(one["_id"]): " ".join((one.get("title") or "", one["text"])).strip() for one in lines})
            if len(texts[-1]) < len(lines):
                raise ValueError("an _id stands in several lines")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"  # the repr of a UnicodeDecodeError has the whole file
            raise DataError(f"{folder / name} cannot be read ({why}): a line is an object with its own _id and text") from None
    corpus, queries = texts
    relevant: dict[str, set[str]] = {}
    try:
        with (folder / "qrels" / f"{split}.tsv").open(newline="", encoding="utf-8-sig") as file:
            for row in csv.DictReader(file, delimiter="\t"):
                if int(row["score"]) > 0 and row["query-id"] in queries:
                    relevant.setdefault(row["query-id"], set()).add(row["corpus-id"])
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise DataError(f"{folder}/qrels/{split}.tsv cannot be read ({error!r}): it has query-id, corpus-id, score") from None
    if not any(found & corpus.keys() for found in relevant.values()):
        raise DataError(f"{folder} has no query whose answer is in its corpus: correct qrels/{split}.tsv")
    return RetrievalSet({name: queries[name] for name in relevant}, corpus, relevant)
