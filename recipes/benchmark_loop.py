"""What the training loop costs over a bare PyTorch loop: the same model, batches, optimizer, clipping and schedule.

    python recipes/benchmark_loop.py --output runs/loop
    python recipes/benchmark_loop.py --model gpt2 --batch-size 8 --length 1024 --output runs/loop-gpt2     # on a GPU

Runs alternate between the two, so that a machine that slows down slows down both; `overhead` is the median over pairs of
(loop / bare - 1) in time for the same steps, without what comes before the first step. Nothing is read from the device in the
bare loop until its end. Writes results.json into --output.
"""

import math
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel, get_scheduler

import hf_posswap as posswap
from hf_posswap.provenance import provenance, write_json
from hf_posswap.terminal import run_program
from hf_posswap.training import TrainingConfig, train
from hf_posswap.training.batching import BatchOrder, MicroBatches

FORMAT = 1


def bare_loop(model: PreTrainedModel, rows: list[dict], config: TrainingConfig, device: torch.device) -> tuple[float, float]:
    """Train as one would by hand; return seconds and the last loss."""
    model.to(device).train()
    # fused, as in the loop: on CPUs it alone would make the loop look better than it is.
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scheduler = get_scheduler("cosine", optimizer, math.ceil(config.warmup_ratio * config.max_steps), config.max_steps)
    order = BatchOrder(len(rows), config.batch_size, config.seed)
    loader = DataLoader(rows, batch_sampler=MicroBatches(order, 1, 0, config.max_steps))
    started = time.perf_counter()
    for batch in loader:
        loss = model(**{name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    last = loss.item()  # waits for the device
    return time.perf_counter() - started, last


def load(name: str | None, length: int, scheme: str) -> PreTrainedModel:
    """Return a swapped model: a checkpoint's, or a small GPT-2 with random weights."""
    torch.manual_seed(0)
    if name:
        model = AutoModelForCausalLM.from_pretrained(name)
    else:
        sizes = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": length, "vocab_size": 4096}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    return posswap.swap(model, scheme)


def main(
    output: Annotated[Path, typer.Option(help="The folder of results.json.")],
    model: Annotated[str | None, typer.Option(help="A causal checkpoint; a small random GPT-2 without.")] = None,
    scheme: Annotated[str, typer.Option(help="The positions that the model is given.")] = "rotary",
    batch_size: int = 16,
    length: int = 128,
    steps: int = 30,
    pairs: int = 5,
):
    device = Accelerator().device
    config = TrainingConfig(max_steps=steps, batch_size=batch_size, table_learning_rate_factor=1.0)
    vocabulary = load(model, length, scheme).config.vocab_size
    tokens = torch.randint(vocabulary, (batch_size * 4, length), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    measured = []
    for number in range(pairs + 1):
        bare, bare_loss = bare_loop(load(model, length, scheme), rows, config, device)
        _, run = train(load(model, length, scheme), rows, config, progress=False)
        if number:  # the first pair warms up caches and kernels
            measured.append({"bare_seconds": bare, "loop_seconds": run.seconds, "losses": [bare_loss, run.losses[-1]]})
            print(f"pair {number}: bare {bare:.3f} s, loop {run.seconds:.3f} s, {run.seconds / bare - 1:+.1%}", flush=True)
    ratios = [pair["loop_seconds"] / pair["bare_seconds"] - 1 for pair in measured]
    results = {
        "format": FORMAT,
        **provenance("python recipes/benchmark_loop.py"),
        "device": str(device),
        "config": {"model": model, "scheme": scheme, "batch_size": batch_size, "length": length, "steps": steps},
        "pairs": measured,
        "overhead": median(ratios),
        "overhead_range": [min(ratios), max(ratios)],
    }
    output.mkdir(parents=True, exist_ok=True)
    write_json(output / "results.json", results)
    print(f"overhead: {results['overhead']:+.1%} (median of {pairs} pairs, {min(ratios):+.1%} to {max(ratios):+.1%})")


if __name__ == "__main__":
    run_program("benchmark_loop", main)
