"""Which examples a step sees, and how they become one batch: shuffling, grouping by length and padding.

Shapes: B rows in a batch, L tokens in a row.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_posswap.errors import DataError

IGNORED = -100  # the label that transformers' losses ignore
_SORTED_TOGETHER = 50  # batches sorted by length together: a larger number means less padding, but also less shuffling


class BatchOrder:
    """The examples of each step's batch. They depend on seed and step alone, not on processes, micro-batches or resuming.

    Every epoch is shuffled again and drops its last, incomplete batch. With `lengths`, the examples of a batch have similar
    lengths, longest first. The longest batch of the first epoch comes first, so that a lack of memory shows at once.
    """

    def __init__(self, examples: int, batch_size: int, seed: int, lengths: Sequence[int] | None = None):
        self.examples, self.batch_size, self.seed, self.lengths = examples, batch_size, seed, lengths
        self._epoch, self._batches = None, []

    def __getitem__(self, step: int) -> list[int]:
        epoch, place = divmod(step, self.examples // self.batch_size)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._shuffled(epoch)
        return self._batches[place]

    def _shuffled(self, epoch: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        size = self.batch_size
        order = torch.randperm(self.examples, generator=generator)[: self.examples // size * size]
        if self.lengths is None:
            return order.view(-1, size).tolist()
        lengths = torch.tensor(self.lengths)
        parts = order.split(_SORTED_TOGETHER * size)
        order = torch.cat([part[lengths[part].argsort(descending=True, stable=True)] for part in parts]).view(-1, size)
        batches = order[torch.randperm(len(order), generator=generator)].tolist()
        if epoch == 0:
            longest = max(batches, key=lambda batch: self.lengths[batch[0]])
            batches.insert(0, batches.pop(batches.index(longest)))
        return batches


def pad(rows: list[dict], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Collate rows of different lengths: pad on the right, add an `attention_mask`, and set labels of padding to -100.

    >>> pad([{"input_ids": [5, 6, 7], "labels": 1}, {"input_ids": [8], "labels": 0}])["input_ids"].tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    rows = [{name: torch.as_tensor(value) for name, value in row.items()} for row in rows]
    rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    if other := next((row for row in rows if row.keys() != rows[0].keys()), None):
        raise DataError(f"rows of a batch have {sorted(rows[0])} and {sorted(other)}: give all of them the same keys")
    fill = {"input_ids": pad_token_id, "labels": IGNORED}
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        batch[name] = pad_sequence(values, True, fill.get(name, 0)) if values[0].dim() else torch.stack(values)
    return batch


def predicts_next(model: torch.nn.Module) -> bool:
    """Whether the model's own loss is that of next-token prediction: it shifts the labels by one."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    heads = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(base.__name__ in heads for base in type(model).__mro__)


def count_terms(batch: dict, *, shifted: bool) -> torch.Tensor:
    """Return how many terms a mean loss has, an int64 scalar: labelled tokens, else labelled examples, else tokens.

    Examples of question answering are labelled by `start_positions`. With `shifted`, the first label of each row does not
    count, since no token predicts it.
    """
    labels = batch.get("labels")
    if labels is None and "start_positions" in batch:  # transformers counts every example: -100 there becomes 0
        return torch.full((), len(batch["start_positions"]), device=batch["start_positions"].device)
    if labels is None:
        return count_tokens(batch)
    if labels.is_floating_point() or labels.shape not in (batch["input_ids"].shape, labels.shape[:1]):  # numbers of examples
        return torch.full((), len(labels), device=labels.device)
    return (labels[:, 1:] if shifted and labels.dim() == 2 else labels).ne(IGNORED).sum()  # tokens, or classes


def count_tokens(batch: dict) -> torch.Tensor:
    """Return the number of tokens, without padding if the batch marks it: an int64 scalar on the batch's device."""
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return mask.ne(0).sum()
    return torch.full((), batch["input_ids"].numel(), device=batch["input_ids"].device)
