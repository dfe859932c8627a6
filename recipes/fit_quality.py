"""How near to its original does `fit` alone bring a swapped model, and how much does the text matter that it is fitted on?

    python recipes/fit_quality.py --model stdlib-gpt2 --scheme rotary --output runs/fit
    python recipes/compare.py fit_quality --start cold --start swap --start fit --output runs/fits -- --model stdlib-gpt2
    python recipes/fit_quality.py --scheme relative --train-file valid.txt --validation-file test.txt --pairs stsb-dev.csv
    hf-posswap compare --collect runs/given --collect runs/random --vary text --output runs/texts

A causal model is measured in blocks of its trained length, four to each block of swap_cost's longest; an encoder in blocks of
its longest input, and a quarter of it, cut from these.

--text is what to fit on: `given`, --train-file or --dataset (default: the embedded text); `embedded`, the standard library's;
`shuffled`, the given text in random order; `random`, tokens drawn uniformly; `written`, by the causal model itself.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from scipy.stats import spearmanr

import hf_posswap as posswap
from hf_posswap.data.calibration import random_tokens, written_text
from hf_posswap.data.tables import read_pairs
from hf_posswap.data.text import wraps
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, SwapOptions, announce, averaged, cost, load_original, main
from hf_posswap.experiments.text_tasks import RunText, TextOptions
from hf_posswap.measure.damage import block_kl, pooled_states
from hf_posswap.measure.losses import row_perplexities, token_losses
from hf_posswap.measure.word_order import sentence_vectors


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, SwapOptions):
    QUESTION = "How near does a fit alone bring a swapped model to its original?"
    FIGURES = {
        "ratio": "perplexity on held-out text over the original's",
        "kl": "of predictions from the original's, 0 is unhurt",
        "perplexity": "on held-out text",
        "cosine": "of mean-pooled states with the original's on held-out blocks of N tokens, 1 is unhurt",
        "spearman": "of the cosine of two sentences with what people say",
    }
    FORBIDDEN_STARTS = {"scratch": "random weights cannot be compared with the original"}

    scheme: str = "rotary"
    start: str = "fit"
    text: Annotated[
        Literal["given", "embedded", "shuffled", "random", "written"],
        "What to fit on. given: the text of --dataset or --train-file; embedded: the text that comes with the package; "
        "shuffled: the given tokens in random order; random: random tokens; written: by a causal model itself.",
    ] = "given"
    pairs: Annotated[str | None, "A table of sentence1, sentence2 and label, for Spearman's rho of an encoder."] = None


def run(config: Config, folder: Path, resume: bool) -> dict:
    text = RunText(config)
    longest, causal = text.trained, text.causal
    if config.pairs and causal:
        raise PosswapError(f"pairs are for encoders, and {config.model} is a causal model")
    if config.text == "written" and not causal:
        raise PosswapError(f"text=written needs a causal model, and {config.model} is an encoder")
    pairs = config.pairs and read_pairs(config.pairs)
    lengths = [longest] if causal else sorted({longest // 4, longest})
    held = text.held(*lengths, 4 * longest if causal else longest)  # the tokens that swap_cost measures on
    text.config = replace(config, start="swap") if config.start == "fit" else config  # the fit follows below, for its report
    model = text.load()
    original, report = load_original(config.model).to(model.device), None
    if config.start == "fit" and config.scheme != ORIGINAL:
        announce("fitting")
        report = posswap.fit(model, _batches(text, original), steps=config.fit_steps, seed=config.seed)
    announce("measuring")
    if causal:
        losses, before = (token_losses(one, held[longest]) for one in (model, original))
        figures = {"ratio": row_perplexities(losses - before), "kl": block_kl(model, original, held[longest])}
        figures |= {"perplexity": row_perplexities(losses)}
    else:
        states = {n: [pooled_states(one, blocks) for one in (model, original)] for n, blocks in held.items()}
        figures = {f"cosine_{n}": torch.cosine_similarity(*both) for n, both in states.items()}
    if pairs:
        size, (*sides, scores) = model.config.hidden_size, pairs  # of the last states, those of the last layer
        vectors = [torch.from_numpy(sentence_vectors(model, text.tokenizer, side)[:, -size:]) for side in sides]
        figures["spearman"] = float(spearmanr(torch.cosine_similarity(*vectors), scores).statistic)
    spent = {} if report is None else {"seconds": report.seconds, "tokens": report.tokens}
    layers = [] if report is None else [asdict(layer) for layer in report.layers]
    return {**averaged(figures), "cost": {**cost(model), **spent}, "model": model, "details": {"layers": layers}}


def _batches(text: RunText, original) -> list[torch.Tensor]:
    config = text.config
    if config.text == "written":
        return [written_text(original, tokens=config.fit_tokens, seed=config.seed)]
    if config.text == "random":
        return random_tokens(original, tokens=config.fit_tokens, seed=config.seed)
    if config.text == "embedded":
        text = RunText(replace(config, dataset=None, dataset_config=None, train_file=None, validation_file=None))
    batches = text.fit_batches()
    generator = torch.Generator().manual_seed(config.seed)
    edge = int(wraps(text.tokenizer))  # [CLS] and [SEP] stay where they are
    for blocks in batches if config.text == "shuffled" else ():
        inner = blocks[:, edge : blocks.shape[1] - edge]
        inner.copy_(inner.flatten()[torch.randperm(inner.numel(), generator=generator)].view_as(inner))
    return batches


if __name__ == "__main__":
    main(Config, run)
