"""Run committed results again with today's code, one run of each, and note the figures next to those on file.

    python recipes/run_again.py cola/comparison.json passkey/comparison.json --output runs/again

Start it where the data stand as the results' commands name them. Of a table it takes the run with rotary positions after a fit,
or the first that is most like it; --row and --seed choose another. It is given the options that are on file. The figures of all
runs in --output, next to those on file, go into its run_again.json: in recipes/results, recipes/older_results.py reads it.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.errors import PosswapError
from hf_posswap.experiments.comparison import ORIGINAL, row_label
from hf_posswap.provenance import read_json, write_json
from hf_posswap.terminal import run_program

RESULTS = Path(__file__).parent / "results"


def choose(runs: list[dict], vary: list[str], row: str | None = None, seed: int | None = None) -> dict:
    """Return the run to repeat; PosswapError if there is none of that row and seed."""
    found = [run for run in runs if row in (None, row_label(run, vary)) and seed in (None, run["config"]["seed"])]
    if not found:
        raise PosswapError(f"no run of row {row!r} and seed {seed}; rows: {sorted({row_label(run, vary) for run in runs})}")
    swapped = [run for run in found if run["config"]["scheme"] != ORIGINAL] or found
    fitted = [run for run in swapped if run["config"]["start"] == "fit"] or swapped
    return next((run for run in fitted if run["config"]["scheme"] == "rotary"), fitted[0])


def again(run: dict, folder: Path) -> list[str]:
    """Write the run's options into its folder, and return the command that runs it."""
    write_json(folder / "config.json", run["config"])
    recipe = Path(__file__).with_name(f"{run['recipe']}.py")
    return [str(recipe), "--config", str(folder / "config.json"), "--output", str(folder)]


def place(output: Path, result: str, label: str) -> Path:
    """Return the folder of a run."""
    return output / result.removesuffix(".json") / label.replace("/", "-")


def notes(output: Path) -> dict[str, dict]:
    """Return {result file: {run: what was found}} for the runs that are finished in `output`."""
    found = {}
    for file in sorted(RESULTS.rglob("*.json")):
        result, content = file.relative_to(RESULTS).as_posix(), read_json(file)
        for before in content.get("runs", [content]):
            if "figures" in before and (made := place(output, result, name(before, content)) / "result.json").exists():
                now = read_json(made)
                figures = {key: [value, now["figures"].get(key)] for key, value in before["figures"].items()}
                note = {"on_file": before["commit"], "figures": figures}
                note |= {key: now[key] for key in ("command", "commit", "versions", "hardware")}
                found.setdefault(result, {})[name(before, content)] = note
    return found


def name(run: dict, content: dict) -> str:
    """Return the name of a run of a result file."""
    return f"{row_label(run, content.get('vary', []))}, seed {run['config']['seed']}"


def run_again(
    results: Annotated[list[str], typer.Argument(help="Result files, as their paths in recipes/results.")],
    output: Annotated[Path, typer.Option(help="Folder for the runs; finished ones are kept.")] = Path("runs/again"),
    row: Annotated[str | None, typer.Option(help="Row of the table, as it is named there.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
) -> None:
    """Run one run of each result file again."""
    known = {file.relative_to(RESULTS).as_posix() for file in RESULTS.rglob("*.json")}
    if unknown := [result for result in results if result not in known]:
        raise PosswapError(f"{unknown[0]!r} is no result file: give its path in {RESULTS}, such as cola/comparison.json")
    failed = []
    for result in results:
        content = read_json(RESULTS / result)
        before = choose(content.get("runs", [content]), content.get("vary", []), row, seed)
        folder = place(output, result, name(before, content))
        if not (folder / "result.json").exists():
            print(f"{result}: {folder}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)  # what a stopped run has left
            if subprocess.run([sys.executable, *again(before, folder)]).returncode:
                failed.append(result)
    write_json(output / "run_again.json", notes(output))
    if failed:
        raise PosswapError(f"these runs failed, see above: {', '.join(failed)}")


if __name__ == "__main__":
    run_program("run_again", run_again)
