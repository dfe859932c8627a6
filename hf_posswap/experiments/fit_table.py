"""The committed results of fits as Markdown tables, and the line with their provenance."""

from statistics import mean, stdev


def provenance_line(results: dict) -> str:
    """Return the line below a table: command, seeds, versions, hardware."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    hardware = results["hardware"]["accelerator"] or "{cpu}, threads: {threads}".format(**results["hardware"])
    commit = f" at commit {results['commit']}" if results["commit"] else ""
    seeds = results["config"]["seeds"]
    spread = "mean ± standard deviation over them" if len(seeds) > 1 else "a single one: no spread"
    return f"`{results['command']}`{commit}; seeds {seeds} ({spread}); {versions}; {hardware}."


def fit_table(results: dict) -> str:
    """Return results of recipes/fit_quality.py as a Markdown table: cold, warm and fitted, ± standard deviation over seeds."""
    names = list(results["original"])
    titles = {"spearman": "STS-B rho", "ratio": "ppl / original's", "kl": "KL", "perplexity": "ppl"}
    heads = [titles.get(name, name.replace("_", " ")) for name in names]
    lines = [f"| {results['config']['model']} | {' | '.join(heads)} | seconds |", f"|---|{'---|' * (len(heads) + 1)}"]
    lines.append(f"| original | {' | '.join(_number(results['original'][name]) for name in names)} | |")
    shown = set()
    for row in results["rows"]:
        if row["scheme"] not in shown:
            shown.add(row["scheme"])
            for stage, label in (("cold", "cold swap"), ("swapped", "swap")):
                lines.append(f"| {row['scheme']}, {label} | {' | '.join(_number(row[stage][name]) for name in names)} | |")
        many = len(row["fitted"]) > 1
        cells = []
        for name in names:
            values = [run[name] for run in row["fitted"]]
            cells.append(_number(mean(values)) + (f" ± {_number(stdev(values))}" if many else ""))
        label = "fit" if row["reconstruct"] else "closed form"
        label += "" if row["text"] == "given" else f" on {row['text']} text"
        seconds = f"{mean(run['seconds'] for run in row['fitted']):.0f}"
        lines.append(f"| {row['scheme']}, {label} | {' | '.join(cells)} | {seconds} |")
    return "\n".join(lines)


def stage_table(results: dict, name: str) -> str:
    """Return one figure of recipes/fit_quality.py as a Markdown table, a row for each scheme: cold, warm and fitted."""
    title = {"ratio": "perplexity / original's"}.get(name, name.replace("_", " "))
    lines = [f"| {results['config']['model']}: {title} | cold swap | swap | fit |", "|---|---:|---:|---:|"]
    for row in results["rows"]:
        values = [run[name] for run in row["fitted"]]
        cells = [_number(row["cold"][name]), _number(row["swapped"][name]), _number(mean(values))]
        cells[-1] += f" ± {_number(stdev(values))}" if len(values) > 1 else ""
        lines.append(f"| `{row['scheme']}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
