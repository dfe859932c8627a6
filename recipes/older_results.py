"""List the committed results that are older than the code that they measure, those with the most changes first.

    python recipes/older_results.py

A result names its commit. Counted are later commits that touch its recipe, or what of the package can change a figure: not
what shares, draws or prints. Most of them change no figure; which ones do, only running the result's command again can tell.
"""

import json
import subprocess
from collections import Counter
from pathlib import Path

from hf_posswap.experiments.comparison import table

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("hf_posswap", ":!hf_posswap/sharing", ":!hf_posswap/contract", ":!hf_posswap/plots.py", ":!hf_posswap/drawing.py")


def later_commits(root: Path = ROOT) -> Counter[str]:
    """Return how many commits each result file below recipes/results is behind what it measures; those behind none are out."""
    behind, results = Counter(), root / "recipes" / "results"
    for file in sorted(results.rglob("*.json")):
        content = json.loads(file.read_text())
        runs = [run for run in content.get("runs", [content]) if "commit" in run]
        for commit, recipe in {(run["commit"], run.get("recipe")) for run in runs}:
            path = f"recipes/{recipe}.py" if recipe else "recipes"
            command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *MEASURED, path]
            count = int(subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout)
            name = file.relative_to(results).as_posix()
            behind[name] = max(behind[name], count)
    return +behind


if __name__ == "__main__":
    print(table(["result", "later commits"], [[name, str(count)] for name, count in later_commits().most_common()]))
