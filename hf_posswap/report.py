"""Results of a comparison for people: a Markdown table for each model, and its pictures."""

from pathlib import Path
from statistics import mean, stdev

from hf_posswap.compare import figures_of
from hf_posswap.plots import plot_perplexity_by_length, plot_quality


def write_report(results: dict, output: Path) -> list[Path]:
    """Write results.md and the PNG files next to results.json; return the paths of all of them."""
    written = []
    for index, model in enumerate(results["models"]):
        stem = f"{index}-{model['model'].rstrip('/').rpartition('/')[2]}"
        figure = plot_quality(model)
        written.append(_save(figure, output / f"{stem}-quality.png"))
        if model["causal"]:
            written.append(_save(plot_perplexity_by_length(model), output / f"{stem}-perplexity.png"))
    text = "\n\n".join(f"### {model['model']}\n\n{markdown_table(model)}" for model in results["models"])
    (output / "results.md").write_text(f"{text}\n\n{provenance_line(results)}\n")
    return [output / "results.json", output / "results.md", *written]


def markdown_table(model: dict) -> str:
    """Return one model's rows as a Markdown table: after a cold swap, a warm one, a fit, a tuning."""
    lengths = sorted(int(n) for n in model["evaluation_tokens"])
    if model["causal"]:
        columns = [(f"ppl {n}", f"perplexity_{n}", "{:.1f}") for n in lengths] + [("KL", "kl", "{:.3f}")]
    else:
        columns = [(f"cosine {n}", f"cosine_{n}", "{:.3f}") for n in lengths]
    columns.append(("word order", "word_order", "{:.2f}"))
    lines = [
        f"| positions | {' | '.join(title for title, _, _ in columns)} |",
        f"|---|{'---|' * len(columns)}",
    ]
    stages = {"cold": "cold swap", "swapped": "swap", "fitted": "fit", "tuned": f"+ {model['tuning_tokens']:,} tokens"}
    for row in model["rows"]:
        figures = {(stage, name): (value, spread) for stage, name, value, spread in figures_of(row)}
        # Longer input than a learned table holds needs some table: the original's is repeated.
        title = row["scheme"]
        if title == "original" and model["causal"]:
            title = f"original (tiled past {model['trained_positions']})"
        for stage, label in stages.items():
            if not any(key[0] == stage for key in figures):
                continue
            label = "as it is" if (row["scheme"], stage) == ("original", "swapped") else label
            cells = [_cell(figures.get((stage, name)), form) for _, name, form in columns]
            lines.append(f"| {title}, {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def provenance_line(results: dict) -> str:
    """Return the command, seeds, versions and hardware behind a table."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    hardware = results["hardware"]["accelerator"] or "{cpu}, threads: {threads}".format(**results["hardware"])
    commit = f" at commit {results['commit']}" if results["commit"] else ""
    seeds = results["config"]["seeds"]
    spread = "mean ± standard deviation over them" if len(seeds) > 1 else "a single one: no spread"
    return f"`{results['command']}`{commit}; seeds {seeds} ({spread}); {versions}; {hardware}."


def fit_table(results: dict) -> str:
    """Return the rows of recipes/fit_quality.py as a Markdown table: cold, warm and fitted, with spread over seeds."""
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


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"


def _cell(figure: tuple[float, float | None] | None, form: str) -> str:
    if figure is None:
        return ""
    value, spread = figure
    return form.format(value) + ("" if spread is None else f" ± {form.format(spread)}")


def _save(figure, path: Path) -> Path:
    figure.savefig(path, dpi=150)
    return path
