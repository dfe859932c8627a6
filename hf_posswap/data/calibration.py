"""Token batches for a fit: the user's, cut from text at several lengths, or written by the model.

A fit uses three parts of a text: one to fit on, one to decide whether a step helped (select), and one that only its report is
measured on (report). `text_batches` splits text into these parts before it cuts it into lengths.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import longest_input
from hf_posswap.data.text import cut_blocks, split_tokens, spread, token_lists, wraps
from hf_posswap.errors import DataError

Batch = dict[str, torch.Tensor]  # input_ids, attention_mask, and token_type_ids if given; all (B, L)

_KEYS = ("input_ids", "attention_mask", "token_type_ids")


class TextBatches(list):
    """Batches to fit on, as a list; `select` and `report` are lists of batches of other text, to judge a fit by.

    If `report` is empty, a fit reports on `select`, and says so.
    """

    def __init__(self, fit: Iterable = (), select: Iterable = (), report: Iterable = ()):
        super().__init__(fit)
        self.select, self.report = list(select), list(report)


def text_batches(
    documents: list[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    tokens: int = 65_536,
    causal: bool = False,
    window: int | None = None,
    seed: int = 0,
) -> TextBatches:
    """Split documents into parts to fit, select and report, and draw blocks of several lengths from each.

    An encoder gets equal numbers of tokens at `max_length`, a quarter, a sixteenth of it, and so on down to about 16, since a
    fit at one length alone fails at others. For a causal model a block of the longest contains all shorter ones, unless its
    tokenizer puts a token at either end: CLIP's last one, which stands for the text, is then fitted at all these lengths.

    Args:
        documents: The text. The parts do not overlap. Documents stay whole, but for those longer than a twentieth of the text:
            of one of these each part may have a stretch. To report on unseen documents, hold some out.
        tokenizer: Of the model.
        max_length: Of the longest blocks, in tokens; up to the longest input of the swapped model.
        tokens: How many in total: eight tenths to fit on, a tenth to select by, a tenth to report on.
        causal: Whether it is for a causal model.
        window: How many tokens the original reads at once, if less than `max_length`: blocks of that length are included. For
            a causal model those of the lengths between, too, and as many blocks of each: most tokens stand in long ones.
        seed: Of the draw to fit on, the shortest length first, no block twice. From the other parts blocks are taken evenly.

    Returns:
        `TextBatches`: (N, L) token ids for each length, for `posswap.fit`.

    Raises:
        PosswapError: The text is too short for a block of the longest length in each part; or `tokens` is below 1.
    """
    documents = [] if isinstance(documents, str | Mapping) else list(documents)
    if not documents or not all(isinstance(one, str) for one in documents):
        raise DataError("documents must be a list of texts, with one at least, and neither one string nor a dict of them")
    if tokens < 1:
        raise DataError(f"tokens={tokens} must be at least 1, and a fit needs thousands")
    shortest = 3 if wraps(tokenizer) else 1
    if min(max_length, max_length if window is None else window) < shortest:
        raise DataError(f"max_length={max_length} and window={window} must be at least {shortest}, for text to fit in")
    generator = torch.Generator().manual_seed(seed)
    lengths = {max_length} if causal and not wraps(tokenizer) else set(mixed_lengths(max_length))
    if window is not None and window < max_length:
        lengths |= {window} | ({max_length // 4**k for k in range(1, 9) if max_length // 4**k > window} if causal else set())
    least = max_length - 2 if wraps(tokenizer) else max_length
    parts = []
    with torch.device("cpu"):  # where the generator draws, whatever the default device is
        for kind, part in enumerate(split_tokens(token_lists(documents, tokenizer), least)):
            budget = tokens * (1 if kind else 8) // 10
            parts.append([])
            for length in sorted(lengths):
                wanted = budget * length // sum(lengths) if causal else budget // len(lengths)
                blocks = cut_blocks(part, tokenizer, length)
                order = None if kind else torch.randperm(len(blocks), generator=generator)
                parts[-1].append(spread(blocks, wanted) if kind else blocks[order[: max(1, wanted // length)]])
    return TextBatches(*parts)


def read_texts(batches, tokenizer: PreTrainedTokenizerBase | None, max_length: int, **options):
    """Return `text_batches` of texts, with its options; return batches as they are, in a list if they came one by one."""
    one = isinstance(batches, torch.Tensor | TextBatches | str | Mapping) or not isinstance(batches, Iterable)
    batches = batches if one else list(batches)
    if one or not batches or not isinstance(batches[0], str):
        return batches
    if tokenizer is None:
        raise DataError("there is no tokenizer to read these texts with: pass tokenizer=, or what posswap.text_batches returns")
    if not all(isinstance(text, str) for text in batches):
        raise DataError("some of the texts are no strings: give texts alone, or batches of token ids alone")
    return text_batches(batches, tokenizer, max_length, **options)


def mixed_lengths(longest: int) -> list[int]:
    """Return the lengths that an encoder is fitted at: the longest, then a quarter of each, down to about 16.

    >>> mixed_lengths(512), mixed_lengths(32), mixed_lengths(4096)
    ([32, 128, 512], [16, 32], [16, 64, 256, 1024, 4096])
    """
    parts = [part for part in (4**k for k in range(9)) if part <= 16 or longest // part >= 16]
    return sorted({max(min(16, longest), longest // part) for part in parts})


@torch.no_grad()
def written_text(model: PreTrainedModel, *, tokens: int = 65_536, seed: int = 0, length: int | None = None) -> torch.Tensor:
    """Let a causal model with a language-modelling head write its own calibration text: (N, L), L its longest by default.

    Plain sampling at temperature 1. A row begins with the token that begins or ends texts or, without one, with a random one.
    """
    length = length or longest_input(model.config)
    rows = max(1, tokens // length)
    generator = torch.Generator().manual_seed(seed)
    start = model.config.bos_token_id if model.config.bos_token_id is not None else model.config.eos_token_id
    first = torch.randint(model.config.vocab_size, (rows, 1), generator=generator)
    if start is not None and start < model.config.vocab_size:  # 50256, the default of GPT2Config, may be beyond a small one
        first = torch.full_like(first, start)
    # No early end and no padding, so that all rows are full; the checkpoint's own settings (beams, penalties) do not apply.
    ends = {"pad_token_id": 0, "eos_token_id": model.config.eos_token_id}
    plain = GenerationConfig(do_sample=True, top_k=0, max_length=length, min_length=length, **ends)
    own, written = model.generation_config, []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.generation_config = plain  # as an argument of `generate`, it would inherit the model's settings
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
    """Return tokens drawn uniformly from the vocabulary, in the lengths of `text_batches` for an encoder."""
    generator = torch.Generator().manual_seed(seed)
    lengths = mixed_lengths(length or longest_input(model.config))
    shapes = [(max(1, tokens // len(lengths) // each), each) for each in lengths]
    return [torch.randint(model.config.vocab_size, shape, generator=generator) for shape in shapes]


def check_batches(batches: torch.Tensor | Iterable, model: PreTrainedModel, longest: int) -> list[Batch]:
    """Return batches as dicts with `input_ids` and `attention_mask` on the CPU; DataError says what is wrong with them."""
    checked = []
    given = [batches] if isinstance(batches, torch.Tensor | Mapping) else batches
    if isinstance(given, str) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise DataError(f"batches must be a list of texts, token ids (N, L), or an iterable of these or dicts, not {kind}")
    for batch in given:
        batch = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        unknown = sorted(set(batch) - set(_KEYS))
        if unknown or "input_ids" not in batch:
            raise DataError(f"a batch has the keys {sorted(batch)}: give input_ids, attention_mask and token_type_ids alone")
        shapes = {value.shape if isinstance(value, torch.Tensor) else None for value in batch.values()}
        if len(shapes) > 1 or None in shapes:
            raise DataError("input_ids, attention_mask and token_type_ids must be tensors of one shape (N, L)")
        ids = batch["input_ids"]
        if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
            raise DataError(f"token ids must be int64 or int32 of shape (N, L), not {ids.dtype} of shape {tuple(ids.shape)}")
        ends = () if "attention_mask" in batch or ids.shape[1] < 4 else (ids[:, :4], ids[:, -4:])
        for pad in (model.config.pad_token_id, model.config.eos_token_id):  # GPT-2 is padded with what ends a text
            if isinstance(pad, int) and any(bool((end == pad).all(-1).any()) for end in ends):
                what = f"rows begin or end with padding (token {pad}), which without an attention_mask would count as text"
                raise DataError(f"{what}: give dicts with the tokenizer's attention_mask, too, or rows without padding")
        mask = batch.get("attention_mask", torch.ones_like(ids))
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise DataError("attention_mask must be 1 where there are tokens and 0 where there is padding")
        if not bool(mask.any(-1).all()):
            raise DataError("a row of attention_mask masks everything: leave that row out")
        batch = {key: value.detach().cpu() for key, value in (batch | {"attention_mask": mask.bool()}).items()}
        # Each row's text is moved to its beginning: most families would count positions of padding before it.
        starts = batch["attention_mask"].int().argmax(-1, keepdim=True)
        columns = (torch.arange(ids.shape[1], device="cpu") + starts) % ids.shape[1]
        batch = {key: value.gather(1, columns) for key, value in batch.items()}
        # Padding after the longest row is no text: a fit to 20 tokens, padded to 512, would count as one to 512.
        end = int(batch["attention_mask"].any(0).nonzero().max()) + 1
        batch = {key: value[:, :end] for key, value in batch.items()}
        ids = batch["input_ids"]
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= model.config.vocab_size:
            raise DataError(f"token ids are {low} to {high}, of {model.config.vocab_size} tokens: use the model's tokenizer")
        if end > longest:
            raise DataError(f"a batch exceeds the positions for {longest}: cut the batches, or swap with max_positions={end}")
        kinds = batch.get("token_type_ids", torch.zeros_like(ids))
        # GPT-2 has no table of token types: it looks them up in the token table.
        count = getattr(model.config, "type_vocab_size", model.config.vocab_size)
        if kinds.dtype not in (torch.int64, torch.int32) or int(kinds.min()) < 0 or int(kinds.max()) >= count:
            raise DataError(f"token_type_ids must be integers from 0 to {count - 1}, int64 or int32, not {kinds.dtype}")
        checked.append(batch)
    if not checked:
        raise DataError("there are no batches: give some text")
    if all(batch["input_ids"].shape[1] == 1 for batch in checked):  # where positions make no difference, nor would a fit
        raise DataError("every row of the batches is one token: give rows of several, (N, L)")
    return checked


def split_batches(batches: list[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Hold out every tenth sequence of each length: (to fit on, held out). What is held out has no copy in the first."""
    fitted, held = [], []
    total, seen = Counter(), Counter()  # sequences of each length, over all batches
    for batch in batches:
        total[batch["input_ids"].shape[1]] += len(batch["input_ids"])
    for batch in batches:
        count, length = batch["input_ids"].shape
        # At least one of each length, if there are two.
        last = (torch.arange(count) + seen[length]) % 10 == min(9, total[length] - 1 if total[length] > 1 else 9)
        seen[length] += count
        for part, chosen in ((held, last), (fitted, ~last)):
            if chosen.any():
                part.append({key: value[chosen] for key, value in batch.items()})
    if not held and len(fitted) > 1:
        held = [fitted.pop()]
    known = {row for batch in held for row in _texts(batch)}
    own = [torch.tensor([row not in known for row in _texts(batch)]) for batch in fitted]
    return [{key: value[rows] for key, value in one.items()} for one, rows in zip(fitted, own, strict=True) if rows.any()], held


def _texts(batch: Batch) -> list[tuple[int, ...]]:
    """Return each row's tokens without padding, of which one text may have more or less from batch to batch."""
    return [tuple(ids[real].tolist()) for ids, real in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


def few_tokens(batches: list[Batch], tokens: int) -> list[Batch]:
    """Split batches into smaller ones of about `tokens` tokens, at least one sequence each."""
    return [
        {key: value[rows] for key, value in batch.items()}
        for batch in batches
        for rows in torch.arange(len(batch["input_ids"]), device="cpu").split(max(1, tokens // batch["input_ids"].shape[1]))
    ]
