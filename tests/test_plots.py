"""Pictures: what is drawn is what was given, read back from the axes; light and dark."""

import io
import math
import re

import matplotlib
import numpy
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap import plots
from hf_posswap.measure.positions import translation
from hf_posswap.schemes.sinusoidal import sinusoids

PROFILE = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(0))
HEAT = {"rows": [0, 0.5], "columns": [128, 256], "row_label": "depth", "column_label": "length", "title": "keys"}
LINES = {"rotary": {256: [3.0, 3.4], 512: [3.5, 3.7]}, "original, window": {256: 3.1, 512: 3.2}}


TABLE = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))

# One picture of each kind, from data made here.
DRAW = {
    "table": lambda dark: plots.plot_table(TABLE, title="a table", dark=dark),
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


@pytest.mark.parametrize(("label", "best"), [("perplexity", min), ("accuracy", max), ("ratio_256", min), ("mrr", max)])
def test_few_lines(label, best):
    """Of many options the best of each scheme are drawn, then the second best; a note names all others, the title the best."""
    lines = {f"{scheme}:o={n}, fit": {8: 1.0, 16: 10 * place + n} for place, scheme in enumerate("abc") for n in range(1, 6)}
    figure = plots.plot_loss_by_length(lines | {"d": {8: 100}}, None, "", label=label)
    drawn = {line.get_label() for line in figure.axes[0].lines}
    kept = {f"{scheme}:o={n}, fit" for scheme in "abc" for n in ((1, 2) if best is min else (5, 4))} | {"d"}
    assert drawn == kept == {text.get_text() for text in figure.axes[0].texts}
    assert set(figure.get_supxlabel().partition("room: ")[2].replace("\n", " ").split("; ")) == set(lines) - kept
    known = "highest" if label == "mrr" else "best"  # where the name does not tell, the highest is not called the best
    assert figure.get_suptitle() == f"{known} at 16: {'a:o=1, fit 1' if best is min else 'c:o=5, fit 25'}"
    bars = plots.plot_bars({"a": [0.1], "b": [0.2]}, label=label).get_suptitle()
    assert bars == f"{known}: {'a 0.1' if best is min else 'b 0.2'}"
    assert plots.plot_loss_by_length({"a": {8: 1}}, None, "", label=label).get_supxlabel() == ""


def test_names_stand_where_lines_end():
    """Names stand in the order of their lines' ends, level with them where there is room, and never on each other."""
    ends = {"far": {8: 3.0, 16: 9.0}, "b": {8: 3, 16: 2.01}, "a": {8: 3, 16: 2.0}}
    figure = plots.plot_loss_by_length(ends, 8, "", label="x")
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
    says = r"colours end at ([\d.]+); ([\d.]+)% of entries are beyond, up to (\d+)"
    end, share, most = re.search(says, bar.get_ylabel()).groups()
    assert math.isclose(float(end), picture.get_clim()[1], rel_tol=0.02)
    assert 0.1 <= float(share) <= 0.5 and math.isclose(float(most), float(table.abs().max()), rel_tol=0.05)
    plain = plots.plot_table(table[1:])
    assert plain.axes[0].images[0].get_clim()[1] == table[1:].abs().max() and plain.axes[1].get_ylabel() == "value"


def test_similarity_as_given():
    """The similarity of rows is the cosine of each pair; rows of zeros have none, and are left out of means."""
    table = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    table[0] = 0
    cosines = plots.plot_similarity(table).axes[0].images[0]
    expected = torch.nn.functional.cosine_similarity(table[1:, None], table[None, 1:], dim=-1)
    assert_close(torch.from_numpy(cosines.get_array().data[1:, 1:]).float(), expected)
    assert cosines.get_clim() == (-1, 1) and cosines.get_array().mask[0].all()
    line = plots.plot_dot_products({"count": torch.tensor([[0.0, 0.0], [1.0, 0.0], [2.0, 0.0]])}).axes[0].lines[0]
    assert line.get_ydata().tolist() == [1.0, 1.0]


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
    """Matrices side by side on one scale, each under its name; yarn's, which also sharpens scores, turn as others do."""
    turn, _ = translation(posswap.Rotary(scaling={"rope_type": "yarn", "factor": 4.0}), 3, 8)
    assert_close(turn @ turn.T, torch.eye(8))
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
    """Means over seeds with a band, joined in order; a line at the trained length, told by the label; the best in the title."""
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
    unordered = plots.plot_loss_by_length({"$a$": {256: 3.0, 1024: 4.0, 512: 3.5}}, None, "$x_$").axes[0]
    assert unordered.lines[0].get_xdata().tolist() == [256, 512, 1024]
    unordered.figure.savefig(io.BytesIO())  # dollars in a name are dollars


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
