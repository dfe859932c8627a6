"""What pictures have in common: colours, dashes and markers of schemes, the page, matrices, and lines with their names.

Colours are Okabe and Ito's, which colour-blind readers can distinguish.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mean
from textwrap import fill

import numpy
import torch
from cycler import cycler
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator

from hf_posswap.experiments.comparison import top

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SCHEMES = ("original", "relative", "rotary", "sinusoidal", "none", "learned", "ladder")  # in the order of COLOURS
STARTS = {"fit": "-", "swap": "--", "cold": ":", "scratch": "-.", "window": "--"}
MOST_LINES = 7

Points = dict[float, float | Sequence[float]]  # x -> y, or one y for each seed


def palette(dark: bool = False) -> tuple[str, ...]:
    """Return the colours of lines, the text colour first.

    >>> palette(dark=True)[:2]
    ('#FFFFFF', '#0072B2')
    """
    return ("#FFFFFF" if dark else "#000000", *COLOURS[1:])


def looks(names: Sequence[str], dark: bool = False) -> dict[str, dict]:
    """Return colour, dash and marker of lines named "scheme:options, start", as `Axes.plot` takes them.

    Names of other schemes share the colours that the built-in ones in this plot leave free.

    >>> looks(["rotary, fit", "rotary, cold"])["rotary, cold"]
    {'color': '#D55E00', 'linestyle': ':', 'marker': 'o'}
    """
    colours, found = dict(zip(SCHEMES, palette(dark), strict=True)), {}
    kinds = [kind_of(name) for name in names]
    free = [colour for scheme, colour in reversed(colours.items()) if scheme not in kinds] or list(colours.values())
    others = list(dict.fromkeys(kind for kind in kinds if kind not in colours))
    for name, kind in zip(names, kinds, strict=True):
        colour = colours.get(kind) or free[others.index(kind) % len(free)]
        dash = next((STARTS[part] for part in name.split(", ")[1:] if part in STARTS), "-")
        alike = sum((one["color"], one["linestyle"]) == (colour, dash) for one in found.values())
        found[name] = {"color": colour, "linestyle": dash, "marker": MARKERS[alike % len(MARKERS)]}
    return found


def style(dark: bool = False) -> dict:
    """Return settings for `matplotlib.rc_context` to draw other plots in this style.

    >>> style(dark=True)["figure.facecolor"]
    '#121212'
    """
    ink, paper = ("#E8E8E8", "#121212") if dark else ("#1A1A1A", "#FFFFFF")
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor"), paper),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 8),
        **dict.fromkeys(("axes.labelsize", "axes.titlesize"), 9),
        "figure.titlesize": 10,
        "legend.frameon": False,
        "lines.markersize": 4.5,
        "axes.prop_cycle": cycler(color=palette(dark), marker=MARKERS),
    }


@contextmanager
def canvas(
    size: tuple[float, float], title: str, sight: str, dark: bool, *, rows: int = 1, columns: int = 1, share: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure in the style, and its axes row by row."""
    with rc_context(style(dark)):
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
        figure.suptitle(plain(fill(": ".join(filter(None, (title, sight))), int(13 * size[0]))))
        yield figure, list(grid.flat)
        for axes in figure.axes:  # matplotlib makes ticks when it draws, after this style has ended
            axes.tick_params(which="both", colors=style(dark)["text.color"])


def kind_of(name: str) -> str:
    """Return the scheme in "scheme:options, start"."""
    return name.partition(",")[0].partition(":")[0]


def plain(name: str) -> str:
    """Return a name, such as a folder's, with its dollar signs escaped: they would begin a formula."""
    return name.replace("$", r"\$")


def array(values: torch.Tensor) -> numpy.ndarray:
    """Return values as NumPy's, float64."""
    return values.detach().cpu().double().numpy()


def cosines(table: torch.Tensor) -> numpy.ma.MaskedArray:
    """Return the cosines of all pairs of rows, float64; a row of zeros has none."""
    rows = table.detach().cpu().double()
    rows = rows / rows.norm(dim=-1, keepdim=True)
    return numpy.ma.masked_invalid((rows @ rows.T).numpy())


def image(
    axes: Axes, matrix: numpy.ndarray, dark: bool, *, limit: float | None = None, square: bool = False, signed: bool = False
) -> tuple[AxesImage, str]:
    """Draw a matrix, with 0 in the middle of the colours if it has both signs; return it and a note on clipped values."""
    signed, note = signed or bool(matrix.min() < 0), ""
    # Orange, background, blue: distinct for the colour-blind.
    light_or_dark = "#FFE0B0 #D9801A #121212 #3F7FC1 #CFE4FA" if dark else "#7F3B08 #E08214 #FFFFFF #4A78B5 #14285A"
    colours = LinearSegmentedColormap.from_list("signs", light_or_dark.split()) if signed else colormaps["cividis"]
    if limit is None:
        sizes = numpy.abs(matrix)
        limit, usual = float(sizes.max()) or 1.0, float(numpy.quantile(sizes, 0.995))
        if limit > 2 * usual > 0:
            note = f"\ncolours end at {usual:.3g}; {numpy.mean(sizes > usual):.1%} of entries are beyond, up to {limit:.3g}"
            limit, colours.colorbar_extend = usual, "both" if signed else "max"
    aspect = "equal" if square else "auto"
    picture = axes.imshow(matrix, vmin=-limit if signed else 0.0, vmax=limit, cmap=colours, aspect=aspect)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return picture, note


@contextmanager
def line_plot(lines: dict[str, Points], title: str, sight: str, dark: bool, **options) -> Iterator[tuple[Figure, Axes]]:
    """Yield a figure and its axes with means as lines and, for several values, a band from the lowest to the highest."""
    with canvas((width_for(lines), 4.0), title, sight, dark) as (figure, (axes,)):
        for name, look in looks(list(lines), dark).items():
            values = {x: list(y) if isinstance(y, Sequence) else [y] for x, y in lines[name].items()}
            axes.plot(list(values), [mean(seeds) for seeds in values.values()], label=plain(name), **{**look, **options})
            low, high = ([edge(seeds) for seeds in values.values()] for edge in (min, max))
            if numpy.max(numpy.subtract(high, low)) > 1e-5:
                axes.fill_between(list(values), low, high, color=look["color"], alpha=0.2, linewidth=0)
        yield figure, axes
        _name_ends(axes)


@contextmanager
def result_plot(
    lines: dict[str, Points], label: str, title: str, dark: bool, known: str = ""
) -> Iterator[tuple[Figure, Axes, list[float]]]:
    """Yield a figure with the best lines, its axes, and all x; the title says which ends best, and what else is known."""
    kept, sight, note = _few(lines, label)
    with line_plot(kept, title, sight + known, dark) as (figure, axes):
        axes.set_ylabel(label)
        if note:
            figure.supxlabel(plain(fill(note, int(15.6 * figure.get_figwidth()))), fontsize=8)
        yield figure, axes, sorted({x for points in kept.values() for x in points})
        _scale(axes)


def _few(lines: dict[str, Points], label: str) -> tuple[dict[str, Points], str, str]:
    """Return the lines to draw, which of them is best (or highest: see `top`) where lines end, and a note on those left out.

    The best line of each scheme comes first, then the second of each; a line that ends sooner counts as worse.
    """
    end, (most, known) = max(max(points) for points in lines.values()), top(label)
    worst = float("inf") if most is min else float("-inf")
    last = {name: float(numpy.mean(points[end])) if end in points else worst for name, points in lines.items()}
    ranked, places = sorted(lines, key=last.get, reverse=most is max), {}
    for name in ranked:
        places[name] = sum(kind_of(other) == kind_of(name) for other in places)
    chosen = sorted(ranked, key=places.get)[:MOST_LINES]
    left_out = [name for name in lines if name not in chosen]
    note = f"not drawn, for room: {'; '.join(left_out)}" if left_out else ""
    kept = {name: dict(sorted(points.items())) for name, points in lines.items() if name in chosen}
    return kept, f"{known} at {end:,}: {ranked[0]} {last[ranked[0]]:.3g}", note


def _name_ends(axes: Axes) -> None:
    """Write the name of each line at its end, moved up or down where names overlap; a thin line leads to it."""
    left, _ = axes.get_xlim()
    fraction = axes.transData + axes.transAxes.inverted()
    ends = []
    for line in _named(axes):
        x, y = line.get_xdata()[-1], line.get_ydata()[-1]
        across = line.get_transform() != axes.transData  # from edge to edge
        ends.append(((1.0 if across else fraction.transform((x, y))[0], fraction.transform((left, y))[1]), line))
    ends.sort(key=lambda end: end[0][1])
    gap, places = 15 / (72 * axes.figure.get_figheight()), []
    for (_, y), _ in ends:
        places.append(max(y, places[-1] + gap) if places else y)
    for index in reversed(range(len(places))):  # back down, from the top of the axes
        places[index] = min([places[index], *(below - gap for below in places[index + 1 : index + 2]), 1.0])
    for place, (end, line) in zip(places, ends, strict=True):
        leader = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.8, "alpha": 0.7, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(line.get_label(), end, (1.04, place), "axes fraction", "axes fraction", leader, va="center", fontsize=8)


def _named(axes: Axes) -> list[Line2D]:
    return [line for line in axes.lines if not line.get_label().startswith("_")]


def _scale(axes: Axes) -> None:
    """Make the y axis logarithmic if values differ by more than a factor of five, with plain numbers."""
    values = [value for line in _named(axes) for value in line.get_ydata()]
    low, high = min(values), max(values)
    if low > 0 and high > 5 * low:
        axes.set_yscale("log")
        axes.set_ylim(0.85 * low, 1.2 * high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=99))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")


def width_for(names) -> float:
    """Return a plot's width in inches, with room for the names of its lines."""
    return 5.8 + 0.065 * max(map(len, names))
