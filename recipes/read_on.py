"""How far can a causal model with new positions read? Loss on text many times as long as it was trained on.

    python recipes/read_on.py --scheme relative --start fit              # a long fit: blocks of four times the trained length
    python recipes/read_on.py --scheme rotary --start fit --span 192     # attention to the last 192 tokens and the first 4
    python recipes/read_on.py --scheme original                          # the baseline: a window slides over the same text
    python recipes/read_on.py --scheme rotary --start fit --span 192 --generate 20000      # also time generated tokens
    python recipes/read_on.py --scheme original --generate 1             # the same behind a window
    python recipes/read_on.py --scheme relative --start fit --tune-steps 500       # also train on long text afterwards

The swapped model reads whole blocks of 16 times the trained length. The original reads the same blocks through a window of the
trained length that slides by a quarter of it, so it reads each token several times. Each figure is the loss over a range of
positions in the block: a model that can read on has about the same loss in all of them.

With --tune-steps both are then trained on next-token prediction, on equal tokens of the same text: the swapped model in blocks
as long as the fit's, the original in blocks of its trained length. Choose the --learning-rate of each by select_loss. With
--brake 0.5 half of the loss is the divergence from the original as it was, which reads long blocks through its window.

loss_N is of positions from N / 2 (the first: from 0) up to N.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Annotated

import psutil  # which accelerate needs
import torch
from torch.utils.benchmark import timer
from transformers import DynamicCache, PreTrainedModel

from hf_posswap.architectures import longest_input
from hf_posswap.attention import CACHE
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, SwapOptions, announce, averaged, cost, load_original, main
from hf_posswap.experiments.text_tasks import RunText, TextOptions, check_enough
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.measure.losses import row_losses, sliding_window_losses, token_losses
from hf_posswap.training import TrainingConfig, train
from hf_posswap.training.launching import check_launch


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, SwapOptions):
    QUESTION = "How far can it read now?"
    FIGURES = {
        "loss": "nats a token of held-out tokens from place N / 2 (the first: 0) to N of a block",
        "start_loss": "the same before training",
        "select_loss": "nats a token of text to choose a rate by, all places",
    }
    FORBIDDEN_STARTS = {"scratch": "a model from scratch has no trained length"}
    LEAST = {"fit_factor": 1, "factor": 1, "tune_steps": 0, "generate": 0}

    model: str = "stdlib-gpt2"
    factor: Annotated[int, "Length of the blocks to read, in multiples of the trained length; a power of two."] = 16
    fit_factor: Annotated[int, "Longest blocks of --start fit, in multiples of the trained length."] = 4
    tune_steps: Annotated[int, "Training steps on next-token prediction, after the fit; 0: none."] = 0
    tune_tokens: Annotated[int, "Tokens per training step."] = 4096
    learning_rate: Annotated[float, "Peak rate, after warm-up over a tenth of the steps; then a cosine to 0."] = 6e-4
    brake: Annotated[float, "Weight of the divergence from the untuned original in the loss of training, from 0 to 1."] = 0.0
    mixed_precision: Annotated[str | None, "Of training: bf16 or fp16. Default: float32, or the launcher's."] = None
    generate: Annotated[int, "Time so many generated tokens, the ends, and reading. It swaps to as many: more to a group."] = 0

    def __post_init__(self):
        super().__post_init__()
        for name in ("mixed_precision", "brake"):
            if getattr(self, name) and not self.tune_steps:
                raise PosswapError(f"{name} is about training, of which there is none: give tune_steps, or leave it out")
        if not 0 <= self.brake <= 1:
            raise PosswapError(f"brake={self.brake} must be from 0 to 1")
        if self.factor & (self.factor - 1):
            raise PosswapError(f"factor={self.factor} must be a power of two: 1, 2, 4, ...")


def run(config: Config, folder: Path, resume: bool) -> dict:
    text = RunText(config, reads_on=True)
    trained = text.trained
    swapped, longest = config.scheme != ORIGINAL, trained * max(config.factor, config.fit_factor)
    fit_length, read_length = trained * config.fit_factor, trained * config.factor
    blocks = text.held(read_length)[read_length]
    if config.tune_steps and config.tune_tokens % fit_length:  # the original, with shorter rows, would train on other budgets
        what = f"tune_tokens={config.tune_tokens} must be a multiple of {fit_length}, the tokens of a swapped model's row"
        raise PosswapError(f"{what} (fit_factor * {trained}): choose another, or another fit_factor")
    if config.tune_steps:
        rows, aside = text.parts(fit_length if swapped else trained, read_length)
        budget = TrainingConfig(
            max_steps=config.tune_steps, batch_size=config.tune_tokens // rows.shape[1], dropout=False,
            learning_rate=config.learning_rate, table_learning_rate_factor=1.0, seed=config.seed,
            mixed_precision=config.mixed_precision,
        )  # fmt: skip
        check_enough(rows, budget), check_launch(budget, 1)
    model = text.load(
        max_positions=max(longest, config.generate) if swapped else None,
        fit_batches=lambda: text.fit_batches(fit_length, window=trained),
    )
    ends = [trained * 2**power for power in range(config.factor.bit_length())]

    def read(blocks: torch.Tensor) -> torch.Tensor:
        announce("measuring")
        stride = max(1, trained // 4)
        return token_losses(model, blocks) if swapped else sliding_window_losses(model, blocks, trained, stride=stride)

    def by_position(name: str) -> dict[str, torch.Tensor]:
        losses = read(blocks)
        return {f"{name}_{end}": row_losses(losses[:, start:end]) for start, end in zip([0, *ends], ends, strict=False)}

    figures, done = {}, None
    if config.tune_steps:
        figures = by_position("start_loss")
        examples, loss = [{"input_ids": row, "labels": row} for row in rows], None
        if config.brake:
            loss = distillation_loss(load_original(config.model), text_weight=1 - config.brake, window=trained)
        model, done = train(model, examples, budget, compute_loss=loss, output=folder, resume=resume)
        figures["select_loss"] = row_losses(read(aside))
    figures = by_position("loss") | figures
    details = {"trained_length": trained, "evaluation_tokens": blocks.numel()}
    if config.generate:
        announce(f"generating {config.generate} tokens")
        if swapped:
            details["generation"] = generation(model, blocks[:1, : min(64, trained)], config.generate)
            details["milliseconds a token read"] = {end: reading(model, blocks[:1].view(-1, end)) for end in ends}
        else:
            details["generation"] = window_generation(model, blocks[:1, :trained], stride=max(1, trained // 4))
    return {**averaged(figures), "cost": cost(model, done), "model": model, "details": details}


@torch.no_grad()
def generation(model: PreTrainedModel, prompt: torch.Tensor, tokens: int) -> dict[str, float]:
    """Return median milliseconds per token of the first and last thousand tokens, how many were written, cached keys, and what
    the process then holds: memory in bytes, of a GPU that of tensors, after the first thousand and at the end.
    """
    model = model.eval()
    cache, token = DynamicCache(config=model.config), prompt.to(model.device)

    def write() -> None:
        nonlocal token
        token = model(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)

    def held() -> int:
        gpu = model.device.type == "cuda"
        return torch.cuda.memory_allocated(model.device) if gpu else psutil.Process().memory_info().rss

    count = min(tokens, longest_input(model.config) - prompt.shape[1])
    written = milliseconds(write, min(count, 1001))
    memory = {"bytes after 1,000": held()}
    written += milliseconds(write, count - len(written))
    times = {"first": median_high(written[1:1001] or written), "last": median_high(written[-1000:])}
    keys = {"tokens": len(written), "keys in the cache": cache.layers[0].keys.shape[-2]}
    return times | keys | memory | {"bytes at the end": held()}


@torch.no_grad()
def window_generation(model: PreTrainedModel, text: torch.Tensor, *, stride: int) -> dict[str, float]:
    """Return median milliseconds per token of a model without room for more than `text` (1, N), which therefore reads anew:

    its last N tokens for each token; or its last N - `stride`, and then writes `stride` tokens with a cache.
    """
    model, text = model.eval(), text.to(model.device)

    def slide() -> None:
        cache, token = DynamicCache(config=model.config), text[:, :-stride]
        for _ in range(stride):
            token = model(token, logits_to_keep=1, **{CACHE: cache}).logits.argmax(-1)

    each = milliseconds(lambda: model(text, use_cache=False, logits_to_keep=1), 20)
    slid = median_high(milliseconds(slide, 20)) / stride
    return {"window read for each token": median_high(each), "window that slides": slid}


@torch.no_grad()
def reading(model: PreTrainedModel, text: torch.Tensor) -> float:
    """Return milliseconds a token of reading (N, L) at once, the median of five; N * L is the same for all lengths."""
    text = text.to(model.device)
    return median_high(milliseconds(lambda: model.base_model(text, use_cache=False), 5)) / text.numel()


def milliseconds(call: Callable, times: int) -> list[float]:
    """Return how long each of several calls takes; torch's timer waits until a GPU has done what it was asked to."""
    found = []
    for _ in range(times):
        started = timer()
        call()
        found.append(1000 * (timer() - started))
    return found


if __name__ == "__main__":
    main(Config, run)
