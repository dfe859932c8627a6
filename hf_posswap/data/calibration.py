"""Token batches that a swap is fitted on: the user's, cut from text at several lengths, or written by the model itself."""

from collections import Counter
from collections.abc import Iterable

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.data.text import token_blocks
from hf_posswap.errors import DataError

Batch = dict[str, torch.Tensor]  # input_ids, attention_mask, and what else a user gave; all (B, L)

_KEYS = ("input_ids", "attention_mask", "token_type_ids")


def text_batches(
    documents: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    tokens: int = 65_536,
    causal: bool = False,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Cut documents into blocks of several lengths, and draw some: (N, L) token ids for each length.

    An encoder gets a third of the tokens at `max_length`, a third at a quarter and a third at a sixteenth of it: what is
    fitted at one length alone fails at another. A causal model sees all shorter lengths in one block of the longest.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [max_length] if causal else mixed_lengths(max_length)
    batches = []
    for length in lengths:
        blocks = token_blocks(documents, tokenizer, length)
        count = max(1, tokens // len(lengths) // length)
        batches.append(blocks[torch.randperm(len(blocks), generator=generator)[:count]])
    return batches


def mixed_lengths(longest: int) -> list[int]:
    """Return the lengths that an encoder is fitted at: a sixteenth, a quarter and the whole of the longest.

    >>> mixed_lengths(512), mixed_lengths(32)
    ([32, 128, 512], [16, 32])
    """
    return sorted({max(min(16, longest), longest // part) for part in (1, 4, 16)})


@torch.no_grad()
def written_text(model: PreTrainedModel, *, tokens: int = 65_536, seed: int = 0, length: int | None = None) -> torch.Tensor:
    """Let a causal model with a language-modelling head write its own calibration text: (N, L), of its longest unless told.

    Plain sampling at temperature 1, from the end-of-text token or, where there is none, from a random one.
    """
    length = length or model.config.max_position_embeddings
    rows = max(1, tokens // length)
    generator = torch.Generator().manual_seed(seed)
    start = model.config.bos_token_id if model.config.bos_token_id is not None else model.config.eos_token_id
    first = torch.randint(model.config.vocab_size, (rows, 1), generator=generator)
    if start is not None:
        first = torch.full_like(first, start)
    # No end before the end, and no padding token: every row is full. The checkpoint's own settings (beams, penalties) stay out.
    plain = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_length=length,
        min_length=length,
        pad_token_id=0,
        eos_token_id=model.config.eos_token_id,
    )
    own, written = model.generation_config, []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.generation_config = plain  # handed to `generate`, it would be filled up from the model's
        try:
            for part in first.split(64):
                ids = part.to(model.device)
                written.append(model.generate(ids, attention_mask=torch.ones_like(ids)))
        finally:
            model.generation_config = own
    return torch.cat(written).cpu()


def random_tokens(
    model: PreTrainedModel, *, tokens: int = 65_536, seed: int = 0, length: int | None = None
) -> list[torch.Tensor]:
    """Draw tokens uniformly from the vocabulary, in the lengths of `text_batches` for an encoder."""
    generator = torch.Generator().manual_seed(seed)
    lengths = mixed_lengths(length or model.config.max_position_embeddings)
    shapes = [(max(1, tokens // len(lengths) // each), each) for each in lengths]
    return [torch.randint(model.config.vocab_size, shape, generator=generator) for shape in shapes]


def check_batches(batches: torch.Tensor | Iterable, model: PreTrainedModel, longest: int) -> list[Batch]:
    """Return batches as dicts with `input_ids` and `attention_mask` on the CPU, or raise saying what is wrong with them."""
    checked = []
    given = [batches] if isinstance(batches, torch.Tensor) or hasattr(batches, "keys") else batches
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise DataError(f"batches must be token ids (N, L), or an iterable of such or of dicts, not {type(given).__name__}")
    for batch in given:
        batch = dict(batch) if hasattr(batch, "keys") else {"input_ids": batch}
        unknown = sorted(set(batch) - set(_KEYS))
        if unknown or "input_ids" not in batch:
            raise DataError(
                f"a batch has the keys {sorted(batch)}: give input_ids, and attention_mask and token_type_ids if any"
            )
        shapes = {value.shape if isinstance(value, torch.Tensor) else None for value in batch.values()}
        if len(shapes) > 1 or None in shapes:
            raise DataError("input_ids, attention_mask and token_type_ids must be tensors of one shape (N, L)")
        ids = batch["input_ids"]
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
            raise DataError(f"token ids must be integers of shape (N, L), not {ids.dtype} of shape {tuple(ids.shape)}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= model.config.vocab_size:
            raise DataError(
                f"token ids reach from {low} to {high} and this model has {model.config.vocab_size} tokens: the text was cut "
                "by another model's tokenizer"
            )
        if ids.shape[1] > longest:
            raise DataError(
                f"a batch is {ids.shape[1]} tokens long and the original has positions for {longest}: it cannot say what to do "
                "beyond; cut the batches"
            )
        kinds = batch.get("token_type_ids", torch.zeros_like(ids))
        # GPT-2 has no table of kinds: it looks them up among the tokens.
        count = getattr(model.config, "type_vocab_size", model.config.vocab_size)
        if kinds.dtype not in (torch.int64, torch.int32) or int(kinds.min()) < 0 or int(kinds.max()) >= count:
            raise DataError(f"token_type_ids must be integers from 0 to {count - 1}")
        mask = batch.get("attention_mask", torch.ones_like(ids))
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise DataError("attention_mask must be 1 where there are tokens and 0 where there is padding")
        batch["attention_mask"] = mask.bool()
        if not bool(batch["attention_mask"].any(-1).all()):
            raise DataError("a row of attention_mask masks everything: leave that row out")
        checked.append({key: value.detach().cpu() for key, value in batch.items()})
    if not checked:
        raise DataError("there are no batches: give some text")
    return checked


def split_batches(batches: list[Batch], *, tokens_a_batch: int) -> tuple[list[Batch], list[Batch]]:
    """Cut batches into small ones of one length each, and set every tenth sequence aside: (to fit on, held out)."""
    fitted, held = [], []
    total, seen = Counter(), Counter()  # sequences of each length, however they come in batches
    for batch in batches:
        total[batch["input_ids"].shape[1]] += len(batch["input_ids"])
    for batch in batches:
        count, length = batch["input_ids"].shape
        rows = torch.arange(count)
        # At least one of each length, if there are two.
        last = (rows + seen[length]) % 10 == min(9, total[length] - 1 if total[length] > 1 else 9)
        seen[length] += count
        for part, chosen in ((held, rows[last]), (fitted, rows[~last])):
            for few in chosen.split(max(1, tokens_a_batch // batch["input_ids"].shape[1])):
                if len(few):
                    part.append({key: value[few] for key, value in batch.items()})
    if not held and len(fitted) > 1:
        held = [fitted.pop()]
    return fitted, held
