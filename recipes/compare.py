"""Run a recipe for several schemes, starts and seeds under one budget, or collect finished runs, and set them side by side.

    python recipes/compare.py downstream_classification --scheme original --scheme rotary --start cold --start fit \\
        --seed 0 --seed 1 --seed 2 --output runs/cola -- --config recipes/configs/cola.yaml
    python recipes/compare.py downstream_classification --output runs/cola --launcher "accelerate launch --config_file \\
        recipes/accelerate/multi_gpu.yaml" -- --model bert-base-uncased --dataset nyu-mll/glue --dataset-config cola
    python recipes/compare.py --collect runs/mine --collect runs/theirs --output runs/both

What stands after `--` goes to every run. Each is a process of its own, so that memory and seeds are its own, and finished ones
are kept: the same command again does the rest. Writes comparison.json, .md, .html (one page, no other files) and pictures.
"""

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

from hf_posswap.errors import PosswapError
from hf_posswap.recipe import ORIGINAL, STARTS
from hf_posswap.runs import load_runs, write_comparison
from hf_posswap.terminal import run_program

FOLDER = Path(__file__).parent


def command(
    recipe: Annotated[str | None, typer.Argument(help="A recipe of this folder, such as passkey.")] = None,
    options: Annotated[list[str] | None, typer.Argument(help="Options of the recipe, after --.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for runs/ and the comparison.")] = Path("runs/comparison"),
    scheme: Annotated[
        list[str] | None, typer.Option(help="Repeatable. Default: original sinusoidal relative rotary none.")
    ] = None,
    start: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(STARTS)}. Default: swap.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 0 1 2.")] = None,
    collect: Annotated[list[Path] | None, typer.Option(help="Folders of finished runs, instead of running.")] = None,
    vary: Annotated[list[str] | None, typer.Option(help="An option that may differ, in --collect. Repeatable.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="Figures of the table. Repeatable. Default: all.")] = None,
    launcher: Annotated[str, typer.Option(help="What starts a run. Default: this Python.")] = sys.executable,
):
    """Compare position schemes in one recipe: equal budgets, means with spread, one page to share."""
    if (recipe is None) == (not collect):
        raise PosswapError("give a recipe to run, or --collect folders of finished runs")
    if recipe is not None:
        script = FOLDER / f"{recipe.removesuffix('.py')}.py"
        if not script.exists():
            raise PosswapError(f"there is no {script}")
        jobs = []
        for number in seed or [0, 1, 2]:  # one seed after the other: what is stopped half way has whole seeds to collect
            for one in scheme or [ORIGINAL, "sinusoidal", "relative", "rotary", "none"]:
                # The original has one start, unless the question is what it would have been from nothing.
                starts = [s for s in start or ["swap"] if s == "scratch"] or ["swap"] if one == ORIGINAL else start or ["swap"]
                jobs += [(one, how, number) for how in starts]
        for one, how, number in tqdm(jobs, desc=script.stem, unit="run"):
            folder = output / "runs" / "-".join("".join(c if c.isalnum() else "-" for c in x) for x in (one, how, str(number)))
            if (folder / "result.json").exists():
                continue
            chosen = ["--scheme", one, "--start", how, "--seed", str(number), "--output", str(folder)]
            resume = ["--resume"] if folder.exists() else []
            done = subprocess.run([*shlex.split(launcher), str(script), *(options or []), *chosen, *resume], check=False)
            if done.returncode:
                raise PosswapError(f"the run of {one}, {how}, seed {number} failed; what is finished is kept in {output}")
    written = write_comparison(load_runs(collect or [output / "runs"]), output, vary=vary or (), figures=figure or ())
    console = Console()
    console.print(Markdown((output / "comparison.md").read_text()))
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line."""
    run_program("compare", command)


if __name__ == "__main__":
    main()
