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
import shlex
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
from attention_worker import DECODERS, LEVELS, MAX_PAIRS, PHASES, SUBJECTS, TABLE_STD, Case
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown
from tqdm import tqdm

import hf_posswap
from hf_posswap.compare import _provenance, _write_json
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.plots import _COLOURS, _MARKERS

WORKER = Path(__file__).with_name("attention_worker.py")
FORMAT = 1
# glibc hands big blocks back to the kernel, which zeroes them anew for every call. "keep" makes it hold on to them, as CUDA's
# caching allocator does. The first flatters whatever allocates little; both are what users meet.
ALLOCATORS = {
    "default": {},
    "keep": {
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**28),
        "MALLOC_MMAP_THRESHOLD_": str(2**40),
        "MALLOC_MMAP_MAX_": "0",  # older versions of glibc ignore a threshold that is so high
    },
}
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
    provenance = _provenance()
    provenance["command"] = shlex.join(["python", "recipes/benchmark_attention.py", *sys.argv[1:]])
    provenance["hardware"] |= {"threads": list(config.threads), "cores": os.cpu_count()}
    found = [records[key(case)] for case in cases if key(case) in records]
    results = {
        "format": FORMAT,
        **provenance,
        "config": json.loads(json.dumps(asdict(config))),
        "malloc": {name: ALLOCATORS[name] for name in config.allocators},
        "missing": len(cases) - len(found),
        "interrupted": interrupted,
        "cases": found,
    }
    _write_json(output / "results.json", results)
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
    _write_json(file, wanted)


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


def tables(results: dict) -> Iterator[tuple[str, list[dict]]]:
    """Yield the title and the records of each table: one for each measure, level, phase, dtype, threads, allocator."""
    groups = {}
    for record in results["cases"]:
        case = record["case"]
        place = f"threads {case['threads']}, malloc {case['allocator']}" if case["device"] == "cpu" else "cuda"
        title = f"{case['level']}, {case['phase']}: {case['measure']}, {case['dtype']}, {place}"
        groups.setdefault(title, []).append(record)
    yield from groups.items()


def markdown(results: dict) -> str:
    """Return all tables, and what stands behind them."""
    config = results["config"]
    parts = []
    for title, records in tables(results):
        parts.append(f"### {title}")
        columns = list(dict.fromkeys(_shape(record) for record in records))
        rows = list(dict.fromkeys(_label(record) for record in records))
        cells = {(_label(record), _shape(record)): record for record in records}
        if records[0]["case"]["measure"] == "memory":
            parts.append("Peak MiB above the level before the calls, in a fresh process.")
            parts.append(_table(rows, columns, cells, _memory_cell))
        else:
            clocks = {"cpu": "process CPU time", "wall": "wall time"}
            used = " or ".join(sorted({clocks[record["clock"]] for record in records if "clock" in record})) or "time"
            shape = "batch x cached length, for each token" if records[0]["case"]["phase"] == "decode" else "batch x length"
            parts.append(f"Ratio of {used} to sdpa of the same family: median of pairs (quartiles). Columns: {shape}.")
            parts.append(_table(rows, columns, cells, _ratio_cell))
            parts.append("Milliseconds, the least (ratio of the least), each process at its own moment: compare ratios.")
            parts.append(_table(rows, columns, cells, _milliseconds_cell))
    failed = [record for record in results["cases"] if "error" in record]
    if failed:
        parts += ["### Failed", "\n".join(f"- {record['key']}: {record['error']}" for record in failed)]
    parts += ["### How to read it", _notes(results)]
    if results["missing"]:
        parts.append(f"**Unfinished**: {results['missing']} cases are missing.")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    hardware = "{cpu}, {cores} cores".format(**results["hardware"])
    if config["device"] == "cuda":
        hardware = f"{results['hardware']['accelerator']}, {hardware}"
    commit = f" at commit {results['commit']}" if results["commit"] else ""
    parts.append(f"`{results['command']}`{commit}; seed {config['seed']}; {versions}; {hardware}.")
    return "\n\n".join(parts) + "\n"


def _notes(results: dict) -> str:
    config = results["config"]
    lines = [
        f"Sizes: {config['heads']} heads of {config['hidden'] // config['heads']}"
        f"; models of {config['layers']} layers, hidden {config['hidden']}, FFN {4 * config['hidden']}, vocabulary "
        f"{config['vocab']}, dropout {config['dropout']:g} in training. Random weights, in the dtype of the table.",
        "A/A: the reference against itself. Differences as small as its distance from 1 mean nothing.",
        f"Relative: key and value tables (`relative-keys`: key only), drawn with a standard deviation of {TABLE_STD}; a swap "
        "starts them at zero, time does not depend on it. A training step is forward and backward, without an optimizer.",
        f"At least {config['calls']} pairs of calls after a warm-up, up to {MAX_PAIRS} within {config['seconds']:g} s.",
    ]
    if "keep" in config["allocators"]:
        lines.append("malloc keep: " + " ".join(f"{name}={value}" for name, value in ALLOCATORS["keep"].items()) + ".")
    if config["busy"]:
        lines.append(f"Oversubscribed on purpose: {config['busy']} busy process(es) ran beside every case.")
    names = {record["case"]["subject"] for record in results["cases"]}
    if names & {"roformer", "gpt-neox"}:
        lines.append(
            "roformer and gpt-neox are transformers' own models; they differ in more than positions, and roformer is eager."
        )
    environments = {record["case"]["family"]: record["environment"] for record in results["cases"] if "environment" in record}
    if old := environments.get("old-bert"):
        lines.append(
            f"old-bert: BERT of transformers {old['transformers']} (torch {old['torch']}), which cannot share a process with a "
            "newer one; its reference is that version's own sdpa model."
        )
    if config["device"] == "cuda":
        seen = next(iter(environments.values()), {})
        kernels = ", ".join(name for name, on in seen.get("sdpa_kernels", {}).items() if on)
        lines.append(f"sdpa may choose from: {kernels}; float32 matmul precision: {seen.get('float32_matmul_precision')}.")
    loads = [record["load"] for record in results["cases"] if record.get("load") is not None]
    if loads:
        lines.append(f"Load average of the machine when cases began: {min(loads):.1f} to {max(loads):.1f}.")
    return "\n".join(f"- {line}" for line in lines)


def _label(record: dict) -> str:
    case = record["case"]
    control = " (A/A)" if case["subject"] == SUBJECTS[case["family"]][0] and case["measure"] == "time" else ""
    return f"{case['family']}/{case['subject']}{control}" + (f", clip {case['clip']}" if case["clip"] else "")


def _shape(record: dict) -> str:
    return "{batch}x{length}".format(**record["case"])


def _table(rows: list[str], columns: list[str], cells: dict, cell) -> str:
    lines = [f"| subject | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row in rows:
        found = [cells.get((row, column)) for column in columns]
        texts = ["" if record is None else "failed" if "error" in record else cell(record) for record in found]
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def _ratio_cell(record: dict) -> str:
    return "{median:.3f} ({low:.3f}–{high:.3f})".format(**record["ratio"])


def _milliseconds_cell(record: dict) -> str:
    return f"{record['ms']['least']:.4g} ({record['ratio']['of_least']:.3f})"


def _memory_cell(record: dict) -> str:
    return "unknown" if record["peak_mib"] is None else f"{record['peak_mib']:.0f}"


def plot(title: str, records: list[dict]) -> Figure | None:
    """Draw time or memory for each token against length, for each subject; None where there is nothing to draw.

    Times are the control's, times the paired ratio: times of different processes would show how busy the machine was.
    """
    memory, decode = records[0]["case"]["measure"] == "memory", records[0]["case"]["phase"] == "decode"
    unit = 1024 if memory else 1000  # KiB, microseconds
    controls = {
        (r["case"]["family"], _shape(r)): r["reference_ms"]["least"] for r in records if "(A/A)" in _label(r) and "ratio" in r
    }
    lines, ticks = {}, {}
    for record in records:
        case = record["case"]
        value = record.get("peak_mib")
        if "ratio" in record and (case["family"], _shape(record)) in controls:
            value = record["ratio"]["median"] * controls[case["family"], _shape(record)]
        if value:  # failed or unknown, or nothing to speak of
            tokens = case["batch"] * (1 if decode else case["length"])
            lines.setdefault(_label(record), []).append((case["length"], value * unit / tokens))
            ticks[case["length"]] = _shape(record)
    if not lines:
        return None
    figure = Figure(figsize=(8.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (label, points) in enumerate(lines.items()):
        # Colours repeat after seven subjects; the marker then is another one, and the line is dashed.
        turn, place = divmod(index, len(_COLOURS))
        marker, style = _MARKERS[(place + turn) % len(_MARKERS)], ("-", "--", ":", "-.")[turn % 4]
        lengths, values = zip(*sorted(points), strict=True)
        axes.plot(lengths, values, linestyle=style, marker=marker, markersize=5, color=_COLOURS[place], label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    values = [value for points in lines.values() for _, value in points]
    steps = [m * 10.0**e for e in range(-6, 12) for m in (1, 2, 5)]
    low, high = max(step for step in steps if step <= min(values)), min(step for step in steps if step >= max(values))
    axes.set_yticks([step for step in steps if low <= step <= high])
    axes.set_ylim(0.95 * low, 1.05 * high)
    axes.set_xlabel("batch x cached length" if decode else "batch x length")
    axes.set_ylabel("peak KiB for each token" if memory else "microseconds for each token")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    return figure


def write_report(results: dict, output: Path) -> list[Path]:
    """Write results.md and a PNG for each table next to results.json; return the paths of all of them."""
    written = []
    for title, records in tables(results):
        figure = plot(title, records)
        if figure is not None:
            written.append(output / f"{re.sub(r'[^a-z0-9]+', '-', title)}.png")
            figure.savefig(written[-1], dpi=150)
    (output / "results.md").write_text(markdown(results))
    return [output / "results.json", output / "results.md", *written]


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
    console.print(Markdown((output / "results.md").read_text()))
    for path in written:
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if results["interrupted"]:
        console.print(f"interrupted, {results['missing']} cases are missing: the same command goes on", style="yellow")
        raise SystemExit(130)


def main() -> None:
    """Run the command line; what users did wrong is told in one paragraph, without a traceback."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(command)
    try:
        app()
    except (PosswapError, OSError) as error:
        Console(stderr=True).print(f"benchmark_attention: {error}", style="red", highlight=False, markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
