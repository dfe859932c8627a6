"""Pictures of results, as matplotlib figures; no global state, nothing is shown or saved here."""

from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart by colour-blind readers too. Markers and dashes repeat what colours say.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_heat_maps(
    panels: dict[str, list[list[float]]], *, rows: list, columns: list, row_label: str, column_label: str, title: str
) -> Figure:
    """Draw matrices of shares from 0 to 1 side by side, each cell with its number."""
    figure = Figure(figsize=(1.5 + len(panels) * (1.0 + 0.6 * len(columns)), 1.6 + 0.4 * len(rows)), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, matrix) in zip(grid, panels.items(), strict=True):
        picture = axes.imshow(matrix, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for row, values in enumerate(matrix):
            for column, value in enumerate(values):
                colour = "white" if value < 0.5 else "black"
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(columns)), [str(column) for column in columns])
        axes.set_yticks(range(len(rows)), [str(row) for row in rows])
        axes.tick_params(labelsize=8, length=0)
        axes.set_xlabel(column_label)
        axes.set_title(name, fontsize=9)
    grid[0].set_ylabel(row_label)
    figure.colorbar(picture, ax=list(grid), shrink=0.9)
    figure.suptitle(title, fontsize=10)
    return figure


def plot_loss_by_length(lines: dict[str, dict[int, float]], trained: int, title: str) -> Figure:
    """Loss against input length: one line for each name, {length: loss}; dashed where the name says that a window slides."""
    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axes = figure.subplots()
    for index, (name, points) in enumerate(lines.items()):
        axes.plot(
            list(points),
            list(points.values()),
            linestyle="--" if "window" in name else "-",
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            color=COLOURS[index % len(COLOURS)],
            label=name,
        )
    lengths = sorted({length for points in lines.values() for length in points})
    axes.axvline(trained, color="0.7", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel(f"input length (tokens; trained with {trained})")
    axes.set_ylabel("held-out loss, nats a token")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    return figure
