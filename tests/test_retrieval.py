"""Retrieval: sets, recall, ways of reading around a short model, and the two recipes with sentence-transformers."""

import json
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import WORDS, refused
from torch.testing import assert_close
from transformers import AutoTokenizer

import hf_posswap as posswap
from hf_posswap.errors import DataError
from hf_posswap.experiments.embedders import sts
from hf_posswap.experiments.models import load_tokenizer
from hf_posswap.measure.retrieval import cut_documents, draw_passages, pieces_of, read_as, recall
from hf_posswap.measure.retrieval_sets import needles, passkeys, read_beir

library = pytest.importorskip("sentence_transformers")

TEXT = [". ".join(" ".join(WORDS[i % 7 :][:6]) for i in range(50))]


def test_passkeys_and_needles(bert_tokenizer):
    """Each document is of its length and says its fact once; a question names a person that no other document knows."""
    for one in (passkeys(bert_tokenizer, 128), needles(bert_tokenizer, 128, TEXT)):
        assert len(one.corpus) == 100 and len(one.queries) == 50
        sizes = [len(bert_tokenizer(text)["input_ids"]) for text in one.corpus.values()]
        assert max(sizes) <= 128 and min(sizes) > 90
        depths = []
        for number, question in one.queries.items():
            first, last = [word.strip("?") for word in question.split() if word[0].isupper() and word != "What"][:2]
            know = {place for place, text in one.corpus.items() if f"{first} {last}" in text}
            assert know == one.relevant[number]
            depths += [one.corpus[place].index(last) / len(one.corpus[place]) for place in know]
        assert min(depths) < 0.2 and max(depths) > 0.7
    assert passkeys(bert_tokenizer, 128) == passkeys(bert_tokenizer, 128) != passkeys(bert_tokenizer, 128, seed=1)
    byte_level = load_tokenizer("stdlib-gpt2")  # whose words are other tokens behind a space
    assert max(len(byte_level(text, verbose=False)["input_ids"]) for text in passkeys(byte_level, 512).corpus.values()) <= 512
    refused("no room", passkeys, bert_tokenizer, 20, error=DataError)
    for none in ([], ["the cat sat.\n" * 999]):
        refused("no sentence, up to '. '", needles, bert_tokenizer, 128, none, error=DataError)


@pytest.fixture
def beir(tmp_path):
    folder = tmp_path / "tiny-beir"
    (folder / "qrels").mkdir(parents=True)
    texts = [{"_id": str(i), "title": "", "text": "\u2028".join(WORDS[i : i + 6])} for i in range(8)]  # no end of a line
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps(text, ensure_ascii=False) for text in texts), encoding="utf-8")
    (folder / "queries.jsonl").write_text("\n".join(json.dumps({"_id": f"q{i}", "text": WORDS[i]}) for i in range(3)))
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\t0\t1\nq1\t1\t2\nq2\t2\t0\n")
    return folder


def test_beir(beir):
    """A folder of BEIR gives the queries with an answer; a broken one is an error."""
    for file in (beir / "queries.jsonl", beir / "qrels" / "test.tsv"):
        file.write_text(file.read_text(), encoding="utf-8-sig")  # with the mark that some editors put in front
    one = read_beir(beir)
    assert one.relevant == {"q0": {"0"}, "q1": {"1"}} and one.queries.keys() == one.relevant.keys() and len(one.corpus) == 8
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq0\t99\t1\n")
    refused("no query whose answer", read_beir, beir, error=DataError)
    one, again = b'{"_id": "a", "text": "b"}', b'{"_id": "a", "text": "c"}'
    for lines in (b"no json", b"[1]", b'{"_id": "a", "text": null}', one + b"\n" + again, one + b" " * 999 + b"\xff"):
        (beir / "queries.jsonl").write_bytes(lines)
        refused(r"queries.jsonl cannot be read .{20,150}own _id and text$", read_beir, beir, error=DataError)


def test_recipe(recipe, save, bert_tokenizer, beir, tmp_path):
    """Figures of a swapped model and of the original read in chunks; the evaluator's first place is our recall."""
    module = recipe("retrieval")
    (tmp_path / "text.txt").write_text(TEXT[0])
    texts = {"train_file": str(tmp_path / "text.txt")}
    given = {"model": str(save("bert")), "lengths": (96,), "beir": (str(beir),), "start": "swap", **texts}
    (tmp_path / "words.csv").write_text("sentence1,sentence2,label\na,b,high\n")
    refused("holds the text 'high': give numbers", module.Config, **given | {"sts": str(tmp_path / "words.csv")})
    refused("two data sets of --beir are named 'tiny-beir'", module.Config, **given | {"beir": (str(beir), "other/tiny-beir")})
    for options in ({"scheme": "rotary", "span": 8}, {"scheme": "alibi"}, {"read": "chunks", "chunk": 16, "max_positions": 99}):
        found = module.run(module.Config(**given, **options), tmp_path, False)
        by_chunk = {"passkey_by_chunk_96", "needle_by_chunk_96"} if "read" in options else set()
        assert set(found["figures"]) == {"passkey_96", "needle_96", "beir_tiny-beir"} | by_chunk
        assert len(found["items"]["needle_96"]) == 50
        embedder, keys = found["model"], passkeys(bert_tokenizer, 96)
        vectors = [embedder.encode(list(part.values()), convert_to_tensor=True) for part in (keys.corpus, keys.queries)]
        assert found["figures"]["passkey_96"] == pytest.approx(float(recall(*vectors, range(50)).float().mean()))
    pieces = [one["pieces"] for one in embedder.encode(list(keys.corpus.values()), output_value=None)]
    assert {len(one) for one in pieces} == {7} and embedder.max_seq_length == 99  # of 96 tokens, 14 at most in each
    hits = recall(pieces, vectors[1], range(50)).float().tolist()
    assert found["items"]["passkey_by_chunk_96"] == hits != found["items"]["passkey_96"]


def text(words: int, seed: int) -> str:
    return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (words,), generator=torch.Generator().manual_seed(seed)))


@pytest.fixture
def folder(save, tmp_path):
    """A tiny pipeline that reads 32 tokens, on disk."""
    library.SentenceTransformer(str(save("bert")), device="cpu").save_pretrained(str(tmp_path / "tiny"))
    return tmp_path / "tiny"


def test_documents_and_passages(bert_tokenizer):
    """Documents are stretches of the text of so many tokens, each once; a passage stands where it says."""
    long = text(100, seed=0)
    documents = cut_documents([long, long, text(45, seed=1), "too short"], bert_tokenizer, 30)
    assert len(documents) == 4 and all(len(bert_tokenizer.tokenize(one)) == 30 for one in documents)
    assert long.startswith(" ".join(documents[:3]))
    passages = draw_passages(documents, bert_tokenizer, 8, 2, seed=0)
    assert [one.document for one in passages] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert passages != draw_passages(documents, bert_tokenizer, 8, 2, seed=1)
    for one in passages:
        words = documents[one.document].split()
        assert words[round(one.place * 30) :][:8] == one.text.split()
    tokenizer = AutoTokenizer.from_pretrained(posswap.embedded_model("stdlib-gpt2"))
    unbroken = "word and more. " * 3 + "漢字假名交文章語"  # in bytes one word, longer than a passage
    for seed in range(20):
        assert all(one.text for one in draw_passages([unbroken], tokenizer, 4, 3, seed=seed))
    refused("too few for 2 passages of 29", draw_passages, documents, bert_tokenizer, 29, 2, seed=0, error=DataError)
    slow = Mock(is_fast=False, wraps=bert_tokenizer)
    refused("give a model with a fast one", draw_passages, documents, slow, 8, 2, seed=0, error=DataError)
    refused("no text has 1,000 tokens", cut_documents, documents, bert_tokenizer, 1000, error=DataError)


@pytest.mark.parametrize("way", ["truncated", "ends", "chunks"])
def test_ways_of_reading(folder, way):
    """Parts of a text give what each gives by itself; short texts are read as ever; pieces too long are refused."""
    pipeline, plain = (library.SentenceTransformer(str(folder), device="cpu") for _ in range(2))
    long, short = text(50, seed=3), "the cat sat"
    for wrong, size, other in (("whole", 16, "--lengths"), (way, 64, "smaller chunks")):
        refused(f"reads 32 tokens at once, not 64: .*{other}", read_as, plain, wrong, size, 64)
    read_as(pipeline, way, 20, 64)
    found = pipeline.encode([long, short])
    words = long.split()
    parts = {"truncated": [words[:18]], "ends": [words[:9] + words[-9:]], "chunks": [words[:16], words[16:33], words[33:]]}[way]
    vectors = plain.encode([" ".join(part) for part in parts], normalize_embeddings=True)
    wanted = vectors.mean(0)
    assert np.allclose(found[0], wanted / np.linalg.norm(wanted), atol=1e-5)
    assert np.allclose(pipeline.encode([short, long], output_value=None)[1]["pieces"], vectors, atol=1e-5)
    wanted = plain.encode([short])[0]
    assert np.allclose(found[1], wanted / np.linalg.norm(wanted), atol=1e-5)
    if way == "chunks":  # a prompt stands before each, and pooling leaves it out of each
        pipeline = library.SentenceTransformer(str(folder), device="cpu")
        for one in (pipeline, plain):
            one.set_pooling_include_prompt(False)
        parts = [" ".join(part) for part in (words[:16], words[16:33], words[33:])]
        vectors = plain.encode(parts, prompt="dog ", normalize_embeddings=True)
        read_as(pipeline, way, 21, 64)
        found = pipeline.encode([long], prompt="dog ", output_value=None)[0]["pieces"]
        assert np.allclose(found, vectors, atol=1e-5)
        refused("the prompt takes 4", pieces_of, list(range(9)), pipeline.tokenizer, way, 4, 3, error=DataError)
    assert len(pieces_of([2, *range(5, 21), 3], pipeline.tokenizer, "chunks", 10)) == 2


def test_white_space():
    """A tokenizer may have tokens for white space: no document is made of it, and no passage. Text without any, one word for a
    tokenizer, is cut like any other, into documents of the size that was asked for.
    """
    tokenizer, words = load_tokenizer("stdlib-gpt2"), "word and more. " * 60
    documents = cut_documents([(words + "\r\n\t" * 400) * 3, (words[:90] + "\r\n\t" * 15) * 40], tokenizer, 64)
    assert len(documents) > 8 and min(map(len, documents)) > 50
    passages = draw_passages(documents, tokenizer, 4, 3, seed=0)
    assert all(one.text and one.text in documents[one.document] for one in passages)
    documents = cut_documents(["".join(chr(0x4E00 + (i * 37) % 5000) for i in range(600))], tokenizer, 64)
    sizes = [len(tokenizer(one)["input_ids"]) for one in documents]
    assert len(sizes) > 5 and all(abs(size - 64) <= 3 for size in sizes), sizes


def test_recall():
    """A query finds its document by the nearest of the vectors that stand for it. NaN would be found first everywhere."""
    documents, queries = torch.eye(3), torch.tensor([[2.0, 0.1, 0], [0, 1, 0], [0.9, 0, 1.0]])
    assert recall(documents, queries, [0, 1, 0]).tolist() == [True, True, False]
    several = [torch.stack([one, other]) for one, other in zip(documents, documents.roll(1, 0), strict=True)]
    assert recall([*several[:2], several[2][:1]], queries[2:], [0]).tolist() == [True]
    for pair in ((documents * torch.tensor([[1], [torch.nan], [1]]), queries), (documents, queries * torch.nan)):
        refused("NaN or infinite", recall, *pair, range(3))


@pytest.fixture
def long_embedder(recipe, monkeypatch, folder, tmp_path):
    """The function that runs the recipe on a tiny pipeline and text, with some options, and the recipe itself."""
    module = recipe("long_embedder")
    monkeypatch.setattr(module, "EACH", 3)
    (tmp_path / "text.txt").write_text(text(3000, seed=1))
    (tmp_path / "test.txt").write_text(text(500, seed=2))
    rows = "".join(f"{text(4, seed=i)},{text(4, seed=i + 1)},{i % 5}\n" for i in range(9))
    (tmp_path / "pairs.csv").write_text(f"sentence1,sentence2,label\n{rows}")
    given = {
        "model": str(folder), "train_file": str(tmp_path / "text.txt"), "validation_file": str(tmp_path / "test.txt"),
        "tokens": 64, "passage": 12, "window": 16, "span": 16, "chunk": 16, "fit_tokens": 1500, "fit_steps": 2,
        "max_steps": 2, "batch_size": 4, "documents": 6, "sts": str(tmp_path / "pairs.csv"),
    }  # fmt: skip

    def run(out: str = "out", resume: bool = False, **options):
        return module.run(module.Config(**{**given, **options}), tmp_path / out, resume)

    return run, tmp_path


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_stopped_embedder_goes_on(long_embedder, monkeypatch, save, family, tmp_path):
    """Stopped in its third step and resumed, it is the one that was never stopped, bit for bit."""
    run, _ = long_embedder
    module, steps = sys.modules["long_embedder"], []
    compute = module.PairsWithBrake.forward

    def half_saved(self, path, **options):
        (Path(path) / "0_Transformer").mkdir(parents=True)
        raise KeyboardInterrupt

    def stops(self, *batch):
        steps.append(batch)
        if len(steps) == 3:  # in the first run
            raise KeyboardInterrupt
        return compute(self, *batch)

    options = {"model": str(save(family)), "scheme": "rotary", "max_steps": 4, "checkpoint_every": 1}
    options["hard"] = int(family == "bert")
    whole = run("whole", **options)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # in the middle of saving what tuning starts from
        patch.setattr(library.SentenceTransformer, "save_pretrained", half_saved)
        run("stopped", **options)
    assert not (tmp_path / "stopped" / "start").exists()
    monkeypatch.setattr(module.PairsWithBrake, "forward", stops)
    with pytest.raises(KeyboardInterrupt):
        run("stopped", **options)
    (state := tmp_path / "stopped/trainer/checkpoint-3/trainer_state.json").parent.mkdir()
    state.write_text('{"epoch')
    refused(f"{state} is no JSON .*: remove this checkpoint", run, "stopped", resume=True, **options)
    state.unlink()  # as of a process that was killed before it wrote it
    resumed = run("stopped", resume=True, **options)
    assert resumed["figures"] == whole["figures"] and len(steps) == 5
    spent = run("stopped", resume=True, **options)["cost"]  # after its last step
    assert spent["tokens"] == whole["cost"]["tokens"] and "tokens_per_second" not in spent
    for one, other in zip(resumed["model"].parameters(), whole["model"].parameters(), strict=True):
        assert torch.equal(one, other)


def test_long_embedder(long_embedder, watch):
    """From text to a pipeline that reads long documents, next to the original tuned alike."""
    run, folder = long_embedder
    found = run(scheme="rotary")
    names = {"recall", "early", "middle", "late", "select", "kept", "sts", "sts_original"}
    assert set(found["figures"]) == names and all(abs(value) <= 1 for value in found["figures"].values())
    assert len(found["items"]["recall"]) == 6 and found["details"]["queries"] == 18 and found["model"].max_seq_length == 64
    assert posswap.describe(found["model"]).span.span == 16
    found["model"].save_pretrained(str(folder / "swapped"))
    refused("has been swapped already", run, "again", scheme="alibi", first=1, model=str(folder / "swapped"))
    asked = watch(sys.modules["long_embedder"], "recall")
    untuned = run("untuned", scheme="original", max_steps=0)
    by_chunk = next(given.args for given in asked if given.args[0][0].dim() == 2)
    assert {len(vectors) for vectors in by_chunk[0]} == {5}  # 62 tokens, 14 at most in each
    assert np.mean(recall(*by_chunk).tolist()) == pytest.approx(untuned["figures"]["by_chunk"])
    smaller = library.SentenceTransformer(str(folder / "tiny"), truncate_dim=8, device="cpu")
    smaller.save_pretrained(str(folder / "smaller"))  # with that: vectors are of 8, and what is trained is not
    assert 0 <= run("smaller-out", scheme="original", model=str(folder / "smaller"))["figures"]["by_chunk"] <= 1
    tuned = run("tuned", scheme="original", cached=2, brake=0.0)
    assert tuned["cost"]["tokens"] == found["cost"]["tokens"] == 8 * (12 + 2 + 64) and "tokens" not in untuned["cost"]
    assert untuned["figures"]["kept"] == pytest.approx(1, abs=1e-5) and tuned["figures"]["kept"] < 1 - 1e-6
    assert untuned["figures"]["sts"] == pytest.approx(untuned["figures"]["sts_original"])
    tuned["model"].similarity_fn_name = "dot"  # as of an embedder that is compared so: rho stays that of cosines
    assert sts(tuned["model"], str(folder / "pairs.csv")) == tuned["figures"]["sts"]


def test_the_brake_and_the_select_text(long_embedder, watch, monkeypatch):
    """The brake adds its weight times 1 - cosine; select documents are neither trained on nor those of the report."""
    run, folder = long_embedder
    module = sys.modules["long_embedder"]
    model = library.SentenceTransformer(str(folder / "tiny"), device="cpu").eval()
    features = [model.preprocess([text(6, seed), text(6, seed + 1)]) for seed in (4, 6)]
    labels = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    losses = [module.PairsWithBrake(model, brake, 0)(features, labels) for brake in (0.0, 2.0)]
    apart = 1 - torch.cosine_similarity(model(features[0])["sentence_embedding"], labels).mean()
    torch.testing.assert_close(losses[1] - losses[0], 2 * apart)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        half = [module.PairsWithBrake(model, 0.0, cached)(features, labels) for cached in (0, 2)]
        short, long = (model(part)["sentence_embedding"].double() for part in features)
    exact = torch.nn.functional.cross_entropy(library.util.cos_sim(short, long) / module.TEMPERATURE, torch.arange(2))
    torch.testing.assert_close(half, [exact.float()] * 2)
    monkeypatch.setattr(module, "tune", lambda *given: {})
    monkeypatch.setattr(module, "recall", lambda long, short, documents: torch.tensor([1.0, 0.5, 0.0] * len(long)))
    tuned, measured = watch(module, "tune"), watch(module, "measure")
    figures = run(scheme="original", max_steps=40)["figures"]
    assert [figures[name] for name in ("early", "middle", "late", "recall")] == [1.0, 0.5, 0.0, 0.5]
    trained = {long for _, long in tuned[-1].args[2]}
    select, report = (set(measured[-1].args[-1][name][0]) for name in ("select", "recall"))
    assert len(trained) > 20 and select and report
    assert not trained & select and not trained & report and not select & report


def test_a_prompt_by_default(long_embedder, watch):
    """Tuning reads texts as `encode` does: the brake of an untouched model is 0. What is measured is not trained on."""
    run, folder = long_embedder
    module = sys.modules["long_embedder"]
    model = library.SentenceTransformer(str(folder / "tiny"), prompts={"query": "red green "}, default_prompt_name="query")
    model.save_pretrained(str(folder / "prompted"))
    (folder / "test.txt").write_text((folder / "text.txt").read_text()[:1500])
    steps, tuned, measured = watch(module.PairsWithBrake, "forward"), watch(module, "tune"), watch(module, "measure")
    found = run(scheme="original", read="truncated", model=str(folder / "prompted"), max_steps=1)
    loss, features, labels = steps[0].args
    assert found["cost"]["tokens"] == sum(int(part["attention_mask"].sum()) for part in features)
    with torch.no_grad():
        assert_close(torch.cosine_similarity(model(features[0])["sentence_embedding"], labels), torch.ones(4))
    assert not {document for _, document in tuned[0].args[2]} & set(measured[0].args[-1]["recall"][0])


def test_hard_negatives(long_embedder, watch, monkeypatch):
    """Each pair also has the documents nearest to its passage as negatives; a loader that drops every batch is an error."""
    run, module = long_embedder[0], sys.modules["long_embedder"]
    steps, mined = watch(module.PairsWithBrake, "forward"), watch(module, "mine_hard_negatives")
    for cached in (0, 2):
        run(f"hard-{cached}", scheme="original", read="truncated", batch_size=2, hard=2, max_steps=12, cached=cached)
        loss, (passages, documents, *negatives), labels = steps[-12].args
        texts = [set(map(tuple, part["input_ids"].tolist())) for part in (documents, *negatives)]
        assert len(set.union(*texts)) == 6 and mined[-1].args[1] is loss.model
        losses = [loss([passages, documents, *negatives[:n]], labels) for n in range(3)]
        assert losses[0] < losses[1] < losses[2]
    full = partial(module.SentenceTransformerTrainingArguments, dataloader_drop_last=True)
    monkeypatch.setattr(module, "SentenceTransformerTrainingArguments", full)
    refused("0 steps of 3: too few documents differ", run, "few", scheme="original", hard=2, max_steps=3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch_size": 1}, "give 2 or more"),
        ({"chunk": 2}, "chunk=2 must be at least 3"),
        ({"batch_size": 400}, "do not fill a batch, which takes 400"),
        ({"hard": 2}, "8 different documents do not fill a batch, which takes 12"),
        ({"tokens": 15}, "too few for 3 passages of 12"),
        ({"learning_rate": -0.1}, "learning_rate=-0.1 must be"),
        ({"scheme": "rotary", "start": "swap", "max_positions": 48}, "max_positions=48 is less than the 64 tokens"),
        ({"scheme": "original", "max_positions": 48}, "max_positions=48 is less than the 64 tokens"),
        ({"tokens": 4000}, "no text has 3,998 tokens"),
        ({"tokens": 450}, "is one document, which is always found"),
        ({"model": "tests"}, "tests cannot be loaded as an embedder"),
    ],
)
def test_refusals(long_embedder, change, says):
    """What cannot be run is said before anything is tuned."""
    refused(says, long_embedder[0], **change)


def test_without_pooling(long_embedder):
    """A pipeline that makes no vector of a text is refused before it is fitted."""
    run, folder = long_embedder
    bare = library.SentenceTransformer(str(folder / "tiny"), device="cpu")
    del bare[1]
    bare.save_pretrained(str(folder / "bare"))
    refused("whose modules pool", run, model=str(folder / "bare"))


def test_a_launcher_says_the_precision(recipe, monkeypatch):
    """The trainer takes it by itself, so that the options must tell it."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert recipe("long_embedder").Config().bf16
