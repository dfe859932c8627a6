"""Pictures of schemes and results, as matplotlib figures: data in, `Figure` out, nothing is shown or saved here.

Every function takes `dark=True` for a picture on a dark page: ink and paper change places, and with them the first colour of
the palette. Colours are Okabe and Ito's, told apart by colour-blind readers too; markers and dashes repeat what they say.
P positions, E dimensions, H heads; distance is key position minus query position.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil, sqrt
from statistics import mean

import numpy
import torch
from cycler import cycler
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import EngFormatter, MaxNLocator

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

Points = dict[float, float | Sequence[float]]  # x -> y, or one y for each seed


def palette(dark: bool = False) -> tuple[str, ...]:
    """Return the colours of lines, ink first.

    >>> palette(dark=True)[:2]
    ('#FFFFFF', '#0072B2')
    """
    return ("#FFFFFF" if dark else "#000000", *COLOURS[1:])


def style(dark: bool = False) -> dict:
    """Return what `matplotlib.rc_context` takes to draw other pictures like these.

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
        "legend.handlelength": 3,
        "legend.labelcolor": ink,
        "lines.markersize": 4.5,
        "axes.prop_cycle": cycler(linestyle=("-", "--", ":")) * cycler(color=palette(dark), marker=MARKERS),
    }


def plot_table(table: torch.Tensor, *, title: str = "", dark: bool = False) -> Figure:
    """Draw a position table (P, E) as a heat map: a row for each position, a column for each dimension.

    Zero is the colour of the paper. Trained tables have outlier rows: where an entry is more than twice as large as all but
    0.5 % are, colours end there, and the label says so.

    >>> from hf_posswap.schemes.sinusoidal import sinusoids
    >>> figure = plot_table(sinusoids(torch.arange(16), 64), title="sinusoidal")
    >>> figure.axes[0].get_ylabel(), figure.axes[0].images[0].get_array().shape
    ('position', (16, 64))
    """
    with _canvas(7.5, 4.2, title, dark) as (figure, (axes,)):
        picture, note = _image(axes, _array(table), dark)
        axes.set(xlabel="dimension", ylabel="position")
        figure.colorbar(picture, label="\n".join(filter(None, ("value", note))))
    return figure


def plot_similarity(table: torch.Tensor, *, normalise: bool = True, title: str = "", dark: bool = False) -> Figure:
    """Draw the cosines of all pairs of rows of a table (P, E), or with `normalise=False` their dot products, as (P, P).

    Where it depends on the distance alone, as for sinusoids, all diagonals are of one colour.

    >>> plot_similarity(torch.eye(3)).axes[0].images[0].get_array().tolist()[0]
    [1.0, 0.0, 0.0]
    """
    with _canvas(5.6, 4.6, title, dark) as (figure, (axes,)):
        picture, note = _image(axes, _gram(table, normalise), dark, limit=1.0 if normalise else None, square=True)
        axes.set(xlabel="position", ylabel="position")
        figure.colorbar(picture, label="\n".join(filter(None, ("cosine" if normalise else "dot product", note))))
    return figure


def plot_dot_products(tables: dict[str, torch.Tensor], *, title: str = "", dark: bool = False) -> Figure:
    """Draw the cosine of two rows of a table (P, E) against their distance: the mean, and a band from the least to the most.

    There is a band where the relation of two positions depends on more than their distance.

    >>> from hf_posswap.schemes.sinusoidal import sinusoids
    >>> figure = plot_dot_products({"sinusoidal": sinusoids(torch.arange(9), 4)})
    >>> line, band = figure.axes[0].lines[0], figure.axes[0].collections
    >>> round(float(line.get_ydata()[1]), 3), len(band)  # (cos 1 + cos 0.01) / 2 at distance 1, and nothing else
    (0.77, 0)
    """
    with _canvas(_width(tables), 4.0, title, dark) as (figure, (axes,)):
        for name, table in tables.items():
            gram = _gram(table, normalise=True)
            diagonals = [gram.diagonal(distance).compressed() for distance in range(len(gram))]
            average, low, high = (
                numpy.array([edge(diagonal) if len(diagonal) else numpy.nan for diagonal in diagonals])
                for edge in (numpy.mean, numpy.min, numpy.max)
            )
            (line,) = axes.plot(range(len(gram)), average, marker="", label=_plain(name))
            if numpy.nanmax(high - low) > 1e-5:  # float32 tables are not Toeplitz to the last digit
                axes.fill_between(range(len(gram)), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.axhline(0, color="0.5", linewidth=0.8, zorder=0)
        axes.set(xlabel="distance (positions)", ylabel="cosine of two rows: mean, least to most")
        _legend(axes)
    return figure


def plot_wavelengths(
    wavelengths: dict[str, torch.Tensor], *, trained: int | None = None, title: str = "", dark: bool = False
) -> Figure:
    """Draw how many tokens a full turn takes, pair by pair of dimensions, on a log axis; 2 pi over the angular frequency.

    Pairs above the line of the trained length have not shown a full turn to a model of that length.

    >>> figure = plot_wavelengths({"rotary": torch.tensor([6.28, 628.0])}, trained=512)
    >>> figure.axes[0].get_yscale(), figure.axes[0].lines[0].get_xdata().tolist()
    ('log', [0, 1])
    """
    with _canvas(_width(wavelengths), 4.0, title, dark) as (figure, (axes,)):
        for beneath, (name, turns) in zip(reversed(range(len(wavelengths))), wavelengths.items(), strict=True):
            # Formulas often agree: what is drawn first is wider, and is seen under what covers it.
            axes.plot(numpy.arange(len(turns)), _array(turns), label=_plain(name), markersize=3, linewidth=1.2 + 1.3 * beneath)
        if trained is not None:
            axes.axhline(trained, color="0.5", linewidth=1, label=f"{trained} tokens: no full turn above")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="pair of dimensions", ylabel="wavelength (tokens)")
        _legend(axes)
    return figure


def plot_translation(matrices: dict[str, torch.Tensor], *, title: str = "", dark: bool = False) -> Figure:
    """Draw matrices T (E, E) with PE(t + k) = T(k) PE(t) side by side: a 2 x 2 rotation for each pair of dimensions.

    Vaswani et al. 2017, section 3.5: "for any fixed offset k, PE(pos+k) can be represented as a linear function of PE(pos)".

    >>> plot_translation({"k = 0": torch.eye(4), "k = 1": torch.eye(4)}).axes[1].get_title()
    'k = 1'
    """
    width = 1.6 + 2.9 * len(matrices)
    with _canvas(width, 3.7, title, dark, columns=len(matrices)) as (figure, grid):
        limit = max(1.0, *(float(matrix.abs().max()) for matrix in matrices.values()))
        for axes, (name, matrix) in zip(grid, matrices.items(), strict=True):
            picture, _ = _image(axes, _array(matrix), dark, limit=limit, square=True, signed=True)
            axes.set_title(_plain(name))
            axes.set_xlabel("dimension at t")
        grid[0].set_ylabel("dimension at t + k")
        figure.colorbar(picture, ax=grid, label="entry of T(k)", shrink=0.8)
    return figure


def plot_attention_by_distance(
    profiles: dict[str, torch.Tensor], *, label: str = "attention", log: bool = True, title: str = "", dark: bool = False
) -> Figure:
    """Draw what each head does by distance, a panel for each layer: thin lines are heads, the thick one is their mean.

    `profiles` are (layers, H, 2 * reach + 1), as `measure.attention_by_distance` returns them, one below the other: before
    and after a swap. The ends hold all that is farther. Where nothing looks to the right, the right is left out. On a log axis
    a head that is far below every mean leaves the picture.

    >>> profile = torch.full((2, 3, 9), 1 / 9)
    >>> figure = plot_attention_by_distance({"before": profile, "after": profile})
    >>> len(figure.axes), len(figure.axes[0].lines), figure.axes[3].get_title()
    (4, 4, 'after, layer 1')
    """
    columns = min(6, max(len(profile) for profile in profiles.values()))
    rows = [ceil(len(profile) / columns) for profile in profiles.values()]
    size = (1.2 + 1.9 * max(columns, 2), 0.9 + 1.9 * sum(rows))
    one_sided = not any(profile[..., profile.shape[-1] // 2 + 1 :].any() for profile in profiles.values())
    with _canvas(*size, title, dark, rows=sum(rows), columns=columns, share=True) as (figure, grid):
        free, least = iter(grid), []
        for (name, profile), height in zip(profiles.items(), rows, strict=True):
            reach = profile.shape[-1] // 2
            distances = numpy.arange(-reach, 1 if one_sided else reach + 1)
            values = _array(profile)[..., : len(distances)]
            least.append(values.mean(1).min())
            for layer, axes in zip(range(height * columns), free, strict=False):
                if layer >= len(values):
                    axes.set_axis_off()
                    continue
                axes.plot(distances, values[layer].T, color=COLOURS[-1], linestyle="-", marker="", linewidth=0.6, alpha=0.7)
                middle = values[layer].mean(0)
                axes.plot(distances, middle, color=palette(dark)[0], linestyle="-", marker="", linewidth=1.6)
                axes.set_title(_plain(f"{name}, layer {layer}"))
        if log:
            grid[0].set_yscale("log")
            if min(least) > 0:  # single heads may fall to 1e-12, and would leave no room for the others
                grid[0].set_ylim(bottom=max(grid[0].get_ylim()[0], min(least) / 30))
        figure.supxlabel(f"distance (key - query), in tokens; the ends hold all beyond {reach}", fontsize=9)
        figure.supylabel(label, fontsize=9)
    return figure


def plot_loss_by_length(
    lines: dict[str, Points],
    trained: int | None,
    title: str,
    *,
    label: str = "held-out loss, nats a token",
    dark: bool = False,
) -> Figure:
    """Loss against input length: one line for each name, {length: loss}; dashed where the name says that a window slides.

    >>> figure = plot_loss_by_length({"rotary": {256: 3.1, 512: [3.2, 3.4]}}, 256, "two seeds at 512")
    >>> figure.axes[0].lines[0].get_ydata().tolist()
    [3.1, 3.3]
    """
    with _canvas(_width(lines), 4.0, title, dark) as (figure, (axes,)):
        for name, points in lines.items():
            _curve(axes, name, points, "--" if "window" in name else None)
        lengths = sorted({length for points in lines.values() for length in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("input length (tokens)" if trained is None else f"input length (tokens; trained with {trained})")
        if trained is not None:
            axes.axvline(trained, color="0.5", linewidth=1, zorder=0)
        axes.set_ylabel(label)
        _scale(axes, [value for line in axes.lines[: len(lines)] for value in line.get_ydata()])
        _legend(axes)
    return figure


def plot_recovery(
    lines: dict[str, Points],
    *,
    original: float | None = None,
    steps: str = "tokens of training",
    label: str = "damage",
    title: str = "",
    dark: bool = False,
) -> Figure:
    """Draw what training wins back, {name: {tokens: value}}, and across it what the original has; 0 tokens are on the axis.

    >>> figure = plot_recovery({"rotary, cold": {0: 37.0, 1000: 26.0}}, original=23.3, label="perplexity")
    >>> [line.get_label() for line in figure.axes[0].lines]
    ['rotary, cold', 'original as it was']
    """
    with _canvas(_width(lines), 4.2, title, dark) as (figure, (axes,)):
        for name, points in lines.items():
            _curve(axes, name, points)
        if original is not None:
            axes.axhline(original, color="0.5", linewidth=1, label="original as it was", zorder=0)
        done = sorted({step for points in lines.values() for step in points})
        first = next((step for step in done if step > 0), 1)
        axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        axes.set_xlim(left=done[0])
        axes.set_xticks(sorted({done[0], *done[::-2]}))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        axes.set(xlabel=steps, ylabel=label)
        _scale(axes, [value for line in axes.lines for value in line.get_ydata()])
        _legend(axes)
    return figure


def plot_heat_maps(
    panels: dict[str, list[list[float]]],
    *,
    rows: list,
    columns: list,
    row_label: str,
    column_label: str,
    title: str,
    dark: bool = False,
) -> Figure:
    """Draw matrices of shares from 0 to 1 side by side, each cell with its number; more than three in several rows.

    >>> axes = {"row_label": "depth", "column_label": "length", "title": "keys found"}
    >>> figure = plot_heat_maps({"rotary": [[1, 0.5]]}, rows=[0.0], columns=[128, 256], **axes)
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.00', '0.50']
    """
    across = len(panels) if len(panels) <= 3 else ceil(sqrt(len(panels)))
    down = ceil(len(panels) / across)
    size = (1.5 + across * (1.0 + 0.6 * len(columns)), 0.6 + down * (1.0 + 0.4 * len(rows)))
    with _canvas(*size, title, dark, rows=down, columns=across) as (figure, grid):
        for axes, (name, matrix) in zip(grid, panels.items(), strict=False):
            picture = axes.imshow(matrix, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            for row, values in enumerate(matrix):
                for column, value in enumerate(values):
                    colour = "white" if value < 0.47 else "black"  # where both read equally well
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
            axes.set_xticks(range(len(columns)), [str(column) for column in columns])
            axes.set_yticks(range(len(rows)), [str(row) for row in rows])
            axes.tick_params(length=0)
            axes.set_xlabel(column_label)
            axes.set_title(_plain(name))
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes in grid[::across]:
            axes.set_ylabel(row_label)
        figure.colorbar(picture, ax=grid, shrink=0.9)
    return figure


@contextmanager
def _canvas(
    width: float, height: float, title: str, dark: bool, *, rows: int = 1, columns: int = 1, share: bool = False
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Hand out a figure in the style, and its axes row by row."""
    with rc_context(style(dark)):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
        if title:
            figure.suptitle(_plain(title))
        yield figure, list(grid.flat)
        for axes in figure.axes:  # matplotlib makes ticks when it draws, and then another style is set
            axes.tick_params(which="both", colors=style(dark)["text.color"])


def _plain(name: str) -> str:
    """Return a name, a folder's for one, so that its dollars do not begin a formula."""
    return name.replace("$", r"\$")


def _array(values: torch.Tensor) -> numpy.ndarray:
    return values.detach().double().cpu().numpy()


def _gram(table: torch.Tensor, normalise: bool) -> numpy.ndarray:
    rows = table.detach().double().cpu()
    if not normalise:
        return (rows @ rows.T).numpy()
    rows = rows / rows.norm(dim=-1, keepdim=True)
    return numpy.ma.masked_invalid((rows @ rows.T).numpy())  # a row of zeros has no direction, and no cosine


def _image(
    axes: Axes, matrix: numpy.ndarray, dark: bool, *, limit: float | None = None, square: bool = False, signed: bool = False
) -> tuple[AxesImage, str]:
    """Draw a matrix, with 0 in the middle of the colours if it has signs; return it, and a note on what is beyond them."""
    signed, note = signed or bool(matrix.min() < 0), ""
    colours = _diverging(dark) if signed else colormaps["cividis"]
    if limit is None:
        sizes = numpy.abs(matrix)
        limit, usual = float(sizes.max()) or 1.0, float(numpy.quantile(sizes, 0.995))
        if limit > 2 * usual > 0:
            note = f"colours end at {usual:.3g}; {numpy.mean(sizes > usual):.1%} of entries are beyond, up to {limit:.3g}"
            limit, colours.colorbar_extend = usual, "both" if signed else "max"
    aspect = "equal" if square else "auto"
    picture = axes.imshow(matrix, vmin=-limit if signed else 0.0, vmax=limit, cmap=colours, aspect=aspect)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    return picture, note


def _diverging(dark: bool) -> LinearSegmentedColormap:
    """Orange, the paper, blue: a pair that the colour-blind tell apart."""
    if dark:
        return LinearSegmentedColormap.from_list("dark", ["#FFE0B0", "#D9801A", "#121212", "#3F7FC1", "#CFE4FA"])
    return LinearSegmentedColormap.from_list("light", ["#7F3B08", "#E08214", "#FFFFFF", "#4A78B5", "#14285A"])


def _curve(axes: Axes, name: str, points: Points, linestyle: str | None = None) -> None:
    """Draw means as a line, and where there are several values a band from the least to the most."""
    points = dict(sorted(points.items()))
    values = [list(value) if isinstance(value, Sequence) else [value] for value in points.values()]
    dashes = {} if linestyle is None else {"linestyle": linestyle}
    (line,) = axes.plot(list(points), [mean(seeds) for seeds in values], label=_plain(name), **dashes)
    if any(len(seeds) > 1 for seeds in values):
        low, high = ([edge(seeds) for seeds in values] for edge in (min, max))
        axes.fill_between(list(points), low, high, color=line.get_color(), alpha=0.2, linewidth=0)


def _scale(axes: Axes, values: list[float]) -> None:
    """Make the y axis logarithmic where values differ by more than five times, with numbers that people read."""
    low, high = min(values), max(values)
    if low > 0 and high > 5 * low:
        steps = [digit * 10.0**power for power in range(-12, 12) for digit in (1, 2, 5)]
        axes.set_yscale("log")
        axes.set_yticks([step for step in steps if low / 2.5 < step < high * 2.5], minor=False)
        axes.set_ylim(0.85 * low, 1.2 * high)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")


def _width(names: Iterable[str]) -> float:
    """Return the inches that a picture takes with its legend."""
    return 5.8 + 0.065 * max(map(len, names))


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
