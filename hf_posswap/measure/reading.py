"""Reading of text longer than the original's input, next to the original behind a sliding window.

A causal model with a head: the loss of the next token by position in the text, in nats. Other models: 1 - cosine of the mean
of a text's last states with the original's, by the length of batches; the original's are those of `measure.windows`.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posswap.architectures import Architecture
from hf_posswap.measure.losses import has_one_head, loss_by_position, sliding_window_losses, token_losses
from hf_posswap.measure.windows import lay_windows

_TOKENS_A_BATCH = 4096


@dataclass(frozen=True)
class Reading:
    """How a swapped model reads long text, before and after a fit; smaller is better."""

    measure: str  # "loss" in nats, or "1 - cosine"
    window: int  # tokens that the original read at once, in steps of a quarter
    original: dict[str, float]  # loss by range of positions, "0-255", ...; empty for cosines, which compare with it
    before: dict[str, float]  # by range of positions, or by the longest text of a batch, "1024"
    after: dict[str, float]


class LongText:
    """Batches of text, and the original's reading of them through a window as the reference.

    measure, original: as in `Reading`.
    """

    def __init__(self, original: PreTrainedModel, architecture: Architecture, batches: list[dict], window: int):
        self.batches, self.window = batches, window
        self.causal = architecture.is_causal(original.config)
        self.measure = "loss" if self.causal and has_one_head(original) else "1 - cosine"
        self.stride = max(1, window // 4)
        if self.measure == "loss":
            self.original = self._by_position(lambda ids: sliding_window_losses(original, ids, window, stride=self.stride))
        else:
            self.original = {}
            self.pooled = [self._pooled(original, batch, window) for batch in batches]

    def read(self, model: PreTrainedModel) -> dict[str, float]:
        if self.measure == "loss":
            return self._by_position(lambda ids: token_losses(model, ids))
        found = defaultdict(list)
        for batch, wanted in zip(self.batches, self.pooled, strict=True):
            length = batch["input_ids"].shape[1]
            got = self._pooled(model, batch, length)
            found[length] += (1 - functional.cosine_similarity(got, wanted, dim=-1)).tolist()
        return {str(length): sum(values) / len(values) for length, values in sorted(found.items())}

    def _by_position(self, losses_of) -> dict[str, float]:
        longest = max(batch["input_ids"].shape[1] for batch in self.batches)
        table = []
        for batch in self.batches:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            for rows in [ids] if mask.all() else [row[real][None] for row, real in zip(ids, mask, strict=True)]:
                found = losses_of(rows)
                table.append(functional.pad(found.double(), (0, longest - rows.shape[1]), value=float("nan")))
        starts = [0, *(self.window * 2**k for k in range(longest.bit_length()))]
        return loss_by_position(torch.cat(table), starts)

    @torch.no_grad()
    def _pooled(self, model: PreTrainedModel, batch: dict, window: int) -> torch.Tensor:
        """Return the mean of each sequence's last states, read through a window, (B, E) float32."""
        mask = batch["attention_mask"]
        window = min(window, mask.shape[1])  # one as long as the sequences is the sequences as they are
        windows, sums = lay_windows(mask, window, self.stride, causal=self.causal), []
        for part in windows.split(_TOKENS_A_BATCH):
            given = {key: value.to(model.device) for key, value in part.cut(batch).items()}
            states = model.base_model(**given, use_cache=False, return_dict=True).last_hidden_state.float().cpu()
            sums.append(torch.where(part.chosen[..., None], states, 0.0).sum(1))
        sums = torch.cat(sums)
        return sums.new_zeros(len(mask), sums.shape[1]).index_add_(0, windows.rows, sums) / mask.sum(1, keepdim=True)
