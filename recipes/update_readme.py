"""Write the tables of README.md from the registries and from the committed result file.

    python recipes/update_readme.py                                    # after the registries changed
    python recipes/update_readme.py runs/three-seeds/results.json      # after a new comparison; copies it to results/

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


def render(readme: str, results: dict) -> str:
    """Return the README with both generated blocks replaced."""
    for name, block in (("matrix", matrix()), ("results", results_tables(results))):
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
