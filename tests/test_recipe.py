"""The skeleton of recipes: options from a dataclass, YAML under the command line, one result file, no folder spoilt."""

import hashlib
import importlib
import json
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated
from unittest.mock import Mock

import pytest
import torch
from conftest import fails, refused, rewrite, works, write_run
from transformers import AutoModelForSequenceClassification

import hf_posswap as posswap
from hf_posswap.experiments.classification import ClassificationConfig
from hf_posswap.experiments.comparison import check_budgets, load_runs
from hf_posswap.experiments.models import cost, load_model, load_tokenizer
from hf_posswap.experiments.options import RecipeConfig, RunOptions, command_line, read_config
from hf_posswap.experiments.text_tasks import TextConfig
from hf_posswap.provenance import input_hashes, lock

RECIPE = '''
"""How deep?

    python recipes/depth.py
    python recipes/depth.py --depth 4

Read on.
"""
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal
from hf_posswap.experiments.recipe import RecipeConfig, main


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    QUESTION = "How deep?"
    FIGURES = {"depth": "where it was"}
    FORBIDDEN_STARTS = {"fit": "there is no text"}

    learning_rate: float = 1e-3
    depth: Annotated[int, "Where the key is."] = 3
    lengths: Annotated[tuple[int, ...], "Of the texts."] = (128, 256)
    read: Literal["whole", "chunks"] = "chunks"


answer = None


def run(config, folder, resume):
    if callable(answer):
        return answer()
    if Path(config.model).is_file():
        Path(config.model).unlink()
    return answer or {"figures": {"depth": config.depth, "longest": max(config.lengths)}, "cost": {}}


if __name__ == "__main__":
    main(Config, run)
'''


@dataclass(frozen=True, kw_only=True)
class Config(RecipeConfig):
    depth: Annotated[int, "Where the key is."] = 3
    lengths: Annotated[tuple[int, ...], "Of the texts."] = (128, 256)


def _file(tmp_path, text):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def start(tmp_path, monkeypatch, program):
    """The function that starts a small recipe with some options; it returns the exit status and what was said."""
    (tmp_path / "depth.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "depth", raising=False)
    module = importlib.import_module("depth")

    def run(*options, answer=None):
        monkeypatch.setattr(module, "answer", answer)
        code, out, err = program(*options, main=lambda: module.main(module.Config, module.run))
        return code, out + err

    return run


def test_command_line_over_file_over_defaults(tmp_path):
    """What is given last wins; lists become tuples; the exponents that YAML reads as text become numbers."""
    file = _file(tmp_path, "depth: 5\nlengths: [1, 2]\nlearning_rate: 1e-4\nscheme: rotary\n")
    config = read_config(Config, file, {"depth": 7})
    assert (config.depth, config.lengths, config.learning_rate, config.scheme) == (7, (1, 2), 1e-4, "rotary")
    assert config.batch_size == RecipeConfig.batch_size
    assert read_config(Config, None, {"lengths": [3]}).lengths == (3,)
    assert read_config(Config, _file(tmp_path, ""), {}) == Config()


def test_local_files_take_the_place_of_a_hub_data_set(tmp_path):
    """A configuration that names a Hub data set is good for local files too, and the other way round."""
    file = _file(tmp_path, "dataset: nyu-mll/glue\ndataset_config: cola\nmetric: matthews\n")
    config = read_config(ClassificationConfig, file, {"train_file": "mine.csv"})
    assert (config.dataset, config.dataset_config, config.train_file, config.metric) == (None, None, "mine.csv", "matthews")
    file = _file(tmp_path, "train_file: mine.txt\nvalidation_file: held.txt\n")
    config = read_config(TextConfig, file, {"dataset": "Salesforce/wikitext"})
    assert (config.dataset, config.train_file, config.validation_file) == ("Salesforce/wikitext", None, None)


CONFIGURATIONS = {
    "downstream_classification.Config": ("cola", "sst2", "word_order"),
    "language_modeling.Config": ("language_modeling", "language_modeling_bert"),
    "length_extrapolation.Config": ("length_extrapolation",),
    "listops.ListOpsConfig": ("listops", "listops_quick"),
    "long_documents.Config": ("hyperpartisan", "movie_reviews"),
    "passkey.PasskeyConfig": ("passkey", "passkey_bert"),
}


def test_configurations(recipe):
    """Every file in recipes/configs is read by its recipe; that of ListOps says what the paper says."""
    folder, read = Path(__file__).parents[1] / "recipes" / "configs", {}
    for place, names in CONFIGURATIONS.items():
        module, kind = place.split(".")
        for name in names:
            read[name] = read_config(getattr(recipe(module), kind), folder / f"{name}.yaml", {"scheme": "rotary"})
    assert set(read) == {file.stem for file in folder.glob("*.yaml")}
    assert all(config.scheme == "rotary" and config.model in ("minilm", "stdlib-gpt2") for config in read.values())
    shape = ("min_length", "max_length", "max_depth", "max_args", "train_examples", "examples")
    assert [getattr(read["listops"], name) for name in shape] == [500, 2000, 10, 10, 96_000, 2000]


RECIPES = [f.stem for f in sorted((Path(__file__).parents[1] / "recipes").glob("*.py")) if "Config, run)" in f.read_text()]


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_says_what_it_is(recipe, name):
    """`--help` has words for each option of each recipe."""
    kinds = [one for one in vars(recipe(name)).values() if isinstance(one, type) and issubclass(one, RunOptions)]
    (kind,) = [one for one in kinds if one.__module__.endswith(name)]
    said = {name: one.annotation.__metadata__[0].help for name, one in command_line(kind, Path("out")).parameters.items()}
    assert [name for name, words in said.items() if words.startswith("[default") or not words] == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("REPLACES: {}", "unknown option 'REPLACES'; known are .*depth"),
        ("depth: true", "depth must be int, not True"),
        ("lengths: 4", r"lengths must be list\[int, \.\.\.\], not 4"),
        ("[1, 2]", "must hold `option: value` lines, not list"),
        ("mixed_precision: ''", "mixed_precision is empty: give a value, or leave it out"),
        ("depth: 5\ndepth: 6", "depth is there twice"),
        ("depth: 5\n\tlearning_rate: 1", r"is no YAML \(.*character '.t'.* line 2.*: write `option: value` lines"),
        ("scheme: rotery", "rotery"),
        ("fit_tokens: 0", "fit_tokens=0 must be at least 1"),
        ("seed: -1", "seed=-1 must be from 0"),
        ("weight_decay: .nan", "weight_decay=nan must be"),
        ("learning_rate: .inf", "learning_rate=inf must be finite and at least 0"),
    ],
)
def test_bad_files(tmp_path, text, says):
    """A key or a value that no option takes is an error that names it."""
    refused(says, read_config, Config, _file(tmp_path, text), {})


def test_a_run_from_the_command_line(start, tmp_path):
    """Options, help, result file; a folder that is finished or in use is not written to, another configuration not resumed."""
    out = works(start, "--help")
    assert "Where the key is. [default: 3]" in out
    assert "Peak learning rate. [default: 0.001]" in " ".join(out.split())  # another default has the help of its parent
    assert "Figures, by how their names begin:\n\n      depth: where it was\n" in out
    assert "    python recipes/depth.py\n      python recipes/depth.py --depth 4\n" in out  # examples stay lines
    output = tmp_path / "out"
    works(start, "--depth", "4", "--lengths", "7", "--lengths", "8", "--output", output)
    result = json.loads((output / "result.json").read_text())
    assert result["figures"] == {"depth": 4, "longest": 8} and result["recipe"] == "depth"
    expected = asdict(Config(depth=4, lengths=(7, 8), learning_rate=1e-3)) | {"read": "chunks"}
    assert result["config"] == json.loads(json.dumps(expected))
    assert " --depth 4 --lengths 7" in result["command"] and result["versions"]["torch"]
    assert (result["question"], result["meaning"]) == ("How deep?", {"depth": "where it was"})
    fails("not empty", start, "--output", output)
    fails("there is no text; known are cold, swap, scratch", start, "--output", output, "--start", "fit")
    fails("another configuration", start, "--output", output, "--resume")
    fails("'mine' is not a tracker", start, "--output", tmp_path / "out2", "--report-to", "mine")  # though nothing is trained
    with lock(tmp_path / "locked"):
        fails("in use by another run", start, "--output", tmp_path / "locked")


def test_inputs_are_named_as_they_were(start, tmp_path, monkeypatch):
    """The hash of an input is that of what the run read, even if the file changes or goes while it runs."""
    monkeypatch.chdir(tmp_path)
    for word in ("tensorboard", "chunks", "cosine"):  # called as values of options are
        (tmp_path / word).write_text("1")
    (tmp_path / "weights").write_text("0.5")
    works(start, "--model", tmp_path / "weights", "--output", tmp_path / "out")
    assert not (tmp_path / "weights").exists()
    inputs = json.loads((tmp_path / "out" / "result.json").read_text())["inputs"]
    assert inputs == {"model": {"weights": hashlib.sha256(b"0.5").hexdigest()}}


def test_a_resumed_run_reads_what_it_began_with(start, tmp_path):
    """A run whose text has changed is not resumed; what the run itself has written into a folder that it reads is no change."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("0.5")
    asked = ("--model", tmp_path / "texts", "--output", tmp_path / "texts" / "out")
    for resume in ((), ("--resume",)):
        works(start, *asked, *resume)
    # Its config.json is a file of options.
    works(start, "--config", tmp_path / "texts" / "out" / "config.json", "--output", tmp_path / "again")
    (tmp_path / "texts" / "a.txt").write_text("0.6")
    fails("its files had other contents", start, *asked, "--resume")
    (tmp_path / "texts" / "out" / "config.json").write_text("{")
    fails("config.json is no JSON", start, *asked, "--resume")


def test_inputs_in_folders(tmp_path):
    """A folder is hashed as deep as it is read; several folders whose files have the same names stay apart."""
    for place in ("one/deep/a.txt", "two/deep/a.txt", "one/.git/a.txt"):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).write_text(place)
    one, two = (hashlib.sha256(f"{name}/deep/a.txt".encode()).hexdigest() for name in ("one", "two"))
    found = input_hashes({"train_file": str(tmp_path / "one"), "beir": (str(tmp_path / "one"), str(tmp_path / "two")), "n": 3})
    assert found == {"train_file": {"deep/a.txt": one}, "beir": {"one/deep/a.txt": one, "two/deep/a.txt": two}}


def test_figures_that_are_no_numbers(start, tmp_path):
    """A run that ends in NaN has failed, and leaves no result; nor does a model of NaN with good figures, which guesses."""
    model = torch.nn.Linear(2, 2)
    model.bias.data[1] = torch.nan
    for number, (answer, says) in enumerate(
        (
            ({"figures": {"loss": float("nan")}}, "ended in loss nan"),
            ({"figures": {"accuracy": 0.5}, "model": model}, "ended in bias that is not finite"),
        )
    ):
        fails(says, start, "--output", tmp_path / str(number), answer={"cost": {}, **answer})
        assert not (tmp_path / str(number) / "result.json").exists()


def test_no_room_for_the_model(start, tmp_path, monkeypatch):
    """The figures are shown all the same."""
    monkeypatch.setattr("hf_posswap.experiments.recipe.save_trained", Mock(side_effect=OSError(28, "No space left")))
    answer = {"figures": {"depth": 12.5}, "cost": {}, "model": torch.nn.Linear(2, 2)}
    code, out = start("--output", tmp_path / "out", "--save-model", answer=answer)
    assert code == 2 and "No space left" in out and "depth  12.5" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_stopped_from_outside(start, tmp_path, number):
    """A scheduler or a closed terminal stops a run as Ctrl-C does, in one line; no temporary file is left; nohup goes on."""

    def answer():
        with TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(number)
        return {"figures": {}, "cost": {}}

    for before, expected in ((signal.SIG_DFL, 130), (signal.SIG_IGN, 0)):
        signal.signal(number, before)
        output = tmp_path / str(expected)
        code, out = start("--output", output, answer=answer)
        assert code == expected and "Traceback" not in out and set(tmp_path.glob("tmp*")) == set()
        assert (output / "result.json").exists() == ("--resume goes on" not in out) == (code == 0)


@pytest.fixture
def checkpoint(make_model, tmp_path):
    make_model("bert").save_pretrained(tmp_path / "bert")
    return str(tmp_path / "bert")


def test_models_by_start(checkpoint, monkeypatch):
    """Every start differs, seeds draw the head and scratch weights, and the original is left as it is."""

    def build(**options):
        config = RecipeConfig(model=checkpoint, **options)
        batches = [torch.randint(2, 90, (40, 16), generator=torch.Generator().manual_seed(0))]
        return load_model(config, AutoModelForSequenceClassification, num_labels=3, fit_batches=lambda: batches)

    plain = build()
    assert not hasattr(plain.config, "position_scheme") and plain.config.num_labels == 3 and not plain.training
    ids = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    seen = {}
    for start in ("cold", "swap", "fit", "scratch"):
        model = build(scheme="rotary", start=start, fit_steps=2)
        assert torch.equal(model.classifier.weight, plain.classifier.weight) is (start != "scratch")
        seen[start] = model.bert(ids).last_hidden_state
    for one in seen:
        for other in seen:
            assert (one == other) is torch.allclose(seen[one], seen[other], atol=1e-4), (one, other)
    assert torch.equal(build(seed=1).bert(ids).last_hidden_state, plain.bert(ids).last_hidden_state)
    assert not torch.equal(build(seed=1).classifier.weight, plain.classifier.weight)
    assert not torch.equal(build(scheme="rotary", start="scratch", seed=1).bert(ids).last_hidden_state, seen["scratch"])
    assert build(scheme="rotary", max_positions=99).config.max_position_embeddings == 99
    refused("learned:extend=tile", build, max_positions=999)
    for needed, longest in ((None, 32), (9, 32), (40, 40)):
        config = RecipeConfig(model=checkpoint, scheme="rotary")
        short = load_model(config, AutoModelForSequenceClassification, max_positions=needed)
        assert short.config.max_position_embeddings == longest
    assert cost(plain)["parameters"] == plain.num_parameters() and cost(plain)["peak_memory_bytes"] > 1e7
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    monkeypatch.setattr("psutil.Process", Mock(**{"return_value.memory_info.return_value.peak_wset": 5}))
    assert cost(plain)["peak_memory_bytes"] == 5


def test_first_tokens_as_in_a_swap(start, checkpoint, tmp_path):
    """Without --first a run has that of `swap`, and says which; files of older runs, which all have a number, mean the same."""
    for first, seen in ((None, 1), (4, 4)):
        config = RecipeConfig(model=checkpoint, scheme="rotary", span=8, first=first)
        assert posswap.describe(load_model(config, AutoModelForSequenceClassification)).span == (8, seen)
    plain = RecipeConfig(model=checkpoint, scheme="rotary", first=4)
    assert posswap.describe(load_model(plain, AutoModelForSequenceClassification)).span is None
    refused("first=9 is about a span", RecipeConfig, first=9)

    def noted(name, *options):
        folder = tmp_path / "runs" / name
        works(start, "--model", checkpoint, "--scheme", "rotary", *options, "--output", folder)
        begun, ended = (json.loads((folder / file).read_text()) for file in ("config.json", "result.json"))
        return begun["first"], ended["config"]["first"]

    span = ("--span", 8)
    runs = {
        "near": (1, *span),
        "two": (2, *span, "--first", 2),
        "whole": (None,),
        "original": (None, *span, "--scheme", "original"),
    }
    for name, (first, *options) in {**runs, "gpt2": (4, *span, "--model", "stdlib-gpt2")}.items():
        assert noted(name, *options) == (first, first)
    for name in runs:  # a file of an older run
        begun = tmp_path / "runs" / name / "config.json"
        rewrite(begun, lambda config: config.update(first=4))
        assert noted(f"{name}-again", "--config", begun) == (4, 4)


def test_first_tokens_count_where_there_is_a_span(tmp_path):
    """Budgets are not unequal for a number that older runs note without using it; where it is used, they are."""
    used = {"scheme": "rotary", "span": 8, "first": 4}
    for name, options in {"a": {"first": 4}, "b": {"scheme": "rotary"}, "c": used}.items():
        write_run(tmp_path / name, {"accuracy": 0.5}, **options)
    check_budgets(load_runs([tmp_path / "a", tmp_path / "b"]))
    write_run(tmp_path / "e", {"accuracy": 0.5}, span=8)
    check_budgets(load_runs([tmp_path / "c", tmp_path / "e"]))
    write_run(tmp_path / "f", {"accuracy": 0.5}, **used | {"first": 1}, start="cold")
    refused("first is 4 in .*c and 1 in .*f", check_budgets, load_runs([tmp_path / name for name in "cef"]))


def test_wrong_checkpoints(checkpoint, bert_tokenizer, tmp_path):
    """A folder without a tokenizer, or with too many tokens, is refused, and a swapped one, and a head of other labels."""
    refused("do not belong together", load_tokenizer, checkpoint)
    bert_tokenizer.add_tokens([f"word{n}" for n in range(100)])
    bert_tokenizer.save_pretrained(checkpoint)
    refused("do not belong together", load_tokenizer, checkpoint)
    swapped = load_model(RecipeConfig(model=checkpoint, scheme="rotary"), AutoModelForSequenceClassification)
    swapped.save_pretrained(tmp_path / "swapped")
    wrong = RecipeConfig(model=str(tmp_path / "swapped"))
    refused("unswapped", load_model, wrong, AutoModelForSequenceClassification, error=posswap.UnsupportedModelError)
    plain = RecipeConfig(model=checkpoint)
    load_model(plain, AutoModelForSequenceClassification, num_labels=3).save_pretrained(checkpoint)
    refused("save its model.base_model", load_model, plain, AutoModelForSequenceClassification, num_labels=2)
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text('{"scheme": "rotary"}')
    refused(f"give {tmp_path}/run/model", load_tokenizer, str(tmp_path / "run"))
    refused("there is no folder", load_tokenizer, str(tmp_path / "nothing"))


def test_a_launcher_says_the_precision(start, monkeypatch, tmp_path):
    """It is in the result, and the run is not resumed in another."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    works(start, "--output", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "result.json").read_text())["config"]["mixed_precision"] == "bf16"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    fails("another configuration", start, "--output", tmp_path / "out", "--resume")


def test_every_parameter_gets_a_gradient(make_model, tmp_path):
    """DDP waits for all of them, and ESM has a head that no loss reads."""
    make_model("esm").save_pretrained(tmp_path)
    model = load_model(RecipeConfig(model=str(tmp_path), scheme="rotary"), AutoModelForSequenceClassification)
    model(torch.arange(2, 18)[None], labels=torch.tensor([1])).loss.backward()
    assert [name for name, one in model.named_parameters() if one.requires_grad and one.grad is None] == []


def test_a_lone_process_of_two(start, monkeypatch, tmp_path):
    """A launcher that starts one process where several were asked for is an error at once, also in recipes without our loop."""
    for name, value in {"MASTER_ADDR": "x", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "no"}.items():
        monkeypatch.setenv(name, value)
    fails("torchrun", start, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
