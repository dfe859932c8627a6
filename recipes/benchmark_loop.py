"""What the training loop costs over a bare PyTorch loop: the same model, batches, optimizer, clipping and schedule.

    python recipes/benchmark_loop.py --output runs/loop
    python recipes/benchmark_loop.py --model gpt2 --batch-size 8 --length 1024 --mixed-precision bf16       # on a GPU

The two loops run in turn, so that a slower machine slows down both. `overhead` is the median over pairs of (loop / bare - 1) in
wall time for the same steps; setup before the first step does not count. The bare loop reads nothing from the device before its
end. `least_overhead` and `most_overhead` are the extremes; all pairs are in the details of result.json.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, get_scheduler

import hf_posswap as posswap
from hf_posswap.assets import model_source
from hf_posswap.experiments.recipe import ORIGINAL, RunOptions, announce, main
from hf_posswap.training import TrainingConfig, train
from hf_posswap.training.batching import BatchOrder


def bare_loop(model: PreTrainedModel, rows: list[dict], config: TrainingConfig, device: torch.device) -> tuple[float, float]:
    """Train with a plain PyTorch loop; return seconds and the last loss."""
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=config.mixed_precision == "bf16")
    model.to(device).train()
    # fused, as in the loop: on CPUs the optimizer alone would make a difference.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scheduler = get_scheduler("cosine", optimizer, math.ceil(config.warmup_ratio * config.max_steps), config.max_steps)
    order = BatchOrder(len(rows), config.batch_size, config.seed)
    loader = DataLoader(rows, batch_sampler=[order[step] for step in range(config.max_steps)])
    started = time.perf_counter()
    for batch in loader:
        with autocast:
            loss = model(**{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    last = loss.item()  # waits until the device is done
    return time.perf_counter() - started, last


def load(config: "Config") -> PreTrainedModel:
    """Return a swapped model: a checkpoint's, or a small GPT-2 with random weights."""
    torch.manual_seed(config.seed)
    if config.model:
        model = AutoModelForCausalLM.from_pretrained(model_source(config.model))
    else:
        sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": config.length, "vocab_size": 4096}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    return model if config.scheme == ORIGINAL else posswap.swap(model, config.scheme)


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    QUESTION = "What does the training loop cost over a bare one?"
    FIGURES = {"overhead": "loop / bare - 1 in time for the same steps, the median over pairs"}
    FORBIDDEN_STARTS = dict.fromkeys(("cold", "fit", "scratch"), "only the time counts here")
    LEAST = dict.fromkeys(("batch_size", "length", "steps", "pairs"), 1)

    model: Annotated[str | None, "A causal checkpoint. Default: a small GPT-2 with random weights."] = None
    scheme: str = "rotary"
    batch_size: Annotated[int, "Sequences a step."] = 16
    length: Annotated[int, "Tokens of a sequence."] = 128
    steps: Annotated[int, "Steps of each loop."] = 30
    pairs: Annotated[int, "How often both loops run, in turn; a first time, which warms up, does not count."] = 5
    mixed_precision: Annotated[Literal["no", "bf16"], "Of both loops."] = "no"


def run(config: Config, folder: Path, resume: bool) -> dict:
    device = PartialState().device
    options = {"max_steps": config.steps, "batch_size": config.batch_size, "mixed_precision": config.mixed_precision}
    budget = TrainingConfig(**options, table_learning_rate_factor=1.0)
    vocabulary = load(config).config.vocab_size
    tokens = torch.randint(vocabulary, (config.batch_size * 4, config.length), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    measured = []
    for number in range(config.pairs + 1):
        bare, bare_loss = bare_loop(load(config), rows, budget, device)
        _, done = train(load(config), rows, budget, progress=False)
        if number:  # the first pair warms up caches and kernels
            measured.append({"bare_seconds": bare, "loop_seconds": done.seconds, "losses": [bare_loss, done.losses[-1]]})
            announce(f"pair {number}: bare {bare:.3f} s, loop {done.seconds:.3f} s, {done.seconds / bare - 1:+.1%}")
    ratios = [pair["loop_seconds"] / pair["bare_seconds"] - 1 for pair in measured]
    figures = {"overhead": median(ratios), "least_overhead": min(ratios), "most_overhead": max(ratios)}
    return {"figures": figures, "cost": {}, "details": {"device": str(device), "pairs": measured}}


if __name__ == "__main__":
    main(Config, run)
