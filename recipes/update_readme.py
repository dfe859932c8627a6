"""Write the tables of README.md from the registries and from the committed result files, and that of claims in notebooks/.

    python recipes/update_readme.py

Tables of recipes come from recipes/results/*/comparison.json, which recipes/compare.py wrote, those of fits from
fit/*/results.json (recipes/fit_quality.py), those of healing are heal/*/results.md (recipes/heal.py), and the speed tables come
from attention/*/results.json (recipes/benchmark_attention.py).

The tests compare the pages with what this prints, so they cannot drift.
"""

import json
import re
from dataclasses import fields
from pathlib import Path

from hf_posswap import ARCHITECTURES, SCHEMES
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.commands.claims import check_claims
from hf_posswap.commands.claims import markdown as claims_table
from hf_posswap.experiments.comparison import background, markdown
from hf_posswap.experiments.fit_table import fit_table, provenance_line, stage_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "recipes" / "results"

# Which figures of a comparison the page shows; all of them are in the comparison.md next to its results.
TASKS = {
    "cola": ("matthews", "accuracy", "loss"),
    "sst2": ("accuracy", "loss"),
    "movie_reviews": ("accuracy", "accuracy_long", "loss"),
}


def matrix() -> str:
    """Schemes x families: the heads that can be swapped, and the attention implementations that a scheme works with."""
    families = sorted(ARCHITECTURES)
    lines = [f"| scheme | options | {' | '.join(families)} | attention |", f"|---|---|{'---|' * len(families)}---|"]
    heads = {f: sum(kind.model_type == f for kind in (c.config_class for c in SWAPPED_CLASSES)) for f in families}
    for name, scheme in SCHEMES.items():
        options = ", ".join(f"`{field.name}`" for field in fields(scheme)) or "none"
        where = ", ".join(scheme.implementations or ("as set",))
        lines.append(f"| `{name}` | {options} | {' | '.join(f'{heads[f]} heads' for f in families)} | {where} |")
    return "\n".join(lines)


def comparison_table(folder: Path, title: str, figures: tuple[str, ...] = ()) -> str:
    """The table of one comparison, and what stands behind it."""
    runs = json.loads((folder / "comparison.json").read_text())["runs"]
    files = f"[All figures]({folder.relative_to(ROOT)}/comparison.md), [runs]({folder.relative_to(ROOT)}/comparison.json)"
    return f"**{title}**\n\n{markdown(runs, figures=figures)}\n\n{background(runs)} {files}."


def fit_tables(folder: Path) -> str:
    """What a fit alone reaches, from the result files of fit_quality.py."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*/results.json"))]
    tables = [f"{fit_table(run)}\n\n{provenance_line(run)}" for run in runs]
    return "\n\n".join(tables)


def ladder_tables(folder: Path) -> str:
    """What each rung of the ladder of absolute codes costs, in one figure for each model; the rest is in results.md."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*/results.json"))]
    tables = []
    for run in runs:
        figure = "ratio" if "ratio" in run["original"] else next(iter(run["original"]))
        tables.append(f"{stage_table(run, figure)}\n\n{provenance_line(run)}")
    return "\n\n".join(tables)


def speed_tables(folder: Path) -> str:
    """What swapped models cost to run, from the result files of benchmark_attention.py: one-thread, two-threads, ..."""
    runs = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/results.json"))}
    records = {name: [record for record in run["cases"] if "error" not in record] for name, run in runs.items()}

    def table(title: str, names: list[str], cell) -> str:
        rows, columns = {}, {}
        for run, record in [(name, record) for name in names for record in records[name]]:
            case, text = record["case"], cell(record)
            if text is None:
                continue
            column = f"{case['phase'].replace('train', 'training')} {case['batch']}x{case['length']}"
            columns[case["phase"], case["length"], case["batch"]] = column
            who = "the original again" if case["subject"] == "sdpa" else case["subject"]
            threads = f", {case['threads']} threads" if case["threads"] > 1 else ""
            taken = ", one core taken by another process" if runs[run]["config"]["busy"] else ""
            rows.setdefault(f"{who}{threads}{taken}", {})[column] = text
        found = [columns[place] for place in sorted(columns)]
        lines = [f"| {title} | {' | '.join(found)} |", f"|---|{'---|' * len(found)}"]
        lines += [f"| {row} | {' | '.join(cells.get(name, '') for name in found)} |" for row, cells in rows.items()]
        return "\n".join(lines)

    def ratio(record: dict) -> str:
        return "{median:.2f} ({low:.2f}–{high:.2f})".format(**record["ratio"])

    peaks = {json.dumps(r["case"] | {"clip": None}): r["peak_mib"] for r in records["memory"]}

    def peak_ratio(record: dict) -> str | None:
        case = record["case"]
        original = peaks[json.dumps(case | {"subject": "sdpa", "clip": None})]
        return None if case["subject"] == "sdpa" else f"{record['peak_mib'] / original:.2f}"

    old = {(f"{r['case']['family']}/{r['case']['subject']}", r["case"]["measure"]): r for r in records["old"]}
    lines = ["| a training step, 1x2048 | ms | peak MiB |", "|---|---|---|"]
    for name in dict.fromkeys(name for name, _ in old):
        least, peak = old[name, "time"]["ms"]["least"], old[name, "memory"]["peak_mib"]
        whose = "transformers 4.57.6, " if name.startswith("old") else ""
        lines.append(f"| {whose}{name.partition('/')[2].replace('_', chr(92) + '_')} | {least:.0f} | {peak:.0f} |")
    first = next(iter(runs.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    commits = ", ".join(sorted({run["commit"] for run in runs.values()}))
    commands = "\n".join(f"- `{run['command']}`" for run in runs.values())
    return "\n\n".join(
        [
            table("time", ["one-thread", "two-threads", "busy"], ratio),
            table("peak memory", ["memory"], peak_ratio),
            table("time of a new token, GPT-2 of 12 layers", ["decode"], ratio),
            "\n".join(lines),
            f"Commit {commits}; {versions}; {first['hardware']['cpu']}, {first['hardware']['cores']} cores:\n\n{commands}",
        ]
    )


def render(readme: str) -> str:
    """Return the README with the generated blocks replaced."""
    costs = [comparison_table(path.parent, path.parent.name) for path in sorted(RESULTS.glob("swap_cost/*/comparison.json"))]
    blocks = (
        ("matrix", matrix()),
        ("fit", fit_tables(RESULTS / "fit")),
        ("heal", "\n\n".join(path.read_text().strip() for path in sorted(RESULTS.glob("heal/*/results.md")))),
        ("results", "\n\n".join(costs)),
        ("ladder", ladder_tables(RESULTS / "ladder")),
        ("tasks", "\n\n".join(comparison_table(RESULTS / name, name, figures) for name, figures in TASKS.items())),
        ("speed", speed_tables(RESULTS / "attention")),
    )
    for name, block in blocks:
        readme = replace_block(readme, name, block)
    return readme


def replace_block(page: str, name: str, block: str) -> str:
    """Return the page with what stands between <!-- name --> and <!-- /name --> replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    page, count = re.subn(pattern, lambda m: f"{m[1]}{block}\n{m[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the page must have one <!-- {name} --> block, it has {count}")
    return page


if __name__ == "__main__":
    page = ROOT / "README.md"
    page.write_text(render(page.read_text()))
    page = ROOT / "notebooks" / "README.md"
    page.write_text(replace_block(page.read_text(), "claims", claims_table(check_claims())))
