"""`hf-posswap plot`: what it draws, from which sources, and what it refuses."""

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import refused, works, write_run
from matplotlib.image import imread
from test_plots import lines
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, BertModel

import hf_posswap as posswap
from hf_posswap.commands import plot as pictures
from hf_posswap.measure import attention_by_distance

RESULTS = Path(__file__).parent.parent / "recipes" / "results"


def drawn(kind: str, *sources, **options):
    return pictures.draw(kind, [*map(str, sources)], **options)


@pytest.fixture
def bert(save):
    return save("bert")


@pytest.fixture
def relative(make_swapped, tmp_path):
    """A tiny swapped BERT with relative positions on disk, without a tokenizer."""
    make_swapped("bert", "relative:clip=3", head=BertModel).save_pretrained(tmp_path / "relative")
    return tmp_path / "relative"


PICTURES = {
    "table": ["sinusoidal:layout=cosine_first"],
    "similarity": ["{bert}"],
    "dot-products": ["{bert}", "ladder:rung=centred", "sinusoidal"],
    "wavelengths": ["rotary:theta=500000", "sinusoidal"],
    "translation": ["rotary"],
    "attention": ["{bert}", "rotary"],
    "loss": [RESULTS / "swap_cost" / "stdlib-gpt2"],
    "recovery": [RESULTS / "heal" / "rotary-fit" / "comparison.json"],
    "heat-map": [RESULTS / "passkey"],
}


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_command_writes_pictures(kind, bert, tmp_path, program):
    """Every kind as PNG or, dark, as SVG, in turn, into a folder that does not exist yet."""
    suffix = (".png", ".svg")[list(pictures.KINDS).index(kind) % 2]
    sources, output = [str(source).format(bert=bert) for source in PICTURES[kind]], tmp_path / "new" / f"picture{suffix}"
    dark = ["--dark"] if suffix == ".svg" else []
    assert str(output) in works(program, "plot", kind, *sources, "--output", output, *dark)
    if suffix == ".png":
        assert output.read_bytes().startswith(b"\x89PNG") and imread(output)[0, 0, :3].min() == 1
    else:
        root = ElementTree.fromstring(output.read_text())
        page = next(path for path in root.iter("{http://www.w3.org/2000/svg}path") if "fill" in path.get("style", ""))
        assert root.tag.endswith("svg") and "fill: #121212" in page.get("style")


def test_same_picture_same_file(tmp_path, program):
    """An SVG tells neither the time nor random names: what is committed changes when the picture does."""
    for name in ("a.svg", "b.svg"):
        program("plot", "loss", *PICTURES["loss"], "--output", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_command_options(tmp_path, program):
    """The options for sizes and shifts reach the picture."""
    assert drawn("table", "sinusoidal").axes[0].images[0].get_array().shape == (16, 64)
    assert drawn("table", "sinusoidal", positions=5, size=8).axes[0].images[0].get_array().shape == (5, 8)
    shifted = drawn("translation", "ladder:rung=slowed", shift=(2, 7), size=8)
    assert [axes.get_title().partition(",")[0] for axes in shifted.axes[:2]] == ["k = 2", "k = 7"]
    assert "misses by" in shifted.axes[0].get_title() and "misses" not in drawn("translation", "rotary").axes[0].get_title()
    works(program, "plot", "translation", "rotary", "--shift", 2, "--size", 8, "--output", tmp_path / "a.png")


def test_models_are_drawn_as_they_are(bert, relative, tmp_path):
    """A folder gives its table; relative positions the norms of their vectors by distance; rotary its own frequencies."""
    model = BertModel.from_pretrained(bert)
    table = model.embeddings.position_embeddings.weight.detach()
    assert_close(torch.from_numpy(drawn("table", bert).axes[0].images[0].get_array().data).float(), table)
    figure = drawn("table", relative)
    vectors = pictures.open_source(str(relative)).encoder.layer[1].attention.self.positions.key_vectors()
    assert_close(torch.tensor(figure.axes[1].lines[0].get_ydata()).float(), vectors[0].norm(dim=-1))
    assert figure.axes[1].lines[0].get_xdata().tolist() == [-3, -2, -1, 0, 1, 2, 3]
    posswap.swap(model, "rotary:fraction=0.5", max_positions=64).save_pretrained(tmp_path / "rotary")
    found = lines(drawn("wavelengths", tmp_path / "rotary").axes[0])
    assert len(found[str(tmp_path / "rotary")][1]) == 4 and "32 tokens: no full turn above" in found


def test_attention_before_and_after(bert, save):
    """The rows are the model as it was and as the swap left it; a swapped one is swapped on as a whole."""
    figure = drawn("attention", bert, "none", positions=24)
    assert [axes.get_title() for axes in figure.axes[::2]] == [f"{bert}, layer 0", "none, layer 0"]
    model = BertModel.from_pretrained(bert).eval()
    batches = pictures._batches(str(bert), model, 24)
    assert batches[0]["input_ids"].shape == (8, 24)
    for row in range(2):
        expected = attention_by_distance(model, batches, reach=23).double().mean(1)
        assert_close(torch.tensor(figure.axes[2 * row + 1].lines[-1].get_ydata()), expected[1], atol=1e-6, rtol=0)
        posswap.swap(model, "none")
    gpt2 = save("gpt2")  # whose head's config names the scheme
    posswap.swap(AutoModelForCausalLM.from_pretrained(gpt2), "rotary").save_pretrained(gpt2)
    assert drawn("attention", gpt2, "alibi", positions=24).axes[-2].get_title() == "alibi, layer 0"


def test_results_are_drawn_as_they_are(tmp_path):
    """Seeds of a row are one line; the figure that was asked for is the one that is drawn."""
    runs = json.loads((RESULTS / "length_extrapolation" / "comparison.json").read_text())["runs"]
    found = lines(drawn("loss", RESULTS / "length_extrapolation", figure="tuned_loss").axes[0])
    mine = [run["figures"] for run in runs if run["config"]["scheme"] == "relative"]
    line = found["relative, fit, learning_rate 0.0003"]
    assert line[0] == [256, 512, 1024, 2048] and len(mine) == 3
    assert math.isclose(line[1][1], sum(figures["tuned_loss_512"] for figures in mine) / 3)
    assert drawn("loss", RESULTS / "length_extrapolation").axes[0].get_ylabel() == "loss, nats a token"

    runs = json.loads((RESULTS / "heal" / "text" / "comparison.json").read_text())["runs"]
    axes = drawn("recovery", RESULTS / "heal" / "text").axes[0]
    curves = [run["details"]["curve"] for run in runs if run["config"]["scheme"] == "relative"]
    assert math.isclose(lines(axes)["relative, fit"][1][-1], sum(curve[-1]["perplexity"] for curve in curves) / len(curves))
    assert "perplexity" in axes.get_ylabel()
    assert lines(axes)["original as it was"][1][0] == runs[0]["details"]["original"]["perplexity"]
    found = lines(drawn("recovery", RESULTS / "heal" / "text", figure="damage").axes[0])
    assert math.isclose(found["relative, fit"][1][0], sum(curve[0]["damage"] for curve in curves) / len(curves))

    runs = json.loads((RESULTS / "passkey" / "comparison.json").read_text())["runs"]
    maps = [run["details"]["candidates"] for run in runs if run["config"]["scheme"] == "rotary"]
    figure = drawn("heat-map", RESULTS / "passkey", figure="candidates")
    (axes,) = (axes for axes in figure.axes if axes.get_title().startswith("rotary"))
    assert_close(torch.tensor(axes.images[0].get_array().tolist()), torch.tensor(maps).mean(0))


def test_folders_of_runs_are_read(tmp_path):
    """Runs that nobody has compared yet are collected, if their budgets are equal."""
    for seed in (0, 1):
        write_run(tmp_path / str(seed), {"loss_8": 2.0, "loss_16": 1.0}, scheme="rotary", start="fit", seed=seed)
    assert lines(drawn("loss", tmp_path).axes[0]) == {"rotary, fit": ([8, 16], [2, 1])}
    write_run(tmp_path / "none", {"loss_8": 2.0}, scheme="none", max_steps=7)
    refused("unequal budgets: max_steps", drawn, "loss", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["heatmap", "rotary"], "no picture 'heatmap'; there are table, similarity"),
        (["table", "rotary"], r"plot attention MODEL rotary.*plot wavelengths.*take schemes that turn"),
        (["table", "learned"], "learned is whatever a checkpoint has learned: name a model"),
        (["table", "ladder:rung=count,combine=concatenate"], "all zeros until it is fitted"),
        (["table", "sinusoidal", "rotary"], "one source at a time; given were sinusoidal, rotary"),
        (["table", "sinusoidal", "--size", "7"], "hidden size 7 is odd"),
        (["table", RESULTS / "passkey"], "takes a scheme or a model; .*passkey is a result file or folder"),
        (["table", "{bert}", "--positions", "99"], "99 positions were asked for, and the model holds 32"),
        (["translation", "{bert}"], "takes a scheme; .*bert is a model"),
        (["wavelengths", "{bert}"], r"only schemes that turn .* have wavelengths; learned has none"),
        (["attention", "rotary", "{bert}"], "takes a model, and then .*: plot attention minilm rotary"),
        (["attention", "{bert}", "--positions", "99"], "99 positions were asked for, and the model holds 32"),
        (["attention", "{relative}"], "relative has no tokenizer to read text with"),
        (["table", "{relative}", "--positions", "9"], "has vectors by distance: leave it out"),
        (["dot-products", "sinusoidal", "sinusoidal"], "sinusoidal is given twice"),
        (["loss", RESULTS / "cola"], "takes runs with a figure at several lengths; there are none"),
        (["loss", RESULTS / "passkey", "--figure", "speed"], "no figure 'speed' to draw; there are accuracy, candidates"),
        (["recovery", RESULTS / "passkey"], "takes curves over tokens, as recipes/heal.py writes them; there are none"),
        (["heat-map", RESULTS / "cola"], "takes shares by depth and length, as recipes/passkey.py writes them"),
        (["heat-map", RESULTS / "attention" / "old" / "results.json"], "results.json holds no runs"),
        (["loss", "{bert}/model.safetensors"], "model.safetensors is no JSON"),
        (["table", "sinusoidal", "--shift", "3"], "does not look at --shift; it takes --positions, --size"),
        (["table", "stdlib-gpt2", "--size", "8"], "--size is for schemes, and stdlib-gpt2 has its own: leave it out"),
        (["table", "sinusoidal", "--output", "a.jpg"], "must end in .png or .svg"),
        (["table", "no/such-thing"], "no/such-thing is no scheme .*, no result file or folder, and no model that loads"),
    ],
    ids=lambda given: None if isinstance(given, str) else "-".join(Path(str(word)).name for word in given),
)
def test_refusals(arguments, says, bert, relative, tmp_path, program):
    """What makes no sense is an error that says what is accepted, and no file is written."""
    given = [str(argument).format(bert=bert, relative=relative) for argument in arguments]
    code, out, err = program("plot", "--output", tmp_path / "a.png", *given)
    assert code == 2 and re.search(says, err) and not (tmp_path / "a.png").exists(), err


def test_files_of_another_make(tmp_path):
    """Runs of other depths, foreign files, and what `compare` would refuse: no numbers, a run twice."""
    file, details = tmp_path / "runs.json", {"depths": [0], "lengths": [8], "accuracy": [[1]]}
    run = json.loads(write_run(tmp_path / "run", {"loss_8": 2.0}, also={"details": details}).read_text())
    other = {**run, "config": {**run["config"], "seed": 1}, "details": {**details, "lengths": [32]}}
    for kind, runs, message in (
        ("heat-map", [run, other], "runs of different depths or lengths"),
        ("recovery", [{**run, "details": {"curve": [{"damage": 1}]}}], "is not what compare or a recipe writes"),
        ("loss", [{}], "no whole result of a recipe, it has no recipe"),
        ("loss", [1], "no whole result of a recipe, it has no object"),
        ("loss", [{**run, "figures": {"loss_8": math.nan}}], "loss_8 nan, which is no finite number"),
        ("loss", [run, run], "has a seed twice"),
    ):
        file.write_text(json.dumps({"runs": runs}))
        refused(message, drawn, kind, file)
