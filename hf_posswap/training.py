"""The one training loop, on accelerate: the same code for a CPU, one GPU and many.

A recipe supplies a model, a data set and, where the model does not compute it, a loss. The global batch is
`batch_size` whatever the number of processes, so two processes take the steps that one would take.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, set_seed
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import get_cosine_schedule_with_warmup

from hf_posswap.errors import PosswapError
from hf_posswap.schemes import AttentionPositions


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long and how fast; everything that must be equal for two runs to be comparable."""

    max_steps: int = 100
    batch_size: int = 16  # sequences a step, over all processes
    learning_rate: float = 3e-4
    # Position tables of attention layers start at zero in a trained network and have far to go: they learn this much faster.
    table_learning_rate_factor: float = 10.0
    warmup_ratio: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    gradient_accumulation_steps: int = 1
    dropout: bool = True  # False: short tuning of a trained model, where noise costs more than it teaches
    mixed_precision: str | None = None  # None: whatever `accelerate launch` or `accelerate config` says
    seed: int = 0
    checkpoint_every: int = 0  # steps; 0: only the end result is kept
    checkpoints_kept: int = 2

    def __post_init__(self):
        if self.max_steps < 1 or self.batch_size < 1 or self.gradient_accumulation_steps < 1:
            raise PosswapError(f"max_steps, batch_size and gradient_accumulation_steps must be 1 or more: {self}")
        if self.batch_size % self.gradient_accumulation_steps:
            raise PosswapError(
                f"batch_size {self.batch_size} does not divide into {self.gradient_accumulation_steps} "
                "gradient_accumulation_steps"
            )


@dataclass
class TrainingRun:
    """What a run did: the budget it spent and the loss at every step."""

    config: TrainingConfig
    processes: int
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan


def train(
    model: torch.nn.Module,
    dataset: Dataset,
    config: TrainingConfig,
    *,
    compute_loss: Callable[[torch.nn.Module, dict], torch.Tensor] | None = None,
    collate: Callable[[list[dict]], dict] | None = None,
    after_step: Callable[[torch.nn.Module, TrainingRun], None] | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    description: str = "training",
) -> tuple[torch.nn.Module, TrainingRun]:
    """Train `model` on `dataset` for `config.max_steps` steps and return it, unwrapped, with what the run did.

    `dataset` holds dicts of tensors, of one length or with a `collate` that pads them. `compute_loss(model, batch)` returns
    a scalar; without it the model's own `model(**batch).loss` is used. `after_step(model, run)` is called on all processes
    after each optimizer step, with the unwrapped model: to measure it, in evaluation mode if need be, or to change what
    is not trained; its time is not counted. With `output` and `checkpoint_every`, checkpoints are written aside and renamed,
    so a killed run leaves no half-written one; `resume=True` goes on from the newest.
    """
    if resume and output is None:
        raise PosswapError("resume=True needs output=, the folder of the run to go on with")
    if len(dataset) < config.batch_size:
        raise PosswapError(f"{len(dataset)} examples do not fill one batch of {config.batch_size}")
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        # split_batches: the global batch stays batch_size. A seedable sampler makes resuming exact in every epoch.
        dataloader_config=DataLoaderConfiguration(
            split_batches=True, use_seedable_sampler=True, data_seed=config.seed, non_blocking=True
        ),
    )
    # `accelerate launch --cpu --num_processes 2` starts one process without a word, and `--multi_gpu` without GPUs
    # starts two that do not know of each other: never train silently on less than was asked for.
    if accelerator.num_processes != int(os.environ.get("WORLD_SIZE", 1)):
        raise PosswapError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but accelerate connected {accelerator.num_processes} process; "
            "on CPUs start with: ACCELERATE_USE_CPU=true torchrun --nproc-per-node N ..."
        )
    set_seed(config.seed)
    micro_batch = config.batch_size // config.gradient_accumulation_steps
    # A generator of its own: without, every start of an epoch draws from the global one, and a resumed run, which starts
    # its epoch once more, would see other dropout than the run it goes on with.
    generator = torch.Generator().manual_seed(config.seed)
    loader = DataLoader(dataset, batch_size=micro_batch, shuffle=True, drop_last=True, collate_fn=collate, generator=generator)
    optimizer = torch.optim.AdamW(_parameter_groups(model, config), lr=config.learning_rate, betas=(0.9, 0.95))
    warmup_steps = math.ceil(config.warmup_ratio * config.max_steps)
    scheduler = get_cosine_schedule_with_warmup(optimizer, warmup_steps, config.max_steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    run = TrainingRun(config, accelerator.num_processes)
    if resume:
        _load_checkpoint(accelerator, Path(output), run)

    model.train(config.dropout)
    bar = tqdm(
        total=config.max_steps,
        initial=len(run.losses),
        desc=description,
        unit="step",
        leave=False,
        disable=None if progress and accelerator.is_main_process else True,  # None: where it is not seen, it is not drawn
    )
    started, spent = time.perf_counter(), run.seconds
    micro_loss = 0.0
    while len(run.losses) < config.max_steps:
        epoch, skipped = divmod(len(run.losses) * config.gradient_accumulation_steps, len(loader))
        batches = skip_first_batches(loader, skipped) if skipped else loader
        batches.set_epoch(epoch)  # on the loader that is iterated: each carries its own count and shuffles by it
        for batch in batches:
            with accelerator.accumulate(model):
                loss = compute_loss(model, batch) if compute_loss else model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            micro_loss += accelerator.reduce(loss.detach(), "mean").item() / config.gradient_accumulation_steps
            run.tokens += micro_batch * batch["input_ids"].shape[1]
            if not accelerator.sync_gradients:
                continue
            scheduler.step()
            if not math.isfinite(micro_loss):
                raise PosswapError(
                    f"the loss became {micro_loss} at step {len(run.losses) + 1}: lower learning_rate "
                    f"({config.learning_rate:g}) or raise warmup_ratio; checkpoints before it are kept"
                )
            run.losses.append(micro_loss)
            run.seconds = spent + time.perf_counter() - started
            bar.set_postfix(loss=f"{micro_loss:.3f}", tokens_s=f"{run.tokens_per_second:.0f}")
            bar.update()
            micro_loss = 0.0
            if after_step is not None:
                looked = time.perf_counter()
                after_step(accelerator.unwrap_model(model), run)
                model.train(config.dropout)
                started += time.perf_counter() - looked
            if output and config.checkpoint_every and len(run.losses) % config.checkpoint_every == 0:
                _save_checkpoint(accelerator, Path(output), run)
            if len(run.losses) == config.max_steps:
                break
    bar.close()
    # keep_fp32_wrapper=False: leave no autocast wrapper on a model that goes back to the user.
    trained = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    accelerator.free_memory()
    return trained.eval(), run


def _parameter_groups(model: torch.nn.Module, config: TrainingConfig) -> list[dict]:
    tables = {id(p) for m in model.modules() if isinstance(m, AttentionPositions) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if id(p) in tables],
            "lr": config.learning_rate * config.table_learning_rate_factor,
            "weight_decay": 0.0,
        },
        {"params": [p for p in trained if id(p) not in tables and p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if id(p) not in tables and p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _save_checkpoint(accelerator: Accelerator, output: Path, run: TrainingRun) -> None:
    folder = output / "checkpoints" / f"step-{len(run.losses):08d}"
    aside = folder.with_name(f"writing-{folder.name}")
    accelerator.save_state(str(aside))
    if accelerator.is_main_process:
        (aside / "progress.json").write_text(json.dumps(asdict(run)))
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        for old in sorted(folder.parent.glob("step-*"))[: -run.config.checkpoints_kept]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def _load_checkpoint(accelerator: Accelerator, output: Path, run: TrainingRun) -> None:
    folders = sorted((output / "checkpoints").glob("step-*"))
    if not folders:
        return
    progress = json.loads((folders[-1] / "progress.json").read_text())
    config = json.loads(json.dumps(asdict(run.config)))  # lists, not tuples, come back from JSON
    if progress["config"] != config or progress["processes"] != run.processes:
        raise PosswapError(
            f"{folders[-1]} was made with {progress['config']} on {progress['processes']} processes, this run has "
            f"{config} on {run.processes}: resume with the same, or start in a new folder"
        )
    accelerator.load_state(str(folders[-1]))
    run.tokens, run.seconds, run.losses = progress["tokens"], progress["seconds"], progress["losses"]
