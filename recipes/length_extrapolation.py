"""Does a swapped causal model read more than it was trained on, and what does a short fine-tune at a longer length gain?

    python recipes/length_extrapolation.py --scheme rotary --start fit
    python recipes/length_extrapolation.py --scheme original     # the bar: the unswapped model, and a window that slides
    python recipes/length_extrapolation.py --scheme learned:extend=tile --finetune-factor 0     # without a fine-tune
    python recipes/length_extrapolation.py --scheme "rotary:scaling={rope_type=yarn,factor=8}" --start fit

The same held-out tokens are cut into blocks of 1, 2, 4, ... times the trained length, and the loss is measured for each cut.
Longer blocks lower the loss of any model, since fewer tokens are at the beginning of a block. So the baseline is the original
with a sliding window of the trained length: longer positions are useful only if they beat it. The swapped model also reads the
longest blocks through the window. If that is better than reading them whole, the new positions hurt; if it is worse, longer
context helps.

For the scheme `original`, all figures are measured with the window. Its fine-tune has blocks of the trained length, and as many
tokens per step as the other schemes have, so it is the baseline after the fine-tune, too. Choose the --learning-rate of each
scheme by select_loss, read as the loss is, in blocks of the fine-tune's length.

Details: losses with the window, and losses by position in the longest block. loss.png shows all losses.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hf_posswap.data.text import shorter_blocks
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, announce, averaged, cost, load_original, main
from hf_posswap.experiments.text_tasks import RunText, TextConfig, check_enough
from hf_posswap.measure.losses import loss_by_position, mean_loss, row_losses, sliding_window_losses, token_losses
from hf_posswap.plots import plot_loss_by_length
from hf_posswap.training import train


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    QUESTION = "Does a causal model read more than it was trained for?"
    FIGURES = {
        "loss": "nats a token on held-out blocks of N tokens; the original's is that behind a sliding window",
        "tuned": "the same after the fine-tune",
        "select_loss": "nats a token of a tenth of the training text that is not trained on, to choose a rate by",
    }
    FORBIDDEN_STARTS = {"scratch": "a model from scratch has no trained length (language_modeling.py --lengths trains one)"}
    LEAST = {"factors": 1, "finetune_factor": 0, "stride": 1}

    model: str = "stdlib-gpt2"
    batch_size: Annotated[int, "Sequences per step, of the fine-tune's length, over all processes."] = 4
    factors: Annotated[tuple[int, ...], "Multiples of the trained length to measure at, repeatable."] = (1, 2, 4, 8, 16)
    finetune_factor: Annotated[int, "Multiple of the trained length to fine-tune at; 0: no fine-tune."] = 4
    stride: Annotated[int | None, "Tokens by which the window slides. Default: a quarter of the trained length."] = None

    def __post_init__(self):
        super().__post_init__()
        if not self.factors or sorted(set(self.factors)) != list(self.factors):
            raise PosswapError(f"factors={self.factors} must be whole numbers from 1 on, in rising order")


def run(config: Config, folder: Path, resume: bool) -> dict:
    text = RunText(config, reads_on=True)
    trained = text.trained
    swapped, stride = config.scheme != ORIGINAL, config.stride or max(1, trained // 4)
    if not 1 <= stride < trained:
        raise PosswapError(f"stride={stride} must be from 1 to {trained - 1}, less than the trained length")
    needed = max(trained * max(*config.factors, config.finetune_factor), config.skip_to or 0)
    cuts = text.held(*(trained * factor for factor in config.factors))
    if config.finetune_factor:
        (rows, aside), budget = text.parts(trained * config.finetune_factor), config
        check_enough(rows, config)
        if not swapped:  # shorter blocks, but as many tokens per step
            rows = shorter_blocks(rows, text.tokenizer, trained)
            budget = replace(config, batch_size=config.batch_size * config.finetune_factor)

    model = text.load(max_positions=needed if swapped else None)
    bar = load_original(config.model).to(model.device) if swapped else model
    end = max(cuts)

    def window(one: PreTrainedModel, lengths) -> dict[int, torch.Tensor]:
        return {n: sliding_window_losses(one, cuts[n], trained, stride=stride) for n in lengths}

    def measure(one: PreTrainedModel) -> dict[str, dict[int, torch.Tensor]]:
        announce("measuring")
        if not swapped:
            return {"window": window(one, cuts)}
        return {"whole": {n: token_losses(one, cut) for n, cut in cuts.items()}, "window": window(one, [end])}

    found, done = {"original": {"window": window(bar, cuts)}}, None
    if swapped:
        found["swapped"] = measure(model)
    if config.finetune_factor:
        data = [{"input_ids": row, "labels": row} for row in rows]
        model, done = train(model, data, budget, output=folder, resume=resume, description="fine-tune")
        found["tuned"] = measure(model)
    means = {
        stage: {kind: {n: mean_loss(losses) for n, losses in by_length.items()} for kind, by_length in kinds.items()}
        for stage, kinds in found.items()
    }
    if PartialState().is_main_process:
        lines = {f"{stage}, {kind}": line for stage, kinds in means.items() for kind, line in kinds.items()}
        plot_loss_by_length(lines, trained, f"{config.model}: {config.scheme}").savefig(folder / "loss.png", dpi=150)
    starts = [0, trained // 16, trained // 4, *(trained * factor for factor in config.factors)]
    kind = "whole" if swapped else "window"
    stages = {"tuned_loss": "tuned"} if done else {}
    stages |= {"loss": "swapped" if swapped else "original"}
    figures = {f"{name}_{n}": row_losses(one) for name, stage in stages.items() for n, one in found[stage][kind].items()}
    if done:
        select = token_losses(model, aside) if swapped else sliding_window_losses(model, aside, trained, stride=stride)
        figures["select_loss"] = row_losses(select)
    return {
        **averaged(figures),
        "cost": cost(model, done),
        "model": model,
        "details": {
            "trained_length": trained,
            "stride": stride,
            "evaluation_tokens": cuts[end].numel(),
            "loss": means,
            "loss_by_position": {
                stage: {kind: loss_by_position(by_length[end], starts) for kind, by_length in kinds.items()}
                for stage, kinds in found.items()
            },
            "finetune_losses": done.losses if done else None,
        },
    }


if __name__ == "__main__":
    main(Config, run)
