"""The recipes of classification end to end on tiny models: what can be learnt is, and what cannot be run is refused first."""

import csv
import itertools
import random
from unittest.mock import patch

import pytest
import torch
from conftest import refused
from transformers import PreTrainedTokenizerFast

from hf_posswap.data.tables import Rows
from hf_posswap.data.text import stdlib_prose
from hf_posswap.experiments import classification
from hf_posswap.experiments.classification import encode

WORDS = "the a sat ran on under mat log and then it was happy sad".split()
FAST = {"max_steps": 2, "batch_size": 8, "eval_batch_size": 8, "fit_steps": 2, "fit_tokens": 256}


@pytest.fixture
def folder(save, tmp_path):
    """Two tiny models, and sentences whose label is whether the first animal is the cat: words alone do not tell."""
    save("bert"), save("gpt2", pad_token_id=None)
    chance = random.Random(0)
    for split, count in (("train", 400), ("dev", 101)):
        rows = []
        for _ in range(count):
            label = chance.choice(("cat", "dog"))
            animals = [label, "dog" if label == "cat" else "cat"]
            rows.append((" ".join(animals + chance.choices(WORDS, k=chance.randint(1, 12))), label))
        _write(tmp_path / f"{split}.csv", ("sentence", "label"), rows)
    return tmp_path


def _write(path, names, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])


def _files(folder, model="bert", **options):
    files = {"train_file": str(folder / "train.csv"), "validation_file": str(folder / "dev.csv")}
    return {"model": str(folder / model), **files, **FAST, **options}


@pytest.mark.parametrize(("model", "scheme"), [("bert", "relative:clip=4"), ("gpt2", "rotary"), ("bert", "none")])
def test_what_can_be_learnt_is_learnt(recipe, folder, model, scheme):
    """Which of two animals comes first: schemes learn it, and no positions at all do not, in an encoder."""
    module = recipe("downstream_classification")
    steps = {"max_steps": 100, "batch_size": 16, "learning_rate": 5e-3, "eval_steps": 50}
    options = _files(folder, model, scheme=scheme, dropout=False, **steps)
    result = module.run(module.Config(**options), folder / "out", False)
    if scheme == "none":  # guesses: the texts tell by their order alone
        assert result["figures"]["accuracy"] < 0.75
        return
    assert result["figures"]["accuracy"] > 0.95 and result["figures"]["matthews"] > 0.9
    assert list(result["figures"]) == ["accuracy", "f1", "f1_macro", "matthews", "loss"] and result["metric"] == "accuracy"
    means = {name: sum(values) / len(values) for name, values in result["items"].items()}
    assert means == pytest.approx({name: result["figures"][name] for name in ("accuracy", "loss")}, rel=1e-4)
    assert [point["step"] for point in result["curve"]] == [50, 100] and len(result["losses"]) == 100
    assert result["curve"][-1]["accuracy"] == result["figures"]["accuracy"] and result["cost"]["tokens"] > 0
    sizes = result["data"]["splits"]
    assert result["data"]["labels"] == ["cat", "dog"] and (sizes["train"]["rows"], sizes["validation"]["rows"]) == (400, 101)
    assert sizes["train"]["longest"] == (16 if model == "bert" else 14) and sizes["train"]["truncated"] == 0


@pytest.mark.parametrize("model", ["bert", "gpt2"])
def test_regression_of_pairs(recipe, folder, model):
    """Numbers for pairs of texts are learnt, by the originals, measured by correlation, also on a test part."""
    chance = random.Random(1)
    for split, count in (("train", 300), ("dev", 60), ("test", 33)):
        rows = [(" ".join(chance.choices(WORDS, k=3)), chance.choice(("cat", "dog")), chance.random()) for _ in range(count)]
        rows = [(first, second, 0.1 * noise + 2 * (second == "cat")) for first, second, noise in rows]
        _write(folder / f"{split}.csv", ("sentence1", "sentence2", "score"), rows)
    module = recipe("downstream_classification")
    options = _files(folder, model, max_steps=150, batch_size=16, learning_rate=3e-3, dropout=False, metric="pearson")
    result = module.run(module.Config(**options, test_file=str(folder / "test.csv")), folder / "out", False)
    assert result["figures"]["pearson"] > 0.9 and result["figures"]["test_pearson"] > 0.9 and result["figures"]["loss"] < 0.3
    assert list(result["figures"])[:4] == ["pearson", "spearman", "loss", "test_pearson"]
    assert result["data"]["labels"] == [] and result["data"]["splits"]["test"]["rows"] == 33


def test_what_a_fit_reads(recipe, folder, watch, monkeypatch):
    """It is said: the training texts, or the embedded text where they are too few; nothing without a fit. The seed draws it."""
    module, draws = recipe("downstream_classification"), watch(classification, "text_batches")
    words = " ".join(random.Random(0).choices("the cat sat on the mat".split(), k=1200))
    monkeypatch.setattr(classification, "embedded_documents", lambda *given, causal: [words])
    for start, tokens, said in (("swap", 999, None), ("fit", 999, "the training texts"), ("fit", 99_999, "the embedded text")):
        config = module.Config(**_files(folder, scheme="rotary", start=start, fit_tokens=tokens, seed=3))
        assert module.run(config, folder / f"{start}-{tokens}", False)["fitted_on"] == said
    assert [draw.kwargs["seed"] for draw in draws] == [3, 3]


def test_the_embedded_task(recipe, folder, monkeypatch):
    """Without a data set the task is intact and swapped sentences, as many of each, none of them in both parts."""
    module, read, tasks = recipe("downstream_classification"), classification.read_labelled, []
    monkeypatch.setattr(classification, "read_labelled", lambda config: tasks.append(read(config)) or tasks[0])
    prose = stdlib_prose("validation")  # the smaller part is read sooner
    halves = {"train": prose[: len(prose) // 2], "validation": prose[len(prose) // 2 :]}
    monkeypatch.setattr(classification, "stdlib_prose", halves.get)
    config = module.Config(**{**_files(folder), "train_file": None, "validation_file": None, "max_train_samples": 200})
    result = module.run(config, folder / "out", False)
    (task,) = tasks
    assert (len(task.train), len(task.validation), sum(task.train.labels)) == (200, 1000, 100)
    assert not set(task.train.texts) & set(task.validation.texts) and task.label_names == ("intact", "swapped")
    assert result["data"]["source"] == "word order" and result["data"]["splits"]["train"]["longest"] > 10


def test_long_documents(recipe, folder):
    """The original is cut at its 32 positions, a swap reads what it is told to, and long documents are counted apart."""
    chance = random.Random(2)
    for split, count in (("train", 200), ("dev", 60)):
        rows = []
        for number in range(count):
            label = chance.choice(("cat", "dog"))  # at the end: what is cut off decides
            rows.append((" ".join([*chance.choices(WORDS, k=8 if number % 3 == 0 else 44), *[label] * 4]), label))
        _write(folder / f"{split}.csv", ("text", "label"), rows)
    module = recipe("long_documents")
    options = _files(folder, max_steps=60, batch_size=16, gradient_accumulation_steps=2, learning_rate=3e-3, max_length=64)
    results = {}
    for scheme in ("original", "rotary"):
        result = module.run(module.Config(**options, scheme=scheme, dropout=False), folder / scheme, False)
        results[scheme] = result["figures"]
        sizes = result["data"]["splits"]["validation"]
        assert (sizes["rows"], sizes["long"], sizes["longest"]) == (60, 40, 50)
        assert (result["data"]["max_length"], sizes["truncated"]) == ((32, 40) if scheme == "original" else (64, 0))
        assert sizes["truncated_share"] == sizes["truncated"] / 60
    assert results["rotary"]["accuracy_long"] > 0.95 and results["rotary"]["accuracy"] > 0.95
    assert results["original"]["accuracy_long"] < 0.75 < results["original"]["accuracy"] + 0.2
    refused("documents with labels", module.Config)


def test_how_much_of_a_document_is_read(recipe, folder, monkeypatch):
    """What a swapped model reads and what it holds are two lengths, and it holds no less than the original."""
    module, asked = recipe("long_documents"), []
    monkeypatch.setattr(
        module, "classify", lambda config, *given, **more: asked.append((config.max_length, config.max_positions))
    )
    for scheme, reads, holds in (("rotary", 48, 128), ("rotary", 64, None), ("rotary", 16, None), ("original", 64, None)):
        module.run(module.Config(**_files(folder, scheme=scheme, max_length=reads, max_positions=holds)), folder, False)
    assert asked == [(48, 128), (64, 64), (16, 32), (32, 32)]


def test_pairs_and_cuts(bert_tokenizer, gpt2_tokenizer):
    """BERT gets two kinds of tokens, GPT-2 an end of text between; both keep the second text when the first is cut."""
    rows = Rows(["the cat sat on the mat"], ["a dog"], [0.5])
    row = encode(rows, bert_tokenizer, 32).rows[0]
    assert row["token_type_ids"].tolist() == [0] * 8 + [1] * 3 and row["labels"].dtype == torch.float32
    row = encode(rows, gpt2_tokenizer, 32).rows[0]
    assert "token_type_ids" not in row and "token_type_ids" not in encode(rows, bert_tokenizer, 32, causal=True).rows[0]
    assert gpt2_tokenizer.decode(row["input_ids"]).split() == "the cat sat on the mat <|endoftext|> a dog".split()
    for tokenizer, end in ((bert_tokenizer, "a dog [SEP]"), (gpt2_tokenizer, "<|endoftext|> a dog")):
        cut = encode(rows, tokenizer, 8)
        assert len(cut.rows[0]["input_ids"]) == 8 and cut.truncated == 1 and cut.lengths[0] > 8
        assert tokenizer.decode(cut.rows[0]["input_ids"]).endswith(end)
    refused("row 2 of the train texts has no token", encode, Rows(["a dog", ""], None, [0, 1]), gpt2_tokenizer, 8)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_length": 33}, "max_length=33, but the model will read 32 tokens: raise max_positions"),
        ({"max_length": 33, "max_positions": 32, "scheme": "rotary"}, "max_length=33"),
        ({"max_length": 2}, "at least 3"),
        ({"max_positions": 64}, "the original reads 32 tokens, not 64"),
        ({"metric": "spearman"}, "does not fit 2 labels; there are accuracy, f1, f1_macro, matthews"),
        ({"batch_size": 401}, "400 training rows do not fill one batch of 401"),
        ({"train_file": None}, "one of them"),
        ({"eval_steps": -1}, "eval_steps=-1"),
        ({"max_train_samples": 0}, "max_train_samples=0 must be at least 1"),
        ({"model": "gpt2", "scheme": "rotary"}, "its tokenizer has no token to pad batches with: set pad_token"),
    ],
)
def test_bad_options(recipe, folder, options, says, monkeypatch):
    """What cannot be run is refused before anything is trained."""
    module = recipe("downstream_classification")
    monkeypatch.setattr(classification, "train", lambda *given, **options: pytest.fail("it has trained"))
    if options.get("model") == "gpt2":
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "gpt2")
        tokenizer.pad_token = tokenizer.eos_token = None
        monkeypatch.setattr(classification, "load_tokenizer", lambda name: tokenizer)
    refused(says, lambda: module.run(module.Config(**_files(folder, **{"max_steps": 1, **options})), folder / "out", False))


def test_measuring_does_not_change_training(recipe, folder):
    """Steps are accumulated as before after a look at the validation rows, and batches of like lengths train as well."""
    module = recipe("downstream_classification")
    losses = []
    for steps, strategy in ((0, "random"), (1, "random"), (0, "group_by_length")):
        options = {"max_steps": 6, "gradient_accumulation_steps": 2, "eval_steps": steps, "learning_rate": 1e-3}
        config = module.Config(**_files(folder, **options, train_sampling_strategy=strategy))
        losses.append(module.run(config, folder / f"{steps}{strategy}", False)["losses"])
    assert losses[0] == losses[1] and losses[2] != losses[0] and len(losses[2]) == 6


def test_resuming(recipe, folder):
    """A run that stopped goes on with the measurements that it has made."""
    module = recipe("downstream_classification")
    config = module.Config(**_files(folder, max_steps=6, eval_steps=2, checkpoint_every=3))
    whole, average, calls = module.run(config, folder / "whole", False), classification.averaged, itertools.count(1)

    def stop(figures):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return average(figures)

    with patch.object(classification, "averaged", stop), pytest.raises(KeyboardInterrupt):
        module.run(config, folder / "cut", False)
    cut = module.run(config, folder / "cut", True)
    assert cut["losses"] == whole["losses"] and cut["figures"] == whole["figures"]
    assert [point["step"] for point in cut["curve"]] == [2, 4, 6]
