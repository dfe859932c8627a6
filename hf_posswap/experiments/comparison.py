"""Compare finished runs of a recipe: equal budgets, means with standard deviations, significant differences.

A run is a folder with the result.json of a recipe (`recipe.main`). Runs may differ in scheme, start and seed, and in options
named by `vary`. Any other difference makes the comparison unfair, and is an error that names it.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, mean, stdev

from hf_posswap.errors import PosswapError
from hf_posswap.extras import extra
from hf_posswap.provenance import read_json
from hf_posswap.training.budget import NOT_BUDGET

ORIGINAL = "original"  # the scheme of a model that is left as it is
FREE = ("scheme", "start", "seed", "schemes_from", "save_model")
_PARTS = {"recipe", "command", "commit", "versions", "hardware", "config", "figures", "cost", "folder"}
_LESS_IS_BETTER = {"loss", "perplexity", "kl", "damage", "ratio", "tokens", "ms", "mib"}  # words in a figure's name
_MORE_IS_BETTER = {"accuracy", "candidates", "f1", "matthews", "spearman", "pearson", "cosine", "word", "recall", "sts"}
COST = {"tokens_per_second": ("tokens/s", 1.0, "{:,.0f}"), "peak_memory_bytes": ("peak MiB", 2**20, "{:,.0f}")}


def load_runs(places: Sequence[Path]) -> list[dict]:
    """Return all results below these folders, sorted by path, each with its `folder`.

    A place may also be a comparison.json, or a folder with one and no runs, so that others' results can be included.
    """
    runs = []
    for place in map(Path, places):
        found = sorted(place.rglob("result.json"))
        runs += [{**read_json(path), "folder": str(path.parent)} for path in found]
        if not found:
            runs += _compared(place)
    return list({run["folder"]: run for run in runs}.values())


def _compared(place: Path) -> list[dict]:
    file = place / "comparison.json" if place.is_dir() else place
    if not file.is_file():
        raise PosswapError(f"no result.json in {place}: give folders that a recipe wrote and finished, or a comparison.json")
    runs = read_json(file).get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) and _PARTS <= set(run) for run in runs):
        raise PosswapError(f"{file} holds no runs: give a comparison.json, or folders that a recipe wrote and finished")
    return [{**run, "folder": str(file.parent / run["folder"])} for run in runs]


def check_budgets(runs: list[dict], vary: Sequence[str] = ()) -> None:
    """Raise PosswapError for runs of different recipes or budgets, a run given twice, or seeds that only some rows have."""
    first = runs[0]
    if other := next((run for run in runs if run["recipe"] != first["recipe"]), None):
        which = f"{other['folder']} is a run of {other['recipe']}, {first['folder']} of {first['recipe']}"
        raise PosswapError(f"{which}: compare one recipe at a time")
    known = {name for run in runs for name in run["config"]}
    if unknown := sorted(set(vary) - known):
        raise PosswapError(f"{unknown[0]!r} is no option of {first['recipe']}; it has {', '.join(sorted(known))}")
    for name in sorted(known - {*FREE, *NOT_BUDGET, *vary}):
        ours = first["config"].get(name)
        if other := next((run for run in runs if run["config"].get(name) != ours), None):
            theirs = f"{other['config'].get(name)!r} in {other['folder']}"
            raise PosswapError(
                f"unequal budgets: {name} is {ours!r} in {first['folder']} and {theirs}; run one of them again, or pass "
                f"--vary {name} if that is the question"
            )
    wanted = None
    for row, members in rows_of(runs, vary).items():
        files = sorted({str(run["config"].get("schemes_from")) for run in members})
        if len(files) > 1:  # the same name may mean different schemes
            raise PosswapError(f"runs of {label_of(row)} have schemes_from {' and '.join(files)}: compare those of one file")
        found = sorted(run["config"]["seed"] for run in members)
        if len(set(found)) < len(found):
            raise PosswapError(f"{label_of(row)} has a seed twice ({found}): give each run once")
        wanted = wanted or (label_of(row), found)
        if found != wanted[1]:
            raise PosswapError(f"{label_of(row)} has seeds {found} and {wanted[0]} {wanted[1]}: give all rows the same seeds")


def rows_of(runs: list[dict], vary: Sequence[str]) -> dict[tuple, list[dict]]:
    """Group runs that differ only in their seed."""
    rows = {}
    for run in runs:
        rows.setdefault(_row(run["config"], vary), []).append(run)
    return dict(sorted(rows.items(), key=lambda item: item[0][0] != ORIGINAL))  # the original comes first


def _row(config: dict, vary: Sequence[str]) -> tuple:
    """Return what the runs of a row share; an original has no start, unless it was trained from scratch."""
    start = "" if config["scheme"] == ORIGINAL and config["start"] != "scratch" else config["start"]
    return (config["scheme"], start, *((name, str(config.get(name))) for name in vary))


def row_label(run: dict, vary: Sequence[str] = ()) -> str:
    """Return the name of a run's row in a table."""
    return label_of(_row(run["config"], vary))


def label_of(row: tuple) -> str:
    """Return the name of a row of a table."""
    scheme, start, *varied = row
    return ", ".join([scheme, *([start] if start else []), *(f"{name} {value}" for name, value in varied)])


def figure_names(runs: list[dict], wanted: Sequence[str] = ()) -> list[str]:
    """Return the figures that were asked for, by default all; raise PosswapError for one that no run has."""
    known = list(dict.fromkeys(name for run in runs for name in run["figures"]))
    if unknown := [name for name in wanted if name not in known]:
        raise PosswapError(f"no run has the figure {unknown[0]!r}; there are {', '.join(sorted(known))}")
    return list(wanted) or known


def is_length(figure: str, name: str) -> bool:
    """Whether `figure` is the figure `name` at a length: `loss_128` is `loss` at 128 tokens."""
    return figure.startswith(f"{name}_") and figure.removeprefix(f"{name}_").isdigit()


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], align: str = "---:") -> str:
    """Return a Markdown table; all columns but the first are aligned to the right, as numbers are.

    >>> print(table(["positions", "loss"], [("rotary", "1.5")]))
    | positions | loss |
    |---|---:|
    | rotary | 1.5 |
    """
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, f"|---|{f'{align}|' * (len(heads) - 1)}", *lines])


def markdown(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return a Markdown table with a line for each scheme and start; ± is the standard deviation over seeds."""
    names = figure_names(runs, figures)
    costs = [name for name in COST if any(name in run["cost"] for run in runs)]
    heads = [*(name.replace("_", " ") for name in names), *(COST[name][0] for name in costs)]
    rows = []
    for row, members in rows_of(runs, vary).items():
        cells = [_cell([run["figures"].get(name) for run in members]) for name in names]
        for name in costs:
            _, unit, form = COST[name]
            values = [run["cost"][name] / unit for run in members if name in run["cost"]]
            cells.append(form.format(mean(values)) if values else "")
        rows.append([label_of(row), *cells])
    return table(["positions", *heads], rows)


def starts_table(runs: list[dict], figure: str) -> str:
    """Return one figure as a Markdown table with a line for each scheme and a column for each start."""
    rows = rows_of(runs, ())
    starts = list(dict.fromkeys(start for _, start in rows if start))
    lines = {scheme: [f"`{scheme}`"] for scheme, start in rows if start}
    for scheme, line in lines.items():
        line += [_cell([run["figures"][figure] for run in rows.get((scheme, start), ())]) for start in starts]
    return table([f"{runs[0]['config']['model']}: {figure.replace('_', ' ')}", *starts], lines.values())


def _cell(values: list[float | None]) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return ""
    form = "{:.3f}" if max(map(abs, found)) < 10 else "{:.1f}"
    return form.format(fmean(found)) + (f" ± {form.format(stdev(found))}" if len(set(found)) > 1 else "")


def paired_table(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return a table of differences from the original, paired by seed; empty if no original was run.

    Runs with one seed share the order of data and other random draws, whose effect cancels in their difference. A cell is the
    mean of the differences ± their standard deviation. Bold: significant in Student's t-test, p < 0.05, each cell by itself.
    A figure that is the same for all seeds is not tested.
    """
    names = figure_names(runs, figures)
    columns = [_differences(rows_of(runs, vary), name) for name in names]
    rows = [[label_of(row), *(_difference(column[row]) for column in columns)] for row in (columns[0] if columns else ())]
    return table(["less the original", *(name.replace("_", " ") for name in names)], rows) if rows else ""


def _differences(rows: dict[tuple, list[dict]], name: str) -> dict[tuple, list[float]]:
    """Return each row's figure minus the original's, seed by seed; rows without an original are left out."""
    found = {}
    for row, members in rows.items():
        # Rows from scratch are compared with the original from scratch, if that was run.
        original = next((one for start in (row[1], "") if (one := (ORIGINAL, start, *row[2:])) in rows), None)
        if row[0] != ORIGINAL and original is not None:
            theirs = {run["config"]["seed"]: run["figures"].get(name) for run in rows[original]}
            pairs = [(run["figures"].get(name), theirs[run["config"]["seed"]]) for run in members]
            found[row] = [ours - theirs for ours, theirs in pairs if None not in (ours, theirs)]
    return found


def _difference(values: list[float]) -> str:
    if not values:
        return ""
    form = "{:+.3f}" if max(map(abs, values)) < 10 else "{:+.1f}"
    if len(values) == 1:
        return form.format(fmean(values))
    cell = f"{form.format(mean(values))} ± {form.format(stdev(values))[1:]}"
    return f"**{cell}**" if surely(values) and float(form.format(mean(values))) else cell


def surely(values: list[float]) -> bool:
    """Whether the mean differs from zero in Student's t-test, p < 0.05; False for one value or equal values."""
    if len(values) < 2:
        return False
    with extra():
        from scipy import stats
    middle, spread = abs(mean(values)), stdev(values)
    return spread > 1e-9 * middle and middle > stats.t.ppf(0.975, len(values) - 1) * spread / len(values) ** 0.5


def verdict(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return the conclusion in a sentence or two: the best row in the first figure, and which rows differ significantly.

    If the figure is measured over lengths, the longest is judged too. The figure's name tells whether more or less is better.
    """
    names = figure_names(runs, figures)
    family = [name for name in names if is_length(name, names[0].rpartition("_")[0])] if names else []
    return " ".join(_judged(rows_of(runs, vary), name) for name in dict.fromkeys([*names[:1], *family[-1:]]))


def _judged(rows: dict[tuple, list[dict]], name: str) -> str:
    found = {row: [run["figures"][name] for run in members if name in run["figures"]] for row, members in rows.items()}
    means = {row: fmean(values) for row, values in found.items() if values}
    less, more = (words & {*name.split("_")} for words in (_LESS_IS_BETTER, _MORE_IS_BETTER))
    best = (min if less else max)(means, key=means.get)
    word = f"{'lowest' if less else 'highest'} {name.replace('_', ' ')}"
    said = f"**{'Best: the' if less or more else 'The'} {word} is {means[best]:.4g}, {label_of(best)}.**"
    differences = _differences(rows, name)
    if not differences:
        return f"{said} No original was run to compare with."
    sure = [f"{label_of(row)} ({mean(values):+.3g})" for row, values in differences.items() if surely(values)]
    if len(next(iter(differences.values()))) < 2:
        return f"{said} One seed: no difference from the original is sure."
    return f"{said} Surely different from the original (paired t-test, p < 0.05): {', '.join(sure) or 'none'}."


def background(runs: list[dict]) -> str:
    """Return the line below a table: recipe, seeds, commits, versions, hardware."""
    seeds = sorted({run["config"]["seed"] for run in runs})
    spread = "means ± standard deviations over them" if len(seeds) > 1 else "a single one: no spread"
    versions = sorted({", ".join(f"{name} {v}" for name, v in run["versions"].items()) for run in runs})
    machines = sorted({f"{machine(run)}, {run['cost'].get('processes', 1)} process(es)" for run in runs})
    commits = ", ".join(sorted({str(run["commit"]) for run in runs}))
    return f"{runs[0]['recipe']}; seeds {seeds} ({spread}); commit {commits}; {'; '.join(versions)}; {'; '.join(machines)}."


def machine(run: dict) -> str:
    """Return what a run was computed on."""
    return run["hardware"]["accelerator"] or "{cpu}, threads: {threads}".format(**run["hardware"])
