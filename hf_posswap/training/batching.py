"""Which examples a step sees, and how they become one batch: shuffling, grouping by length, padding and packing.

Shapes: B rows in a batch, L tokens in a row.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Sampler
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_posswap.architectures import find_family
from hf_posswap.errors import DataError, UnsupportedModelError

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
        order = torch.randperm(self.examples, generator=generator).tolist()
        size = self.batch_size
        order = order[: self.examples // size * size]
        if self.lengths is None:
            return [order[start : start + size] for start in range(0, len(order), size)]
        stretch = _SORTED_TOGETHER * size
        parts = [order[start : start + stretch] for start in range(0, len(order), stretch)]
        order = [example for part in parts for example in sorted(part, key=lambda example: -self.lengths[example])]
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        if epoch == 0:
            longest = max(range(len(batches)), key=lambda place: self.lengths[batches[place][0]])
            batches.insert(0, batches.pop(longest))
        return batches


class MicroBatches(Sampler[list[int]]):
    """The batches of steps first to last - 1, each split into equal parts; accelerate splits every part over processes."""

    drop_last = True

    def __init__(self, order: BatchOrder, parts: int, first: int, last: int):
        self.order, self.parts, self.first, self.last = order, parts, first, last
        self.batch_size = order.batch_size // parts

    def __len__(self) -> int:
        return (self.last - self.first) * self.parts

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self.first, self.last):
            batch = self.order[step]
            for start in range(0, len(batch), self.batch_size):
                yield batch[start : start + self.batch_size]


def pad(rows: list[dict], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Collate rows of different lengths: pad on the right, add an `attention_mask`, and set labels of padding to -100.

    >>> pad([{"input_ids": [5, 6, 7], "labels": 1}, {"input_ids": [8], "labels": 0}])["input_ids"].tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    rows = [{name: torch.as_tensor(value) for name, value in row.items()} for row in rows]
    rows = [{"attention_mask": torch.ones_like(row["input_ids"]), **row} for row in rows]
    fill = {"input_ids": pad_token_id, "labels": IGNORED}
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if values[0].dim():
            values = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill.get(name, 0))
        batch[name] = values if isinstance(values, torch.Tensor) else torch.stack(values)
    return batch


def pack(rows: Sequence[dict], max_length: int, pad_token_id: int = 0) -> list[dict[str, torch.Tensor]]:
    """Put several short sequences into each row of `max_length` tokens. Positions start at 0 in each sequence.

    Rows hold `input_ids` and, if they are labelled, `labels` for each token. Collate with `collate_packed(model)`, whose mask
    keeps sequences apart. `num_tokens` counts tokens without padding; `train` reads it and removes it from the batch.

    Raises:
        DataError: A sequence is empty or longer than `max_length`.
    """
    # Best fit decreasing: longest first, each into the fullest row that still has room for it.
    filled: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    lengths = [len(row["input_ids"]) for row in rows]
    for place in sorted(range(len(rows)), key=lambda place: -lengths[place]):
        length = lengths[place]
        if not 0 < length <= max_length:
            raise DataError(f"sequence {place} has {length} tokens; 1 to {max_length} can be packed: split or truncate it")
        fit = bisect_left(room, (length, -1))
        left, row = room.pop(fit) if fit < len(room) else (max_length, len(filled))
        if row == len(filled):
            filled.append([])
        filled[row].append(place)
        if left > length:
            insort(room, (left - length, row))
    return [_packed([rows[place] for place in places], max_length, pad_token_id) for places in filled]


def _packed(rows: list[dict], max_length: int, pad_token_id: int) -> dict[str, torch.Tensor]:
    tokens = sum(len(row["input_ids"]) for row in rows)
    padding = max_length - tokens
    lengths = [len(row["input_ids"]) for row in rows] + [padding]  # padding is one more sequence, which sees only itself
    packed = {"position_ids": torch.cat([torch.arange(length) for length in lengths]), "num_tokens": torch.tensor(tokens)}
    for name, fill in (("input_ids", pad_token_id), ("labels", IGNORED)):
        if name in rows[0]:
            parts = [torch.as_tensor(row[name]) for row in rows]
            packed[name] = torch.cat([*parts, parts[0].new_full((padding,), fill)])
    return packed


def collate_packed(model: PreTrainedModel) -> Callable[[list[dict]], dict]:
    """Return a collate function for packed rows, such that no token sees or predicts a token of another sequence.

    The batch gets a mask (B, 1, L, L) in the form that the model's attention implementation takes. transformers can find the
    sequences from their positions, but only for some families and only without a cache.

    Raises:
        UnsupportedModelError: The attention implementation takes no such mask.
    """
    config = model.config
    architecture = find_family(config.model_type)
    causal = architecture.is_causal(config) if architecture else config.is_decoder
    implementation = config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise UnsupportedModelError(
            f"packing takes eager or sdpa attention, not {implementation!r}: call model.set_attn_implementation('sdpa')"
        )

    def collate(rows: list[dict]) -> dict:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        starts = batch["position_ids"] == 0
        sequence = starts.cumsum(-1)
        mask = sequence[:, None, :, None] == sequence[:, None, None, :]
        if causal:
            mask = mask & torch.ones_like(mask[0, 0]).tril()
            if "labels" in batch:  # the first token of a sequence would be predicted from the sequence before it
                batch["labels"] = batch["labels"].masked_fill(starts, IGNORED)
        if implementation == "eager":  # which adds the mask to the scores
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        return {**batch, "attention_mask": mask}

    return collate


def predicts_next(model: torch.nn.Module) -> bool:
    """Whether the model's own loss is that of next-token prediction: it shifts the labels by one."""
    heads = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(base.__name__ in heads for base in type(model).__mro__)


def count_terms(batch: dict, *, shifted: bool) -> torch.Tensor:
    """Return how many terms a mean loss has: labelled tokens, else labelled examples, else tokens; an int64 scalar.

    With `shifted`, the first label of each row does not count, since no token predicts it.
    """
    labels = batch.get("labels")
    if labels is None:
        return count_tokens(batch)
    if labels.dim() == 2 and labels.shape == batch["input_ids"].shape:
        return (labels[:, 1:] if shifted else labels).ne(IGNORED).sum()
    return torch.full((), len(labels), device=labels.device)


def count_tokens(batch: dict) -> torch.Tensor:
    """Return the number of tokens, without padding if the batch marks it: an int64 scalar on the batch's device."""
    if "num_tokens" in batch:
        return batch["num_tokens"].sum()
    mask = batch.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        return mask.ne(0).sum()
    return torch.full((), batch["input_ids"].numel(), device=batch["input_ids"].device)
