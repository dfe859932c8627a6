"""Does a model find a key that is hidden in a long text? Accuracy by length and depth, as a heat map.

    python recipes/passkey.py --config recipes/configs/passkey.yaml --scheme rotary --output runs/passkey    # minutes, CPU
    python recipes/passkey.py --config recipes/configs/passkey_bert.yaml --scheme relative --output runs/bert
    python recipes/passkey.py --model gpt2 --no-train --lengths 128 --lengths 1024 --output runs/zero-shot
    accelerate launch recipes/passkey.py --model gpt2 --scheme rotary --train-lengths 1024 --output runs/gpt2    # on GPUs

Mohtashami & Jaggi 2023 (https://arxiv.org/abs/2305.16300); hf_posswap/measure/passkey.py has the texts, and what differs.

A causal model is trained on short generated texts to say the key, and tested at all lengths. An encoder is trained to point at
the key, as in question answering. Test keys are in no training text. For `candidates`, 0.1 is chance.

Writes result.json, with the matrices of lengths x depths, and heat_map.png into --output.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Literal

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import AutoModelForCausalLM, AutoModelForQuestionAnswering

from hf_posswap.architectures import longest_input
from hf_posswap.data.calibration import text_batches
from hf_posswap.data.text import embedded_documents
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import RecipeConfig, announce, averaged, cost, load_family, load_model, load_tokenizer, main
from hf_posswap.measure.passkey import PasskeyExamples, PasskeyTexts, depth_texts, point_at_keys, recall_keys
from hf_posswap.plots import plot_heat_maps
from hf_posswap.training import pad, train


@dataclass(frozen=True, kw_only=True)
class PasskeyConfig(RecipeConfig):
    QUESTION = "Does it find a key that is hidden in a long text?"
    FIGURES = {
        "accuracy": "share of keys said in full, in texts of N tokens, over all depths",
        "candidates": "share of texts in which the key is likelier than nine others",
    }
    LEAST = {"examples": 1, "tokens_a_batch": 1}

    model: str = "stdlib-gpt2"
    max_steps: int = 300
    train: Annotated[bool, "Train on generated texts first, or test the checkpoint as it is."] = True
    train_lengths: Annotated[tuple[int, ...], "Tokens of training texts; each text draws one; repeatable."] = (256,)
    lengths: Annotated[tuple[int, ...], "Tokens of test texts; repeatable."] = (128, 256, 512, 1024, 2048, 4096, 8192)
    depths: Annotated[tuple[float, ...], "Where in the filler the key is, 0 to 1; repeatable."] = (0.0, 0.25, 0.5, 0.75, 1.0)
    examples: Annotated[int, "Test texts for each length and depth."] = 20
    filler: Annotated[Literal["repeat", "text"], "repeat: the paper's five sentences; text: the standard library's."] = "repeat"
    decoys: Annotated[int, "Number of other keys in each text, with other names."] = 0
    tokens_a_batch: Annotated[int, "Most tokens in a test batch; a longer text is a batch of its own."] = 8192

    def __post_init__(self):
        super().__post_init__()
        if not (self.lengths and self.depths and self.train_lengths):
            raise PosswapError("one of lengths, depths and train_lengths is an empty list: give a value, or leave it out")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise PosswapError(f"depths={self.depths} must be from 0 (the start of the filler) to 1 (its end)")


def run(config: PasskeyConfig, folder: Path, resume: bool) -> dict:
    tokenizer = load_tokenizer(config.model)
    checkpoint, causal = load_family(config.model)
    if not causal and not config.train and "QuestionAnswering" not in str(checkpoint.architectures):
        raise PosswapError(f"{config.model} has no question-answering head: it must be trained to point at keys")
    texts, tested = (
        PasskeyTexts(tokenizer, split, causal=causal, filler=config.filler, decoys=config.decoys)
        for split in ("train", "validation")
    )
    lengths = sorted({*config.lengths, *(config.train_lengths if config.train else ())})
    if lengths[0] < tested.shortest:
        raise PosswapError(f"length={lengths[0]} is too short: keys and question take {tested.shortest} tokens")

    def fit_batches() -> list:
        options = {"tokens": config.fit_tokens, "causal": causal, "seed": config.seed}
        return text_batches(embedded_documents("train", causal=causal), tokenizer, longest_input(checkpoint), **options)

    auto_class = AutoModelForCausalLM if causal else AutoModelForQuestionAnswering
    longest = max(lengths[-1], (config.train and config.skip_to) or 0)
    model = load_model(config, auto_class, max_positions=longest, fit_batches=fit_batches, tokenizer=tokenizer)
    done = None
    if config.train:
        examples = PasskeyExamples(texts, config.train_lengths, config.max_steps * config.batch_size, seed=config.seed)
        model, done = train(model, examples, config, collate=pad, output=folder, resume=resume)
    announce("measuring")
    started = time.perf_counter()
    ask = recall_keys if causal else lambda *given: [point_at_keys(*given, kinds=tested.kinds)]
    answers = heat_maps(model, tested, config, ask=ask)
    panels = {name: [[mean(cell) for cell in row] for row in rows] for name, rows in answers.items()}
    if PartialState().is_main_process:
        learnt = dict.fromkeys((min(config.train_lengths), max(config.train_lengths)))
        title = f"{config.model}, {config.scheme}" + f", trained at {' to '.join(map(str, learnt))}" * config.train
        axes = {"row_label": "depth of the key", "column_label": "length (tokens)", "title": title}
        figure = plot_heat_maps(panels, rows=list(config.depths), columns=list(config.lengths), **axes)
        figure.savefig(folder / "heat_map.png", dpi=150)
    columns = [(f"{name}_{n}", rows, place) for name, rows in answers.items() for place, n in enumerate(config.lengths)]
    return {
        **averaged({name: [right for row in rows for right in row[place]] for name, rows, place in columns}),
        "details": {"depths": config.depths, "lengths": config.lengths, **panels, "losses": done.losses if done else []},
        "cost": {**cost(model, done), "evaluation_seconds": time.perf_counter() - started},
        "model": model,
    }


def heat_maps(model, texts: PasskeyTexts, config: PasskeyConfig, *, ask: Callable) -> dict[str, list[list[tuple[bool]]]]:
    """Return which answers are right, by figure, in matrices with a row for each depth and a column for each length."""
    panels = {}
    for depth in config.depths:
        rows = {}
        for length in config.lengths:
            drawn = list(enumerate(depth_texts(texts, length, depth, config.examples, seed=config.seed)))
            size = max(1, config.tokens_a_batch // length)
            # Padded to equal counts by repeating texts, since all processes must call a sharded model together.
            with PartialState().split_between_processes(drawn, apply_padding=True) as own:
                found = []
                for some in (own[first : first + size] for first in range(0, len(own), size)):
                    numbers, asked = zip(*some, strict=True)
                    found += zip(numbers, *ask(model, list(asked)), strict=True)
            answers = {number: right for number, *right in gather_object(found)}
            for name, column in zip(("accuracy", "candidates"), zip(*answers.values(), strict=True), strict=False):
                rows.setdefault(name, []).append(column)
        for name, row in rows.items():
            panels.setdefault(name, []).append(row)
    return panels


if __name__ == "__main__":
    main(PasskeyConfig, run)
