"""What positions cost to run: time and memory of a swapped model, compared with the unswapped one on sdpa, on your machine.

    python recipes/benchmark_attention.py --scheme relative --output runs/try
    python recipes/compare.py benchmark_attention --scheme original --scheme relative --scheme rotary --seed 0 \\
        --output runs/attention -- --shape 4x512 --shape 1x2048 --threads 2
    python recipes/benchmark_attention.py --family gpt2 --layers 12 --phase decode --shape 1x1024 --scheme relative
    python recipes/benchmark_attention.py --scheme relative:clip=16 --implementation window --dtype bfloat16    # on a GPU

Models have random weights. The model and its reference are called in turn, so that other load on the machine affects both. A
ratio is the median over pairs of calls: of CPU time with one CPU thread, of wall time otherwise. Its quartiles are in the
details. The scheme `original` compares the reference with itself: other ratios that are as close to 1 mean nothing. Peak memory
is measured in a separate process, as growth above the level before the calls.

By default glibc returns large blocks to the kernel, which zeroes them again for every call. To keep them, as CUDA's allocator
does, put MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776 MALLOC_TOP_PAD_=268435456 before the command.
"""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Literal

import torch
from torch.utils.benchmark import timer
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, PreTrainedModel

import hf_posswap as posswap
from hf_posswap.attention import CACHE
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, RunOptions, announce, main

PHASES = ("forward", "train", "decode")
MAX_PAIRS, WARM_UP = 200, 3
TABLE_STD = 0.02  # for relative tables, which a swap starts at zero: zeros may be faster to compute with


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    QUESTION = "What do positions cost in time and memory?"
    FIGURES = {
        "forward": "time of a forward over that of the unswapped model on sdpa",
        "train": "the same of a training step without its optimizer",
        "decode": "the same of a token after N cached ones",
        "mib": "peak memory in MiB",
    }
    FORBIDDEN_STARTS = dict.fromkeys(("cold", "fit", "scratch"), "weights are random here")
    LEAST = dict.fromkeys(("threads", "layers", "hidden", "heads", "vocab", "calls"), 1)

    scheme: str = "relative"
    family: Annotated[Literal["bert", "gpt2"], "Family of the model, which has random weights."] = "bert"
    attention: Annotated[Literal["sdpa", "eager"], "Attention of the model; its reference always has sdpa."] = "sdpa"
    implementation: Annotated[str | None, "For relative: fused, window or triton. Default: chosen by shape."] = None
    phase: Annotated[tuple[str, ...], "forward, train, decode (one new token after those cached); repeatable."] = PHASES[:2]
    shape: Annotated[tuple[str, ...], "Batch x length in tokens, repeatable."] = ("4x512", "1x2048")
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], "Data type of the weights."] = "float32"
    threads: Annotated[int, "CPU threads."] = 1
    layers: Annotated[int, "Layers of the model."] = 2
    hidden: Annotated[int, "Its hidden size."] = 768
    heads: Annotated[int, "Its attention heads."] = 12
    vocab: Annotated[int, "Its vocabulary, small, so that the head counts little."] = 1000
    calls: Annotated[int, "The least number of pairs of calls, up to 200."] = 5
    seconds: Annotated[float, "Add further pairs until this time is over."] = 1.0

    def __post_init__(self):
        super().__post_init__()
        if unknown := [phase for phase in self.phase if phase not in PHASES]:
            raise PosswapError(f"phase={unknown[0]!r} is not known; known are {', '.join(PHASES)}")
        if "decode" in self.phase and self.family != "gpt2":
            raise PosswapError("phase=decode needs a decoder: --family gpt2")
        if wrong := [shape for shape in self.shape if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", shape)]:
            raise PosswapError(f"shape={wrong[0]!r} must be batch x length, such as 4x512")
        if self.hidden % self.heads or self.hidden // self.heads % 2:
            raise PosswapError(f"hidden={self.hidden} must be heads={self.heads} times an even number")
        if self.implementation and not self.scheme.startswith("relative"):
            raise PosswapError(f"implementation={self.implementation!r} is for relative positions, not for {self.scheme}")


def run(config: Config, folder: Path, resume: bool) -> dict:
    torch.set_num_threads(config.threads)
    figures, details = {}, {}
    for phase in config.phase:
        for shape in config.shape:
            announce(f"{phase} {shape}")
            batch, length = map(int, shape.split("x"))
            reference = replace(config, scheme=ORIGINAL, attention="sdpa", implementation=None)
            case = f"{phase}_{shape}"
            details[case] = paired_times(config, [make_step(one, phase, batch, length) for one in (reference, config)])
            figures[f"{case}_ratio"] = details[case]["ratio"]
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                try:
                    peak = process.submit(peak_memory, config, phase, batch, length).result()
                except BrokenProcessPool:
                    raise PosswapError(f"the process for {phase} {shape} died, probably out of memory: leave it out") from None
            if peak is not None:
                figures[f"{case}_mib"] = peak
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"figures": figures, "cost": {}, "details": {"device": device, **details}}


def build_model(config: Config, positions: int) -> PreTrainedModel:
    """Return a randomly initialised model of the configured sizes, swapped unless the scheme is `original`."""
    torch.manual_seed(config.seed)
    sizes = {"vocab_size": config.vocab, "attn_implementation": config.attention, "max_position_embeddings": positions}
    sizes |= {"hidden_size": config.hidden, "num_hidden_layers": config.layers, "num_attention_heads": config.heads}
    if config.family == "bert":
        model = BertModel(BertConfig(**sizes, intermediate_size=4 * config.hidden), add_pooling_layer=False)
    else:
        model = GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    if config.scheme != ORIGINAL:
        posswap.swap(model, config.scheme, warm_start=False)
        for name, parameter in model.named_parameters():
            if name.endswith(("key_table", "value_table")):
                torch.nn.init.normal_(parameter, std=TABLE_STD)
        if config.implementation:
            posswap.set_relative_implementation(model, config.implementation)
    return model.to("cuda" if torch.cuda.is_available() else "cpu", getattr(torch, config.dtype)).eval()


def make_step(config: Config, phase: str, batch: int, length: int) -> Callable[[], None]:
    """Return one call of a model: a forward, a training step without its optimizer, or one token after those cached."""
    model = build_model(config, max(512, length + 2 * MAX_PAIRS))
    tokens = torch.randint(0, config.vocab, (batch, length), generator=torch.Generator().manual_seed(config.seed))
    tokens = tokens.to(model.device)
    options = {} if config.family == "bert" else {"use_cache": False}

    def train() -> None:
        model(tokens, **options).last_hidden_state.float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def forward() -> None:
        model(tokens, **options)

    if phase != "decode":
        return train if phase == "train" else forward
    with torch.no_grad():
        cache = model(tokens, use_cache=True)[CACHE]

    @torch.no_grad()
    def decode() -> None:
        model(tokens[:, :1], use_cache=True, **{CACHE: cache})  # the cache grows in place

    return decode


def paired_times(config: Config, steps: list[Callable[[], None]]) -> dict:
    """Call the reference and the model in turn; return the ratio with its quartiles, and the least milliseconds of both."""
    # CPU time is not affected by other processes, but means little with several threads. torch's timer waits for a GPU.
    clock = time.process_time if config.threads == 1 and not torch.cuda.is_available() else timer

    def milliseconds(step: Callable[[], None]) -> float:
        before = clock()
        step()
        return 1e3 * (clock() - before)

    for step in WARM_UP * steps:  # compiles or chooses kernels, starts threads
        milliseconds(step)
    started, pairs = time.perf_counter(), []
    while len(pairs) < config.calls or time.perf_counter() - started < config.seconds:
        pairs.append([milliseconds(step) for step in steps])
        if len(pairs) == MAX_PAIRS:
            break
    ratios = [ours / theirs for theirs, ours in pairs]
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    least = [min(column) for column in zip(*pairs, strict=True)]
    clock_name = "CPU time" if clock is time.process_time else "wall time"
    found = {"ratio": median(ratios), "quartiles": [low, high], "reference_ms": least[0], "ms": least[1]}
    return {**found, "pairs": len(pairs), "clock": clock_name}


def peak_memory(config: Config, phase: str, batch: int, length: int) -> float | None:
    """Return by how many MiB memory grows at most in two calls: CUDA's bytes in use, Linux's resident ones, else None."""
    torch.set_num_threads(config.threads)
    # A small first call loads code and starts threads, which should not count.
    make_step(replace(config, layers=1), phase, 1, min(length, 32))()
    step = make_step(config, phase, batch, length)
    if not torch.cuda.is_available():
        if not Path("/proc/self/clear_refs").exists():
            return None
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc: return free memory to the system first, since
        if trim is not None:  # calls that reuse it would not seem to grow
            trim(0)
    before = mebibytes()
    reset_peak()
    for _ in range(2):
        step()
    return round(mebibytes(peak=True) - before, 2)


def mebibytes(*, peak: bool = False) -> float:
    """Return the memory in use, or its peak since `reset_peak`: of CUDA's caching allocator, or resident (Linux only)."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()) / 2**20
    field, lines = "VmHWM:" if peak else "VmRSS:", Path("/proc/self/status").read_text("utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def reset_peak() -> None:
    """Begin to look for the peak."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", "utf-8", newline="\n")


if __name__ == "__main__":
    main(Config, run)
