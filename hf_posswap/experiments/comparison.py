"""Compare finished runs of a recipe: equal budgets, means with standard deviations; `differences` are elsewhere.

A run is a folder with the result.json of a recipe (`recipe.main`). Runs may differ in scheme, start and seed, and in options
named by `vary`. Any other difference makes the comparison unfair, and is an error that names it.
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, mean, stdev

from hf_posswap.errors import PosswapError
from hf_posswap.provenance import read_json
from hf_posswap.training.budget import NOT_BUDGET

FORMAT = 1  # of result.json
ORIGINAL = "original"  # the scheme of a model that is left as it is
FREE = ("scheme", "start", "seed", "schemes_from", "save_model")
_PARTS = {"recipe": str, "versions": dict, "hardware": dict, "config": dict, "figures": dict, "cost": dict}  # what is read here
_ROW = {"scheme": str, "start": str, "seed": int}
# Words in the names of figures; a figure with none of them has a highest row, but no best one.
_LESS_IS_BETTER = set("loss perplexity kl damage ratio tokens to ms mib kib seconds overhead memory".split())
_MORE_IS_BETTER = set("accuracy candidates f1 matthews spearman pearson cosine word recall sts".split())
COST = {"tokens_per_second": ("tokens/s", 1.0, "{:,.0f}"), "peak_memory_bytes": ("peak MiB", 2**20, "{:,.0f}")}


def load_runs(places: Sequence[Path]) -> list[dict]:
    """Return all results below these folders, sorted by path, each with its `folder`.

    A place may also be a result.json, a comparison.json, or a folder with that and no runs: others' results can be included.
    """
    runs = []
    for place in map(Path, places):
        found = [place] if place.name == "result.json" and place.is_file() else sorted(place.rglob("result.json"))
        runs += [{**_checked(read_json(path), path), "folder": str(path.parent)} for path in found]
        if not found:
            runs += _compared(place)
    kept = {}
    for run in runs:  # one may be reached by two ways, and two comparisons may name two of them alike
        kept[Path(run["folder"]).resolve(), *(run["config"][name] for name in _ROW), str(run["figures"])] = run
    return list(kept.values())


def _compared(place: Path) -> list[dict]:
    """Return the runs of a comparison.json, or of a folder that has one."""
    file = place / "comparison.json" if place.is_dir() else place
    if not file.is_file():
        raise PosswapError(f"no result.json in {place}: give folders that a recipe wrote and finished, or a comparison.json")
    runs = read_json(file).get("runs")
    if not isinstance(runs, list) or not runs:
        raise PosswapError(f"{file} holds no runs: give a comparison.json, or folders that a recipe wrote and finished")
    whole = enumerate([_checked(run, file) for run in runs], 1)  # runs that name no folder are told apart by their number
    return [{**run, "folder": os.path.normpath(file.parent / str(run.get("folder", number)))} for number, run in whole]


def _checked(run: dict, file: Path) -> dict:
    """Return the run; raise PosswapError if it lacks what is read of it here, or a figure is not finite."""
    if fault := next(_faults(run), None):
        raise PosswapError(f"{file} is no whole result of a recipe, it has {fault}: run it again, or leave it out")
    return run


def _faults(run: dict) -> Iterator[str]:
    if not isinstance(run, dict):
        yield "no object"
    yield from (f"no {name}" for name, kind in _PARTS.items() if not isinstance(run.get(name), kind))
    yield from (f"no {name} in its config" for name, kind in _ROW.items() if not isinstance(run["config"].get(name), kind))
    if run.get("format", FORMAT) != FORMAT:
        yield f"format {run['format']!r}, and this version reads {FORMAT}"
    for name, value in run["figures"].items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            yield f"{name} {value!r}, which is no finite number"


def check_budgets(runs: list[dict], vary: Sequence[str] = ()) -> None:
    """Raise PosswapError for runs of different recipes or budgets, a run given twice, or seeds that only some rows have."""
    first = runs[0]
    if other := next((run for run in runs if run["recipe"] != first["recipe"]), None):
        which = f"{other['folder']} is a run of {other['recipe']}, {first['folder']} of {first['recipe']}"
        raise PosswapError(f"{which}: compare one recipe at a time")
    known = {name for run in runs for name in run["config"]}
    if unknown := sorted(set(vary) - known):
        raise PosswapError(f"{unknown[0]!r} is no option of {first['recipe']}; it has {', '.join(sorted(known))}")
    # `first` means something in these alone; older runs note a number all the same.
    spans = [run for run in runs if run["config"].get("span") is not None and run["config"]["scheme"] != ORIGINAL]
    for name in sorted(known - {*FREE, *NOT_BUDGET, *vary}):
        told = spans if name == "first" else runs
        if other := next((run for run in told if run["config"].get(name) != told[0]["config"].get(name)), None):
            theirs = f"{other['config'].get(name)!r} in {other['folder']}"
            what = f"{name} is {told[0]['config'].get(name)!r} in {told[0]['folder']} and {theirs}"
            raise PosswapError(f"unequal budgets: {what}; run one of them again, or pass --vary {name} if that is the question")
        _check_contents(runs, name)
    wanted = None
    for row, members in rows_of(runs, vary).items():
        for name in (*vary, "schemes_from"):  # between rows they may differ
            _check_contents(members, name)
        files = sorted({str(run["config"].get("schemes_from")) for run in members})
        if len(files) > 1:  # the same name may mean different schemes
            raise PosswapError(f"runs of {label_of(row)} have schemes_from {' and '.join(files)}: compare those of one file")
        found = sorted(run["config"]["seed"] for run in members)
        if len(set(found)) < len(found):
            raise PosswapError(f"{label_of(row)} has a seed twice ({found}): give each run once")
        wanted = wanted or (label_of(row), found)
        if found != wanted[1]:
            raise PosswapError(f"{label_of(row)} has seeds {found} and {wanted[0]} {wanted[1]}: give all rows the same seeds")


def _check_contents(runs: list[dict], name: str) -> None:
    """Raise PosswapError if files of one option have the same name but other content; older results have no hashes."""
    hashed = [run for run in runs if name in run.get("inputs", {})]
    if other := next((run for run in hashed if run["inputs"][name] != hashed[0]["inputs"][name]), None):
        where = f"{hashed[0]['folder']} and {other['folder']} have other content (SHA-256) under the name"
        way = f"remove one and run it again, or name the files apart and pass --vary {name}"  # finished runs are kept
        raise PosswapError(f"{where} {name} {other['config'].get(name)!r}: {way}")


def made_in(content) -> Iterator[dict]:
    """Yield the parts of a result file that name their commit: its runs, or the steps or the fit that it tells of."""
    if isinstance(content, dict) and "commit" in content:
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from made_in(part)


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


def top(name: str) -> tuple[Callable, str]:
    """Return `min` or `max`, whichever finds the row to name, and what that is: the best, or the highest if no one can tell.

    >>> top("loss_256")[1], top("recall")[1], top("kept")[1]
    ('best', 'best', 'highest')
    """
    words = {*re.findall("[a-z0-9]+", name.lower())}
    known = "best" if words & (_LESS_IS_BETTER | _MORE_IS_BETTER) else "highest"
    return (min if words & _LESS_IS_BETTER else max), known


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


def markdown(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = (), costs: Iterable[str] = COST) -> str:
    """Return a Markdown table with a line for each scheme and start; ± is the standard deviation over seeds."""
    names = figure_names(runs, figures)
    costs = [name for name in costs if any(name in run["cost"] for run in runs)]
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
    spread = f" ± {form.format(stdev(found))}" if len(set(found)) > 1 else ""
    return form.format(fmean(found)) + spread + f" ({len(found)} of {len(values)} seeds)" * (len(found) < len(values))


def budgets(runs: list[dict], vary: Sequence[str] = ()) -> str:
    """Return the tokens that rows were fitted and trained on, in a line; empty if results do not say."""
    spent = {}
    for row, members in rows_of(runs, vary).items():
        config, fitted = members[0]["config"], row[1] == "fit"
        paced = ("tokens_per_second", "documents_per_second")  # a fit's own tokens stand without either
        spending = [run["cost"] for run in members if any(name in run["cost"] for name in paced)]
        trained = [cost["tokens"] for cost in spending if "tokens" in cost]
        parts = [f"a fit on {config['fit_tokens']:,}, {config['fit_steps']} steps a layer"] if fitted else []
        parts += [f"{mean(trained):,.0f} forward and back in training"] if trained else []
        spent.setdefault(", and ".join(parts), []).append(label_of(row))
    said = [f"{parts} ({' / '.join(labels)})" for parts, labels in spent.items() if parts]
    return f"Tokens: {'; '.join(said)}." if said else ""


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
