"""Pictures: what is drawn is what was given, read back from the axes; light and dark; and the command that draws them."""

import io
import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy
import pytest
import torch
import typer
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text
from torch.testing import assert_close
from transformers import BertModel, GPT2Model
from typer.testing import CliRunner

import hf_posswap as posswap
from hf_posswap import plots
from hf_posswap.commands import plot as pictures
from hf_posswap.errors import PosswapError
from hf_posswap.measure import attention_by_distance
from hf_posswap.measure.positions import frequencies, one_head, position_table, scheme_of, translation
from hf_posswap.schemes.sinusoidal import sinusoids

RESULTS = Path(__file__).parent.parent / "recipes" / "results"
PROFILE = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(0))
HEAT = {"rows": [0, 0.5], "columns": [128, 256], "row_label": "depth", "column_label": "length", "title": "keys"}
LINES = {"rotary": {256: [3.0, 3.4], 512: [3.5, 3.7]}, "original, window": {256: 3.1, 512: 3.2}}


TABLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

# One picture of each kind, from data made here.
DRAW = {
    "table": lambda dark: plots.plot_table(TABLE, title="a table", dark=dark),
    "positive table": lambda dark: plots.plot_table(TABLE.abs(), dark=dark),
    "similarity": lambda dark: plots.plot_similarity(TABLE, title="rows", dark=dark),
    "dot products": lambda dark: plots.plot_dot_products({"random": TABLE, "other": TABLE[:4]}, dark=dark),
    "wavelengths": lambda dark: plots.plot_wavelengths({"rotary": torch.tensor([6.3, 6283.0])}, trained=512, dark=dark),
    "translation": lambda dark: plots.plot_translation({"k = 1": torch.eye(4), "k = 2": -torch.eye(4)}, dark=dark),
    "attention": lambda dark: plots.plot_attention_by_distance({"before": PROFILE, "after": PROFILE}, dark=dark),
    "loss": lambda dark: plots.plot_loss_by_length(LINES, 256, "loss", dark=dark),
    "recovery": lambda dark: plots.plot_recovery({"cold": {0: 9.0, 100: 5.0, 900: 1.0}}, original=0.9, dark=dark),
    "bars": lambda dark: plots.plot_bars({"rotary": [0.3, 0.4], "original": [0.9]}, label="accuracy", dark=dark),
    "heat maps": lambda dark: plots.plot_heat_maps({"accuracy": [[1, 0.4], [0.6, 0]]}, **HEAT, dark=dark),
}


def lines(axes) -> dict[str, tuple[list, list]]:
    """The named lines of an axes, {name: (x, y)}."""
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


def luminance(colour) -> float:
    """Relative luminance, as WCAG 2.1 defines it."""
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other) -> float:
    """Contrast ratio of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", DRAW)
def test_readable_on_both_pages(name, dark):
    """Every text has a contrast of 4.5 with the page, axes are labelled, the saved file keeps the page, settings stay."""
    before = dict(matplotlib.rcParams)
    figure = DRAW[name](dark)
    memory = io.BytesIO()
    figure.savefig(memory, dpi=40)  # outside of the style, where ticks are made
    assert dict(matplotlib.rcParams) == before
    page = figure.get_facecolor()
    assert (luminance(page) < 0.05) == dark
    assert_close(imread(io.BytesIO(memory.getvalue()))[0, 0, :3], numpy.array(page[:3], dtype="float32"), atol=0.01, rtol=0)
    cells = {text for axes in figure.axes for text in axes.texts}
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and text not in cells]
    assert len(texts) > 4
    for text in texts:
        assert contrast(text.get_color(), page) >= 4.5, (text.get_text(), text.get_color())
    for axes in figure.axes:
        assert contrast(axes.spines["left"].get_edgecolor(), page) >= 4.5
        for tick in (*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks()):
            assert contrast(tick.tick1line.get_color(), page) >= 4.5
    said = {figure.get_supxlabel(), figure.get_supylabel(), figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()}
    assert len(said - {""}) >= (1 if name in ("similarity", "bars") else 2)


def test_numbers_of_cells_are_readable():
    """In every cell of a heat map the number stands out from its own colour."""
    figure = plots.plot_heat_maps({"a": [[0, 0.3, 0.46], [0.48, 0.6, 1]]}, **{**HEAT, "columns": [1, 2, 3]})
    picture = figure.axes[0].images[0]
    for text in figure.axes[0].texts:
        column, row = text.get_position()
        cell = picture.to_rgba(picture.get_array())[row, column]
        assert contrast(text.get_color(), cell) >= 4.4, (text.get_text(), cell)


# Okabe and Ito 2008, "Color Universal Design": colours that every kind of eye tells apart.
OKABE_ITO = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_can_be_told_apart(dark):
    """Lines have colours of a published palette, which stand out from the page; the map's ends differ in blue, seen by all."""
    text, *colours = plots.palette(dark)
    assert set(colours) < OKABE_ITO and len(set(colours)) == len(colours) == 6
    assert all(contrast(colour, plots.style(dark)["figure.facecolor"]) > 2 for colour in (text, *colours))
    ends = plots.plot_table(torch.tensor([[-1.0, 1.0]]), dark=dark).axes[0].images[0].get_cmap()
    assert all(ends(1 - share)[2] - ends(share)[2] > 0.2 for share in (0.1, 0.25, 0.4))


def test_one_look_a_scheme():
    """A scheme has its colour and a start its dash whatever stands beside; options differ in markers, own schemes in colour."""
    names = ["original", "rotary, fit", "rotary:theta=500, fit", "rotary, cold", "mine, fit", "yours", "learned:extend=tile"]
    found = plots.looks(names)
    assert found["rotary, cold"] == plots.looks(["rotary, cold"])["rotary, cold"]
    for one, other, differ in (
        ("rotary, fit", "rotary:theta=500, fit", {"marker"}),
        ("rotary, fit", "rotary, cold", {"linestyle"}),
        ("mine, fit", "yours", {"color"}),
    ):
        assert {key for key in found[one] if found[one][key] != found[other][key]} == differ
    assert len({found[name]["color"] for name in names}) == 5
    assert found["original"] == {"color": "#000000", "linestyle": "-", "marker": "o"}
    assert plots.looks(["original"], dark=True)["original"]["color"] == "#FFFFFF"


@pytest.mark.parametrize(("label", "best"), [("perplexity", min), ("accuracy", max)])
def test_few_lines(label, best):
    """Of many options the best of each scheme are drawn, then the second best; a note names all others, the title the best."""
    lines = {f"{scheme}:o={n}, fit": {8: 1.0, 16: 10 * place + n} for place, scheme in enumerate("abc") for n in range(1, 6)}
    figure = plots.plot_loss_by_length(lines | {"d": {8: 100}}, None, "", label=label)
    drawn = {line.get_label() for line in figure.axes[0].lines}
    kept = {f"{scheme}:o={n}, fit" for scheme in "abc" for n in ((1, 2) if best is min else (5, 4))} | {"d"}
    assert drawn == kept == {text.get_text() for text in figure.axes[0].texts}
    assert set(figure.get_supxlabel().partition("room: ")[2].replace("\n", " ").split("; ")) == set(lines) - kept
    assert figure.get_suptitle() == f"best at 16: {'a:o=1, fit 1' if best is min else 'c:o=5, fit 25'}"
    assert plots.plot_loss_by_length({"a": {8: 1}}, None, "", label=label).get_supxlabel() == ""


def test_names_stand_where_lines_end():
    """Names stand in the order of their lines' ends, level with them where there is room, and never on each other."""
    figure = plots.plot_loss_by_length(
        {"far": {8: 3.0, 16: 9.0}, "b": {8: 3, 16: 2.01}, "a": {8: 3, 16: 2.0}}, 8, "", label="x"
    )
    places = {text.get_text(): text.xyann[1] for text in figure.axes[0].texts}  # the names', in shares of the axes
    fraction = figure.axes[0].transData + figure.axes[0].transAxes.inverted()
    low, high = (fraction.transform((16, y))[1] for y in (2, 9))
    assert places["a"] == pytest.approx(low) and places["far"] == pytest.approx(high)
    assert places["b"] - places["a"] > 11 / (72 * 4.0) and {text.xyann[0] for text in figure.axes[0].texts} == {1.04}


def test_table_as_given():
    """The picture holds the table; colours are centred at zero where there are signs, and begin there where there are none."""
    table = sinusoids(torch.arange(16), 64)
    figure = plots.plot_table(table, title="sinusoidal")
    axes, bar = figure.axes
    picture = axes.images[0]
    assert_close(torch.from_numpy(picture.get_array().data).float(), table)
    assert picture.get_clim() == (-1, 1) and bar.get_ylabel() == "value"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("dimension", "position")
    assert figure.get_suptitle() == "sinusoidal: all rows have a norm of 5.66"
    for dark in (False, True):  # zero is the colour of the page
        middle = plots.plot_table(table, dark=dark).axes[0].images[0].get_cmap()(0.5)
        assert_close(middle[:3], to_rgb(plots.style(dark)["figure.facecolor"]), atol=0.02, rtol=0)
    positive = plots.plot_table(torch.arange(6.0).view(2, 3)).axes[0].images[0]
    assert positive.get_clim() == (0, 5) and positive.get_cmap().name == "cividis"


def test_outlier_rows_leave_colours_to_the_others():
    """With one row a hundred times as large, colours end at the bulk, and the label says what is beyond."""
    table = torch.randn(512, 8, generator=torch.Generator().manual_seed(0), dtype=torch.bfloat16)
    table[0] *= 100
    figure = plots.plot_table(table)
    picture, bar = figure.axes[0].images[0], figure.axes[1]
    assert 2 < picture.get_clim()[1] < 5 and picture.get_cmap().colorbar_extend == "both"
    end, share, most = re.search(
        r"colours end at ([\d.]+); ([\d.]+)% of entries are beyond, up to (\d+)", bar.get_ylabel()
    ).groups()
    assert math.isclose(float(end), picture.get_clim()[1], rel_tol=0.02)
    assert 0.1 <= float(share) <= 0.5 and math.isclose(float(most), float(table.abs().max()), rel_tol=0.05)
    plain = plots.plot_table(table[1:])
    assert plain.axes[0].images[0].get_clim()[1] == table[1:].abs().max() and plain.axes[1].get_ylabel() == "value"


def test_similarity_against_a_loop():
    """The similarity of rows is the cosine of each pair."""
    table = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    cosines = plots.plot_similarity(table).axes[0].images[0]
    for i in range(5):
        for j in range(5):
            dot = float(table[i] @ table[j])
            assert math.isclose(cosines.get_array()[i, j], dot / float(table[i].norm() * table[j].norm()), abs_tol=1e-5)
    assert cosines.get_clim() == (-1, 1)


def test_dot_products_against_a_loop():
    """The mean over pairs at each distance, and the least and most as a band; sinusoids need none."""
    table = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    axes = plots.plot_dot_products({"random": table, "sinusoidal": sinusoids(torch.arange(40), 16)}).axes[0]
    drawn = lines(axes)
    cosine = torch.nn.functional.cosine_similarity
    for distance in range(6):
        pairs = [float(cosine(table[i], table[i + distance], dim=0)) for i in range(6 - distance)]
        assert math.isclose(drawn["random"][1][distance], sum(pairs) / len(pairs), abs_tol=1e-6)
        (band,) = axes.collections
        edge = [y for x, y in band.get_paths()[0].vertices if x == distance]
        assert_close((min(edge), max(edge)), (min(pairs), max(pairs)), atol=1e-6, rtol=0)
    expected = [sum(math.cos(d * 10_000 ** (-m / 8)) for m in range(8)) / 8 for d in range(40)]
    assert_close(drawn["sinusoidal"][1], expected, atol=1e-5, rtol=0, check_dtype=False)


def test_wavelengths_as_given():
    """A line for each name over the pairs, and one across at the trained length."""
    axes = plots.plot_wavelengths({"a": torch.tensor([6.0, 60.0, 600.0]), "b": torch.tensor([5.0])}, trained=99).axes[0]
    drawn = lines(axes)
    assert drawn["a"] == ([0, 1, 2], [6, 60, 600]) and drawn["b"] == ([0], [5])
    assert drawn["99 tokens: no full turn above"][1] == [99, 99]
    assert "tokens" in axes.get_ylabel() and {text.get_text() for text in axes.texts} == set(drawn)
    assert axes.figure.get_suptitle() == "full turns within 99 tokens: a 2 of 3 pairs, b 1 of 1 pairs"


def test_translations_as_given():
    """Matrices side by side on one scale, each under its name."""
    matrices = {"k = 1": torch.rand(4, 4), "k = 2": torch.rand(4, 4) * 3}
    figure = plots.plot_translation(matrices)
    for axes, (name, matrix) in zip(figure.axes, matrices.items(), strict=False):
        assert axes.get_title() == name
        assert_close(torch.from_numpy(axes.images[0].get_array().data).float(), matrix)
        assert axes.images[0].get_clim()[1] == -axes.images[0].get_clim()[0] == matrices["k = 2"].max()


def test_attention_as_given():
    """A thin line for each head and a thick one for their mean, layer by layer, before above after."""
    figure = plots.plot_attention_by_distance({"before": PROFILE, "after": 2 * PROFILE})
    assert [axes.get_title() for axes in figure.axes] == [f"{n}, layer {i}" for n in ("before", "after") for i in (0, 1)]
    for number, axes in enumerate(figure.axes):
        expected = PROFILE[number % 2] * (1 + number // 2)
        *heads, middle = axes.lines
        assert len(heads) == 3 and middle.get_linewidth() > 2 * heads[0].get_linewidth()
        for line, values in zip((*heads, middle), (*expected, expected.mean(0)), strict=True):
            assert list(line.get_xdata()) == list(range(-4, 5))
            assert_close(torch.tensor(line.get_ydata()).float(), values)
        assert axes.get_yscale() == "log"


def test_attention_of_causal_and_deep_models():
    """The right is left out where nothing looks; more than six layers go on in the next row; a faint head hides nobody."""
    profile = torch.rand(8, 2, 5)
    profile[..., 3:] = 0
    profile[:, 0, 1] = 1e-12
    figure = plots.plot_attention_by_distance({"gpt": profile})
    assert len(figure.axes) == 12 and [axes.axison for axes in figure.axes] == [True] * 8 + [False] * 4
    assert list(figure.axes[0].lines[0].get_xdata()) == [-2, -1, 0]
    assert 1e-6 < figure.axes[0].get_ylim()[0] < profile.mean(1)[..., :3].min()


def test_loss_by_length_as_given():
    """Means over seeds with a band; a line at the trained length, whose place the label says; the best in the title."""
    axes = plots.plot_loss_by_length(LINES, 256, "title").axes[0]
    drawn = lines(axes)
    assert_close(drawn["rotary"][1], [3.2, 3.6])
    assert drawn["original, window"] == ([256, 512], [3.1, 3.2])
    assert [line.get_linestyle() for line in axes.lines[:2]] == ["-", "--"]
    assert axes.figure.get_suptitle() == "title: best at 512: original, window 3.2"
    (band,) = axes.collections
    assert {tuple(point) for point in band.get_paths()[0].vertices} >= {(256, 3.0), (256, 3.4), (512, 3.5), (512, 3.7)}
    assert axes.lines[2].get_xdata() == [256, 256] and "trained with 256" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_xticklabels()] == ["256", "512"]
    assert axes.get_yscale() == "linear"
    wide = plots.plot_loss_by_length({"cold": {256: 2500.0}, "fit": {256: 23.0}}, None, "x", label="perplexity").axes[0]
    assert (wide.get_yscale(), wide.get_ylabel(), len(wide.lines)) == ("log", "perplexity", 2)
    assert {50, 100, 1000} <= set(wide.get_yticks())


def test_recovery_as_given():
    """Curves from 0 tokens on, and the original across; damage that falls to nothing has a plain axis."""
    axes = plots.plot_recovery({"cold": {0: 37.0, 100: 30.0, 900: 26.0}}, original=23.3, label="perplexity").axes[0]
    assert lines(axes) == {"cold": ([0, 100, 900], [37, 30, 26]), "original as it was": ([0, 1], [23.3, 23.3])}
    assert axes.get_xscale() == "symlog" and axes.get_xlim()[0] == 0 and axes.get_ylabel() == "perplexity"
    nothing = plots.plot_recovery({"original": {0: 0.0, 10: 1.0}}).axes[0]
    assert nothing.get_yscale() == "linear" and len(nothing.lines) == 1


def test_heat_maps_as_given():
    """Every cell with its number; more than three panels stand in rows, and what is over is empty."""
    panels = {str(n): [[n / 10, 0.5], [1, 0]] for n in range(5)}
    figure = plots.plot_heat_maps(panels, **HEAT)
    for axes, (name, matrix) in zip(figure.axes, panels.items(), strict=False):
        assert axes.get_title() == name and axes.images[0].get_array().tolist() == matrix
        assert [text.get_text() for text in axes.texts] == [f"{value:.2f}" for row in matrix for value in row]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "256"]
    rows = {round(axes.get_subplotspec().rowspan.start) for axes in figure.axes[:6]}
    assert rows == {0, 1} and not figure.axes[5].axison
    assert [axes.get_ylabel() for axes in figure.axes[:4]] == ["depth", "", "", "depth"]


# -- numbers behind the pictures --------------------------------------------------------------------------------------


def test_position_tables(make_model, make_swapped):
    """A position table is the scheme's formula, the checkpoint's table, or what stands in its place in a swapped model."""
    assert_close(position_table(posswap.Sinusoidal(layout="halves"), 5, 6), sinusoids(torch.arange(5), 6, layout="halves"))
    model = make_model("gpt2", head=GPT2Model)
    assert_close(position_table(model), model.wpe.weight.detach())
    swapped = make_swapped("bert", "sinusoidal", head=BertModel, max_positions=48)
    ids = torch.arange(48)[None]
    assert_close(position_table(swapped), swapped.embeddings.position_embeddings(ids)[0].detach())
    assert not position_table(swapped, 7).requires_grad and len(position_table(swapped, 7)) == 7


@pytest.mark.parametrize("layout", ["interleaved", "cosine_first", "halves", "tensor2tensor"])
def test_frequencies(layout, make_swapped):
    """Frequencies are those of the sinusoids' formula, in every layout, and those with which rotary turns."""
    exponents = torch.arange(4, dtype=torch.float64) / (3 if layout == "tensor2tensor" else 4)
    found = frequencies(posswap.Sinusoidal(layout=layout, base=500), one_head(8, 16))
    assert_close(found, 500**-exponents, rtol=1e-5, atol=0)
    model = make_swapped("gpt2", "rotary:theta=100", head=GPT2Model)
    assert_close(frequencies(*scheme_of(model)), 100 ** -(torch.arange(8, dtype=torch.float64) / 8))


def test_translation_of_rotary_and_of_sines_alone():
    """Rotary turns its pairs, dimension by dimension as `rotate` does; sines without cosines have no T."""
    matrix, missed = translation(posswap.Rotary(), 3, 4)
    cos, sin = math.cos(3), math.sin(3)
    assert missed == 0
    assert_close(matrix[:2], torch.tensor([[cos, -sin, 0, 0], [sin, cos, 0, 0]]))
    assert translation(posswap.Ladder(rung="slowed"), 4, 8)[1] > 0.1


# -- the command ------------------------------------------------------------------------------------------------------

COMMAND = typer.Typer()
COMMAND.command()(pictures.plot)


def call(*arguments):
    """Run `plot`; return what it printed, or raise what it raised."""
    done = CliRunner().invoke(COMMAND, [str(argument) for argument in arguments])
    if isinstance(done.exception, PosswapError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def drawn(kind: str, *sources, **options):
    """The figure that `plot` saves."""
    return pictures.draw(pictures.Wish(kind=kind, sources=tuple(map(str, sources)), **options))


@pytest.fixture
def bert(save):
    """A tiny BERT with its tokenizer on disk."""
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
    "recovery": [RESULTS / "heal" / "rotary-starts" / "comparison.json"],
    "heat-map": [RESULTS / "passkey"],
}


@pytest.mark.parametrize("kind", pictures.KINDS)
def test_command_writes_pictures(kind, bert, tmp_path):
    """Every kind as PNG or, dark, as SVG, in turn, into a folder that does not exist yet."""
    suffix = (".png", ".svg")[list(pictures.KINDS).index(kind) % 2]
    sources, output = [str(source).format(bert=bert) for source in PICTURES[kind]], tmp_path / "new" / f"picture{suffix}"
    assert str(output) in call(kind, *sources, "--output", output, *(["--dark"] if suffix == ".svg" else []))
    if suffix == ".png":
        assert output.read_bytes().startswith(b"\x89PNG") and imread(output)[0, 0, :3].min() == 1
    else:
        root = ElementTree.fromstring(output.read_text())
        page = next(path for path in root.iter("{http://www.w3.org/2000/svg}path") if "fill" in path.get("style", ""))
        assert root.tag.endswith("svg") and "fill: #121212" in page.get("style")


def test_other_formats_are_refused(tmp_path):
    """Formats other than PNG and SVG are refused."""
    for name in ("a.jpg", "picture", "a.PNG.pdf"):
        with pytest.raises(PosswapError, match="must end in .png or .svg"):
            call("table", "sinusoidal", "--output", tmp_path / name)


def test_same_picture_same_file(tmp_path):
    """An SVG tells neither the time nor random names: what is committed changes when the picture does."""
    for name in ("a.svg", "b.svg"):
        call("loss", *PICTURES["loss"], "--output", tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_command_options(tmp_path):
    """The options for sizes and shifts reach the picture."""
    assert drawn("table", "sinusoidal").axes[0].images[0].get_array().shape == (16, 64)
    assert drawn("table", "sinusoidal", positions=5, size=8).axes[0].images[0].get_array().shape == (5, 8)
    shifted = drawn("translation", "ladder:rung=slowed", shifts=(2, 7), size=8)
    assert [axes.get_title().partition(",")[0] for axes in shifted.axes[:2]] == ["k = 2", "k = 7"]
    assert "misses by" in shifted.axes[0].get_title() and "misses" not in drawn("translation", "rotary").axes[0].get_title()
    assert "wrote" in call("translation", "rotary", "--shift", 2, "--size", 8, "--output", tmp_path / "a.png")


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


def test_attention_before_and_after(bert):
    """The rows are the model as it was and as the swap left it."""
    figure = drawn("attention", bert, "none", positions=24)
    assert [axes.get_title() for axes in figure.axes[::2]] == [f"{bert}, layer 0", "none, layer 0"]
    model = BertModel.from_pretrained(bert).eval()
    batches = pictures._batches(str(bert), model, 24)
    assert batches[0]["input_ids"].shape == (8, 24)
    for row in range(2):
        expected = attention_by_distance(model, batches, reach=23).double().mean(1)
        assert_close(torch.tensor(figure.axes[2 * row + 1].lines[-1].get_ydata()), expected[1], atol=1e-6, rtol=0)
        posswap.swap(model, "none")


def test_results_are_drawn_as_they_are(tmp_path):
    """Seeds of a row are one line; the figure that was asked for is the one that is drawn."""
    runs = json.loads((RESULTS / "length_extrapolation" / "comparison.json").read_text())["runs"]
    found = lines(drawn("loss", RESULTS / "length_extrapolation", figure="tuned_loss").axes[0])
    mine = [run["figures"] for run in runs if run["config"]["scheme"] == "relative"]
    assert found["relative, fit"][0] == [256, 512, 1024, 2048] and len(mine) == 3
    assert math.isclose(found["relative, fit"][1][1], sum(figures["tuned_loss_512"] for figures in mine) / 3)
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
    run = {"recipe": "r", "figures": {"loss_8": 2.0, "loss_16": 1.0}, "config": {"scheme": "rotary", "start": "fit", "lr": 1}}
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        content = {**run, "config": {**run["config"], "seed": seed}, "cost": {}}
        (tmp_path / str(seed) / "result.json").write_text(json.dumps(content))
    assert lines(drawn("loss", tmp_path).axes[0]) == {"rotary, fit": ([8, 16], [2, 1])}
    content["config"]["lr"] = 2
    (tmp_path / "1" / "result.json").write_text(json.dumps(content))
    with pytest.raises(PosswapError, match="unequal budgets: lr"):
        drawn("loss", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["heatmap", "rotary"], "no picture 'heatmap'; there are table, similarity"),
        (["table", "rotary"], r"plot attention MODEL rotary.*plot wavelengths.*take schemes that turn"),
        (["dot-products", "none"], "none adds no vectors"),
        (["table", "learned"], "learned is whatever a checkpoint has learned: name a model"),
        (["table", "ladder:rung=count,combine=concatenate"], "all zeros until it is fitted"),
        (["table", "sinusoidal", "rotary"], "one source at a time; given were sinusoidal, rotary"),
        (["table", "sinusoidal", "--size", "7"], "hidden size 7 is odd"),
        (["table", "sinusoidal:lyout=halves"], "did you mean 'layout'"),
        (["table", RESULTS / "passkey"], "takes a scheme or a model; .*passkey is a result file or folder"),
        (["table", "{bert}", "--positions", "99"], "99 positions were asked for, and the model holds 32"),
        (["similarity", "{relative}"], "relative:clip=3 adds no vectors"),
        (["translation", "{bert}"], "takes a scheme; .*bert is a model"),
        (["translation", "relative"], "relative adds no vectors"),
        (["wavelengths", "{bert}"], r"only schemes that turn .* have wavelengths; learned has none"),
        (["wavelengths", "ladder"], r"ladder has none"),
        (["attention", "rotary", "{bert}"], "takes a model, and then .*: plot attention minilm rotary"),
        (["attention", "{bert}", "--positions", "99"], "99 positions were asked for, and the model holds 32"),
        (["attention", "{relative}"], "relative has no tokenizer to read text with"),
        (["loss", "rotary"], "takes a result file or folder; rotary is a scheme"),
        (["loss", RESULTS / "cola"], "takes runs with a figure at several lengths; there are none"),
        (["loss", RESULTS / "passkey", "--figure", "speed"], "no figure 'speed' to draw; there are accuracy, candidates"),
        (["recovery", RESULTS / "passkey"], "takes curves over tokens, as recipes/heal.py writes them; there are none"),
        (["heat-map", RESULTS / "cola"], "takes shares by depth and length, as recipes/passkey.py writes them"),
        (["heat-map", RESULTS / "loop" / "results.json"], "results.json holds no runs"),
        (["loss", "{bert}/model.safetensors"], "model.safetensors is no JSON"),
        (["table", "no/such-thing"], "no/such-thing is no scheme .*, no result file or folder, and no model that loads"),
    ],
    ids=lambda given: None if isinstance(given, str) else "-".join(Path(str(word)).name for word in given),
)
def test_refusals(arguments, says, bert, relative, tmp_path):
    """What makes no sense is an error that says what is accepted, and no file is written."""
    given = [str(argument).format(bert=bert, relative=relative) for argument in arguments]
    with pytest.raises(PosswapError, match=says):
        call(*given, "--output", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("layout", ["interleaved", "cosine_first", "halves", "tensor2tensor"])
def test_a_shift_of_sinusoids_is_exact_at_any_size(layout):
    """T moves rows on where pairs are so slow that no fit could tell them apart; an odd number of dimensions is padded."""
    for size in (16, 128, *([7] if layout == "tensor2tensor" else [])):
        matrix, missed = translation(posswap.Sinusoidal(layout=layout), 16, size)
        rows = sinusoids(torch.arange(100), size, layout=layout)
        torch.testing.assert_close(rows[:-16] @ matrix.T, rows[16:], rtol=0, atol=1e-5)
        assert missed == 0 and matrix.count_nonzero() <= 2 * size
        if size % 2 == 0:
            torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rung", ["count", "normalised", "binary", "slowed"])
def test_a_shift_that_is_no_linear_map_misses(rung):
    """p -> p + k is not linear in p: what is missed is told as a share of the step, however large p is."""
    assert translation(posswap.Ladder(rung=rung), 1, 32)[1] > 0.2
    with pytest.raises(posswap.PosswapError, match="shift=0 must be at least 1"):
        translation(posswap.Ladder(rung=rung), 0, 32)


def test_rows_of_zeros_have_no_cosine():
    """Rows of zeros are left out of means and bands, and blank in the matrix."""
    table = torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])
    line = plots.plot_dot_products({"count": table}).axes[0].lines[0]
    assert line.get_ydata().tolist() == [1.0, 1.0]
    assert plots.plot_similarity(table).axes[0].images[0].get_array().mask[0].all()


def test_what_a_picture_does_not_look_at_is_an_error(tmp_path):
    """Options of other kinds, runs of other depths and foreign files are refused."""
    file, details = tmp_path / "runs.json", {"depths": [0], "lengths": [8], "accuracy": [[1]]}
    run = {"config": {"scheme": "rotary", "start": "fit", "seed": 0}, "details": details}
    for kind, source, message in (
        ("heat-map", {"runs": [run, {**run, "details": {**details, "lengths": [32]}}]}, "runs of different depths or lengths"),
        ("loss", {"runs": [1]}, "is not what compare or a recipe writes"),
        ("loss", {"runs": [{}]}, "is not what compare or a recipe writes"),
        ("recovery", {"runs": [1]}, "is not what compare or a recipe writes"),
    ):
        file.write_text(json.dumps(source))
        with pytest.raises(PosswapError, match=message):
            call(kind, file, "--output", tmp_path / "x.png")
    with pytest.raises(PosswapError, match="does not look at --shift; it takes --positions, --size"):
        call("table", "sinusoidal", "--shift", 3, "--output", tmp_path / "x.png")


def test_points_are_joined_in_order():
    """Lengths that come in another order are drawn from left to right; dollars in a name are dollars."""
    axes = plots.plot_loss_by_length({"$a$": {256: 3.0, 1024: 4.0, 512: 3.5}}, None, "$x_$").axes[0]
    assert axes.lines[0].get_xdata().tolist() == [256, 512, 1024]
    axes.figure.savefig(io.BytesIO())
