"""Recipes that read text, end to end: masks that resume, a head for a model without one, losses by length."""

import hashlib
import json
import math
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from accelerate.state import AcceleratorState
from conftest import WORDS, fails, refused, works
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, BertForMaskedLM, DistilBertConfig, DistilBertForMaskedLM

from hf_posswap.data.text import read_documents, shorter_blocks, spread, token_blocks
from hf_posswap.experiments.recipe import main
from hf_posswap.experiments.text_tasks import MaskedBlocks, RunText, TextConfig, documents, mask_tokens, train_head
from hf_posswap.measure.losses import mean_loss, token_losses
from hf_posswap.provenance import weight_hashes
from hf_posswap.training import TrainingConfig, run_state

SENTENCES = ("the cat sat on the mat and then it was happy", "a sad dog ran under the log and it sat then")


@pytest.fixture
def text(tmp_path):
    """A text file of which the last tenth is other text than the rest."""
    file = tmp_path / "text.txt"
    file.write_text("\n".join(SENTENCES[i * i % 401 % 2] for i in range(400)))
    return str(file)


@pytest.fixture
def gpt2(save, gpt2_tokenizer):
    """A tiny saved GPT-2 with its tokenizer; it reads 32 tokens."""
    return str(save("gpt2", vocab_size=len(gpt2_tokenizer)))


@pytest.fixture
def bert(save, bert_tokenizer):
    """A tiny saved BERT without a head, with its tokenizer; it reads 32 tokens."""
    return str(save("bert", vocab_size=len(bert_tokenizer)))


@pytest.fixture
def start(recipe, program):
    """The function that runs a recipe as its command line does; it returns the exit status and the errors."""

    def run(name, **options):
        arguments = []
        for option, value in options.items():
            flag = f"--{option.replace('_', '-')}"
            for one in value if isinstance(value, tuple) else (value,):
                arguments += [flag] if one is True else [flag, one]
        module = recipe(name)
        code, _, err = program(*arguments, main=lambda: main(module.Config, module.run))
        return code, err

    return run


@pytest.fixture
def result(start, tmp_path):
    """The function that runs a recipe to its end and returns its result."""

    def run(name, **options):
        options = {"output": tmp_path / "out", **options}
        works(start, name, **options)
        return json.loads((options["output"] / "result.json").read_text())

    return run


TINY = {"max_steps": 4, "batch_size": 4, "evaluation_tokens": 256, "fit_tokens": 2048, "fit_steps": 2}


def test_the_same_tokens_at_every_length(gpt2_tokenizer, bert_tokenizer):
    """Shorter blocks hold what the longer ones do, in order; [CLS] and [SEP] come around each of them."""
    text = [" ".join(SENTENCES) * 9]
    blocks = token_blocks(text, gpt2_tokenizer, 32)
    assert torch.equal(shorter_blocks(blocks, gpt2_tokenizer, 8).flatten(), blocks.flatten())
    assert torch.equal(shorter_blocks(blocks, gpt2_tokenizer, 32), blocks)
    blocks = token_blocks(text, bert_tokenizer, 32)
    short = shorter_blocks(blocks, bert_tokenizer, 12)
    assert torch.equal(short[:, 1:-1].reshape(len(blocks), 30), blocks[:, 1:-1])
    assert (short[:, 0] == bert_tokenizer.cls_token_id).all() and (short[:, -1] == bert_tokenizer.sep_token_id).all()
    assert spread(blocks, 64).tolist() == [blocks[0].tolist(), blocks[-1].tolist()] and len(spread(blocks, 1)) == 1


def test_masks(bert_tokenizer):
    """Masks depend on seed, epoch and sequence alone, and never cover special tokens."""
    blocks = token_blocks([" ".join(SENTENCES) * 40], bert_tokenizer, 32)
    inputs, labels = mask_tokens(blocks, bert_tokenizer, 0.15)
    torch.rand(3)
    again = mask_tokens(blocks, bert_tokenizer, 0.15)
    assert torch.equal(inputs, again[0]) and torch.equal(labels, again[1])
    chosen = labels != -100
    assert 0.1 < chosen.float().mean() < 0.2 and not chosen[:, 0].any() and not chosen[:, -1].any()
    assert torch.equal(inputs[~chosen], blocks[~chosen]) and torch.equal(labels[chosen], blocks[chosen])
    assert 0.7 < (inputs[chosen] == bert_tokenizer.mask_token_id).float().mean() < 0.9
    data = {seed: MaskedBlocks(blocks, bert_tokenizer, 0.15, seed=seed, examples=len(blocks) + 1) for seed in (0, 1)}
    assert len(data[0]) == 2 * len(blocks)
    seen = {(seed, n): data[seed][n]["labels"] for seed in (1, 0) for n in (len(blocks) + 2, 2)}
    assert len({tuple(labels.tolist()) for labels in seen.values()}) == 4
    assert torch.equal(seen[1, 2], MaskedBlocks(blocks, bert_tokenizer, 0.15, seed=1, examples=1)[2]["labels"])
    example = data[0][len(blocks) + 2]
    assert torch.equal(torch.where(example["labels"] == -100, example["input_ids"], example["labels"]), blocks[2])


def test_documents(tmp_path):
    """One file is cut, two files are read whole, and options that need each other say so."""
    for name, content in (("train", "first " * 20), ("held", "second " * 20)):
        (tmp_path / f"{name}.txt").write_text(content)
    one = TextConfig(train_file=str(tmp_path / "train.txt"))
    parts = [documents(one, split, causal=True)[0] for split in ("train", "validation")]
    assert "".join(parts) == "first " * 20 and len(parts[1]) == 12
    two = TextConfig(train_file=str(tmp_path / "train.txt"), validation_file=str(tmp_path / "held.txt"))
    assert [documents(two, split, causal=True) for split in ("train", "validation")] == [["first " * 20], ["second " * 20]]
    (tmp_path / "table.csv").write_text("text\n" + "\n".join(f"row {i}" for i in range(40)))
    assert len(read_documents(tmp_path / "table.csv", split=None)) == 40
    for options, says in (
        ({"dataset": "a", "train_file": "b"}, "not both"),
        ({"validation_file": "b"}, "--train-file"),
        ({"dataset_config": "b"}, "--dataset"),
        ({"evaluation_tokens": 0}, "at least 1"),
    ):
        refused(says, TextConfig, **options)


def test_a_new_head(bert, bert_tokenizer):
    """A new head learns while the encoder and the tied embeddings stay bit for bit; the global seed does not matter."""
    blocks = token_blocks([" ".join(SENTENCES) * 40], bert_tokenizer, 16)
    held = mask_tokens(blocks[::4], bert_tokenizer, 0.3)
    config = TrainingConfig(max_steps=30, batch_size=8, learning_rate=1e-2, dropout=False)
    heads = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model, loading = AutoModelForMaskedLM.from_pretrained(bert, output_loading_info=True)
        missing = set(loading["missing_keys"])
        encoder = {name: value.clone() for name, value in model.bert.state_dict().items()}
        before = mean_loss(token_losses(model, *held))
        train_head(model, missing, MaskedBlocks(blocks, bert_tokenizer, 0.3, seed=0, examples=240), config)
        assert mean_loss(token_losses(model, *held)) < before - 0.3
        assert all(torch.equal(value, encoder[name]) for name, value in model.bert.state_dict().items())
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        heads.append(model.cls.state_dict())
    assert all(torch.equal(value, heads[1][name]) for name, value in heads[0].items())


def test_causal_language_modeling(gpt2, text, result, tmp_path):
    """Training lowers the loss, figures agree with each other, and another seed ends elsewhere."""
    options = {"model": gpt2, "train_file": text, "scheme": "rotary", **TINY, "learning_rate": 1e-2, "max_steps": 12}
    found = result("language_modeling", **options)
    figures, details = found["figures"], found["details"]
    assert figures["loss"] < figures["start_loss"] - 0.3
    assert figures["perplexity"] == figures["perplexity_32"] and figures["select_loss"] not in (figures["loss"], None)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]), rel=1e-5)
    assert {"perplexity_8", "perplexity_16"} < set(figures) and details["objective"] == "causal"
    assert list(details["loss_by_position"]) == ["0-7", "8-31"] and details["new_head"] is None
    assert len(details["curve"]) == 12 and found["cost"]["tokens"] == 12 * 4 * 32
    other = result("language_modeling", **options, seed=1, output=tmp_path / "other")["figures"]
    assert other["start_loss"] == figures["start_loss"] and other["loss"] != figures["loss"]


def test_select_text(tmp_path):
    """Rates are chosen by text that is not trained on: it has no run of tokens in common with the training text."""
    (tmp_path / "numbers.txt").write_text(" ".join(map(str, range(4000))))
    config = TextConfig(model="stdlib-gpt2", scheme="rotary", train_file=str(tmp_path / "numbers.txt"), evaluation_tokens=512)
    parts = RunText(config).parts(32, 128)
    assert parts[0].shape[1] == 32 and parts[1].shape == (4, 128)
    rows, aside = ({tuple(run) for run in part.unfold(1, 12, 1).flatten(0, 1).tolist()} for part in parts)
    assert rows and aside and not rows & aside


def test_masked_language_modeling(bert, text, result, tmp_path):
    """A head is trained before the swap, the same for each scheme and seed, and can be given; so are evaluation masks."""
    common = {"model": bert, "train_file": text, "head_steps": 20, "head_learning_rate": 1e-2, **TINY}
    runs = {}
    for name, options in {
        "plain": {},
        "rotary": {"scheme": "rotary", "start": "fit", "seed": 3},
        "given": {"scheme": "rotary", "start": "fit", "seed": 3, "head": tmp_path / "plain" / "head.safetensors"},
        "longer": {"scheme": "rotary", "block_size": 48, "lengths": 64},
    }.items():
        runs[name] = result("language_modeling", **common, **options, output=tmp_path / name)
    heads = {name: run["details"]["new_head"] for name, run in runs.items()}
    assert heads["plain"]["loss_before_swap"] == runs["plain"]["figures"]["start_loss"]  # nothing was swapped
    assert heads["plain"]["loss_before_swap"] == heads["rotary"]["loss_before_swap"] == heads["given"]["loss_before_swap"]
    assert heads["plain"]["steps"] == 20 and "steps" not in heads["given"]
    assert runs["rotary"]["figures"] == runs["given"]["figures"]
    assert runs["rotary"]["figures"]["start_loss"] != runs["plain"]["figures"]["start_loss"]
    saved = [load_file(tmp_path / name / "head.safetensors") for name in ("plain", "rotary")]
    assert all(torch.equal(value, saved[1][name]) for name, value in saved[0].items()) and len(saved[0]) >= 4
    assert runs["longer"]["details"]["block_size"] == 48 and heads["longer"]["steps"] == 20


def test_a_head_of_its_own(save, start, result, bert_tokenizer, text, tmp_path):
    """A checkpoint with a head keeps it, and does not take another; a head of several modules is refused before the fit."""
    given = {"model": save("bert", head=BertForMaskedLM, vocab_size=len(bert_tokenizer)), "train_file": text}
    found = result("language_modeling", **given, **TINY)
    assert found["details"]["new_head"] is None and not (tmp_path / "out" / "head.safetensors").exists()
    for how, says in (("swap", "head of its own"), ("scratch", "at random, too")):
        fails(says, start, "language_modeling", **given, start=how, head="x", output=tmp_path / how)
    sizes = {"vocab_size": len(bert_tokenizer), "dim": 32, "hidden_dim": 32, "n_layers": 1, "n_heads": 2}
    DistilBertForMaskedLM(DistilBertConfig(**sizes)).save_pretrained(given["model"])
    two = {"scheme": "rotary", "start": "fit", "output": tmp_path / "two"}
    assert "fitting" not in fails("not DistilBERT", start, "language_modeling", **given, **two)


def test_language_modeling_resumes(bert, text, start, result, tmp_path, monkeypatch):
    """A run that was stopped ends with the figures of one that was not, masks and head included."""
    options = {"model": bert, "train_file": text, "scheme": "rotary", **TINY, "head_steps": 3, "checkpoint_every": 2}
    expected = result("language_modeling", **options)
    save = run_state.Checkpoints.save

    def save_and_stop(*given):
        save(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(run_state.Checkpoints, "save", save_and_stop)
        assert start("language_modeling", **options, output=tmp_path / "cut")[0] == 130
    resumed = result("language_modeling", **options, output=tmp_path / "cut", resume=True)
    assert resumed["figures"] == expected["figures"]


def test_length_extrapolation(gpt2, text, result, tmp_path):
    """The swapped model reads all lengths, the original through the window; both fine-tune on as many tokens."""
    options = {"model": gpt2, "train_file": text, **TINY, "factors": (1, 2, 4), "finetune_factor": 2, "stride": 8}
    swapped = result("length_extrapolation", **options, scheme="rotary", start="fit", skip_to=200)
    names = [*(f"{stage}loss_{n}" for stage in ("tuned_", "") for n in (32, 64, 128)), "select_loss"]
    assert list(swapped["figures"]) == names
    details = swapped["details"]
    assert details["loss"]["swapped"]["whole"]["32"] == swapped["figures"]["loss_32"]
    assert details["loss"]["tuned"]["whole"]["128"] == swapped["figures"]["tuned_loss_128"]
    assert list(details["loss_by_position"]["swapped"]["whole"]) == ["0-1", "2-7", "8-31", "32-63", "64-127"]
    assert (tmp_path / "out" / "loss.png").stat().st_size > 10_000
    bar = result("length_extrapolation", **options, output=tmp_path / "bar")
    assert list(bar["figures"]) == names
    assert {str(n): bar["figures"][f"loss_{n}"] for n in (32, 64, 128)} == details["loss"]["original"]["window"]
    assert bar["cost"]["tokens"] == swapped["cost"]["tokens"] == 4 * 4 * 64
    for run in (bar, swapped):  # on other text, in blocks of the fine-tune's length
        assert run["figures"]["select_loss"] == pytest.approx(run["figures"]["tuned_loss_64"], abs=0.5)
        assert run["figures"]["select_loss"] != run["figures"]["tuned_loss_64"]
    # Positions of the rotary model do not matter, so in the first window nothing does.
    first = [details["loss_by_position"]["swapped"][kind]["2-7"] for kind in ("whole", "window")]
    assert first[0] == pytest.approx(first[1], abs=1e-5)


def test_read_on(gpt2, text, result, tmp_path, monkeypatch):
    """Losses by position, the original's behind its window; a span reaches the model, and its cache does not grow."""
    given = {name: value for name, value in TINY.items() if name in ("evaluation_tokens", "fit_tokens", "fit_steps")}
    options = {"model": gpt2, "train_file": text, **given, "factor": 4, "fit_factor": 2, "fit_tokens": 4096}
    monkeypatch.chdir(tmp_path)
    training = {"scheme": "rotary", "tune_steps": 8, "tune_tokens": 512, "learning_rate": 0.01}
    AcceleratorState._reset_state()  # a process keeps the precision that other tests began with
    Path("text").write_text("A file called as the text column is.")
    results = {
        name: result("read_on", **options, output=tmp_path / name, **more)
        for name, more in {
            "original": {"generate": 1},
            "whole": {"scheme": "rotary", "start": "fit", "generate": 1},
            "near": {"scheme": "rotary", "start": "fit", "span": 8, "first": 2, "generate": 60},
            "tuned": training,
            "half": training | {"mixed_precision": "bf16"},
            "braked": training | {"brake": 1.0},
        }.items()
    }
    tuned, half, braked = (results.pop(name) for name in ("tuned", "half", "braked"))
    between = (tuned["figures"]["loss_64"] + tuned["figures"]["start_loss_64"]) / 2
    assert braked["cost"]["tokens"] == 8 * 512 and braked["figures"]["loss_64"] > between  # no text is in its loss
    assert half["figures"]["loss_64"] not in (tuned["figures"]["loss_64"], half["figures"]["start_loss_64"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as a launcher does: noted where it trains in that
    for steps, noted in ((1, "bf16"), (0, None)):
        again = result("read_on", **options, scheme="rotary", tune_steps=steps, tune_tokens=512, output=tmp_path / f"{steps}")
        assert again["config"]["mixed_precision"] == noted
    AcceleratorState._reset_state()
    assert tuned["cost"]["tokens"] == 8 * 512 and tuned["figures"]["loss_64"] < tuned["figures"]["start_loss_64"]
    assert tuned["figures"]["select_loss"] < tuned["figures"]["start_loss_64"]
    for one in results.values():
        assert list(one["figures"]) == list(one["items"]) == ["loss_32", "loss_64", "loss_128"]
        means = {name: sum(values) / len(values) for name, values in one["items"].items()}
        assert one["figures"] == pytest.approx(means, rel=1e-4)
        assert len(one["items"]["loss_64"]) == 2  # blocks of 128 tokens
    assert results["whole"]["figures"] != results["near"]["figures"]
    inputs = results["near"]["inputs"]
    assert inputs.keys() == {"model", "train_file"} and weight_hashes(Path(gpt2)).items() <= inputs["model"].items()
    assert inputs["train_file"] == {"text.txt": hashlib.sha256(Path(text).read_bytes()).hexdigest()}
    generation = results["near"]["details"]["generation"]
    assert list(results["near"]["details"]["milliseconds a token read"]) == ["32", "64", "128"]
    assert generation["tokens"] == 60 and generation["keys in the cache"] == 8 + 2 - 1
    assert 2**20 < generation["bytes after 1,000"] and 2**20 < generation["bytes at the end"]
    window = results["original"]["details"]["generation"]
    assert 0 < window["window that slides"] and list(window) == ["window read for each token", "window that slides"]


@pytest.mark.parametrize(
    ("name", "scheme", "length", "at"),
    [("read_on", "original", 32, 1), ("read_on", "rotary", 64, 1), ("language_modeling", "rotary", 32, -1)],
)
def test_trains_as_it_says(gpt2, result, recipe, tmp_path, watch, name, scheme, length, at):
    """Blocks of the fit's length, or the original's, at the rate that was given; select text is not trained on."""
    words = torch.randint(len(WORDS), (4000,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "words.txt").write_text(" ".join(WORDS[i] for i in words))
    options = {"model": gpt2, "train_file": str(tmp_path / "words.txt"), "scheme": scheme}
    budget = {"factor": 4, "fit_factor": 2, "tune_steps": 2, "tune_tokens": 128}
    options |= budget if name == "read_on" else {"max_steps": 2, "batch_size": 4}
    module = recipe(name)
    trainings = watch(module, "train")
    read = watch(module, "token_losses", *({"sliding_window_losses"} & vars(module).keys()))
    result(name, **options, evaluation_tokens=256, learning_rate=0.03)
    _, rows, config = trainings[0].args
    assert config.learning_rate == 0.03 and config.batch_size * length == 128
    assert {len(row["input_ids"]) for row in rows} == {length}
    trained = {tuple(row["input_ids"].tolist()) for row in rows}
    select = read[at].args[1].unflatten(1, (-1, length)).flatten(0, 1)
    assert not trained & {tuple(row.tolist()) for row in select}


def test_length_extrapolation_without_a_fine_tune(gpt2, text, result):
    """A tiled table reads on, and there are no figures of a tuned model."""
    options = {"model": gpt2, "train_file": text, **TINY, "factors": (1, 2), "finetune_factor": 0}
    assert list(result("length_extrapolation", **options, scheme="learned:extend=tile")["figures"]) == ["loss_32", "loss_64"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("language_modeling", {"block_size": 64}, "the original reads 32 tokens, not 64"),
        ("language_modeling", {"block_size": 64, "scheme": "rotary", "max_positions": 48}, "less than the 64 tokens"),
        ("language_modeling", {"batch_size": 4000}, "fewer than one batch of 4000"),
        ("language_modeling", {"lengths": 9000, "scheme": "rotary"}, "fewer than one block"),
        ("language_modeling", {"mlm_probability": 1}, "between 0 and 1"),
        ("language_modeling", {"lengths": 1}, "lengths=1 must be at least 4"),
        ("read_on", {"factor": 4, "tune_steps": 2, "tune_tokens": 192}, "tune_tokens=192 must be a multiple of 128"),
        ("read_on", {"generate": -1}, "generate=-1 must be at least 0"),
        ("read_on", {"mixed_precision": "bf16"}, "about training, of which there is none"),
        ("read_on", {"brake": 0.5}, "about training, of which there is none"),
        ("read_on", {"brake": 1.5, "tune_steps": 1}, "brake=1.5 must be from 0 to 1"),
        ("length_extrapolation", {"start": "scratch"}, "language_modeling.py"),
        ("length_extrapolation", {"factors": (2, 1)}, "in rising order"),
        ("length_extrapolation", {"stride": 32}, "from 1 to 31"),
        ("length_extrapolation", {"scheme": "rotary", "max_positions": 64, "factors": 4}, "less than the 128 tokens"),
    ],
)
def test_bad_input(gpt2, text, recipe, start, tmp_path, monkeypatch, name, options, says):
    """What cannot be run is said in a paragraph, before anything is trained."""
    monkeypatch.setattr(recipe(name), "train", None)
    fails(says, start, name, **{"model": gpt2, "train_file": text, "output": tmp_path / "out", **options})


def test_bad_input_comes_before_the_head(bert, text, start, tmp_path):
    """What does not fit is found before a head is trained for it: a scheme, a launch; encoders have no window to slide."""
    options = {"model": bert, "train_file": text, "block_size": 64, "scheme": "learned", "output": tmp_path / "out"}
    fails("cannot hold", start, "language_modeling", **options)
    for launch in ("FSDP", "DEEPSPEED"):  # which train copies of weights
        with patch.dict(os.environ, {f"ACCELERATE_USE_{launch}": "true"}):
            fails("then pass --head", start, "language_modeling", model=bert, train_file=text, output=tmp_path / launch)
    assert not list(tmp_path.rglob("head.safetensors"))
    fails("encoder", start, "length_extrapolation", model=bert, train_file=text, output=tmp_path / "other")
