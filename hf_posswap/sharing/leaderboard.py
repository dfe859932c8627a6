"""Leaderboards: the results of several shared models in one table for each recipe and data set."""

from collections.abc import Sequence
from pathlib import Path

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.experiments.comparison import background, check_budgets, figure_names, markdown
from hf_posswap.sharing.record import data_of, own_rows, read_results, scheme_of


def leaderboard(places: str | Path | Sequence[str | Path], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return Markdown tables, one for each recipe and data set, with the results of several folders or repositories.

    A table has rows of each model's own scheme and of its original, under one budget: options other than the base model must
    not differ, unless `vary` names them. `figures` selects columns.

    Raises:
        CheckpointError: A folder or repository has no results.
        DataError: A comparison has no run with the positions of its model.
        PosswapError: Budgets differ, or no run has a figure.
    """
    places = [places] if isinstance(places, str | Path) else places
    names = [str(Path(place).resolve()) if Path(place).is_dir() else str(place) for place in places]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PosswapError(f"a place is given twice: {', '.join(twice)}")
    tables, known = {}, {"from", "model", *vary}
    for place in places:
        content = read_results(place)
        scheme = scheme_of(content["model"]["position_scheme"], place)
        for comparison in content["comparisons"]:
            own = own_rows(comparison["runs"], scheme, content["model"].get("span"), place)
            for run in [one for one in comparison["runs"] if one["config"]["scheme"] == "original"] + own:
                config = run["config"] | {"from": str(place)}
                row = {**run, "config": config, "folder": str(place)}
                tables.setdefault(f"{run['recipe']}: {data_of(config)}", []).append(row)
    if not tables:
        raise DataError(f"none of {', '.join(names)} has a comparison: hf-posswap card FOLDER --results RUNS puts one there")
    parts, every = [], [run for runs in tables.values() for run in runs]
    figure_names(every, figures)  # raises for one that no run has
    if unknown := [name for name in vary if not any(name in run["config"] for run in every)]:
        raise PosswapError(f"no run has the option {unknown[0]!r}, which may vary: correct it, or leave it out")
    for title, runs in tables.items():
        here = [name for name in sorted(known) if any(name in run["config"] for run in runs)]
        check_budgets(runs, here)
        shown = [name for name in figures if any(name in run["figures"] for run in runs)]
        if shown or not figures:
            parts.append(f"## {title}\n\n{markdown(runs, vary=here, figures=shown)}\n\n{background(runs)}\n")
    return "\n".join(parts)
