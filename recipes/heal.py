"""How many tokens win back what a swap cost? Distil the swapped model from its original, on text without labels.

    python recipes/heal.py --scheme rotary --start fit --output runs/heal                     # stdlib-gpt2, one seed
    python recipes/compare.py heal --scheme original --scheme rotary --start cold --start fit --output runs/heals
    python recipes/heal.py --model minilm --train-file my.txt --max-steps 300 --scheme relative --output runs/minilm
    accelerate launch recipes/heal.py --model gpt2 --dataset wikitext --dataset-config wikitext-2-raw-v1 --scheme rotary

The scheme `original` is the control: the unswapped model, tuned alike, which matters if --text-weight lets it learn the text.

Held-out text is in the blocks that `fit_quality` measures on. It is measured at 0 tokens and after about ten steps that grow
by a factor. `to_90_percent` is interpolated between these, linearly in the logarithm of damage. It is missing if damage never
falls to a tenth of a cold swap's, whatever the start. `select` is measured on a tenth of the training text that distillation
leaves out, though not --start fit: choose the --learning-rate of each row by it.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from transformers import PreTrainedModel

from hf_posswap.architectures import longest_input
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, announce, averaged, cost, give_positions, load_original, main
from hf_posswap.experiments.text_tasks import RunText, TextConfig, check_enough
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.measure.damage import block_kl, pooled_states
from hf_posswap.measure.losses import row_perplexities, token_losses
from hf_posswap.training import TrainingRun, train

SHARES = (90, 95, 99)  # per cent of the cold swap's damage
MEASUREMENTS = 10  # after the one at 0 tokens


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    QUESTION = "How many tokens of distillation from the original win back what a swap cost?"
    FIGURES = {
        "damage": "to held-out text, KL or 1 - cosine to the original; with N, after N tokens of distillation",
        "perplexity": "on held-out text at the end",
        "ratio": "perplexity over the original's before; with N, after N tokens",
        "to": "tokens until so much of the cold swap's damage is won back",
        "select": "ratio if the text's tokens count in the loss, else damage, on text to choose a rate by",
    }
    FORBIDDEN_STARTS = {"scratch": "random weights have nothing to win back"}

    model: str = "stdlib-gpt2"
    scheme: str = "rotary"
    learning_rate: float = 1e-3
    dropout: bool = False
    text_weight: Annotated[float, "Weight of next-token prediction in the loss of a causal model, 0 to 1."] = 0.0
    block_size: Annotated[int | None, "Tokens of a training sequence. Default: the trained length; for BERT up to 128."] = None
    fit_learning_rate: Annotated[float, "Peak learning rate of --start fit."] = 1e-3


def run(config: Config, folder: Path, resume: bool) -> dict:
    """All processes measure, since all must call a sharded model together."""
    text = RunText(config)
    longest, causal = text.trained, text.causal
    block_size = config.block_size or text.block_size
    if not 2 < block_size <= longest:
        raise PosswapError(f"block_size={block_size} must be from 3 to {longest}, the length {config.model} was trained at")
    if (config.skip_to or 0) > longest:
        raise PosswapError(f"skip_to={config.skip_to}: the original, which reads the same positions, has {longest}: lower it")
    blocks, aside = text.parts(block_size)
    check_enough(blocks, config)
    held = text.held(longest, 4 * longest) if causal else text.held(text.block_size, longest)
    held = held[longest] if causal else list(held.values())
    original = load_original(config.model)
    loss = distillation_loss(original, text_weight=config.text_weight)  # whose errors are no news after a fit
    model = text.load(fit_learning_rate=config.fit_learning_rate)
    original.to(model.device)
    announce("measuring before the first step")
    reported, selected = (
        (blocks, token_losses(original, blocks) if causal else [pooled_states(original, rows) for rows in blocks])
        for blocks in (held, aside if causal else [aside])
    )

    def measure(model: PreTrainedModel, blocks, before) -> dict[str, torch.Tensor]:
        """Return figures of each block, given what the original says to them."""
        if not causal:
            pairs = zip(blocks, before, strict=True)
            return {"damage": 1 - torch.cat([torch.cosine_similarity(pooled_states(model, rows), was) for rows, was in pairs])}
        losses = token_losses(model, blocks)
        found = {"damage": block_kl(model, original, blocks), "perplexity": row_perplexities(losses)}
        return found | {"ratio": row_perplexities(losses - before)}

    cold = None
    if config.scheme != ORIGINAL:
        swapped = load_original(config.model).to(model.device)
        give_positions(swapped, replace(config, start="cold"), longest_input(model.config), None)
        cold = averaged(measure(swapped, *reported))["figures"]["damage"]
    looks = measured_steps(config.max_steps)
    begin = {"step": 0, "tokens": 0, **averaged(measure(model, *reported))["figures"]}

    def look(model: PreTrainedModel, run: TrainingRun) -> None:
        if len(run.losses) in looks:
            run.points.append({"step": len(run.losses), "tokens": run.tokens, **averaged(measure(model, *reported))["figures"]})

    place = {"output": folder, "resume": resume, "description": "distillation"}
    model, done = train(model, [{"input_ids": row} for row in blocks], config, compute_loss=loss, after_step=look, **place)
    curve = [begin, *done.points]
    # With --text-weight the model also learns from the text, so low damage is not the aim.
    judged = "ratio" if causal and config.text_weight else "damage"
    shares = () if cold is None else SHARES
    marks = {f"to_{share}_percent": tokens_to_reach(curve, (1 - share / 100) * cold) for share in shares}
    end = measure(model, *reported)  # again: with a value for each block
    figures = {
        **{name: end[name] for name in dict.fromkeys((judged, *end))},
        **{name: tokens for name, tokens in marks.items() if tokens is not None},
        **{f"{judged}_{point['tokens']}": point[judged] for point in curve},
        "select": measure(model, *selected)[judged],
    }
    details = {"curve": curve, "original": averaged(measure(original, *reported))["figures"], "cold_damage": cold}
    details |= {"block_size": block_size, "losses": done.losses}
    return {**averaged(figures), "cost": cost(model, done), "model": model, "details": details}


def measured_steps(max_steps: int) -> list[int]:
    """Return the steps after which to measure: the first, the last, and others between at a constant factor.

    >>> measured_steps(100)
    [1, 2, 3, 5, 8, 13, 22, 36, 60, 100]
    """
    return sorted({round(max_steps ** (i / (MEASUREMENTS - 1))) for i in range(MEASUREMENTS)})


def tokens_to_reach(curve: list[dict], level: float) -> int | None:
    """Return after how many tokens damage first is at or below a level, interpolated; None if it never is."""
    if curve[0]["damage"] <= level:
        return 0
    for before, after in zip(curve, curve[1:], strict=False):
        if after["damage"] <= level:
            # Rounding may make tiny damage zero or negative.
            high, middle, low = (math.log(max(value, 1e-12)) for value in (before["damage"], level, after["damage"]))
            share = (high - middle) / (high - low) if high > low else 1.0
            return round(before["tokens"] + share * (after["tokens"] - before["tokens"]))
    return None


if __name__ == "__main__":
    main(Config, run)
