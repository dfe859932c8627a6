"""Finished runs of a recipe side by side: the same budget or no comparison, means with spread, one page to share.

A run is a folder with the result.json of a recipe (`recipe.main`). Runs may differ in scheme, start and seed; anything else
that differs was either asked for (`vary`) or makes the comparison unfair, and that is an error which names it.
"""

import base64
import html
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, mean, stdev
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from hf_posswap.errors import PosswapError
from hf_posswap.extras import extra
from hf_posswap.provenance import write_json
from hf_posswap.training.budget import NOT_BUDGET

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORIGINAL = "original"  # the scheme of a model that is left as it is
FREE = ("scheme", "start", "seed", "schemes_from", "save_model")
_PARTS = {"recipe", "command", "commit", "versions", "hardware", "config", "figures", "cost", "folder"}
COST = {"tokens_per_second": ("tokens/s", 1.0, "{:,.0f}"), "peak_memory_bytes": ("peak MiB", 2**20, "{:,.0f}")}


def load_runs(places: Sequence[Path]) -> list[dict]:
    """Return the results below some folders, in the order of their paths; each knows its `folder`.

    A comparison.json, or a folder that holds one and no runs, is read too: what others have measured needs no second run.
    """
    runs = []
    for place in map(Path, places):
        found = sorted(place.rglob("result.json"))
        runs += [{**_read(path), "folder": str(path.parent)} for path in found]
        if not found:
            runs += _compared(place)
    return list({run["folder"]: run for run in runs}.values())


def _compared(place: Path) -> list[dict]:
    file = place / "comparison.json" if place.is_dir() else place
    if not file.is_file():
        raise PosswapError(f"no result.json in {place}: give folders that a recipe wrote and finished, or a comparison.json")
    runs = _read(file).get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) and _PARTS <= set(run) for run in runs):
        raise PosswapError(f"{file} holds no runs: give a comparison.json, or folders that a recipe wrote and finished")
    return [{**run, "folder": str(file.parent / run["folder"])} for run in runs]


def _read(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise PosswapError(f"{path} cannot be read ({error}): remove it, and run that again") from None
    if not isinstance(found, dict):
        raise PosswapError(f"{path} must hold an object, not {type(found).__name__}")
    return found


def check_budgets(runs: list[dict], vary: Sequence[str] = ()) -> None:
    """Raise where runs cannot be compared: another recipe, another budget, a run twice, or seeds that only some have."""
    first = runs[0]
    for run in runs[1:]:
        if run["recipe"] != first["recipe"]:
            raise PosswapError(
                f"{run['folder']} is a run of {run['recipe']}, {first['folder']} of {first['recipe']}: compare one recipe at "
                "a time"
            )
    known = {name for run in runs for name in run["config"]}
    if unknown := sorted(set(vary) - known):
        raise PosswapError(f"{unknown[0]!r} is no option of {first['recipe']}; it has {', '.join(sorted(known))}")
    for name in sorted(known - {*FREE, *NOT_BUDGET, *vary}):
        for run in runs[1:]:
            values = [one["config"].get(name) for one in (first, run)]
            if values[0] != values[1]:
                raise PosswapError(
                    f"unequal budgets: {name} is {values[0]!r} in {first['folder']} and {values[1]!r} in {run['folder']}; run "
                    f"one of them again, or pass --vary {name} if that is the question"
                )
    rows = _rows(runs, vary)
    seeds = {row: [run["config"]["seed"] for run in members] for row, members in rows.items()}
    for row, members in rows.items():
        files = sorted({str(run["config"].get("schemes_from")) for run in members})
        if len(files) > 1:  # one name, and maybe two schemes
            raise PosswapError(f"runs of {_label(row)} have schemes_from {' and '.join(files)}: compare those of one file")
    for row, found in seeds.items():
        if len(set(found)) < len(found):
            raise PosswapError(f"{_label(row)} has a seed twice ({sorted(found)}): give each run once")
        if set(found) != set(seeds[next(iter(rows))]):
            raise PosswapError(
                f"{_label(row)} has seeds {sorted(found)} and {_label(next(iter(rows)))} {sorted(seeds[next(iter(rows))])}: "
                "compare over equal seeds"
            )


def _rows(runs: list[dict], vary: Sequence[str]) -> dict[tuple, list[dict]]:
    """Group runs that differ in seed alone."""
    rows = {}
    for run in runs:
        rows.setdefault(_row(run["config"], vary), []).append(run)
    return dict(sorted(rows.items(), key=lambda item: item[0][0] != ORIGINAL))  # what all others are compared with


def _row(config: dict, vary: Sequence[str]) -> tuple:
    """Return what a row's runs share; an original has no start, unless it was trained from nothing."""
    start = "" if config["scheme"] == ORIGINAL and config["start"] != "scratch" else config["start"]
    return (config["scheme"], start, *((name, str(config.get(name))) for name in vary))


def row_label(run: dict, vary: Sequence[str] = ()) -> str:
    """Return the name of the row of a table that a run is in."""
    return _label(_row(run["config"], vary))


def _label(row: tuple) -> str:
    scheme, start, *varied = row
    return ", ".join([scheme, *([start] if start else []), *(f"{name} {value}" for name, value in varied)])


def markdown(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return one table, a line for each scheme and start; ± is the standard deviation over seeds."""
    names = list(figures) or list(dict.fromkeys(name for run in runs for name in run["figures"]))
    for name in names:
        if not any(name in run["figures"] for run in runs):
            known = sorted({name for run in runs for name in run["figures"]})
            raise PosswapError(f"no run has the figure {name!r}; there are {', '.join(known)}")
    costs = [name for name in COST if any(name in run["cost"] for run in runs)]
    heads = [*(name.replace("_", " ") for name in names), *(COST[name][0] for name in costs)]
    lines = [f"| positions | {' | '.join(heads)} |", f"|---|{'---:|' * len(heads)}"]
    for row, members in _rows(runs, vary).items():
        cells = [_cell([run["figures"].get(name) for run in members]) for name in names]
        for name in costs:
            _, unit, form = COST[name]
            values = [run["cost"][name] / unit for run in members if name in run["cost"]]
            cells.append(form.format(mean(values)) if values else "")
        lines.append(f"| {_label(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return ""
    form = "{:.3f}" if max(map(abs, found)) < 10 else "{:.1f}"
    spread = len(found) > 1 and all(map(math.isfinite, found))
    return form.format(fmean(found)) + (f" ± {form.format(stdev(found))}" if spread else "")


def paired_table(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return a table of how far each row is from the original's, seed by seed; empty where no original was run.

    Runs of one seed share their luck (the order of data, what is drawn), which falls out of their difference: the mean of the
    differences ± their standard deviation. Bold: Student's t-test calls it different from zero, p < 0.05, each cell by itself;
    where a figure is the same with all seeds there is nothing to test.
    """
    rows = _rows(runs, vary)
    names = list(figures) or list(dict.fromkeys(name for run in runs for name in run["figures"]))
    lines = [f"| less the original | {' | '.join(name.replace('_', ' ') for name in names)} |", f"|---|{'---:|' * len(names)}"]
    for row, members in rows.items():
        # What was born with a scheme is compared with what was born without, if that was run.
        original = next((one for start in (row[1], "") if (one := (ORIGINAL, start, *row[2:])) in rows), None)
        if row[0] == ORIGINAL or original is None:
            continue
        figures_of = {run["config"]["seed"]: run["figures"] for run in rows[original]}
        cells = []
        for name in names:
            pairs = [(run["figures"].get(name), figures_of[run["config"]["seed"]].get(name)) for run in members]
            cells.append(_difference([ours - theirs for ours, theirs in pairs if None not in (ours, theirs)]))
        lines.append(f"| {_label(row)} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def _difference(values: list[float]) -> str:
    if not values:
        return ""
    form = "{:+.3f}" if max(map(abs, values)) < 10 else "{:+.1f}"
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return form.format(fmean(values))
    with extra():
        from scipy import stats
    middle, spread = form.format(mean(values)), stdev(values)
    surely = abs(mean(values)) > stats.t.ppf(0.975, len(values) - 1) * spread / len(values) ** 0.5
    cell = f"{middle} ± {form.format(spread)[1:]}"
    return f"**{cell}**" if surely and spread > 1e-9 * abs(mean(values)) and float(middle) else cell


def background(runs: list[dict]) -> str:
    """Return what stands behind a table: seeds, commands, commits, versions, hardware."""
    seeds = sorted({run["config"]["seed"] for run in runs})
    spread = "means ± standard deviations over them" if len(seeds) > 1 else "a single one: no spread"
    versions = sorted({", ".join(f"{name} {v}" for name, v in run["versions"].items()) for run in runs})
    machines = sorted(
        {
            (run["hardware"]["accelerator"] or f"{run['hardware']['cpu']}, threads: {run['hardware']['threads']}")
            + f", {run['cost'].get('processes', 1)} process(es)"
            for run in runs
        }
    )
    commits = ", ".join(sorted({str(run["commit"]) for run in runs}))
    return f"{runs[0]['recipe']}; seeds {seeds} ({spread}); commit {commits}; {'; '.join(versions)}; {'; '.join(machines)}."


def plot(runs: list[dict], name: str, vary: Sequence[str] = ()) -> "Figure":
    """Draw one figure: a line over lengths where runs have `name_128`, `name_256`, ..., else a bar a row; dots are seeds."""
    with extra():
        from matplotlib.figure import Figure  # takes a second, the first time more

    from hf_posswap.plots import COLOURS, MARKERS

    rows = _rows(runs, vary)
    lengths = sorted({int(n.removeprefix(f"{name}_")) for run in runs for n in run["figures"] if _is_length(n, name)})
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    if len(lengths) > 1:
        for index, (row, members) in enumerate(rows.items()):
            found = {n: [r["figures"][f"{name}_{n}"] for r in members if f"{name}_{n}" in r["figures"]] for n in lengths}
            found = {n: values for n, values in found.items() if values}
            spread = [stdev(values) if len(values) > 1 else 0.0 for values in found.values()]
            axes.errorbar(
                list(found),
                [mean(values) for values in found.values()],
                yerr=spread if any(spread) else None,
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index % len(MARKERS)],
                linestyle=("-", "--", ":")[index // len(COLOURS) % 3],
                capsize=2,
                label=_label(row),
            )
        drawn = [run["figures"][f"{name}_{n}"] for run in runs for n in lengths if f"{name}_{n}" in run["figures"]]
        if min(drawn) > 0 and max(drawn) > 20 * min(drawn):  # one row far off would press all others into one line
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("tokens")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    else:
        for index, members in enumerate(rows.values()):
            values = [run["figures"][name] for run in members if name in run["figures"]]
            if not values:
                continue
            axes.barh(index, mean(values), color="#56B4E9", height=0.6)
            axes.plot(values, [index] * len(values), "o", color="#0072B2", markersize=4)
        axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
        axes.invert_yaxis()
    axes.set_ylabel(name.replace("_", " ")) if len(lengths) > 1 else axes.set_xlabel(name.replace("_", " "))
    return figure


def plots(runs: list[dict], vary: Sequence[str] = (), figures: Sequence[str] = ()) -> "dict[str, Figure]":
    """Draw what a comparison shows: a picture for each family of figures over lengths, else the main one, which comes first."""
    names = list(figures) or list(dict.fromkeys(name for run in runs for name in run["figures"]))
    families = [n for n in dict.fromkeys(n.rpartition("_")[0] for n in names) if sum(_is_length(m, n) for m in names) > 1]
    return {name: plot(runs, name, vary) for name in families or names[:1]}


def _is_length(figure: str, name: str) -> bool:
    return figure.startswith(f"{name}_") and figure.removeprefix(f"{name}_").isdigit()


def write_comparison(runs: list[dict], output: Path, *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> list[Path]:
    """Check the budgets; write comparison.json, comparison.md, PNG pictures and one self-contained comparison.html."""
    check_budgets(runs, vary)
    table = markdown(runs, vary=vary, figures=figures)
    pictures = plots(runs, vary, figures)
    paired = paired_table(runs, vary=vary, figures=figures)
    if paired and len({run["config"]["seed"] for run in runs}) > 1:
        paired += "\n\nDifferences are taken seed by seed; bold ones are unlike zero by a t-test (p < 0.05, each by itself)."
    text = "\n\n".join(part for part in (table, paired, background(runs)) if part) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    written = [output / "comparison.json", output / "comparison.md", output / "comparison.html"]
    write_json(written[0], {"format": 1, "vary": list(vary), "runs": runs})
    written[1].write_text(text)
    written[2].write_text(_page(runs, text, pictures))
    for name, figure in pictures.items():
        written.append(output / f"{name}.png")
        figure.savefig(written[-1], dpi=150)
    return written


def _page(runs: list[dict], text: str, pictures: "dict[str, Figure]") -> str:
    parts = [MarkdownIt("commonmark", {"html": False}).enable("table").render(text)]
    for name, figure in pictures.items():
        memory = io.BytesIO()
        figure.savefig(memory, format="png", dpi=150)
        data = base64.b64encode(memory.getvalue()).decode()
        parts.append(f'<figure><img alt="{html.escape(name)}" src="data:image/png;base64,{data}"></figure>')
    for run in runs:
        config = html.escape(json.dumps(run["config"], indent=2))
        parts.append(f"<details><summary><code>{html.escape(run['command'])}</code></summary><pre>{config}</pre></details>")
    style = (
        "body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222}"
        "table{border-collapse:collapse}td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd}"
        "img{max-width:100%}summary{overflow-wrap:anywhere;margin:.3rem 0}"
    )
    title = f"{html.escape(runs[0]['recipe'])}: {html.escape(str(runs[0]['config']['model']))}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head>'
        f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )
