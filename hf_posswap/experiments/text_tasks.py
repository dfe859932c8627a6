"""What recipes on plain text share: options that name the text, seeded masks, a masked-LM loss, and a new masked-LM head.

Masks for training depend only on the seed and the example's index. So a resumed run gets the masks that it would have had
without the interruption, for any number of processes. Masks for evaluation are the same for every scheme and seed.
"""

import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch.nn import functional
from torch.utils.data import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import longest_input
from hf_posswap.data import text
from hf_posswap.data.calibration import TextBatches, text_batches
from hf_posswap.errors import DataError, PosswapError, UnsupportedModelError
from hf_posswap.experiments.models import load_family, load_model, load_tokenizer, usual_class
from hf_posswap.experiments.options import RecipeConfig
from hf_posswap.measure.losses import lm_head
from hf_posswap.training import TrainingConfig, TrainingRun, train

FIXED_SEED = 0  # for what must be equal in all runs of a comparison: masks of held-out text, a new head


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """Which text to use, with the option names of transformers' examples. Default: the standard library's, without download."""

    LEAST = {"evaluation_tokens": 1}

    dataset: Annotated[str | None, "A Hub data set: owner/name. Default: the embedded text."] = None
    dataset_config: Annotated[str | None, "The configuration of that data set."] = None
    train_file: Annotated[str | None, "A text, csv, json or parquet file, or a folder of .txt files."] = None
    validation_file: Annotated[str | None, "Held-out text. Default: a tenth of the training file, not trained on."] = None
    text_column: Annotated[str, "The column of a table that holds the text."] = "text"
    evaluation_tokens: Annotated[int, "Held-out tokens to measure each figure on (not of embedders)."] = 32_768

    REPLACES: ClassVar[dict[str, tuple[str, ...]]] = {
        "train_file": ("dataset", "dataset_config"),
        "dataset": ("dataset_config", "train_file", "validation_file"),
    }

    def __post_init__(self):
        super().__post_init__()
        hub, files = (self.dataset, self.dataset_config), (self.train_file, self.validation_file)
        if all(files) and Path(files[0]).resolve() == Path(files[1]).resolve():
            raise PosswapError(f"{self.train_file} is given to train on and to measure on: leave out --validation-file")
        if (any(hub) and any(files)) or any(second and not first for first, second in (hub, files)):
            raise PosswapError("give --dataset (and --dataset-config) or --train-file (and --validation-file), not both")


@dataclass(frozen=True, kw_only=True)
class TextConfig(TextOptions, RecipeConfig):
    """A recipe that trains on text."""


def documents(config: TextOptions, split: text.Split, *, causal: bool) -> list[str]:
    """Return the texts of one split: the user's, or by default the embedded text."""
    source = ":".join(filter(None, (config.dataset, config.dataset_config))) or config.train_file
    if not source:
        return text.embedded_documents(split, causal=causal)
    if config.validation_file:
        source, split = source if split == "train" else config.validation_file, None
    return text.read_documents(source, split=split, text_column=config.text_column)


class RunText:
    """The text of a run, in tokens of its checkpoint; text and tokenizer are read when they are first needed."""

    def __init__(self, config: TextOptions, *, reads_on: bool = False):
        family, self.causal = load_family(config.model)
        self.config, self.trained = config, longest_input(family)  # the checkpoint's longest input, in tokens
        if reads_on and not self.causal:
            raise UnsupportedModelError(f"{config.model} is an encoder: this recipe takes causal models, such as GPT-2")

    @property
    def block_size(self) -> int:
        """Tokens to train on at once: as many as the checkpoint reads, of an encoder 128, since sentences are shorter."""
        return self.trained if self.causal else min(128, self.trained)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.config.model)

    @cached_property
    def training(self) -> list[str]:
        return documents(self.config, "train", causal=self.causal)

    @cached_property
    def held_out(self) -> list[str]:
        return documents(self.config, "validation", causal=self.causal)

    def blocks(self, length: int) -> torch.Tensor:
        """Return the training text in blocks (N, length); DataError if they do not fill a batch."""
        blocks = text.token_blocks(self.training, self.tokenizer, length)
        check_enough(blocks, self.config)
        return blocks

    def parts(self, length: int, longest: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the training text in blocks (N, length), less the select text, and select text in blocks (N, longest).

        Select text is a tenth of the training text, on which no run trains: rates are chosen by it. It has --evaluation-tokens.
        Nor is another tenth trained on, which a fit would report on. Of less text than ten of the longest blocks, a fit may
        read some select text, in shorter ones.
        """
        longest = longest or length
        to_train, to_select, _ = text.split_tokens(text.token_lists(self.training, self.tokenizer), longest)
        aside = text.spread(text.cut_blocks(to_select, self.tokenizer, longest), self.config.evaluation_tokens)
        return text.cut_blocks(to_train, self.tokenizer, length), aside

    def held(self, *lengths: int) -> dict[int, torch.Tensor]:
        """Return --evaluation-tokens of held-out text, the same tokens in blocks of each length: {length: (N, length)}."""
        longest = text.spread(text.token_blocks(self.held_out, self.tokenizer, max(lengths)), self.config.evaluation_tokens)
        return {length: text.shorter_blocks(longest, self.tokenizer, length) for length in lengths}

    def fit_batches(self, longest: int | None = None, **options) -> TextBatches:
        """Return `text_batches` of the training text for --start fit, by default up to the checkpoint's longest input."""
        options |= {"tokens": self.config.fit_tokens, "causal": self.causal, "seed": self.config.seed}
        return text_batches(self.training, self.tokenizer, longest or self.trained, **options)

    def load(self, auto_class: type | None = None, **options) -> PreTrainedModel:
        """Return the model of the run (`load_model`), fitted on the training text if it is to be."""
        options = {"fit_batches": self.fit_batches, "tokenizer": self.tokenizer} | options
        model = load_model(self.config, auto_class or usual_class(self.causal), **options)
        # A loss on the states gives an encoder's pooler no gradient, and DDP waits for every gradient.
        if getattr(model, "pooler", None) is not None:
            model.pooler.requires_grad_(False)
        return model


def check_enough(blocks: torch.Tensor, config: TrainingConfig) -> None:
    """Raise DataError if blocks (N, L) do not fill a batch."""
    if len(blocks) < config.batch_size:
        raise DataError(f"the training text fills {len(blocks)} blocks, fewer than one batch of {config.batch_size}: give more")


def mask_tokens(
    blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase, probability: float, seed: int = FIXED_SEED
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks (N, L) masked as in BERT's training, and labels (N, L), which are -100 for tokens that were not chosen.

    Of the chosen tokens 80 % become [MASK], 10 % random tokens, 10 % stay: transformers' DataCollatorForLanguageModeling.
    """
    # Older versions of transformers treat a seed of 0 as no seed.
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=probability, seed=seed + 1)
    batch = collate([{"input_ids": row} for row in blocks])
    return batch["input_ids"], batch["labels"]


class MaskedBlocks(Dataset):
    """Blocks of tokens (N, L), copied with a different mask in each copy, so that training never repeats an example.

    BERT's training data were made in the same way, with ten copies (Devlin et al. 2019).
    """

    def __init__(self, blocks: torch.Tensor, tokenizer: PreTrainedTokenizerBase, share: float, *, seed: int, examples: int):
        self.blocks, self.tokenizer, self.share, self.seed = blocks, tokenizer, share, seed
        self.copies = max(1, -(-examples // len(blocks)))

    def __len__(self) -> int:
        return len(self.blocks) * self.copies

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)
        seed = random.Random(f"{self.seed} {index}").getrandbits(62)
        row = index % len(self.blocks)
        input_ids, labels = mask_tokens(self.blocks[row : row + 1], self.tokenizer, self.share, seed)
        return {"input_ids": input_ids[0], "labels": labels[0]}


def masked_lm_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of the masked tokens, for `train`. The head, costly in a small model, is computed for these only."""
    chosen = batch["labels"] != -100
    head = lm_head(getattr(model, "module", model))  # DDP wraps the model, and the wrapper must be called below
    with head.register_forward_pre_hook(lambda module, states: (states[0][chosen],)):
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return functional.cross_entropy(logits.float(), batch["labels"][chosen])


def train_head(model: PreTrainedModel, missing: set[str], blocks: MaskedBlocks, config: TrainingConfig) -> TrainingRun:
    """Train a new masked-LM head, in place; the encoder and weights tied to it stay as they are.

    `missing` are the names of the new weights, which are drawn here with a fixed seed.
    """
    generator = torch.Generator().manual_seed(FIXED_SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in missing and parameter.dim() > 1:  # norms and biases are not random
                parameter.copy_(torch.empty(parameter.shape).normal_(0, model.config.initializer_range, generator=generator))
    model.base_model.requires_grad_(False)
    _, run = train(model, blocks, config, compute_loss=masked_lm_loss, description="new head")
    model.base_model.requires_grad_(True)
    return run
