"""Can a model work out nested expressions? ListOps with its published grammar, as classification into ten digits.

    python recipes/listops.py --config recipes/configs/listops_quick.yaml --scheme rotary --output runs/listops   # minutes, CPU
    python recipes/listops.py --config recipes/configs/listops.yaml --scheme relative --output runs/lra           # a GPU's work
    python recipes/listops.py --model bert-base-uncased --start swap --max-length 500 --min-length 100 --output runs/pretrained

Nangia & Bowman 2018 (https://arxiv.org/abs/1804.06028), with the lengths of Tay et al. 2021 (https://arxiv.org/abs/2011.04006),
whose Transformer gets 36.37 %; hf_posswap/measure/listops.py has the grammar. Symbols are the first 18 token ids; the model's
tokenizer is not used. By default weights are random, as in the paper, and --num-layers, --hidden-size and --num-heads change
the size. With another --start, training begins from the checkpoint.

result.json also has the accuracy by length and by depth.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
from transformers import AutoModelForSequenceClassification

from hf_posswap.architectures import family_of
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import RecipeConfig, averaged, cost, load_family, load_model, main
from hf_posswap.measure.listops import TOKEN_IDS, ListOpsExamples, depth, listops_expressions
from hf_posswap.training import pad, predict, train

_SIZES = {"num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "num_heads": "num_attention_heads"}
_LENGTH_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class ListOpsConfig(RecipeConfig):
    QUESTION = "Can a model work out nested expressions (ListOps)?"
    FIGURES = {"accuracy": "of held-out expressions", "majority": "what guessing the commonest answer gets"}
    FORBIDDEN_STARTS = {"fit": "a fit reads text, and ListOps has none"}
    READS_TEXT = False
    LEAST = dict.fromkeys(("train_examples", "examples", *_SIZES), 1)

    start: str = "scratch"
    max_steps: int = 5000
    batch_size: int = 32
    min_length: Annotated[int, "Expressions have more symbols than this."] = 500
    max_length: Annotated[int, "Expressions have fewer symbols than this."] = 2000
    max_depth: Annotated[int, "The largest depth of nesting; a single digit has depth 1."] = 10
    max_args: Annotated[int, "Arguments of an operator, at most."] = 10
    train_examples: Annotated[int, "Expressions to train on."] = 96_000
    examples: Annotated[int, "Expressions to test on."] = 2000
    num_layers: Annotated[int | None, "With --start scratch: number of layers. Default: the checkpoint's."] = None
    hidden_size: Annotated[int | None, "With --start scratch: hidden size. Default: the checkpoint's."] = None
    num_heads: Annotated[int | None, "With --start scratch: attention heads. Default: the checkpoint's."] = None

    def __post_init__(self):
        super().__post_init__()
        if self.start != "scratch" and any(getattr(self, size) is not None for size in _SIZES):
            raise PosswapError(f"{', '.join(_SIZES)} are for --start scratch: a checkpoint has its own")


def run(config: ListOpsConfig, folder: Path, resume: bool) -> dict:
    positions = config.max_length + 1  # at most max_length - 1 symbols, and [CLS] and [SEP]
    model = load_model(config, AutoModelForSequenceClassification, max_positions=positions, **_options(config, positions))
    shape = {name: getattr(config, name) for name in ("min_length", "max_length", "max_depth", "max_args")}
    expressions = listops_expressions(config.train_examples + config.examples, **shape, seed=config.seed)
    trained, tested = expressions[config.examples :], expressions[: config.examples]
    model, done = train(model, ListOpsExamples(trained), config, collate=pad, output=folder, resume=resume)
    answers = list(ListOpsExamples(tested))
    wanted = torch.stack([example["labels"] for example in answers])
    right = predict(model, answers, TOKEN_IDS["[PAD]"], config.batch_size).argmax(-1).eq(wanted).tolist()
    labels = Counter(wanted.tolist())
    return {
        **averaged({"accuracy": right, "majority": max(labels.values()) / len(tested)}),
        "details": {
            "by_length": _by_length([len(text.split()) for text in tested], right),
            "by_depth": _by_group([str(depth(text)) for text in tested], right),
            "losses": done.losses,
        },
        "cost": cost(model, done),
        "model": model,
    }


def _options(config: ListOpsConfig, positions: int) -> dict:
    """Return fields of the model's config: ten labels, our padding token, and for --start scratch also our sizes."""
    options = {"num_labels": 10, "pad_token_id": TOKEN_IDS["[PAD]"]}
    if config.start == "scratch":
        options |= {name: getattr(config, size) for size, name in _SIZES.items() if getattr(config, size) is not None}
        options |= {"vocab_size": len(TOKEN_IDS), "bos_token_id": TOKEN_IDS["[CLS]"], "eos_token_id": TOKEN_IDS["[SEP]"]}
        if config.hidden_size is not None:
            options["intermediate_size"] = 4 * config.hidden_size  # GPT-2 computes its own, and ignores this
        family, _ = load_family(config.model, **options)
        if (size := family.hidden_size) % (heads := family.num_attention_heads):
            raise PosswapError(f"hidden_size={size} does not divide into num_heads={heads}: choose a multiple, or other heads")
        family_of(family).set_longest_input(family, config.max_positions or positions)  # RoBERTa counts from its padding on
        options["max_position_embeddings"] = family.max_position_embeddings
    return options


def _by_length(lengths: list[int], right: list[bool]) -> dict[str, dict]:
    bounds = sorted(lengths)
    cuts = sorted({bounds[len(bounds) * part // _LENGTH_GROUPS] for part in range(_LENGTH_GROUPS)})
    spans = pairwise([*cuts, bounds[-1] + 1])
    names = {length: f"{low}-{high - 1}" for low, high in spans for length in range(low, high)}
    return _by_group([names[length] for length in lengths], right)


def _by_group(groups: list[str], right: list[bool]) -> dict[str, dict]:
    found = {}
    for group, answer in sorted(zip(groups, right, strict=True), key=lambda pair: int(pair[0].split("-")[0])):
        found.setdefault(group, []).append(answer)
    return {group: {"accuracy": mean(answers), "examples": len(answers)} for group, answers in found.items()}


if __name__ == "__main__":
    main(ListOpsConfig, run)
