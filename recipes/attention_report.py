"""Tables and plots of a benchmark's results.json; benchmark_attention.py writes them."""

import re
from collections.abc import Iterator
from pathlib import Path

from attention_worker import ALLOCATORS, MAX_PAIRS, SUBJECTS, TABLE_STD
from matplotlib.figure import Figure

from hf_posswap.plots import COLOURS, MARKERS


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
        turn, place = divmod(index, len(COLOURS))
        marker, style = MARKERS[(place + turn) % len(MARKERS)], ("-", "--", ":", "-.")[turn % 4]
        lengths, values = zip(*sorted(points), strict=True)
        axes.plot(lengths, values, linestyle=style, marker=marker, markersize=5, color=COLOURS[place], label=label)
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
