"""What does a swap cost, and what do a fit and a short tuning win back? The swapped model is compared with its original.

    hf-posswap compare --output runs/minilm                                                # default schemes, built-in model
    hf-posswap compare --start cold --start swap --start fit --output runs/gpt2 -- --model gpt2 --train-file my.txt
    python recipes/swap_cost.py --model stdlib-gpt2 --scheme rotary --output runs/rotary   # one scheme, one seed

Figures are measured after the swap (and fit), and again, as `tuned_...`, after --max-steps of tuning, equal for all schemes. An
encoder is tuned by distillation from the original, a causal model on its own loss. The causal model is measured in blocks of
one, two and four times its trained length, past which the original repeats its table. For `word_order`, a linear probe on an
encoder's frozen states tells the swapped sentence from the intact one, or which of the two a causal model finds likelier.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from transformers import PreTrainedModel

from hf_posswap.data.text import stdlib_prose
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, announce, averaged, cost, load_original, main
from hf_posswap.experiments.text_tasks import RunText, TextConfig
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.measure.damage import block_kl, pooled_states
from hf_posswap.measure.losses import row_perplexities, token_losses
from hf_posswap.measure.word_order import word_order_examples, word_order_preference, word_order_probe
from hf_posswap.training import train


@dataclass(frozen=True, kw_only=True)
class SwapCostConfig(TextConfig):
    """Options of one run, by default small enough to try all schemes in minutes on a CPU."""

    QUESTION = "What does a swap cost, and what do a fit and a short tuning win back?"
    FIGURES = {
        "cosine": "of mean-pooled states with the original's on held-out blocks of N tokens, 1 is unhurt",
        "perplexity": "on held-out blocks of N tokens",
        "kl": "of predictions from the original's, 0 is unhurt",
        "word_order": "how often two swapped neighbours in a sentence are noticed, 0.5 is chance",
        "tuned": "the same after the training steps",
    }
    FORBIDDEN_STARTS = {"scratch": "the cost of a swap is what a checkpoint loses"}
    LEAST = {"word_order_sentences": 0}

    max_steps: int = 16
    batch_size: int = 8
    learning_rate: float = 2e-4
    table_learning_rate_factor: float = 100.0  # with so few steps, tables would otherwise stay near zero
    dropout: bool = False
    fit_tokens: int = 16_384
    fit_steps: int = 10
    evaluation_tokens: int = 8192
    word_order_sentences: Annotated[int, "To train the probe on, half of them intact; half as many test it. 0: no probe."] = 480

    def __post_init__(self):
        super().__post_init__()
        if 0 < self.word_order_sentences < 4:
            raise PosswapError(f"word_order_sentences={self.word_order_sentences}: give 4 or more, or 0 for no probe")


def run(config: SwapCostConfig, folder: Path, resume: bool) -> dict:
    """Swap, measure, tune, measure again."""
    text = RunText(config)
    trained, causal, tokenizer = text.trained, text.causal, text.tokenizer
    if not causal and (config.skip_to or 0) > trained:
        raise PosswapError(f"skip_to={config.skip_to}: the original, which reads the same positions, has {trained}: lower it")
    lengths = [n * trained for n in (1, 2, 4)] if causal else [text.block_size, trained]
    cuts, tuning = text.held(*lengths), text.blocks(text.block_size)
    ours = config.dataset or config.train_file
    prose = [
        "\n".join(texts).split("\n") if ours else stdlib_prose(split)
        for split, texts in (("train", text.training), ("validation", text.held_out))
    ]
    sentences = config.word_order_sentences
    probe = sentences and [word_order_examples(part, n) for part, n in zip(prose, (sentences, sentences // 2), strict=True)]

    if config.scheme == ORIGINAL and causal:  # its table repeated past the end; up to there it is unchanged, bit for bit
        text.config = replace(config, scheme="learned:extend=tile", start="swap", span=None, first=None)
    model = text.load(max_positions=lengths[-1])
    original = load_original(config.model).to(model.device)
    states = None if causal else {n: pooled_states(original, cut) for n, cut in cuts.items()}

    def measure(model: PreTrainedModel, stage: str) -> dict[str, float | torch.Tensor]:
        announce("measuring")
        if causal:
            figures = {f"perplexity_{n}": row_perplexities(token_losses(model, cut)) for n, cut in cuts.items()}
            figures["kl"] = block_kl(model, original, cuts[trained])
        else:
            figures = {f"cosine_{n}": torch.cosine_similarity(pooled_states(model, cut), states[n]) for n, cut in cuts.items()}
        if probe and causal:
            figures["word_order"] = word_order_preference(model, tokenizer, probe[1][0])
        elif probe:
            figures["word_order"] = word_order_probe(model, tokenizer, *probe)
        return {f"{stage}{name}": value for name, value in figures.items()}

    figures = measure(model, "")
    rows = [{"input_ids": row, "labels": row} if causal else {"input_ids": row} for row in tuning]
    distil = None if causal else distillation_loss(original)
    model, done = train(model, rows, config, compute_loss=distil, output=folder, resume=resume, description="tuning")
    return {
        **averaged(figures | measure(model, "tuned_")),
        "cost": cost(model, done),
        "model": model,
        "details": {
            "trained_length": trained,
            "tuning_tokens": done.tokens,
            "evaluation_tokens": {str(n): cut.numel() for n, cut in cuts.items()},
        },
    }


if __name__ == "__main__":
    main(SwapCostConfig, run)
