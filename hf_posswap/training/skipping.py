"""Train short, read long: short examples with positions as large as those of long ones (PoSE, Zhu et al. 2023, section 3:
https://arxiv.org/abs/2309.10400).

An example of L tokens is cut in two at a random place c. The first part keeps its positions; those of the second are shifted by
a random gap. Distances within a part stay as they are; distances between the parts go up to `longest`:

    0, 1, ..., c - 1, c + gap, ..., L - 1 + gap        c ~ U{1, ..., L - 1},  gap ~ U{0, ..., longest - L}
"""

import random

import torch
from torch.utils.data import Dataset

from hf_posswap.architectures import family_of, longest_input
from hf_posswap.errors import PosswapError


class SkippedPositions(Dataset):
    """The examples of a dataset with such `position_ids` (L,), which depend only on the seed and the example's index."""

    def __init__(self, dataset: Dataset, model: torch.nn.Module, longest: int, seed: int):
        if longest > (reads := longest_input(model.config)):
            raise PosswapError(f"skip_to={longest} is more than the {reads} tokens it reads: swap with max_positions={longest}")
        self.dataset, self.longest, self.seed = dataset, longest, seed
        self.first_id = family_of(model.config).first_id(model.config)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        row = dict(self.dataset[index])
        length = len(row["input_ids"])
        if "position_ids" in row or length > self.longest:
            what = "positions of its own" if "position_ids" in row else f"{length} tokens"
            raise PosswapError(f"skip_to={self.longest}: example {index} has {what}: give shorter examples, without positions")
        draw = random.Random(f"{self.seed} {index}")
        cut, gap = draw.randint(1, max(1, length - 1)), draw.randint(0, self.longest - length)
        positions = torch.arange(length) + self.first_id
        positions[cut:] += gap
        # Without a mask, transformers takes a gap in positions for the border between two packed texts.
        return {"attention_mask": torch.ones(length, dtype=torch.long), **row, "position_ids": positions}
