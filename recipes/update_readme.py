"""Write the tables of README.md from the registries and from the committed result file.

    python recipes/update_readme.py                                    # after the registries changed
    python recipes/update_readme.py runs/three-seeds/results.json      # after a new comparison; copies it to results/

The speed tables come from recipes/results/attention/*/results.json, each written by recipes/benchmark_attention.py.

The tests compare the README with what this prints, so the page cannot drift.
"""

import json
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

from hf_posswap import ARCHITECTURES, SCHEMES
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.report import markdown_table, provenance_line, write_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "recipes" / "results" / "compare.json"


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


def results_tables(results: dict) -> str:
    """The tables of a comparison, one for each model, and what stands behind them."""
    tables = [f"**{model['model']}**\n\n{markdown_table(model)}" for model in results["models"]]
    return "\n\n".join([*tables, provenance_line(results)])


def speed_tables(folder: Path) -> str:
    """Time and peak memory of swapped models as ratios to the unswapped one on sdpa, a row for each way of running."""
    runs = {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/results.json"))}
    records = [record for run in runs.values() for record in run["cases"]]
    blocks = []
    for measure, phases, title in (
        ("time", ("forward", "train"), "time"),
        ("memory", ("forward", "train"), "peak memory"),
        ("time", ("decode",), "time of a new token"),
    ):
        rows, columns = {}, {}
        for record in records:
            case = record["case"]
            if case["measure"] != measure or case["phase"] not in phases:
                continue
            control = measure == "memory" and next(
                other["peak_mib"]
                for other in records
                if other["case"] == case | {"subject": "sdpa", "clip": None} and "peak_mib" in other
            )
            column = f"{case['phase'].replace('train', 'training')} {case['batch']}x{case['length']}"
            columns[case["phase"], case["batch"] * case["length"], column] = column
            name = "the original again" if case["subject"] == "sdpa" else case["subject"].replace("_", "\\_")
            threads = f", {case['threads']} threads" if case["threads"] > 1 else ""
            kept = ", pages kept" if case["allocator"] == "keep" else ""
            old = ", transformers 4.57.6" if case["family"] == "old-bert" else ""
            if measure == "memory" and case["subject"] == "sdpa":
                continue
            ratio = record["peak_mib"] / control if measure == "memory" else record["ratio"]["median"]
            rows.setdefault(f"{name}{old}{threads}{kept}", {})[column] = f"{ratio:.2f}"
        if rows:
            names = [columns[key] for key in sorted(columns)]
            lines = [f"| {title} | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
            lines += [f"| {row} | {' | '.join(cells.get(name, '') for name in names)} |" for row, cells in rows.items()]
            blocks.append("\n".join(lines))
    first = next(iter(runs.values()))
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    commits = ", ".join(sorted({run["commit"] for run in runs.values()}))
    commands = "; ".join(f"`{run['command']}`" for run in runs.values())
    blocks.append(
        f"{commands} at commit {commits}; {versions}; {first['hardware']['cpu']}, {first['hardware']['cores']} cores."
    )
    return "\n\n".join(blocks)


def render(readme: str, results: dict) -> str:
    """Return the README with the generated blocks replaced."""
    blocks = (("matrix", matrix()), ("results", results_tables(results)), ("speed", speed_tables(RESULTS.parent / "attention")))
    for name, block in blocks:
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        readme, count = re.subn(pattern, lambda m, b=block: f"{m[1]}{b}\n{m[2]}", readme, flags=re.DOTALL)
        if count != 1:
            raise SystemExit(f"README.md must have one <!-- {name} --> block, it has {count}")
    return readme


if __name__ == "__main__":
    if len(sys.argv) > 1:
        RESULTS.parent.mkdir(exist_ok=True)
        shutil.copyfile(sys.argv[1], RESULTS)
        write_report(json.loads(RESULTS.read_text()), RESULTS.parent)
    page = ROOT / "README.md"
    page.write_text(render(page.read_text(), json.loads(RESULTS.read_text())))
