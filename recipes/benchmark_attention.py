"""What positions cost: time and memory of swapped models and of attention alone, against plain sdpa, on your machine.

    python recipes/benchmark_attention.py                                    # models, 2 shapes, about 20 minutes on 2 cores
    python recipes/benchmark_attention.py --quick --output runs/try          # the same in small, to see that it runs
    python recipes/benchmark_attention.py --level op --subject all           # attention alone, every implementation
    python recipes/benchmark_attention.py --device cuda --dtype bfloat16 --shape 8x512 --shape 4x4096
    python recipes/benchmark_attention.py --dry-run --subject all            # only list the cases

Writes results.json, results.md and one PNG for each table into --output. An interrupted run goes on when started again with
the same options.

How it measures: every case is a fresh process. It holds the subject and its reference, the unswapped model (or plain
attention) on sdpa, and calls them in turn, so that whatever else the machine does hits both. A ratio is the median over pairs
of calls, of CPU time on one CPU thread and of wall time otherwise; its spread is the quartiles. The reference against itself
is the A/A control: differences as small as its distance from 1 mean nothing. Peak memory is a process of its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import torch
import typer
from attention_report import write_report
from attention_worker import ALLOCATORS, DECODERS, LEVELS, PHASES, SUBJECTS, Case
from rich.console import Console
from tqdm import tqdm

import hf_posswap
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.provenance import provenance, write_json
from hf_posswap.terminal import print_markdown, run_program

WORKER = Path(__file__).with_name("attention_worker.py")
FORMAT = 1
NAMES = tuple(f"{family}/{subject}" for family, subjects in SUBJECTS.items() for subject in subjects)
DEFAULT_SUBJECTS = ("sdpa", "bert/eager", "bidirectional/eager", "relative", "rotary", "relative_key")


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """One run: which cases, and how each is measured. A resumed run must have the same."""

    levels: tuple[str, ...] = ("model",)
    phases: tuple[str, ...] = PHASES
    measures: tuple[str, ...] = ("time", "memory")
    subjects: tuple[str, ...] = DEFAULT_SUBJECTS
    shapes: tuple[str, ...] = ("4x512", "1x2048")
    decode_shapes: tuple[str, ...] = ("1x128", "1x1024")
    clips: tuple[int, ...] = (64,)
    dtypes: tuple[str, ...] = ("float32",)
    threads: tuple[int, ...] = (1,)
    allocators: tuple[str, ...] = ("default",)
    device: str = "cpu"
    dropout: float = 0.0
    layers: int = 2
    hidden: int = 768
    heads: int = 12
    vocab: int = 1000
    calls: int = 5
    seconds: float = 1.0
    timeout: float = 600.0
    busy: int = 0
    old_python: str | None = None
    seed: int = 0

    def __post_init__(self):
        accepted = {
            "levels": tuple(LEVELS),
            "phases": PHASES,
            "measures": ("time", "memory"),
            "subjects": ("all", *NAMES, *dict.fromkeys(name.partition("/")[2] for name in NAMES)),
            "dtypes": ("float32", "bfloat16", "float16"),
            "allocators": tuple(ALLOCATORS),
            "device": ("cpu", "cuda"),
        }
        for field, known in accepted.items():
            given = getattr(self, field)
            for name in (given,) if isinstance(given, str) else given:
                if name not in known:
                    raise PosswapError(f"{field}: {name!r} is not known; known are {', '.join(known)}")
        for shape in (*self.shapes, *self.decode_shapes):
            if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape):
                raise PosswapError(f"shape {shape!r} must be batch x length, such as 4x512")
        for field in ("layers", "hidden", "heads", "vocab", "calls", *("clips", "threads")):
            given = getattr(self, field)
            for number in given if isinstance(given, tuple) else (given,):
                if number < 1:
                    raise PosswapError(f"{field}: {number} must be at least 1")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise PosswapError(f"hidden {self.hidden} must be heads {self.heads} times an even number")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise PosswapError("device cuda: torch finds no CUDA device here")
        if self.old_python is None and any(name.startswith("old-bert/") for name in self.subjects):
            raise PosswapError("old-bert subjects need --old-python, an interpreter that has transformers 4.57.6")

    def chosen(self, name: str) -> bool:
        """Whether a subject such as bert/relative was asked for, by its whole name, its last part, or all."""
        return bool({"all", name, name.partition("/")[2]} & set(self.subjects))


def list_cases(config: BenchmarkConfig) -> list[Case]:
    """Return every process of a run, the A/A control of each family and shape first."""
    cases = []
    for measure in config.measures:
        for level in config.levels:
            for family in LEVELS[level]:
                names = [name for name in SUBJECTS[family] if config.chosen(f"{family}/{name}")]
                if not names or (family == "old-bert" and config.old_python is None):
                    continue
                names = list(dict.fromkeys((SUBJECTS[family][0], *names)))  # never without its control
                cases += _family_cases(config, measure, level, family, names)
    if not cases:
        raise PosswapError(
            f"nothing to run: at level {', '.join(config.levels)} none of {', '.join(config.subjects)} has a phase "
            f"{', '.join(config.phases)} for {', '.join(config.measures)}; levels are {', '.join(LEVELS)}"
        )
    return cases


def _family_cases(config: BenchmarkConfig, measure: str, level: str, family: str, names: list[str]) -> Iterator[Case]:
    sizes = {field: getattr(config, field) for field in ("layers", "hidden", "heads", "vocab", "calls", "seconds", "seed")}
    # Resident memory says little about what is in use when the allocator keeps pages.
    allocators = ("default",) if measure == "memory" else config.allocators
    for phase in config.phases:
        if phase == "decode" and (family not in DECODERS or measure == "memory"):
            continue
        shapes = config.decode_shapes if phase == "decode" else config.shapes
        for allocator in allocators:
            for threads in config.threads:
                for dtype in config.dtypes:
                    for shape in shapes:
                        batch, length = map(int, shape.split("x"))
                        for name in names:
                            # Clips but the first are measured at one shape, in the middle of the list.
                            clips = config.clips if shape == shapes[len(shapes) // 2] else config.clips[:1]
                            for clip in clips if re.match(r"relative(-|$)", name) else (None,):
                                yield Case(
                                    measure=measure, level=level, phase=phase, family=family, subject=name, batch=batch,
                                    length=length, clip=clip, dtype=dtype, device=config.device, threads=threads,
                                    allocator=allocator, dropout=config.dropout, **sizes,
                                )  # fmt: skip


def run_case(case: Case, config: BenchmarkConfig) -> dict:
    """Run one case in a fresh process; return its record, with an `error` where it did not end well."""
    old = case.family == "old-bert"
    command = [config.old_python if old else sys.executable, str(WORKER), json.dumps(asdict(case))]
    surroundings = os.environ | ALLOCATORS[case.allocator] | {"OMP_NUM_THREADS": str(case.threads), "HF_HUB_OFFLINE": "1"}
    surroundings |= {"MKL_NUM_THREADS": str(case.threads), "TOKENIZERS_PARALLELISM": "false"}
    if old:
        surroundings.pop("PYTHONPATH", None)  # another interpreter, with packages of its own
    else:
        path = [str(Path(hf_posswap.__file__).parents[1]), surroundings.get("PYTHONPATH", "")]
        surroundings["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    try:
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=config.timeout, check=False)
    except subprocess.TimeoutExpired:
        return _record(case, {"error": f"took longer than --timeout {config.timeout:g} s"})
    except OSError as error:
        return _record(case, {"error": f"{command[0]} cannot be started: {error}"})
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        hint = ", probably out of memory" if name == "SIGKILL" else ""
        return _record(case, {"error": f"the process was ended by {name}{hint}"})
    try:
        return _record(case, json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, json.JSONDecodeError):
        said = (done.stderr.strip() or "nothing was said").splitlines()[-1]
        return _record(case, {"error": f"exit status {done.returncode}: {said}"})


def _record(case: Case, result: dict) -> dict:
    if "times_ms" in result:
        result = {**result, **summary(result["times_ms"], clock(case))}
    return {"key": key(case), "case": asdict(case), **result}


def key(case: Case) -> str:
    """Return the name of a case, unique in a run."""
    clip = f" clip {case.clip}" if case.clip else ""
    where = f"{case.batch}x{case.length} {case.dtype} threads {case.threads} malloc {case.allocator}"
    return f"{case.measure} {case.level} {case.phase} {case.family}/{case.subject}{clip} {where}"


def clock(case: Case) -> str:
    """Return which time the ratios are of: CPU time does not see other processes, but means little for several threads."""
    return "cpu" if case.threads == 1 and case.device == "cpu" else "wall"


def summary(times: dict, clock: str) -> dict:
    """Return least and median milliseconds, and the ratio: median and quartiles over pairs, and that of the least times."""
    reference, subject = times[f"reference_{clock}"], times[clock]
    ratios = [ours / theirs for ours, theirs in zip(subject, reference, strict=True)]
    low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "clock": clock,
        "pairs": len(ratios),
        "ms": {"least": min(subject), "median": median(subject)},
        "reference_ms": {"least": min(reference), "median": median(reference)},
        "ratio": {"median": middle, "low": low, "high": high, "of_least": min(subject) / min(reference)},
    }


def benchmark(config: BenchmarkConfig, output: Path, *, retry: bool = False, progress: bool = True) -> dict:
    """Run the cases that `output` does not hold yet, one process each; return and write what it holds then.

    Ctrl-C stops between or within cases; what is finished stays, and is reported.
    """
    cases = list_cases(config)
    _prepare_output(config, output)
    journal = output / "cases.jsonl"
    records = {name: record for name, record in _read_journal(journal).items() if not (retry and "error" in record)}
    waiting = [case for case in cases if key(case) not in records]
    bar = tqdm(total=len(cases), initial=len(cases) - len(waiting), unit="case", disable=None if progress else True)
    interrupted = False
    try:
        with _busy_processes(config.busy), journal.open("a") as lines:
            for case in waiting:
                bar.set_description(key(case))
                record = run_case(case, config)
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                records[record["key"]] = record
                bar.update()
    except KeyboardInterrupt:
        interrupted = True
    bar.close()
    origin = provenance("python recipes/benchmark_attention.py")
    origin["hardware"] |= {"threads": list(config.threads), "cores": os.cpu_count()}
    found = [records[key(case)] for case in cases if key(case) in records]
    results = {
        "format": FORMAT,
        **origin,
        "config": json.loads(json.dumps(asdict(config))),
        "malloc": {name: ALLOCATORS[name] for name in config.allocators},
        "missing": len(cases) - len(found),
        "interrupted": interrupted,
        "cases": found,
    }
    write_json(output / "results.json", results)
    return results


def _prepare_output(config: BenchmarkConfig, output: Path) -> None:
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file: give a folder")
    file, wanted = output / "config.json", json.loads(json.dumps(asdict(config)))
    if file.exists():
        held = json.loads(file.read_text())
        names = [field.name for field in fields(config) if held.get(field.name) != wanted[field.name]]
        if names:
            changes = ", ".join(f"{name} {held.get(name)!r} there, {wanted[name]!r} now" for name in names)
            raise CheckpointError(f"{output} holds a benchmark with another configuration: {changes}; choose another --output")
    elif output.exists() and any(output.iterdir()):
        raise CheckpointError(f"{output} exists and holds no benchmark: choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    write_json(file, wanted)


def _read_journal(journal: Path) -> dict[str, dict]:
    records = {}
    for line in journal.read_text().splitlines() if journal.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the last line of a run that was killed while it wrote
        records[record["key"]] = record
    return records


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Keep `count` cores busy with something else, as other jobs on a shared machine do."""
    code = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    sum(range(10**6))"  # ends when this process is gone
    command = [sys.executable, "-c", code, str(os.getpid())]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(count)]  # Ctrl-C reaches them too
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


_default = BenchmarkConfig()


def _help(text: str, default: tuple) -> str:
    return f"{text} Repeatable. Default: {', '.join(map(str, default))}."


def command(
    output: Annotated[Path, typer.Option(help="Folder for results.json, results.md and plots.")] = Path("runs/attention"),
    level: Annotated[list[str] | None, typer.Option(help=_help("model, or op: attention alone.", _default.levels))] = None,
    phase: Annotated[list[str] | None, typer.Option(help=_help("forward, train, decode.", _default.phases))] = None,
    measure: Annotated[list[str] | None, typer.Option(help=_help("time, memory.", _default.measures))] = None,
    subject: Annotated[
        list[str] | None, typer.Option(help=_help(f"all, or of {', '.join(NAMES)}; or its last part.", DEFAULT_SUBJECTS))
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help=_help("Batch x length.", _default.shapes))] = None,
    decode_shape: Annotated[
        list[str] | None, typer.Option(help=_help("Batch x cached length, for decode.", _default.decode_shapes))
    ] = None,
    clip: Annotated[
        list[int] | None, typer.Option(help=_help("Of relative; all but the first at the middle shape only.", _default.clips))
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=_help("float32, bfloat16, float16.", _default.dtypes))] = None,
    threads: Annotated[list[int] | None, typer.Option(help=_help("CPU threads.", _default.threads))] = None,
    allocator: Annotated[
        list[str] | None,
        typer.Option(help=_help("default, or keep: malloc holds on to freed pages. For time only.", _default.allocators)),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = _default.device,
    dropout: Annotated[float, typer.Option(help="In training; 0.1 is what BERT and GPT-2 are configured with.")] = 0.0,
    layers: Annotated[int, typer.Option(help="Layers of a model.")] = _default.layers,
    hidden: Annotated[int, typer.Option(help="Width of a model; heads are hidden / heads wide at both levels.")] = 768,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = _default.heads,
    vocab: Annotated[int, typer.Option(help="Vocabulary of a model.")] = _default.vocab,
    calls: Annotated[int | None, typer.Option(help=f"Pairs of calls, at least. Default: {_default.calls}.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help=f"More pairs as long as they take less than this. Default: {_default.seconds:g}.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a case is given up and recorded so.")] = _default.timeout,
    busy: Annotated[int, typer.Option(help="Processes that spin beside every case: an oversubscribed machine.")] = 0,
    old_python: Annotated[
        str | None, typer.Option(help="An interpreter that has transformers 4.57.6, for old-bert: relative_key.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights and inputs.")] = _default.seed,
    quick: Annotated[bool, typer.Option("--quick", help="One short shape and two calls, unless options say more.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Run recorded failures again.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cases and run none.")] = False,
):
    """Measure what positions cost in time and memory, against unswapped models on sdpa, paired and with an A/A control."""
    small = {"shapes": ("2x64",), "decode_shapes": ("1x64",), "calls": 2, "seconds": 0.0} if quick else {}
    given = {
        "levels": level,
        "phases": phase,
        "measures": measure,
        "subjects": subject,
        "shapes": shape,
        "decode_shapes": decode_shape,
        "clips": clip,
        "dtypes": dtype,
        "threads": threads,
        "allocators": allocator,
        "calls": calls,
        "seconds": seconds,
    }
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if value is not None}
    config = BenchmarkConfig(
        **(small | given),
        device=device,
        dropout=dropout,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=vocab,
        timeout=timeout,
        busy=busy,
        old_python=old_python,
        seed=seed,
    )
    if dry_run:
        names = [key(case) for case in list_cases(config)]
        typer.echo("\n".join([*names, f"{len(names)} cases, a process each"]))
        return
    results = benchmark(config, output, retry=retry)
    written = write_report(results, output)
    console = Console()
    print_markdown(console, (output / "results.md").read_text())
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if results["interrupted"]:
        console.print(f"interrupted, {results['missing']} cases are missing: the same command goes on", style="yellow")
        raise SystemExit(130)


def main() -> None:
    """Run the command line."""
    run_program("benchmark_attention", command)


if __name__ == "__main__":
    main()
