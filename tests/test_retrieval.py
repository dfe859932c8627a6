"""Retrieval sets and the recipe that looks in them, with sentence-transformers' own evaluator."""

import json

import pytest
from conftest import WORDS

from hf_posswap.errors import DataError
from hf_posswap.measure.retrieval import recall
from hf_posswap.measure.retrieval_sets import needles, passkeys, read_beir

library = pytest.importorskip("sentence_transformers")

TEXT = [". ".join(" ".join(WORDS[i % 7 :][:6]) for i in range(50))]


def test_passkeys_and_needles(bert_tokenizer):
    """Each document is of its length and says its fact once; a question names a person that no other document knows."""
    for one in (passkeys(bert_tokenizer, 128), needles(bert_tokenizer, 128, TEXT)):
        assert len(one.corpus) == 100 and len(one.queries) == 50
        sizes = [len(bert_tokenizer(text)["input_ids"]) for text in one.corpus.values()]
        assert max(sizes) <= 128 and min(sizes) > 90
        for number, question in one.queries.items():
            first, last = [word.strip("?") for word in question.split() if word[0].isupper() and word != "What"][:2]
            know = {place for place, text in one.corpus.items() if f"{first} {last}" in text}
            assert know == one.relevant[number]
    assert passkeys(bert_tokenizer, 128) == passkeys(bert_tokenizer, 128) != passkeys(bert_tokenizer, 128, seed=1)
    with pytest.raises(DataError, match="no room"):
        passkeys(bert_tokenizer, 20)
    with pytest.raises(DataError, match="no room"):
        needles(bert_tokenizer, 128, [])


@pytest.fixture
def beir(tmp_path):
    """A tiny folder in BEIR's format."""
    folder = tmp_path / "tiny-beir"
    (folder / "qrels").mkdir(parents=True)
    texts = [{"_id": str(i), "title": "", "text": " ".join(WORDS[i : i + 6])} for i in range(8)]
    (folder / "corpus.jsonl").write_text("\n".join(map(json.dumps, texts)))
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": f"q{i}", "text": WORDS[i]}) for i in range(3)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\t0\t1\nq1\t1\t2\nq2\t2\t0\n")
    return folder


def test_beir(beir):
    """A folder of BEIR gives the queries with an answer; a broken one is an error."""
    one = read_beir(beir)
    assert one.relevant == {"q0": {"0"}, "q1": {"1"}} and one.queries.keys() == one.relevant.keys() and len(one.corpus) == 8
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\t99\t1\n")
    with pytest.raises(DataError, match="no query whose answer"):
        read_beir(beir)
    (beir / "queries.jsonl").write_text("no json")
    with pytest.raises(DataError, match="queries.jsonl cannot be read"):
        read_beir(beir)


def test_recipe(recipe, save, bert_tokenizer, beir, tmp_path):
    """Figures of a swapped model and of the original read in chunks; the evaluator's first place is our recall."""
    module = recipe("retrieval")
    (tmp_path / "text.txt").write_text(TEXT[0])
    texts = {"train_file": str(tmp_path / "text.txt")}
    given = {"model": str(save("bert")), "lengths": (96,), "beir": (str(beir),), "start": "swap", **texts}
    for options in ({"scheme": "rotary", "span": 8}, {"read": "chunks", "chunk": 16}):
        found = module.run(module.Config(**given, **options), tmp_path, False)
        assert set(found["figures"]) == {"passkey_96", "needle_96", "beir_tiny-beir"} and len(found["items"]["needle_96"]) == 50
        embedder, keys = found["model"], passkeys(bert_tokenizer, 96)
        vectors = [embedder.encode(list(part.values()), convert_to_tensor=True) for part in (keys.corpus, keys.queries)]
        assert found["figures"]["passkey_96"] == pytest.approx(float(recall(*vectors, range(50)).float().mean()))
