"""Plots of schemes and results as matplotlib figures: data in, `Figure` out, nothing shown or saved.

In all plots a scheme has one colour, a start one dash style, options of one scheme differ in markers, and the original is a
solid line in the text colour. Lines are named at their ends; at most seven are drawn, and a note names those left out. Titles
end with the main finding, computed from the data. `dark=True` is for dark pages. Colours are Okabe and Ito's, which
colour-blind readers can distinguish. P positions, E dimensions, H heads; distance is key position minus query position.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil, sqrt
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
from matplotlib.ticker import EngFormatter, MaxNLocator

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SCHEMES = ("original", "relative", "rotary", "sinusoidal", "none", "learned", "ladder")  # in the order of COLOURS
STARTS = {"fit": "-", "swap": "--", "cold": ":", "scratch": "-.", "annealed": (0, (5, 1, 1, 1, 1, 1)), "window": "--"}
MOST_LINES = 7
LESS_IS_BETTER = ("loss", "perplexity", "kl", "damage", "seconds", "kib")

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
    kinds = [_kind(name) for name in names]
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


def plot_table(table: torch.Tensor, *, title: str = "", dark: bool = False) -> Figure:
    """Draw a position table (P, E) as a heat map: a row for each position, a column for each dimension.

    Zero is the colour of the paper. Trained tables have outlier rows: where an entry is more than twice as large as all but
    0.5 % are, colours end there, and the label says so.

    >>> from hf_posswap.schemes.sinusoidal import sinusoids
    >>> figure = plot_table(sinusoids(torch.arange(16), 64), title="sinusoidal")
    >>> figure.get_suptitle(), figure.axes[0].images[0].get_array().shape
    ('sinusoidal: all rows have a norm of 5.66', (16, 64))
    """
    norms = table.detach().double().norm(dim=-1)
    low, middle, high = (f"{edge.item():.3g}" for edge in (norms.min(), norms.median(), norms.max()))
    sight = f"norms of rows from {low} to {high}, median {middle}" if low != high else f"all rows have a norm of {low}"
    with _canvas(7.5, 4.2, title, sight, dark) as (figure, (axes,)):
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
    gram, what = _gram(table, normalise), "cosine" if normalise else "dot product"
    near, far = (float(numpy.ma.filled(gram.diagonal(apart).mean(), numpy.nan)) for apart in (1, len(gram) // 2))
    sight = f"mean {what} of neighbours {near:.2f}, of rows half a table apart {far:.2f}"
    with _canvas(5.6, 4.6, title, sight, dark) as (figure, (axes,)):
        picture, note = _image(axes, gram, dark, limit=1.0 if normalise else None, square=True)
        axes.set(xlabel="position", ylabel="position")
        figure.colorbar(picture, label="\n".join(filter(None, (what, note))))
    return figure


def plot_dot_products(tables: dict[str, torch.Tensor], *, title: str = "", dark: bool = False) -> Figure:
    """Draw the cosine of two rows of a table (P, E) against their distance: the mean, and a band from the least to the most.

    A band appears where the cosine depends on more than the distance.

    >>> from hf_posswap.schemes.sinusoidal import sinusoids
    >>> figure = plot_dot_products({"sinusoidal": sinusoids(torch.arange(9), 4)})
    >>> round(float(figure.axes[0].lines[0].get_ydata()[1]), 3), figure.get_suptitle()  # (cos 1 + cos 0.01) / 2
    (0.77, 'distance alone decides: sinusoidal')
    """
    curves, decides = {}, {True: [], False: []}
    for name, table in tables.items():
        gram = _gram(table, normalise=True)
        diagonals = [gram.diagonal(distance).compressed() for distance in range(len(gram))]
        curves[name] = {d: values.tolist() for d, values in enumerate(diagonals) if len(values)}
        # float32 tables are Toeplitz only up to rounding
        decides[all(numpy.ptp(values) < 1e-5 for values in diagonals if len(values))].append(name)
    words = {True: "distance alone decides", False: "a band where it does not"}
    sight = "; ".join(f"{words[alone]}: {', '.join(names)}" for alone, names in decides.items() if names)
    with _canvas(_width(tables), 4.0, title, sight, dark) as (figure, (axes,)):
        _curves(axes, curves, dark, marker="")
        axes.axhline(0, color="0.5", linewidth=0.8, zorder=0)
        axes.set(xlabel="distance (positions)", ylabel="cosine of two rows: mean, least to most")
        _name_ends(axes)
    return figure


def plot_wavelengths(
    wavelengths: dict[str, torch.Tensor], *, trained: int | None = None, title: str = "", dark: bool = False
) -> Figure:
    """Draw the wavelength of each pair of dimensions, in tokens, on a log axis: 2 pi over the angular frequency.

    A model of the trained length has not seen a full turn of the pairs above its line.

    >>> figure = plot_wavelengths({"rotary": torch.tensor([6.28, 628.0])}, trained=512)
    >>> figure.get_suptitle(), figure.axes[0].lines[0].get_xdata().tolist()
    ('full turns within 512 tokens: rotary 1 of 2 pairs', [0, 1])
    """
    if trained is None:
        sight = "a full turn takes, in tokens: "
        sight += "; ".join(
            f"{name} {_engineer(turns.min())} to {_engineer(turns.max())}" for name, turns in wavelengths.items()
        )
    else:
        counts = (f"{name} {int((turns <= trained).sum())} of {len(turns)} pairs" for name, turns in wavelengths.items())
        sight = f"full turns within {trained} tokens: " + ", ".join(counts)
    with _canvas(_width(wavelengths), 4.0, title, sight, dark) as (figure, (axes,)):
        _curves(
            axes, {name: dict(enumerate(_array(turns).tolist())) for name, turns in wavelengths.items()}, dark, markersize=3
        )
        for beneath, line in enumerate(reversed(axes.lines)):
            line.set_linewidth(1.2 + 1.3 * beneath)  # formulas often agree: a line drawn earlier stays visible under later ones
        if trained is not None:
            axes.axhline(trained, color="0.5", linewidth=1, label=f"{trained} tokens: no full turn above")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="pair of dimensions", ylabel="wavelength (tokens)")
        _name_ends(axes)
    return figure


def plot_translation(matrices: dict[str, torch.Tensor], *, title: str = "", dark: bool = False) -> Figure:
    """Draw matrices T (E, E) with PE(t + k) = T(k) PE(t) side by side: a 2 x 2 rotation for each pair of dimensions.

    Vaswani et al. 2017, section 3.5: "for any fixed offset k, PE(pos+k) can be represented as a linear function of PE(pos)".

    >>> figure = plot_translation({"k = 0": torch.eye(4), "k = 1": torch.eye(4)})
    >>> figure.axes[1].get_title(), figure.get_suptitle()
    ('k = 1', 'rotations: T(k) keeps every length')
    """
    off = max(float((one.double() @ one.double().T - torch.eye(len(one))).abs().max()) for one in matrices.values())
    sight = "rotations: T(k) keeps every length" if off < 1e-3 else f"no rotations: T(k) T(k)' is up to {off:.2g} from 1"
    with _canvas(1.6 + 2.9 * len(matrices), 3.7, title, sight, dark, columns=len(matrices)) as (figure, grid):
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
    """Draw each head's attention mass by distance, a panel for each layer: thin lines are heads, the thick one is their mean.

    `profiles` are (layers, H, 2 * reach + 1), as `measure.attention_by_distance` returns them, one below the other: before
    and after a swap. The ends hold all that is farther. The right half is left out if no head attends to it. On a log axis
    heads far below every mean are cut off.

    >>> profile = torch.full((2, 3, 9), 1 / 9)
    >>> figure = plot_attention_by_distance({"before": profile, "after": profile})
    >>> len(figure.axes), len(figure.axes[0].lines), figure.axes[3].get_title()
    (4, 4, 'after, layer 1')
    """
    columns = min(6, max(len(profile) for profile in profiles.values()))
    rows = [ceil(len(profile) / columns) for profile in profiles.values()]
    size = (1.2 + 1.9 * max(columns, 2), 0.9 + 1.9 * sum(rows))
    one_sided = not any(profile[..., profile.shape[-1] // 2 + 1 :].any() for profile in profiles.values())
    near = {name: profile.double().mean((0, 1))[1:-1] for name, profile in profiles.items()}  # the ends are no distances
    sight = f"{label}, mean of all heads, is largest at distance "
    sight += ", ".join(f"{int(one.argmax()) - len(one) // 2:+} ({one.max():.2g}; {name})" for name, one in near.items())
    with _canvas(*size, title, sight, dark, rows=sum(rows), columns=columns, share=True) as (figure, grid):
        free, least = iter(grid), []
        for (name, profile), height in zip(profiles.items(), rows, strict=True):
            reach, kind = profile.shape[-1] // 2, _kind(name)
            distances = numpy.arange(-reach, 1 if one_sided else reach + 1)
            values = _array(profile)[..., : len(distances)]
            least.append(values.mean(1).min())
            colour = palette(dark)[SCHEMES.index(kind) if kind in SCHEMES else 0]
            for layer, axes in zip(range(height * columns), free, strict=False):
                if layer >= len(values):
                    axes.set_axis_off()
                    continue
                axes.plot(distances, values[layer].T, color=colour, marker="", linewidth=0.6, alpha=0.4)
                axes.plot(distances, values[layer].mean(0), color=colour, marker="", linewidth=1.8)
                axes.set_title(_plain(f"{name}, layer {layer}"))
        if log:
            grid[0].set_yscale("log")
            if min(least) > 0:  # single heads may fall to 1e-12 and squeeze the others
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
    across: str = "input length (tokens)",
    ticks: dict[float, str] | None = None,
    dark: bool = False,
) -> Figure:
    """Draw the loss, or what `label` names, against input length: one line for each name, {length: loss}.

    `ticks` are names for lengths. The title says which line is best at the longest length: the lowest if the label is a loss, a
    perplexity or a cost, otherwise the highest.

    >>> figure = plot_loss_by_length({"rotary": {256: 3.1, 512: [3.2, 3.4]}}, 256, "losses")
    >>> figure.axes[0].lines[0].get_ydata().tolist(), figure.get_suptitle()
    ([3.1, 3.3], 'losses: best at 512: rotary 3.3')
    """
    kept, sight, note = _few(lines, label)
    with _canvas(_width(kept), 4.0, title, sight, dark, note) as (figure, (axes,)):
        _curves(axes, kept, dark)
        lengths = sorted({length for points in kept.values() for length in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [(ticks or {}).get(n, str(n)) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel(across if trained is None else f"{across.removesuffix(')')}; trained with {trained})")
        axes.set_ylabel(label)
        _scale(axes)
        _name_ends(axes)
        if trained is not None:
            axes.axvline(trained, color="0.5", linewidth=1, zorder=0)
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
    """Draw values during training, {name: {tokens: value}}, and the original's as a horizontal line; 0 tokens are on the axis.

    >>> figure = plot_recovery({"rotary, cold": {0: 37.0, 1000: 26.0}}, original=23.3, label="perplexity")
    >>> figure.get_suptitle()
    'best at 1,000: rotary, cold 26; original 23.3'
    """
    kept, sight, note = _few(lines, label)
    sight += "" if original is None else f"; original {original:.3g}"
    with _canvas(_width(kept), 4.2, title, sight, dark, note) as (figure, (axes,)):
        _curves(axes, kept, dark)
        if original is not None:
            axes.axhline(original, color=palette(dark)[0], linewidth=1, label="original as it was", zorder=0)
        done = sorted({step for points in kept.values() for step in points})
        first = next((step for step in done if step > 0), 1)
        axes.set_xscale("symlog", linthresh=first, linscale=0.5)
        axes.set_xlim(left=done[0])
        axes.set_xticks(sorted({done[0], *done[::-2]}))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        axes.set(xlabel=steps, ylabel=label)
        _scale(axes)
        _name_ends(axes)
    return figure


def plot_bars(rows: dict[str, Sequence[float]], *, label: str, title: str = "", dark: bool = False) -> Figure:
    """Draw a bar for each row: the mean over seeds, which are dots.

    >>> plot_bars({"rotary, fit": [0.5, 0.7], "original": [0.9]}, label="accuracy").get_suptitle()
    'best: original 0.9'
    """
    means = {name: mean(values) for name, values in rows.items()}
    best = _best(label)(means, key=means.get)
    with _canvas(_width(rows), 1.0 + 0.3 * len(rows), title, f"best: {best} {means[best]:.3g}", dark) as (figure, (axes,)):
        for index, (name, look) in enumerate(looks(list(rows), dark).items()):
            axes.barh(index, means[name], color=look["color"], alpha=0.6, height=0.6)
            axes.plot(rows[name], [index] * len(rows[name]), "o", color=palette(dark)[0], markersize=3)
        axes.set_yticks(range(len(rows)), [_plain(name) for name in rows])
        axes.invert_yaxis()
        axes.set_xlabel(label)
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
    """Draw matrices of shares (0 to 1) side by side, each cell with its number; more than three take several rows.

    >>> axes = {"row_label": "depth", "column_label": "length", "title": "keys found"}
    >>> figure = plot_heat_maps({"rotary": [[1, 0.5]]}, rows=[0.0], columns=[128, 256], **axes)
    >>> [text.get_text() for text in figure.axes[0].texts], figure.get_suptitle()
    (['1.00', '0.50'], 'keys found: most on average, rotary 0.75')
    """
    across = len(panels) if len(panels) <= 3 else ceil(sqrt(len(panels)))
    down = ceil(len(panels) / across)
    size = (1.5 + across * (1.0 + 0.6 * len(columns)), 0.6 + down * (1.0 + 0.4 * len(rows)))
    means = {name: float(numpy.mean(matrix)) for name, matrix in panels.items()}
    most = max(means, key=means.get)
    sight = f"most on average, {most} {means[most]:.2f}"
    with _canvas(*size, title, sight, dark, rows=down, columns=across) as (figure, grid):
        for axes, (name, matrix) in zip(grid, panels.items(), strict=False):
            picture = axes.imshow(matrix, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            for (row, column), value in numpy.ndenumerate(numpy.array(matrix, dtype=float)):
                colour = "white" if value < 0.47 else "black"  # where black and white are equally legible
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
            axes.set_xticks(range(len(columns)), [str(column) for column in columns])
            axes.set_yticks(range(len(rows)), [str(row) for row in rows])
            axes.tick_params(length=0)
            axes.set(xlabel=column_label, title=_plain(name))
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes in grid[::across]:
            axes.set_ylabel(row_label)
        figure.colorbar(picture, ax=grid, shrink=0.9)
    return figure


@contextmanager
def _canvas(
    width: float,
    height: float,
    title: str,
    sight: str,
    dark: bool,
    note: str = "",
    *,
    rows: int = 1,
    columns: int = 1,
    share: bool = False,
) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure in the style, and its axes row by row."""
    with rc_context(style(dark)):
        figure = Figure(figsize=(width, height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share)
        letters = int(13 * width)  # in a line
        figure.suptitle(_plain(fill(": ".join(filter(None, (title, sight))), letters)))
        if note:
            figure.supxlabel(_plain(fill(note, int(1.2 * letters))), fontsize=8)
        yield figure, list(grid.flat)
        for axes in figure.axes:  # matplotlib makes ticks when it draws, after this style has ended
            axes.tick_params(which="both", colors=style(dark)["text.color"])


def _kind(name: str) -> str:
    """Return the scheme in "scheme:options, start"."""
    return name.partition(",")[0].partition(":")[0]


def _plain(name: str) -> str:
    """Return a name, such as a folder's, with its dollar signs escaped: they would begin a formula."""
    return name.replace("$", r"\$")


def _engineer(value: float) -> str:
    return EngFormatter(places=None, sep="")(float(f"{float(value):.3g}"))


def _array(values: torch.Tensor) -> numpy.ndarray:
    return values.detach().double().cpu().numpy()


def _gram(table: torch.Tensor, normalise: bool) -> numpy.ndarray:
    rows = table.detach().double().cpu()
    if not normalise:
        return (rows @ rows.T).numpy()
    rows = rows / rows.norm(dim=-1, keepdim=True)
    return numpy.ma.masked_invalid((rows @ rows.T).numpy())  # a row of zeros has no cosine


def _image(
    axes: Axes, matrix: numpy.ndarray, dark: bool, *, limit: float | None = None, square: bool = False, signed: bool = False
) -> tuple[AxesImage, str]:
    """Draw a matrix, with 0 in the middle of the colours if it has both signs; return it and a note on clipped values."""
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
    """Return orange, background, blue: distinct for the colour-blind."""
    if dark:
        return LinearSegmentedColormap.from_list("dark", ["#FFE0B0", "#D9801A", "#121212", "#3F7FC1", "#CFE4FA"])
    return LinearSegmentedColormap.from_list("light", ["#7F3B08", "#E08214", "#FFFFFF", "#4A78B5", "#14285A"])


def _best(label: str):
    return min if any(word in label.lower() for word in LESS_IS_BETTER) else max


def _few(lines: dict[str, Points], label: str) -> tuple[dict[str, Points], str, str]:
    """Return the lines to draw, which of them is best where lines end, and a note on those left out.

    The best line of each scheme comes first, then the second of each; a line that ends sooner counts as worse.
    """
    end, best = max(max(points) for points in lines.values()), _best(label)
    worst = float("inf") if best is min else float("-inf")
    last = {name: float(numpy.mean(points[end])) if end in points else worst for name, points in lines.items()}
    ranked, places = sorted(lines, key=last.get, reverse=best is max), {}
    for name in ranked:
        places[name] = sum(_kind(other) == _kind(name) for other in places)
    chosen = sorted(ranked, key=places.get)[:MOST_LINES]
    left_out = [name for name in lines if name not in chosen]
    note = f"not drawn, for room: {'; '.join(left_out)}" if left_out else ""
    kept = {name: dict(sorted(points.items())) for name, points in lines.items() if name in chosen}
    return kept, f"best at {end:,}: {ranked[0]} {last[ranked[0]]:.3g}", note


def _curves(axes: Axes, lines: dict[str, Points], dark: bool, **options) -> None:
    """Draw means as lines and, for several values, a band from the lowest to the highest."""
    for name, look in looks(list(lines), dark).items():
        values = {x: list(y) if isinstance(y, Sequence) else [y] for x, y in lines[name].items()}
        axes.plot(list(values), [mean(seeds) for seeds in values.values()], label=_plain(name), **{**look, **options})
        low, high = ([edge(seeds) for seeds in values.values()] for edge in (min, max))
        if numpy.max(numpy.subtract(high, low)) > 1e-5:
            axes.fill_between(list(values), low, high, color=look["color"], alpha=0.2, linewidth=0)


def _name_ends(axes: Axes) -> None:
    """Write the name of each line at its end, moved up or down where names overlap; a thin line leads to it."""
    middle = axes.get_xlim()
    fraction = axes.transData + axes.transAxes.inverted()
    ends = []
    for line in axes.lines:
        if not line.get_label().startswith("_"):
            x, y = line.get_xdata()[-1], line.get_ydata()[-1]
            across = line.get_transform() != axes.transData  # from edge to edge
            ends.append(((1.0 if across else fraction.transform((x, y))[0], fraction.transform((middle[0], y))[1]), line))
    ends.sort(key=lambda end: end[0][1])
    gap, places = 15 / (72 * axes.figure.get_figheight()), []
    for (_, y), _ in ends:
        places.append(max(y, places[-1] + gap) if places else y)
    highest = 1.0
    for index in reversed(range(len(places))):
        places[index] = min(places[index], highest)
        highest = places[index] - gap
    for place, (end, line) in zip(places, ends, strict=True):
        leader = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.8, "alpha": 0.7, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(line.get_label(), end, (1.04, place), "axes fraction", "axes fraction", leader, va="center", fontsize=8)


def _scale(axes: Axes) -> None:
    """Make the y axis logarithmic if values differ by more than a factor of five, with plain numbers."""
    values = [value for line in axes.lines for value in line.get_ydata()]
    low, high = min(values), max(values)
    if low > 0 and high > 5 * low:
        steps = [digit * 10.0**power for power in range(-12, 12) for digit in (1, 2, 5)]
        axes.set_yscale("log")
        axes.set_yticks([step for step in steps if low / 2.5 < step < high * 2.5], minor=False)
        axes.set_ylim(0.85 * low, 1.2 * high)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")


def _width(names) -> float:
    """Return a plot's width in inches, with room for the names of its lines."""
    return 5.8 + 0.065 * max(map(len, names))
