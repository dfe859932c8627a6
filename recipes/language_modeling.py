"""What does another position scheme cost a language model, and what does training on text win back? Masked LM for BERT, causal
LM for GPT-2. The control is --start scratch, a model that is trained with the scheme from the beginning.

    python recipes/language_modeling.py --model stdlib-gpt2 --scheme rotary --start fit
    python recipes/language_modeling.py --scheme relative --train-file train.txt --validation-file valid.txt  # minilm
    python recipes/language_modeling.py --model gpt2 --scheme rotary --dataset wikitext --dataset-config wikitext-2-raw-v1
    python recipes/language_modeling.py --model stdlib-gpt2 --scheme none --start scratch --learning-rate 1e-3

A BERT checkpoint without a masked-LM head (sentence encoders have none) gets a new one. It is trained before the swap, on the
frozen original encoder, and is the same for every scheme and seed. It is saved as head.safetensors; with --head, other runs use
it without training it again. Its loss is in the details of result.json, as are losses by position. BERT's are of masked tokens.

Choose the --learning-rate of each scheme by select_loss, and compare schemes by loss.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMaskedLM, PreTrainedModel

from hf_posswap.data.text import shorter_blocks
from hf_posswap.errors import PosswapError
from hf_posswap.experiments import text_tasks
from hf_posswap.experiments.recipe import announce, averaged, cost, main
from hf_posswap.experiments.text_tasks import MaskedBlocks, RunText, TextConfig, check_enough
from hf_posswap.measure.losses import lm_head, loss_by_position, mean_loss, row_losses, row_perplexities, token_losses
from hf_posswap.training import TrainingConfig, train


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    QUESTION = "What does a scheme cost a language model, and what does training on text win back?"
    FIGURES = {
        "perplexity": "on held-out text; with N, in blocks of N tokens",
        "loss": "its logarithm, nats a token",
        "start": "the same before training",
        "select_loss": "nats a token of a tenth of the training text that is not trained on, to choose a rate by",
    }
    LEAST = {"head_steps": 1, "head_learning_rate": 1e-12, "block_size": 4, "lengths": 4}

    block_size: Annotated[int | None, "Tokens of a training sequence. Default: the trained length; for BERT up to 128."] = None
    lengths: Annotated[tuple[int, ...], "Tokens to measure at; repeatable. Default: 1/4, 1/2 and all of the block size."] = ()
    mlm_probability: Annotated[float, "Share of tokens to mask, for BERT."] = 0.15
    head: Annotated[str | None, "head.safetensors of another run. Default: train a missing head."] = None
    head_steps: Annotated[int, "Steps to train a missing head."] = 200
    head_learning_rate: Annotated[float, "Peak learning rate for a missing head."] = 1e-3

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.mlm_probability < 1:
            raise PosswapError(f"mlm_probability={self.mlm_probability} must lie between 0 and 1")
        if self.head and self.start == "scratch":
            raise PosswapError("start=scratch draws its head at random, too: leave out head")


def run(config: Config, folder: Path, resume: bool) -> dict:
    text = RunText(config)
    trained, causal, tokenizer = text.trained, text.causal, text.tokenizer
    block_size = config.block_size or text.block_size
    lengths = sorted({*(config.lengths or (max(4, block_size // 4), max(4, block_size // 2))), block_size})
    if not causal and tokenizer.mask_token is None:
        raise PosswapError(f"the tokenizer of {config.model} has no mask token, which masked language modelling needs")
    blocks, aside = text.parts(block_size)
    check_enough(blocks, config)
    cuts = text.held(*lengths)

    def to_read(cut: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (cut,) if causal else text_tasks.mask_tokens(cut, tokenizer, config.mlm_probability)

    held = {n: to_read(cut) for n, cut in cuts.items()}
    if causal:
        rows = [{"input_ids": row, "labels": row} for row in blocks]
    else:
        examples = config.max_steps * config.batch_size
        rows = MaskedBlocks(blocks, tokenizer, config.mlm_probability, seed=config.seed, examples=examples)

    head = {}

    def prepare(model: PreTrainedModel, missing: set[str]) -> None:
        lm_head(model)  # raises before the fit for one that has none in one module
        if not causal and missing:
            length = min(block_size, trained)
            short, asked = (shorter_blocks(long, tokenizer, length) for long in (blocks, cuts[lengths[-1]]))
            examples = config.head_steps * config.batch_size
            new = MaskedBlocks(short, tokenizer, config.mlm_probability, seed=text_tasks.FIXED_SEED, examples=examples)
            head.update(_new_head(model, missing, new, to_read(asked), config, folder))
        elif config.head:
            raise PosswapError(f"{config.model} has a head of its own: leave out --head")

    longest = max(lengths[-1], config.skip_to or 0)
    model = text.load(None if causal else AutoModelForMaskedLM, max_positions=longest, prepare=prepare)
    start = {n: token_losses(model, *cut) for n, cut in held.items()}
    compute_loss = None if causal else text_tasks.masked_lm_loss
    model, done = train(model, rows, config, compute_loss=compute_loss, output=folder, resume=resume)
    announce("measuring")
    losses = {n: token_losses(model, *cut) for n, cut in held.items()}
    every = max(1, len(done.losses) // 10)
    figures = {
        "perplexity": row_perplexities(losses[block_size]),
        **{f"perplexity_{n}": row_perplexities(found) for n, found in losses.items()},
        "loss": row_losses(losses[block_size]),
        "start_perplexity": row_perplexities(start[block_size]),
        "start_loss": row_losses(start[block_size]),
        "select_loss": row_losses(token_losses(model, *to_read(aside))),
    }
    return {
        **averaged(figures),
        "cost": cost(model, done),
        "model": model,
        "details": {
            "objective": "causal" if causal else "masked",
            "trained_length": trained,
            "block_size": block_size,
            "evaluation_tokens": {str(n): int(found.isfinite().sum()) for n, found in losses.items()},
            "start_loss": {str(n): mean_loss(found) for n, found in start.items()},
            "loss": {str(n): mean_loss(found) for n, found in losses.items()},
            "start_loss_by_position": loss_by_position(start[lengths[-1]]),
            "loss_by_position": loss_by_position(losses[lengths[-1]]),
            "curve": [
                {"step": step + len(some), "training_loss": mean(some)}
                for step in range(0, len(done.losses), every)
                for some in [done.losses[step : step + every]]
            ],
            "new_head": head or None,
        },
    }


def _new_head(model: PreTrainedModel, missing: set, blocks: MaskedBlocks, held: tuple, config: Config, folder: Path) -> dict:
    """Give a checkpoint a masked-LM head, trained or from a file; return what it cost and how well it predicts."""
    encoder = {id(parameter) for parameter in model.base_model.parameters()}
    new = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in encoder}
    facts = {"parameters": sum(parameter.numel() for parameter in new.values()), "file": config.head}
    if config.head:
        found = load_file(config.head)
        if {name: value.shape for name, value in found.items()} != {name: value.shape for name, value in new.items()}:
            raise PosswapError(f"{config.head} does not fit {config.model}, whose head has {', '.join(new)}")
        with torch.no_grad():
            for name, parameter in new.items():
                parameter.copy_(found[name])
    else:
        # These train copies, or parts, of the weights in `new`.
        if parse_flag_from_env("ACCELERATE_USE_FSDP") or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            raise PosswapError("train a new head on one process or with multi_gpu.yaml, then pass --head")
        budget = TrainingConfig(
            max_steps=config.head_steps, batch_size=config.batch_size, learning_rate=config.head_learning_rate,
            dropout=False, mixed_precision=config.mixed_precision, seed=text_tasks.FIXED_SEED,
            gradient_accumulation_steps=config.gradient_accumulation_steps, auto_find_batch_size=config.auto_find_batch_size,
        )  # fmt: skip
        done = text_tasks.train_head(model, missing, blocks, budget)
        facts |= {"steps": config.head_steps, "tokens": done.tokens, "seconds": done.seconds}
        if PartialState().is_main_process:
            weights = {name: parameter.detach().cpu().contiguous() for name, parameter in new.items()}
            save_file(weights, folder / "head.safetensors")
    return facts | {"loss_before_swap": mean_loss(token_losses(model, *held))}


if __name__ == "__main__":
    main(Config, run)
