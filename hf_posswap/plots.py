"""Plots of schemes and results as matplotlib figures: data in, `Figure` out, nothing shown or saved.

In all plots a scheme has one colour, a start one dash style, options of one scheme differ in markers, and the original is a
solid line in the text colour. Lines are named at their ends; at most seven are drawn, and a note names those left out. Titles
end with the main finding, computed from the data. `dark=True` is for dark pages.
P positions, E dimensions, H heads; distance is key position minus query position.
"""

from collections.abc import Sequence
from math import ceil, sqrt
from statistics import mean

import numpy
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from hf_posswap import drawing
from hf_posswap.drawing import Points, array, canvas, image, line_plot, looks, palette, plain, result_plot
from hf_posswap.experiments.comparison import top

style = drawing.style  # for plots of your own


def plot_table(table: torch.Tensor, *, title: str = "", dark: bool = False) -> Figure:
    """Draw a position table (P, E) as a heat map: a row for each position, a column for each dimension.

    Where numbers have both signs, zero is the colour of the paper. Trained tables have outlier rows: where an entry is more
    than twice as large as all but 0.5 % are, colours end there, and the label says so.

    >>> from hf_posswap.schemes.sinusoidal import sinusoids
    >>> figure = plot_table(sinusoids(torch.arange(16), 64), title="sinusoidal")
    >>> figure.get_suptitle(), figure.axes[0].images[0].get_array().shape
    ('sinusoidal: all rows have a norm of 5.66', (16, 64))
    """
    norms = table.detach().cpu().double().norm(dim=-1)
    low, middle, high = (f"{edge.item():.3g}" for edge in (norms.min(), norms.median(), norms.max()))
    sight = f"norms of rows from {low} to {high}, median {middle}" if low != high else f"all rows have a norm of {low}"
    with canvas((7.5, 4.2), title, sight, dark) as (figure, (axes,)):
        picture, note = image(axes, array(table), dark)
        axes.set(xlabel="dimension", ylabel="position")
        figure.colorbar(picture, label="value" + note)
    return figure


def plot_similarity(table: torch.Tensor, *, title: str = "", dark: bool = False) -> Figure:
    """Draw the cosines of all pairs of rows of a table (P, E), as (P, P).

    Where it depends on the distance alone, as for sinusoids, all diagonals are of one colour.

    >>> plot_similarity(torch.eye(3)).axes[0].images[0].get_array().tolist()[0]
    [1.0, 0.0, 0.0]
    """
    cosines = drawing.cosines(table)
    near, far = (float(numpy.ma.filled(cosines.diagonal(apart).mean(), numpy.nan)) for apart in (1, len(cosines) // 2))
    sight = f"mean cosine of neighbours {near:.2f}, of rows half a table apart {far:.2f}"
    with canvas((5.6, 4.6), title, sight, dark) as (figure, (axes,)):
        picture, _ = image(axes, cosines, dark, limit=1.0, square=True)
        axes.set(xlabel="position", ylabel="position")
        figure.colorbar(picture, label="cosine")
    return figure


def plot_dot_products(tables: dict[str, torch.Tensor], *, title: str = "", dark: bool = False) -> Figure:
    """Draw the cosine of two rows of a table (P, E) against their distance: the mean, and a band from the least to the most.

    A band appears where the cosine depends on more than the distance.

    >>> from hf_posswap.schemes.sinusoidal import sinusoids
    >>> figure = plot_dot_products({"sinusoidal": sinusoids(torch.arange(9), 4)})
    >>> round(float(figure.axes[0].lines[0].get_ydata()[1]), 3), figure.get_suptitle()  # (cos 1 + cos 0.01) / 2
    (0.77, 'distance alone decides: sinusoidal')
    """
    lines, decides = {}, {True: [], False: []}
    for name, table in tables.items():
        cosines = drawing.cosines(table)
        diagonals = [cosines.diagonal(distance).compressed() for distance in range(len(cosines))]
        lines[name] = {d: values.tolist() for d, values in enumerate(diagonals) if len(values)}
        # float32 tables are Toeplitz only up to rounding
        decides[all(numpy.ptp(values) < 1e-5 for values in diagonals if len(values))].append(name)
    words = {True: "distance alone decides", False: "a band where it does not"}
    sight = "; ".join(f"{words[alone]}: {', '.join(names)}" for alone, names in decides.items() if names)
    with line_plot(lines, title, sight, dark, marker="") as (figure, axes):
        axes.axhline(0, color="0.5", linewidth=0.8, zorder=0)
        axes.set(xlabel="distance (positions)", ylabel="cosine of two rows: mean, least to most")
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
        short = EngFormatter(places=None, sep="")
        spans = ([short(float(f"{end:.3g}")) for end in (turns.min(), turns.max())] for turns in wavelengths.values())
        ends = (f"{name} {low} to {high}" for name, (low, high) in zip(wavelengths, spans, strict=True))
        sight = f"a full turn takes, in tokens: {'; '.join(ends)}"
    else:
        counts = (f"{name} {int((turns <= trained).sum())} of {len(turns)} pairs" for name, turns in wavelengths.items())
        sight = f"full turns within {trained} tokens: {', '.join(counts)}"
    lines = {name: dict(enumerate(array(turns).tolist())) for name, turns in wavelengths.items()}
    with line_plot(lines, title, sight, dark, markersize=3) as (figure, axes):
        for beneath, line in enumerate(reversed(axes.lines)):
            line.set_linewidth(1.2 + 1.3 * beneath)  # formulas often agree: a line drawn earlier stays visible under later ones
        if trained is not None:
            axes.axhline(trained, color="0.5", linewidth=1, label=f"{trained} tokens: no full turn above")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set(xlabel="pair of dimensions", ylabel="wavelength (tokens)")
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
    with canvas((1.6 + 2.9 * len(matrices), 3.7), title, sight, dark, columns=len(matrices)) as (figure, grid):
        limit = max(1.0, *(float(matrix.abs().max()) for matrix in matrices.values()))
        for axes, (name, matrix) in zip(grid, matrices.items(), strict=True):
            picture, _ = image(axes, array(matrix), dark, limit=limit, square=True, signed=True)
            axes.set_title(plain(name))
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
    with canvas(size, title, sight, dark, rows=sum(rows), columns=columns, share=True) as (figure, grid):
        free, least = iter(grid), []
        for (name, profile), height in zip(profiles.items(), rows, strict=True):
            reach, kind = profile.shape[-1] // 2, drawing.kind_of(name)
            distances = numpy.arange(-reach, 1 if one_sided else reach + 1)
            values = array(profile)[..., : len(distances)]
            least.append(values.mean(1).min())
            colour = palette(dark)[drawing.SCHEMES.index(kind) if kind in drawing.SCHEMES else 0]
            for layer, axes in zip(range(height * columns), free, strict=False):
                if layer >= len(values):
                    axes.set_axis_off()
                    continue
                axes.plot(distances, values[layer].T, color=colour, marker="", linewidth=0.6, alpha=0.4)
                axes.plot(distances, values[layer].mean(0), color=colour, marker="", linewidth=1.8)
                axes.set_title(plain(f"{name}, layer {layer}"))
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
    title: str = "",
    *,
    label: str = "held-out loss, nats a token",
    dark: bool = False,
) -> Figure:
    """Draw the loss, or what `label` names, against input length: one line for each name, {length: loss}.

    The title says which line is best at the longest length: the lowest if the label is a loss, a perplexity or a cost, else the
    highest.

    >>> figure = plot_loss_by_length({"rotary": {256: 3.1, 512: [3.2, 3.4]}}, 256, "losses")
    >>> figure.axes[0].lines[0].get_ydata().tolist(), figure.get_suptitle()
    ([3.1, 3.3], 'losses: best at 512: rotary 3.3')
    """
    with result_plot(lines, label, title, dark) as (figure, axes, lengths):
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, map(str, lengths))
        axes.minorticks_off()
        axes.set_xlabel(f"input length (tokens{'' if trained is None else f'; trained with {trained}'})")
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
    'best at 1,000: rotary, cold 26; original as it was 23.3'
    """
    known = "" if original is None else f"; original as it was {original:.3g}"
    with result_plot(lines, label, title, dark, known) as (figure, axes, done):
        if original is not None:
            axes.axhline(original, color=palette(dark)[0], linewidth=1, label="original as it was", zorder=0)
        axes.set_xscale("symlog", linthresh=next((step for step in done if step > 0), 1), linscale=0.5)
        axes.set_xlim(left=done[0])
        axes.set_xticks(sorted({done[0], *done[::-2]}))
        axes.minorticks_off()
        axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
        axes.set_xlabel(steps)
    return figure


def plot_bars(rows: dict[str, Sequence[float]], *, label: str, title: str = "", dark: bool = False) -> Figure:
    """Draw a bar for each row: the mean over seeds, which are dots.

    >>> plot_bars({"rotary, fit": [0.5, 0.7], "original": [0.9]}, label="accuracy").get_suptitle()
    'best: original 0.9'
    """
    means = {name: mean(values) for name, values in rows.items()}
    (most, known), size = top(label), (drawing.width_for(rows), 1.0 + 0.3 * len(rows))
    first = most(means, key=means.get)
    with canvas(size, title, f"{known}: {first} {means[first]:.3g}", dark) as (figure, (axes,)):
        for index, (name, look) in enumerate(looks(list(rows), dark).items()):
            axes.barh(index, means[name], color=look["color"], alpha=0.6, height=0.6)
            axes.plot(rows[name], [index] * len(rows[name]), "o", color=palette(dark)[0], markersize=3)
        axes.set_yticks(range(len(rows)), [plain(name) for name in rows])
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
    with canvas(size, title, sight, dark, rows=down, columns=across) as (figure, grid):
        for axes, (name, matrix) in zip(grid, panels.items(), strict=False):
            picture = axes.imshow(matrix, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            for (row, column), value in numpy.ndenumerate(numpy.array(matrix, dtype=float)):
                colour = "white" if value < 0.47 else "black"  # where black and white are equally legible
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
            axes.set_xticks(range(len(columns)), [str(column) for column in columns])
            axes.set_yticks(range(len(rows)), [str(row) for row in rows])
            axes.tick_params(length=0)
            axes.set(xlabel=column_label, title=plain(name))
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        for axes in grid[::across]:
            axes.set_ylabel(row_label)
        figure.colorbar(picture, ax=grid, shrink=0.9)
    return figure
