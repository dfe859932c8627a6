"""The one training loop, on accelerate: the same code for a CPU, one GPU and many.

A recipe supplies a model, a data set and, where the model does not compute one, a loss. The global batch size is
`batch_size` for any number of processes, so two processes take the same steps as one. The optimizer is AdamW with betas of 0.9
and 0.95.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from accelerate.utils import send_to_device, set_seed
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch.utils.data import Dataset, default_collate
from tqdm import tqdm
from transformers import get_scheduler
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posswap.errors import Interrupted, PosswapError
from hf_posswap.schemes import AttentionPositions
from hf_posswap.training.batching import IGNORED, BatchOrder, count_terms, count_tokens, predicts_next
from hf_posswap.training.budget import TrainingConfig, TrainingRun
from hf_posswap.training.launching import make_whole, sharable, start_accelerator
from hf_posswap.training.run_log import RunLog
from hf_posswap.training.run_state import Checkpoints, StopRequest, accumulation_steps_of, remove_checkpoints
from hf_posswap.training.skipping import SkippedPositions

Loss = Callable[[torch.nn.Module, dict], torch.Tensor]
AfterStep = Callable[[torch.nn.Module, TrainingRun], None]


def train(
    model: torch.nn.Module,
    dataset: Dataset,
    config: TrainingConfig,
    *,
    compute_loss: Loss | None = None,
    collate: Callable[[list[dict]], dict] | None = None,
    after_step: AfterStep | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    description: str = "training",
) -> tuple[torch.nn.Module, TrainingRun]:
    """Train `model` on `dataset` for `config.max_steps` steps; return the unwrapped model and a record of the run.

    `dataset` holds dicts of tensors, all of one length unless `collate` pads them. `compute_loss(model, batch)` returns a
    scalar; the default is the model's own `model(**batch).loss`. Either must be a mean over the batch's labelled tokens
    (labels of shape (B, L), without -100), else its labelled examples (other labels), else its tokens (no labels). Parts of
    a batch, on several processes or accumulated, are weighted by that count, so uneven padding does not change the loss.

    `after_step(model, run)` is called on all processes after each optimizer step with the unwrapped model, to measure it
    (it is set back to training mode afterwards), or to change weights that are not trained. Its time is not counted. What it
    adds to `run.points` is there again after an interruption.

    With `output`, the first SIGTERM or Ctrl-C lets the step finish, saves a checkpoint and raises `Interrupted`; several
    processes agree on that step within about a second. Checkpoints, also those of `checkpoint_every`, are renamed into place
    once complete, so a killed run leaves no partial one. `resume=True` continues from the newest, bit for bit on one process,
    and refuses another number of processes. If `auto_find_batch_size` starts again, `after_step` sees the steps again, too.

    Under FSDP the returned model, and that of `after_step`, holds this process's shards: all processes must call it together,
    and likewise functions that gather shards, such as `Accelerator.get_state_dict`. Under DeepSpeed's stage 3 this holds for
    `after_step`, but the returned model is whole. DeepSpeed leaves weights in the precision in which it trained.

    Raises:
        PosswapError: A model or data set that cannot be trained, a loss of NaN or infinity, or too few processes.
        CheckpointError: A checkpoint cannot be written, or belongs to another run.
        Interrupted: A signal asked the run to stop.
    """
    if output is None and (resume or config.report_to):
        wanted = "resume=True" if resume else f"report_to={config.report_to}"
        raise PosswapError(f"{wanted} needs output=, the folder of the run")
    if len(dataset) < config.batch_size:
        raise PosswapError(f"{len(dataset)} examples do not fill one batch of {config.batch_size}: lower batch_size")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise PosswapError("every parameter of the model is frozen: set requires_grad=True where it should learn")
    _check_labels(dataset)
    if config.skip_to is not None:
        dataset = SkippedPositions(dataset, model, config.skip_to, config.seed)
    loop = _Loop(model, dataset, config, compute_loss, collate, after_step, output and Path(output), progress, description)
    if not config.auto_find_batch_size:
        return loop.run(config.gradient_accumulation_steps, resume=resume)
    return _with_fitting_batches(loop, resume=resume)


class _Loop:
    """The arguments of one call of `train`. `run` may be called again after it ran out of memory."""

    def __init__(self, model, dataset, config, compute_loss, collate, after_step, output, progress, description):
        self.model, self.dataset, self.config = model, dataset, config
        self.compute_loss, self.collate, self.after_step = compute_loss, collate, after_step
        self.output, self.progress, self.description = output, progress, description
        self.patched = "forward" in vars(model)  # by the user: accelerate puts its autocast there, too
        grouped = config.train_sampling_strategy == "group_by_length"
        lengths = [len(dataset[place]["input_ids"]) for place in range(len(dataset))] if grouped else None
        self.order = BatchOrder(len(dataset), config.batch_size, config.seed, lengths)

    def run(self, accumulation_steps: int, *, resume: bool) -> tuple[torch.nn.Module, TrainingRun]:
        config, model = self.config, self.model
        accelerator = start_accelerator(config, accumulation_steps, self.output)
        set_seed((config.seed + accelerator.process_index) % 2**32)  # each process draws its own dropout masks
        run = TrainingRun(config, accelerator.num_processes, accumulation_steps)
        checkpoints = self.output and Checkpoints(accelerator, self.output, resume=resume)
        try:
            with sharable(model, accelerator), _gradient_checkpointing(model, config.gradient_checkpointing):
                # fused: on CPUs, with small batches and large embeddings, the default takes longer than the backward pass.
                groups = _parameter_groups(model, config)
                optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
                # The first step of a warm-up has a rate of 0: a run of one step would train nothing.
                warmup_steps = min(math.ceil(config.warmup_ratio * config.max_steps), config.max_steps - 1)
                scheduler = get_scheduler(config.lr_scheduler_type, optimizer, warmup_steps, config.max_steps)
                model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
                if accelerator.is_fsdp2:  # gives it a class of another name, by which transformers finds hidden states
                    recorded = getattr(self.model, "_can_record_outputs", None)
                    dict.__setitem__(_CAN_RECORD_REGISTRY, str(type(self.model)), recorded)
                if resume:
                    checkpoints.load(run, len(self.dataset))
                if config.report_to:
                    plain = {name: v if isinstance(v, int | float) else str(v) for name, v in asdict(config).items()}
                    accelerator.init_trackers("training", plain)
                self._take_steps(accelerator, model, optimizer, scheduler, run, checkpoints)
            make_whole(accelerator.unwrap_model(model, keep_torch_compile=False))
        finally:
            for tracker in accelerator.trackers:  # not end_training(), which would also disconnect the processes
                tracker.finish()
            # The user gets the model back without autocast and compile wrappers.
            trained = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
            if not self.patched:
                vars(trained).pop("forward", None)  # accelerate restores it as an attribute of the instance
            accelerator.free_memory()
        return trained.eval(), run

    def _take_steps(self, accelerator, model, optimizer, scheduler, run: TrainingRun, checkpoints: Checkpoints | None) -> None:
        config, parts = self.config, run.gradient_accumulation_steps
        shifted = predicts_next(self.model)
        hidden = None if self.progress and accelerator.is_main_process else True  # None: drawn in a terminal only
        steps = {"total": config.max_steps, "initial": len(run.losses), "unit": "step"}
        bar = tqdm(desc=self.description, leave=False, disable=hidden, **steps)
        model.train(config.dropout)
        with bar, StopRequest(active=self.output is not None) as stop:
            every_step, description = self.after_step is not None, self.description if self.progress else None
            log = RunLog(accelerator, run, bar, stop, every_step=every_step, description=description)
            for step in range(len(run.losses), config.max_steps):
                batches = self._parts(accelerator, step, parts)
                log.pending.append(self._step(accelerator, model, optimizer, scheduler, batches, shifted))
                last = log.steps == config.max_steps
                save = bool(config.checkpoint_every) and checkpoints and log.steps % config.checkpoint_every == 0
                if log.due or last or save:
                    log.read()
                if self.after_step is not None:
                    with log.not_counted():
                        plain = accelerator.unwrap_model(model, keep_torch_compile=False)
                        autocast = None if self.patched else vars(plain).pop("forward", None)
                        self.after_step(plain, run)  # measures in the precision in which the model is returned
                        if autocast is not None:
                            plain.forward = autocast
                        model.train(config.dropout)
                if last:  # no later step reads a signal that comes while it measures or saves
                    log.ask()
                if checkpoints and (save or log.stopping):
                    checkpoints.save(run, len(self.dataset))
                    if last:
                        log.ask()
                if log.stopping:
                    where = f"step {len(run.losses)} of {config.max_steps}, the checkpoint is in {self.output}"
                    raise Interrupted(f"stopped after {where}: continue with resume=True (--resume) and the same output")

    def _parts(self, accelerator, step: int, parts: int) -> list[dict]:
        """Return this process's share of each part of a step's batch.

        Nothing is read ahead: a resumed run would draw the random numbers of a `collate` that masks tokens once more.
        """
        part = self.config.batch_size // parts
        share = part // accelerator.num_processes
        batches = []
        for start in range(share * accelerator.process_index, self.config.batch_size, part):
            places = self.order[step][start : start + share]
            together = getattr(self.dataset, "__getitems__", None)  # as torch's loaders read: rows may be transformed together
            rows = together(places) if together else [self.dataset[place] for place in places]
            batches.append(send_to_device((self.collate or default_collate)(rows), accelerator.device, non_blocking=True))
        return batches

    def _step(self, accelerator, model, optimizer, scheduler, batches: Sequence[dict], shifted: bool):
        """Take one optimizer step; return this process's share of the loss, the gradient norm, tokens and learning rate."""
        terms = torch.stack([count_terms(batch, shifted=shifted) for batch in batches])
        tokens = torch.stack([count_tokens(batch) for batch in batches])
        all_terms, all_tokens = accelerator.reduce(torch.stack([terms.sum(), tokens.sum()]), "sum")
        # accelerate averages over accumulation steps and processes; these weights turn that into a mean over terms. Dividing
        # last makes the weight of an undivided batch exactly one.
        averaged_over = len(batches) * accelerator.num_processes
        weights = terms * averaged_over / all_terms.clamp(min=1)
        step_loss, norm = 0.0, None
        rate = scheduler.get_last_lr()[-1]  # of this step; position tables, which come first, have a multiple of it
        for batch, weight in zip(batches, weights, strict=True):
            with accelerator.accumulate(model):
                loss = self.compute_loss(model, batch) if self.compute_loss else getattr(model(**batch), "loss", None)
                if loss is None:
                    raise PosswapError("the model returned no loss: give its batches `labels`, or pass compute_loss")
                # The mean loss of a part without labels is NaN: leave it out.
                loss = torch.where(weight > 0, loss * weight, 0.0)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), self.config.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            step_loss = step_loss + loss.detach()
        if hasattr(norm, "full_tensor"):  # FSDP2
            norm = norm.full_tensor()
        norm = torch.as_tensor(-1.0 if norm is None else norm, device=step_loss.device).float()  # -1: DeepSpeed may hide it
        return step_loss / averaged_over, norm, all_tokens, rate


def _with_fitting_batches(loop: _Loop, *, resume: bool) -> tuple[torch.nn.Module, TrainingRun]:
    """Run; when out of memory, undo everything and start again with parts of the batch at most half as large."""
    config, model = loop.config, loop.model
    resumed = resume and accumulation_steps_of(loop.output)
    parts = resumed or config.gradient_accumulation_steps
    start = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    while True:
        try:
            return loop.run(parts, resume=resume)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and not should_reduce_batch_size(error):
                raise
            if parts == config.batch_size:
                raise PosswapError(f"memory does not suffice for a single sequence at a time: {error}") from error
        # Outside of `except`, where the error's traceback no longer keeps activations alive.
        parts = next(d for d in range(2 * parts, config.batch_size + 1) if config.batch_size % d == 0)
        logging.getLogger(__name__).warning(
            "memory does not suffice: starting again with %d gradient_accumulation_steps of %d sequences, the same batch of %d",
            *(parts, config.batch_size // parts, config.batch_size),
        )
        if loop.output and not resumed:
            remove_checkpoints(loop.output)
        model.zero_grad(set_to_none=True)
        model.load_state_dict(start)
        clear_device_cache(garbage_collection=True)


@contextmanager
def _gradient_checkpointing(model: torch.nn.Module, wanted: bool) -> Iterator[None]:
    """Inside, gradient checkpointing is on, if wanted. A model that has it on already stays as it is."""
    if not wanted or any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        yield
        return
    # transformers 5.23 renamed it, and warns of the old name.
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_enable")()
    try:
        yield
    finally:
        getattr(model, f"{name}_disable")()
        model.disable_input_require_grads()  # which *_enable() had switched on


def _check_labels(dataset: Dataset) -> None:
    """Raise when all labels are equal; reading stops at the first two that differ, so it is quick for most data sets."""
    first = None
    for row in (dataset[place] for place in range(len(dataset))):
        if not isinstance(row, dict) or row.get("labels") is None:
            return
        labels = torch.as_tensor(row["labels"]).flatten()
        for label in labels[labels != IGNORED].unique().tolist():
            first = label if first is None else first
            if label != first:
                return
    if len(dataset) > 1:
        what = "every label in the training set is -100, which losses ignore" if first is None else f"all labels are {first}"
        raise PosswapError(f"there is nothing to learn: {what}")


def _parameter_groups(model: torch.nn.Module, config: TrainingConfig) -> list[dict]:
    tables = {id(p) for m in model.modules() if isinstance(m, AttentionPositions) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = config.learning_rate * config.table_learning_rate_factor
    groups = [
        {"params": [p for p in trained if id(p) in tables], "lr": rate, "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) not in tables and p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if id(p) not in tables and p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
