"""Where the public data of our results come from, and whether what you have is the same, byte for byte.

    python recipes/data.py          # each set: its source, its licence, how our files were made from it
    python recipes/data.py data/    # compare data/cola/train.csv and so on with the files that were measured on

No recipe needs these files: all take any path. A result names the SHA-256 of what it read (`inputs` in result.json).
"""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from hf_posswap.errors import DataError
from hf_posswap.provenance import input_hashes
from hf_posswap.terminal import run_program

# Name -> source (GitHub repository @ commit, and the files in it), licence, how the files were made, their SHA-256 by name.
SETS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def data(folder: Annotated[Path | None, typer.Argument(help="A folder with cola/train.csv and so on, to check.")] = None):
    """Say where the data of the results come from, or check what is in a folder."""
    if folder is None:
        for name, one in SETS.items():
            print(f"{name}: {', '.join(one['files'])}\n  from {one['source']}\n  licence: {one['licence']}\n  {one['made']}")
        return
    states = check(folder)
    for file, state in states.items():
        print(f"{file}: {state}")
    if "another" in states.values():
        raise DataError(f"files in {folder} differ from those measured on: make them again, see `python recipes/data.py`")
    if set(states.values()) == {"missing"}:
        raise DataError(f"{folder} has none of the files: it should have {next(iter(states))} and so on")


def check(folder: Path) -> dict[str, str]:
    """Return, for each file, whether it is "the same", "another" or "missing"."""
    states = {}
    for name, one in SETS.items():
        for file, expected in one["files"].items():
            found = input_hashes({"file": str(folder / name / file)})
            same = "the same" if found and found["file"][file] == expected else "another"
            states[f"{name}/{file}"] = same if found else "missing"
    return states


if __name__ == "__main__":
    run_program("data", data)
