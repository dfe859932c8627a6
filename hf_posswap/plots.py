"""Pictures of results, as matplotlib figures; no global state, nothing is shown or saved here."""

from matplotlib.figure import Figure

from hf_posswap.compare import figures_of

# Okabe and Ito's palette: told apart by colour-blind readers too. Markers and dashes repeat what colours say.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def plot_perplexity_by_length(model: dict) -> Figure:
    """Perplexity against input length for each scheme: right after the swap (dashed), after fit and tuning (solid)."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    lengths = sorted(int(n) for n in model["evaluation_tokens"])
    for index, row in enumerate(model["rows"]):
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        figures = {(stage, name): (value, spread) for stage, name, value, spread in figures_of(row)}
        for stage, style in (("swapped", "--"), ("tuned", "-")):
            points = [figures[stage, f"perplexity_{n}"] for n in lengths]
            axes.errorbar(
                lengths,
                [value for value, _ in points],
                yerr=_spreads(points),
                linestyle=style,
                marker=marker,
                markersize=5,
                color=colour,
                alpha=1.0 if stage == "tuned" else 0.5,
                label=row["scheme"] if stage == "tuned" else None,
                capsize=2,
            )
    axes.axvline(model["trained_positions"], color="0.7", linewidth=1, zorder=0)
    axes.annotate(
        "trained length", (model["trained_positions"], 1.0), xycoords=("data", "axes fraction"), xytext=(4, -12),
        textcoords="offset points", color="0.4", fontsize=8,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.tick_params(which="both", labelsize=8)
    axes.set_xlabel("input length (tokens)")
    axes.set_ylabel("held-out perplexity, lower is better")
    axes.set_title(f"{model['model']}: dashed right after the swap, solid after fit and tuning", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


def plot_quality(model: dict) -> Figure:
    """One bar for each scheme and stage: cosine with the original, or perplexity at the trained length."""
    lengths = sorted(int(n) for n in model["evaluation_tokens"])
    name = f"perplexity_{lengths[0]}" if model["causal"] else f"cosine_{lengths[-1]}"
    stages = {
        "cold": ("cold swap", "#E69F00"),
        "swapped": ("warm swap", "#56B4E9"),
        "fitted": ("fitted", "#009E73"),
        "tuned": ("tuned", "#0072B2"),
    }
    figure = Figure(figsize=(8.5, 4.0), layout="constrained")
    axes = figure.subplots()
    rows = model["rows"]
    tables = [{(s, n): (value, spread) for s, n, value, spread in figures_of(row)} for row in rows]
    reference = tables[0]["swapped", name][0]
    for offset, (stage, (label, colour)) in zip((-0.33, -0.11, 0.11, 0.33), stages.items(), strict=True):
        places = [i for i, table in enumerate(tables) if i > 0 and (stage, name) in table]
        values = [tables[i][stage, name] for i in places]
        bars = axes.bar(
            [i + offset for i in places],
            [value for value, _ in values],
            yerr=_spreads(values),
            width=0.2,
            color=colour,
            label=label,
            capsize=2,
        )
        axes.bar_label(bars, fmt="%.1f" if model["causal"] else "%.2f", fontsize=7, padding=2)
    axes.axhline(reference, color="black", linewidth=1, linestyle=":", label="original")
    if model["causal"]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_minor_formatter("{x:.0f}")
        axes.tick_params(which="both", labelsize=8)
        axes.set_ylabel(f"perplexity at {lengths[0]} tokens, lower is better")
    else:
        axes.set_ylabel(f"cosine with the original at {lengths[-1]} tokens")
    axes.margins(y=0.12)
    axes.set_xticks(range(1, len(rows)), [row["scheme"] for row in rows[1:]])
    axes.set_title(f"{model['model']}: what a swap costs, and what {model['tuning_tokens']:,} tokens win back", fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


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


def _spreads(figures: list[tuple[float, float | None]]) -> list[float] | None:
    spreads = [spread for _, spread in figures]
    return None if None in spreads else spreads  # one seed: no bars, instead of bars of no length


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
