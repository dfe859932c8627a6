"""List the committed results that are older than the code that they measure, those with the most changes first.

    python recipes/older_results.py

A result names its commit. Counted are later commits that touch its recipe, or what of the package can change a figure: not
what shares, draws or prints, nor, without a span, what spans use. Most of them change no figure; which ones do, only running it
again can tell: where recipes/run_again.py did that for a run, and no figure moved by over 5 %, commits are counted from there.
"""

import json
import subprocess
from collections import Counter
from pathlib import Path

from hf_posswap.experiments.comparison import made_in, table
from hf_posswap.terminal import run_program

ROOT = Path(__file__).resolve().parents[1]
PRINTING = ("sharing", "contract", "commands", "start", "plots.py", "drawing.py", "cli.py", "describing.py", "terminal.py")
PRINTING += tuple(f"experiments/{name}.py" for name in ("comparison", "differences", "page"))
MEASURED = ("hf_posswap", *(f":!hf_posswap/{name}" for name in PRINTING))
OF_SPANS = (":!hf_posswap/functional/banded.py", ":!hf_posswap/span_cache.py", ":!hf_posswap/span_mask.py")


def later_commits(root: Path = ROOT) -> Counter[str]:
    """Return how many commits each result file below recipes/results is behind what it measures; those behind none are out."""
    behind, results = Counter(), root / "recipes" / "results"
    again = json.loads((results / "run_again.json").read_text("utf-8")) if (results / "run_again.json").exists() else {}

    def count(commit: str, recipe: str | None, spans: bool) -> int:
        paths = (f"recipes/{recipe}.py" if recipe else "recipes/*.py", *(() if spans else OF_SPANS))
        command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *MEASURED, *paths]
        counted = subprocess.run(command, cwd=root, capture_output=True, text=True)
        if counted.returncode:
            raise SystemExit(f"this needs a git clone with its history: {counted.stderr.strip()}")
        return int(counted.stdout)

    for file in sorted({*results.rglob("*.json")} - {results / "run_again.json"}):
        content, name = json.loads(file.read_text("utf-8")), file.relative_to(results).as_posix()
        made = {(run["commit"], run.get("recipe"), bool(run.get("config", {}).get("span"))) for run in made_in(content)}
        repeated = [
            max(count(note["commit"], *of_run) for _, *of_run in made)
            for note in again.get(name, {}).values()
            if all(now is not None and abs(now - was) <= 0.05 * abs(was) for was, now in note["figures"].values())
        ]
        behind[name] = min([max((count(*one) for one in made), default=0), *repeated])
    return +behind


def older_results() -> None:
    """List the committed results that are older than the code that they measure, those with the most changes first."""
    print(table(["result", "later commits"], [[name, str(count)] for name, count in later_commits().most_common()]))


if __name__ == "__main__":
    run_program("older_results", older_results)
