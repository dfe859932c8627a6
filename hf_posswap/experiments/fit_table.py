"""The committed results of fits as Markdown tables, and the line with their provenance."""

from statistics import mean, stdev

from hf_posswap.experiments.comparison import machine, table


def provenance_line(results: dict) -> str:
    """Return the line below a table: command, seeds, versions, hardware."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    commit = f" at commit {results['commit']}" if results["commit"] else ""
    seeds = results["config"]["seeds"]
    spread = "mean ± standard deviation over them" if len(seeds) > 1 else "a single one: no spread"
    return f"`{results['command']}`{commit}; seeds {seeds} ({spread}); {versions}; {machine(results)}."


def fit_table(results: dict) -> str:
    """Return results of recipes/fit_quality.py as a Markdown table: cold, warm and fitted, ± standard deviation over seeds."""
    names = list(results["original"])
    titles = {"spearman": "STS-B rho", "ratio": "ppl / original's", "kl": "KL", "perplexity": "ppl"}
    rows = {"original": [*(_number([results["original"][name]]) for name in names), ""]}
    for row in results["rows"]:
        for stage, label in (("cold", "cold swap"), ("swapped", "swap")):
            rows.setdefault(f"{row['scheme']}, {label}", [*(_number([row[stage][name]]) for name in names), ""])
        label = "fit" if row["reconstruct"] else "closed form"
        label += "" if row["text"] == "given" else f" on {row['text']} text"
        seconds = f"{mean(run['seconds'] for run in row['fitted']):.0f}"
        rows[f"{row['scheme']}, {label}"] = [*(_number([run[name] for run in row["fitted"]]) for name in names), seconds]
    heads = [results["config"]["model"], *(titles.get(name, name.replace("_", " ")) for name in names), "seconds"]
    return table(heads, ([label, *cells] for label, cells in rows.items()))


def stage_table(results: dict, name: str) -> str:
    """Return one figure of recipes/fit_quality.py as a Markdown table, a row for each scheme: cold, warm and fitted."""
    title = {"ratio": "perplexity / original's"}.get(name, name.replace("_", " "))
    stages = (([row["cold"][name]], [row["swapped"][name]], [run[name] for run in row["fitted"]]) for row in results["rows"])
    rows = [[f"`{row['scheme']}`", *map(_number, values)] for row, values in zip(results["rows"], stages, strict=True)]
    return table([f"{results['config']['model']}: {title}", "cold swap", "swap", "fit"], rows)


def _number(values: list[float]) -> str:
    found = [mean(values), stdev(values)] if len(values) > 1 else values
    return " ± ".join(f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}" for value in found)
