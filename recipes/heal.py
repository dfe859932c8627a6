"""Win back what a swap cost: distil the swapped model from its original on text without labels, and count the tokens.

    python recipes/heal.py --output runs/heal                                  # stdlib-gpt2: 2 schemes, 3 starts, 1 seed
    python recipes/heal.py --model minilm --data my.txt --max-steps 300 --output runs/minilm
    accelerate launch recipes/heal.py --model gpt2 --data wikitext:wikitext-2-raw-v1 --output runs/gpt2     # on GPUs
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -- recipes/heal.py --start fit --output runs/heal   # on two CPUs

The `--` matters: without it torchrun takes --start for an abbreviation of its own --start-method.

Starts: `cold` drops the table, `swap` is the warm start, `fit` fits layer by layer after it. The scheme `original` is the
control: the unswapped model, tuned alike, which matters when --text-weight lets the text itself teach.

How it measures: damage to held-out text (KL to the original's predictions, or 1 - cosine of an encoder's pooled states) and
perplexity, at 0 tokens and at about ten steps, each a constant factor after the one before. `tokens to 90 %` is where damage
first falls to a tenth of what the cold swap of that scheme costs, the same mark for every start; between two measured points
the logarithm of damage is a straight line.

Writes results.json, results.md and recovery.png into --output, and every finished row at once: --resume does the rest.
"""

import copy
import json
import math
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated

import typer
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogFormatter
from rich.console import Console
from transformers import PreTrainedModel

import hf_posswap as posswap
from hf_posswap.data.calibration import text_batches
from hf_posswap.data.text import embedded_documents, read_documents, token_blocks
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, load_family, load_original, load_tokenizer
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.measure.damage import damage, perplexity
from hf_posswap.plots import COLOURS
from hf_posswap.provenance import prepare_output, provenance, write_json
from hf_posswap.schemes import parse_scheme
from hf_posswap.terminal import print_markdown, run_program
from hf_posswap.training import TrainingConfig, TrainingRun, train
from hf_posswap.training.launching import share_weights

STARTS = {"cold": ":", "swap": "--", "fit": "-"}  # and how their lines look; the original has none
SHARES = (90, 95, 99)  # per cent of the cold swap's damage
MEASUREMENTS = 10  # after the one at 0 tokens
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class HealConfig:
    """One run: which swaps, how each is tuned and on what it is measured. A resumed run must have the same."""

    model: str = "stdlib-gpt2"
    schemes: tuple[str, ...] = ("rotary", "relative")
    starts: tuple[str, ...] = ("cold", "swap", "fit")
    seeds: tuple[int, ...] = (0,)
    max_steps: int = 100
    batch_size: int = 16
    learning_rate: float = 1e-3
    text_weight: float = 0.0  # of the text's own next tokens, against the original's predictions of them
    table_learning_rate_factor: float = TrainingConfig.table_learning_rate_factor
    block_size: int | None = None  # tokens of a training sequence; None: the trained length, up to 128 for an encoder
    data: str | None = None  # text, table or Hub dataset; None: the standard library's text
    text_column: str = "text"
    fit_tokens: int = 65_536
    fit_steps: int = 100  # for each layer
    fit_learning_rate: float = 1e-3
    evaluation_tokens: int = 8192

    def __post_init__(self):
        for field in ("max_steps", "batch_size", "fit_tokens", "fit_steps", "evaluation_tokens"):
            if getattr(self, field) < 1:
                raise PosswapError(f"{field}={getattr(self, field)} must be at least 1")
        if not self.schemes or not self.starts or not self.seeds:
            raise PosswapError("healing needs at least one scheme, one start and one seed")
        for scheme in self.schemes:
            if scheme != ORIGINAL:
                parse_scheme(scheme)
        for start in self.starts:
            if start not in STARTS:
                raise PosswapError(f"start {start!r} is not known; known are {', '.join(STARTS)}")

    def rows(self) -> list[tuple[str, str, int]]:
        """Return (scheme, start, seed) of every row, in the order in which they are run."""
        wanted = (
            (scheme, start if scheme != ORIGINAL else "", seed)
            for scheme in self.schemes
            for seed in self.seeds
            for start in self.starts
        )
        return list(dict.fromkeys(wanted))


def heal(config: HealConfig, output: Path, *, resume: bool = False, progress: bool = True) -> dict | None:
    """Run the rows that `output` does not hold yet; return and write the results. Processes but the main one return None."""
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    finished = []
    if state.is_main_process:
        folder = prepare_output(asdict(config), output, resume)
        finished = [number for number in range(len(config.rows())) if (folder / f"{number}.json").exists()]
    finished = broadcast_object_list([finished])[0]
    bench = _Bench(config, state, progress)
    for number, (scheme, start, seed) in enumerate(config.rows()):
        if number not in finished:
            row = bench.row(scheme, start, seed)
            if state.is_main_process:
                write_json(folder / f"{number}.json", row)
    if not state.is_main_process:
        return None
    origin = provenance("python recipes/heal.py")
    origin["hardware"] |= {"processes": state.num_processes}
    rows = [json.loads((folder / f"{number}.json").read_text()) for number in range(len(config.rows()))]
    results = {"format": FORMAT, **origin, "config": asdict(config), **bench.facts(), "rows": with_tokens(rows)}
    write_json(output / "results.json", results)
    (output / "results.md").write_text(markdown(results))
    plot(results).savefig(output / "recovery.png", dpi=150)
    return results


class _Bench:
    """One model with the text that its swaps are tuned and measured on."""

    def __init__(self, config: HealConfig, state: PartialState, progress: bool):
        self.config, self.state, self.progress = config, state, progress
        self.causal = load_family(config.model)[1]
        self.checkpoint, tokenizer = load_original(config.model), load_tokenizer(config.model)
        # Nothing reaches a pooler from the states of layers, and processes that train together wait for every gradient.
        if getattr(self.checkpoint, "pooler", None) is not None:
            self.checkpoint.pooler.requires_grad_(False)
        self.checkpoint.to(state.device)
        longest = self.checkpoint.config.max_position_embeddings
        self.block_size = config.block_size or (longest if self.causal else min(128, longest))
        if not 2 < self.block_size <= longest:
            raise PosswapError(
                f"block_size={self.block_size} must be from 3 to {longest}, the length {config.model} was trained at"
            )
        training, held_out = (
            read_documents(config.data, split=split, text_column=config.text_column)
            if config.data
            else embedded_documents(split, causal=self.causal)
            for split in ("train", "validation")
        )
        self.rows = [{"input_ids": row} for row in token_blocks(training, tokenizer, self.block_size)]
        self.held_out = text_batches(held_out, tokenizer, longest, tokens=config.evaluation_tokens, causal=self.causal)
        if "fit" in config.starts:
            self.fit_batches = text_batches(training, tokenizer, longest, tokens=config.fit_tokens, causal=self.causal)
        self.reference = cache(self._reference)

    def facts(self) -> dict:
        """Return what all rows have in common."""
        return {
            "causal": self.causal,
            "measure": "KL" if self.causal else "1 - cosine",
            "parameters": self.checkpoint.num_parameters(),
            "block_size": self.block_size,
            "evaluation_tokens": sum(blocks.numel() for blocks in self.held_out),
            "original": {"perplexity": perplexity(self.checkpoint, self.held_out[0])} if self.causal else {},
        }

    def row(self, scheme: str, start: str, seed: int) -> dict:
        """Swap, tune and measure once. The main process fits; all measure, since a sharded model is called by all together."""
        model = copy.deepcopy(self.checkpoint)
        original = self.checkpoint
        if scheme != ORIGINAL:
            model = posswap.swap(model, scheme, warm_start=start != "cold")
            original = posswap.original(model)
        row = {"scheme": scheme, "start": start, "seed": seed}
        row["reference"] = self.reference(scheme)
        if start == "fit" and self.state.is_main_process:
            steps, rate = self.config.fit_steps, self.config.fit_learning_rate
            report = posswap.fit(
                model, self.fit_batches, reconstruct=steps, learning_rate=rate, seed=seed, progress=self.progress
            )
            row["fit"] = {"seconds": report.seconds, "tokens": report.tokens, "tokens_held_out": report.tokens_held_out}
        if start == "fit":
            share_weights(model)
        config = TrainingConfig(
            max_steps=self.config.max_steps,
            batch_size=self.config.batch_size,
            learning_rate=self.config.learning_rate,
            table_learning_rate_factor=self.config.table_learning_rate_factor,
            dropout=False,
            seed=seed,
        )
        curve = [{"tokens": 0, **self._measure(model, original)}]
        looks = measured_steps(config.max_steps)

        def look(model: PreTrainedModel, run: TrainingRun) -> None:
            step = len(run.losses)
            if step in looks:
                curve.append({"tokens": run.tokens, **self._measure(model, original)})

        _, run = train(
            model,
            self.rows,
            config,
            compute_loss=distillation_loss(original, text_weight=self.config.text_weight),
            after_step=look,
            progress=self.progress,
            description=f"{scheme}, {start}, seed {seed}",
        )
        spent = {"tokens": run.tokens, "seconds": run.seconds, "tokens_per_second": run.tokens_per_second}
        return {**row, **spent, "processes": run.processes, "curve": curve}

    def _reference(self, scheme: str) -> dict:
        if scheme == ORIGINAL:
            return self._measure(self.checkpoint, self.checkpoint)
        return self._measure(posswap.swap(copy.deepcopy(self.checkpoint), scheme, warm_start=False), self.checkpoint)

    def _measure(self, model: PreTrainedModel, original: PreTrainedModel) -> dict:
        figures = {"damage": damage(model, original, [{"input_ids": blocks} for blocks in self.held_out]).total}
        return figures | ({"perplexity": perplexity(model, self.held_out[0])} if self.causal else {})


def measured_steps(max_steps: int) -> list[int]:
    """Return the steps after which a run is measured: the first, the last, and by a constant factor in between.

    >>> measured_steps(100)
    [1, 2, 3, 5, 8, 13, 22, 36, 60, 100]
    """
    return sorted({round(max_steps ** (i / (MEASUREMENTS - 1))) for i in range(MEASUREMENTS)})


def tokens_to_reach(curve: list[dict], level: float) -> int | None:
    """Return the tokens at which damage first is at or below a level: 0 where it starts there, None if it never gets there."""
    if curve[0]["damage"] <= level:
        return 0
    for before, after in zip(curve, curve[1:], strict=False):
        if after["damage"] <= level:
            # Rounding may make the damage of an unhurt model zero or less.
            high, middle, low = (math.log(max(value, 1e-12)) for value in (before["damage"], level, after["damage"]))
            share = (high - middle) / (high - low) if high > low else 1.0
            return round(before["tokens"] + share * (after["tokens"] - before["tokens"]))
    return None


def with_tokens(rows: list[dict]) -> list[dict]:
    """Add to each row the tokens to each share of the cold swap's damage, and to where the cold run of its seed ended."""
    ends = {(row["scheme"], row["seed"]): row["curve"][-1]["damage"] for row in rows if row["start"] == "cold"}
    added = []
    for row in rows:
        cost, end = row["reference"]["damage"], ends.get((row["scheme"], row["seed"]))
        # The original has lost nothing that it could recover.
        shares = () if row["scheme"] == ORIGINAL else SHARES
        recover = {str(share): tokens_to_reach(row["curve"], (1 - share / 100) * cost) for share in shares}
        cold_end = {} if end is None else {"tokens_to_cold_end": tokens_to_reach(row["curve"], end)}
        added.append({**row, "tokens_to_recover": recover, **cold_end})
    return added


def _groups(results: dict) -> dict[tuple[str, str], list[dict]]:
    groups = {}
    for row in results["rows"]:
        groups.setdefault((row["scheme"], row["start"]), []).append(row)
    return groups


def markdown(results: dict) -> str:
    """Return one table, a line for each scheme and start, and what stands behind it; ± is the deviation over seeds."""
    config, measure = results["config"], results["measure"]
    titles = ["scheme", "start", f"{measure}, start", f"{measure}, end", *(f"tokens to {share} %" for share in SHARES)]
    if "cold" in config["starts"]:
        titles.append("tokens to cold end")
    if results["causal"]:
        titles += ["perplexity, end", "of the original's"]
    if "fit" in config["starts"]:
        titles.append("fit, s")
    lines = [f"| {' | '.join(titles)} |", f"|---|---|{'---:|' * (len(titles) - 2)}"]
    for (scheme, start), rows in _groups(results).items():
        cells = [scheme, start, *(_number([row["curve"][place]["damage"] for row in rows]) for place in (0, -1))]
        lost = scheme != ORIGINAL
        cells += [_tokens([row["tokens_to_recover"][str(share)] for row in rows]) if lost else "" for share in SHARES]
        if "cold" in config["starts"]:
            cells.append(_tokens([row["tokens_to_cold_end"] for row in rows]) if lost else "")
        if results["causal"]:
            ends = [row["curve"][-1]["perplexity"] for row in rows]
            cells += [_number(ends), _number([end / results["original"]["perplexity"] for end in ends], "{:.4f}")]
        if "fit" in config["starts"]:
            cells.append(_number([row["fit"]["seconds"] for row in rows if "fit" in row], "{:.0f}"))
        lines.append(f"| {' | '.join(cells)} |")
    trained = config["max_steps"] * config["batch_size"] * results["block_size"]
    share = config.get("text_weight", 0.0)
    taught = f", the text's own next tokens with a weight of {share:g}" if share else ""
    notes = [
        f"{config['model']}, distilled from its original for {config['max_steps']} steps of {config['batch_size']} x "
        f"{results['block_size']} tokens, {trained:,} in all, learning rate {config['learning_rate']:g}{taught}; seeds: "
        f"{', '.join(map(str, config['seeds']))}. Measured on {results['evaluation_tokens']:,} held-out tokens. "
        "`tokens to 90 %`: until damage is a tenth of what the cold swap costs; 0: at the start already."
    ]
    if results["causal"]:
        notes.append(f"The original's perplexity is {results['original']['perplexity']:.4g}.")
    if fits := [row["fit"] for row in results["rows"] if "fit" in row]:
        notes.append(f"`fit` read {fits[0]['tokens'] + fits[0]['tokens_held_out']:,} tokens before, which are not counted.")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    hardware = results["hardware"]
    machine = f"{hardware['accelerator'] or hardware['cpu']}, {hardware['processes']} process(es)"
    commit = f" at commit {results['commit']}" if results["commit"] else ""
    return "\n".join(lines) + f"\n\n{' '.join(notes)}\n\n`{results['command']}`{commit}; {versions}; {machine}.\n"


def _number(values: list[float], form: str = "{:.3g}") -> str:
    if not values:
        return ""
    spread = f" ± {form.format(stdev(values))}" if len(values) > 1 else ""
    return form.format(mean(values)) + spread


def _tokens(values: list[int | None]) -> str:
    reached = [value for value in values if value is not None]
    if not reached:
        return "never"
    some = f" ({len(reached)} of {len(values)})" if len(reached) < len(values) else ""
    return _number(reached, "{:,.0f}") + some


def plot(results: dict) -> Figure:
    """Draw damage against tokens, the mean over seeds in a band from the least to the most; both axes are logarithmic.

    Where the text itself teaches, damage is not what is wanted less of: then it is perplexity, relative to the original's.
    """
    taught = results["config"].get("text_weight", 0.0) > 0

    def value(point: dict) -> float:
        return point["perplexity"] / results["original"]["perplexity"] if taught else max(point["damage"], 1e-12)

    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = {scheme: COLOURS[index % len(COLOURS)] for index, scheme in enumerate(results["config"]["schemes"])}
    for (scheme, start), rows in _groups(results).items():
        tokens = [point["tokens"] for point in rows[0]["curve"]]
        points = [[value(row["curve"][i]) for row in rows] for i in range(len(tokens))]
        line = {"color": colours[scheme], "linestyle": STARTS.get(start, "-."), "marker": "o", "markersize": 3}
        axes.plot(tokens, [mean(values) for values in points], **line)
        if len(rows) > 1:
            low, high = [min(values) for values in points], [max(values) for values in points]
            axes.fill_between(tokens, low, high, color=colours[scheme], alpha=0.15, linewidth=0)
    tokens = [point["tokens"] for point in results["rows"][0]["curve"]]
    axes.set_xscale("symlog", linthresh=tokens[1], linscale=0.5)  # 0 tokens are on the axis, too
    axes.set_xlim(left=0)
    axes.set_xticks(sorted({0, *tokens[::-2]}))
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(places=0, sep=""))
    if taught:
        axes.axhline(1, color="0.7", linewidth=1, zorder=0)
        axes.set_ylabel("perplexity on held-out text / the original's")
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(LogFormatter())  # labels where less than a decade is seen
        axes.set_ylabel(f"damage on held-out text ({results['measure']})")
    axes.set_xlabel("tokens of distillation")
    axes.set_title(f"{results['config']['model']}: what distillation from the original wins back", fontsize=10)
    handles = [Line2D([], [], color=colour, linewidth=3, label=scheme) for scheme, colour in colours.items()]
    handles += [Line2D([], [], color="0.3", linestyle=STARTS[start], label=start) for start in results["config"]["starts"]]
    axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    return figure


_default = HealConfig()


def command(
    output: Annotated[Path, typer.Option(help="Folder for results.json, results.md, recovery.png and rows.")] = Path(
        "runs/heal"
    ),
    model: Annotated[str, typer.Option(help="A model folder or Hub id; minilm and stdlib-gpt2 are built in.")] = _default.model,
    scheme: Annotated[
        list[str] | None, typer.Option(help=f"name:option=value. Repeatable. Default: {', '.join(_default.schemes)}.")
    ] = None,
    start: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(STARTS)}. Repeatable. Default: {', '.join(_default.starts)}.")
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Of the order of text. Repeatable. Default: 0.")] = None,
    max_steps: Annotated[int, typer.Option(help="Optimizer steps of each row.")] = _default.max_steps,
    batch_size: Annotated[int, typer.Option(help="Sequences a step, over all processes.")] = _default.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = _default.learning_rate,
    text_weight: Annotated[
        float, typer.Option(help="Share of the text's own next tokens in the loss of a causal model.")
    ] = _default.text_weight,
    table_learning_rate_factor: Annotated[
        float, typer.Option(help="Position tables of attention learn this much faster.")
    ] = _default.table_learning_rate_factor,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens of a training sequence. Default: the trained length; for an encoder up to 128.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text, csv, json or parquet file, folder, or Hub dataset. Default: the standard library."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="The column of a table that holds the text.")] = _default.text_column,
    fit_tokens: Annotated[int, typer.Option(help="Tokens that the start `fit` fits on.")] = _default.fit_tokens,
    fit_steps: Annotated[int, typer.Option(help="Steps of that fit for each layer.")] = _default.fit_steps,
    fit_learning_rate: Annotated[float, typer.Option(help="Peak rate of these steps.")] = _default.fit_learning_rate,
    evaluation_tokens: Annotated[int, typer.Option(help="Held-out tokens of each figure.")] = _default.evaluation_tokens,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
):
    """Distil swapped models from their original, and report how many tokens win back what the swap cost."""
    config = HealConfig(
        model=model,
        schemes=tuple(scheme or _default.schemes),
        starts=tuple(start or _default.starts),
        seeds=tuple(seed or _default.seeds),
        max_steps=max_steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        text_weight=text_weight,
        table_learning_rate_factor=table_learning_rate_factor,
        block_size=block_size,
        data=data,
        text_column=text_column,
        fit_tokens=fit_tokens,
        fit_steps=fit_steps,
        fit_learning_rate=fit_learning_rate,
        evaluation_tokens=evaluation_tokens,
    )
    if heal(config, output, resume=resume) is not None:
        console = Console()
        print_markdown(console, (output / "results.md").read_text())
        for name in ("results.json", "results.md", "recovery.png"):
            console.print(f"wrote {output / name}", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line."""
    run_program("heal", command)


if __name__ == "__main__":
    main()
