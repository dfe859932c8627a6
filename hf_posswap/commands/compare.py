"""Run a recipe for several schemes, starts and seeds under one budget, or collect finished runs, and compare them."""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tqdm import tqdm

from hf_posswap.assets import model_source
from hf_posswap.errors import DataError, Interrupted, PosswapError
from hf_posswap.experiments.comparison import ORIGINAL, load_runs
from hf_posswap.experiments.options import STARTS
from hf_posswap.experiments.page import write_comparison
from hf_posswap.provenance import input_hashes, read_json, write_json
from hf_posswap.schemes import parse_scheme
from hf_posswap.schemes.importing import import_schemes
from hf_posswap.terminal import print_markdown
from hf_posswap.training.run_log import announce

SCHEMES = (ORIGINAL, "sinusoidal", "relative", "rotary", "none")
QUICK_SCHEMES = (ORIGINAL, "relative", "rotary")
QUICK = shlex.split("--max-steps 8 --fit-tokens 8192 --evaluation-tokens 4096 --word-order-sentences 120")
OWN = {"--output", "--scheme", "--start", "--seed", "--schemes-from", "--resume"}  # options that the comparison gives each run
DEFAULT_RECIPE = "hf_posswap.experiments.swap_cost"  # part of the package, so it works without the folder recipes/


def compare(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's file. Default: what a swap costs.")] = None,
    options: Annotated[list[str] | None, typer.Argument(help="Options for every run of the recipe, after --.")] = None,
    output: Annotated[Path, typer.Option(help="Folder for runs/ and the comparison.")] = Path("runs/comparison"),
    scheme: Annotated[list[str] | None, typer.Option(help=f"Repeatable. Default: {' '.join(SCHEMES)}.")] = None,
    start: Annotated[list[str] | None, typer.Option(help=f"Repeatable: {', '.join(STARTS)}. Default: swap.")] = None,
    seed: Annotated[list[int] | None, typer.Option(min=0, max=2**32 - 1, help="Repeatable. Default: 0 1 2.")] = None,
    schemes_from: Annotated[str | None, typer.Option(help="A module or file.py that registers further schemes.")] = None,
    collect: Annotated[list[Path] | None, typer.Option(help="Finished runs or comparisons instead. Repeatable.")] = None,
    vary: Annotated[list[str] | None, typer.Option(help="An option that --collect runs may differ in. Repeatable.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="A figure to show. Repeatable. Default: all.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The default recipe in minutes: rotary, relative; start fit.")] = False,
    launcher: Annotated[str | None, typer.Option(help="Command that starts each run. Default: this Python.")] = None,
):
    """Compare position schemes in one recipe: equal budgets, means ± standard deviation, one page to share.

    The default recipe measures, on the built-in MiniLM, what a swap costs and a short tuning wins back; with --start fit,
    what a fit does. Options after -- are passed to every run, which is a process of its own. Finished runs are kept, so the
    same command goes on after an interruption. Writes comparison.json, .md, .html (self-contained) and pictures.

    \b
        hf-posswap compare --quick --output runs/quick
        hf-posswap compare --output runs/cost
        hf-posswap compare recipes/passkey.py --scheme original --scheme rotary --start fit --output runs/keys \\
            -- --config recipes/configs/passkey.yaml
        hf-posswap compare --collect runs/mine --collect theirs/comparison.json --output runs/both
    """
    if recipe is not None and recipe.startswith("-"):  # only options after `--`: they are for the default recipe
        recipe, options = None, [recipe, *(options or [])]
    if collect and (recipe or options or scheme or start or seed or schemes_from or launcher):
        what = "give a recipe to run (and --scheme, --start, --seed, --schemes-from, --launcher), or --collect finished runs"
        raise PosswapError(f"{what}, not both")
    if quick and (recipe or collect):
        raise PosswapError("--quick is the default recipe with a small budget: leave out the recipe, or --quick")
    if quick:  # other options given on the command line win
        options, scheme = [*QUICK, *(options or [])], scheme or QUICK_SCHEMES
        start, seed = start or ["fit"], seed or [0]
    if given := OWN & {option.partition("=")[0] for option in options or []}:
        raise PosswapError(f"{min(given)} is given by the comparison: put it before --, or leave it out")
    if not collect:
        if schemes_from:
            import_schemes(schemes_from)
            options = [*(options or []), "--schemes-from", schemes_from]
        if recipe and not Path(recipe).is_file():
            raise PosswapError(f"there is no {recipe}: give the path of a recipe, such as recipes/passkey.py")
        program = [recipe] if recipe else ["-m", DEFAULT_RECIPE]
        try:
            begins = shlex.split(launcher) if launcher else [sys.executable]  # whose path may hold spaces
        except ValueError as error:
            raise PosswapError(f"--launcher {launcher} is no command ({error}): write it as for a shell") from None
        jobs = _jobs(scheme or SCHEMES, start or ["swap"], seed or [0, 1, 2])
        _begin(output, {"recipe": program, "options": options or []})
        run_all([*begins, *program, *(options or [])], jobs, output)
    runs = load_runs(collect or [output / "runs"])
    try:
        written = write_comparison(runs, output, vary=vary or (), figures=figure or ())
    except (KeyError, TypeError, AttributeError) as error:
        if not collect:
            raise
        said = f"{type(error).__name__}: {error}"
        raise DataError(f"--collect names what compare or a recipe does not write ({said}): give their files") from error
    console = Console(markup=False, emoji=False)  # paths are printed
    print_markdown(console, (output / "comparison.md").read_text(encoding="utf-8"))
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)


def run_all(command: list[str], jobs: list[tuple[str, str, int]], output: Path) -> None:
    """Run a recipe's command for each (scheme, start, seed) that has no result below `output` yet."""
    bar, finished = tqdm(jobs, desc="compare", unit="run", disable=None), None
    for number, (scheme, start, seed) in enumerate(bar, 1):
        bar.set_postfix_str(f"{scheme}, {start}, seed {seed}")
        # A plus stays: 1e+1 is not 1e-1.
        name = "-".join("".join(c if c.isalnum() or c == "+" else "-" for c in part) for part in (scheme, start, str(seed)))
        if len(name) > 200:  # of a file system's 255
            name = f"{name[:180]}-{sha256(name.encode()).hexdigest()[:12]}"
        folder = output / "runs" / name
        if (folder / "result.json").exists():
            finished = folder
            continue
        if finished is not None:
            _check_inputs(finished)
        chosen = ["--scheme", scheme, "--start", start, "--seed", str(seed), "--output", str(folder)]
        announce(f"compare: {scheme}, {start}, seed {seed}, run {number} of {len(jobs)}")
        status = _run([*command, *chosen, *(["--resume"] if folder.exists() else [])])
        if status == 130:
            raise Interrupted(f"stopped; finished runs are kept in {output}: the same command does the rest")
        if status:
            raise PosswapError(f"the run of {scheme}, {start}, seed {seed} failed; finished runs are kept in {output}")


def _check_inputs(folder: Path) -> None:
    """Raise PosswapError if a file that this finished run has read is another now: it could not be compared with new runs."""
    run = read_json(folder / "result.json")
    for name, hashes in run.get("inputs", {}).items():  # older results have none
        given = run["config"][name]
        place = model_source(given) if name == "model" else given  # a folder of a built-in's name is not read
        if input_hashes({name: tuple(place) if isinstance(place, list) else place}, folder).get(name, hashes) != hashes:
            what = f"{name} {given!r} has other content than for the finished run in {folder}"
            raise PosswapError(f"{what}: put back what it was, or choose another --output")


def _run(command: list[str]) -> int:
    """Run a command in its own session; return its exit status, or 130 if this process was asked to stop.

    The run gets SIGTERM, on which the training loop saves a checkpoint. On Ctrl-C a launcher would print a traceback. Windows
    has neither: there the run has got the Ctrl-C of the terminal itself.
    """
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    except KeyboardInterrupt:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        with suppress(AttributeError, ProcessLookupError, PermissionError):  # no groups, or this one is empty
            for _ in range(600):  # a minute at most: accelerate's launcher ends at once, and the run it began still saves
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        return 130


def _jobs(schemes: list[str], starts: list[str], seeds: list[int]) -> list[tuple[str, str, int]]:
    for scheme in schemes:
        if scheme != ORIGINAL:
            parse_scheme(scheme)  # find a typo in the last scheme before the first one runs
    if unknown := [start for start in starts if start not in STARTS]:
        raise PosswapError(f"start={unknown[0]!r} is not known; known are {', '.join(STARTS)}")
    only = ["scratch" if "scratch" in starts else "swap"]  # the original has one start, but may also be trained from scratch
    rows = [(scheme, start) for scheme in schemes for start in (only if scheme == ORIGINAL else starts)]
    return [(*row, seed) for seed in seeds for row in rows]  # an interrupted comparison has complete seeds to collect


def _begin(output: Path, asked: dict) -> None:
    """Note recipe and options in the folder, or raise if it has runs of others: finished runs would be mixed with new ones.

    A folder without a finished run may begin anew, as after a typo; a recipe does not resume what others have begun.
    """
    file = output / "comparison_of.json"
    if any(output.glob("runs/*/result.json")) and file.exists() and read_json(file) != asked:
        raise PosswapError(f"{output} holds runs of another recipe or of other options, see {file}: choose another --output")
    write_json(file, asked)
