"""Retrieval of long documents by short passages: documents, passages, ways to read them, recall.

An embedder with a shorter limit than a document reads it in one of these ways. Each takes a single call of `encode`, so
sentence-transformers' own trainer can train the model as it will be used:

    truncated   the first tokens
    ends        the first half and the last half of what it reads
    chunks      all tokens, in as few pieces as can be, of equal length: a short rest would count as much as the others in the
                mean of their vectors, of length 1
    whole       as it is: for an embedder that reads enough
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import ceil
from typing import Literal, NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from hf_posswap.architectures import find_family, longest_input
from hf_posswap.data.text import wraps
from hf_posswap.errors import DataError, PosswapError
from hf_posswap.pipelines import unwrap

Way = Literal["whole", "truncated", "ends", "chunks"]
_LONGEST_WORD = 32  # tokens


class Passage(NamedTuple):
    """Some tokens of a document, as text."""

    text: str
    document: int  # its number
    place: float  # of its first token in the document, from 0 to 1


def cut_documents(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[str]:
    """Cut texts between words into documents of `tokens` tokens, without rests, duplicates, and what is mostly white space.

    A word that reaches past its document's last token stays whole, and the next document begins behind it: so a document may
    have a few tokens fewer, or more, which the pipeline's limit then cuts off. DataError: no text is so long.
    """
    documents = []
    for text in texts:
        cuts = _cuts(text, tokenizer)
        whole = [text[start:end] for start, end in pairwise(cuts[::tokens])]
        documents += [one.strip() for one in whole if len(one.strip()) > len(one) // 2]
    if not documents:
        raise DataError(f"no text has {tokens:,} tokens, the length of a document: give longer texts, or ask for fewer tokens")
    return list(dict.fromkeys(documents))


def draw_passages(
    documents: Sequence[str], tokenizer: PreTrainedTokenizerBase, tokens: int, each: int, seed: int
) -> list[Passage]:
    """Draw passages of `tokens` tokens, one from each of `each` equal parts of a document; DataError: one is too short.

    A passage of white space moves on to the next text; near the end of a document that ends in one long word, to the last.
    """
    generator, passages = torch.Generator().manual_seed(seed), []
    for number, document in enumerate(documents):
        cuts = _cuts(document, tokenizer)
        size = len(cuts) - 1
        room = (size - tokens) / each
        if room < 1:
            raise DataError(f"a document has {size} tokens, too few for {each} passages of {tokens}: give longer ones")
        there = [start for start in range(size - tokens + 1) if document[cuts[start] : cuts[start + tokens]].strip()]
        for part in range(each):
            drawn = int(room * (part + float(torch.rand(1, generator=generator))))
            start = next((start for start in there if start >= drawn), there[-1])  # a last word may be longer than a passage
            passages.append(Passage(document[cuts[start] : cuts[start + tokens]].strip(), number, start / size))
    return passages


def _cuts(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return where to cut a text before each token, and after the last, but never in a word: 0, then the ends of words.

    Text without spaces (Chinese in bytes, base64) can be one word to a tokenizer: it is cut between any two tokens.
    """
    if not tokenizer.is_fast:
        raise DataError("the tokenizer, written in Python, does not say where tokens stand: give a model with a fast one")
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends, words = [end for _, end in found["offset_mapping"]], found.word_ids()
    sizes = Counter(words)
    for place in range(len(ends) - 2, -1, -1):
        if words[place] is not None and words[place] == words[place + 1] and sizes[words[place]] <= _LONGEST_WORD:
            ends[place] = ends[place + 1]
    return [0, *ends]


def pieces_of(ids: list[int], tokenizer: PreTrainedTokenizerBase, way: Way, size: int, prompt: int = 0) -> list[list[int]]:
    """Return what is read of a text: lists of at most `size` token ids, each with the tokenizer's special tokens.

    With `prompt`, the first tokens, so many, stand before each piece. DataError: they leave no room.

    >>> from transformers import GPT2Tokenizer
    >>> [pieces_of(list(range(7)), GPT2Tokenizer(), way, 4) for way in ("truncated", "ends", "chunks")]
    [[[0, 1, 2, 3]], [[0, 1, 5, 6]], [[0, 1, 2], [3, 4, 5, 6]]]
    """
    edge = 1 if wraps(tokenizer) else 0
    begin = max(edge, prompt)
    first, body, last = ids[:begin], ids[begin : len(ids) - edge], ids[len(ids) - edge :]
    room = size - begin - edge
    if way == "whole" or len(body) <= room:
        return [ids]
    if room < 1:
        raise DataError(f"of {size} tokens that are read at once the prompt takes {begin + edge}: read more, or shorten it")
    if way == "chunks":
        count = ceil(len(body) / room)
        cuts = [len(body) * number // count for number in range(count + 1)]
        return [first + body[start:end] + last for start, end in pairwise(cuts)]
    return [first + (body[:room] if way == "truncated" else body[: room // 2] + body[room // 2 - room :]) + last]


def read_as(pipeline, way: Way, size: int, longest: int) -> None:
    """Let a SentenceTransformer take texts of up to `longest` tokens, in place, with a model that reads `size`.

    PosswapError: the model does not read so many.

    `encode(..., output_value=None)` then also gives the vectors of a text's `pieces`, (N, E); the last is repeated until all
    texts of a batch have as many.
    """
    tokenizer, counts, config = pipeline.tokenizer, [], unwrap(pipeline).config
    asked = longest if way == "whole" else size
    if find_family(config.model_type) is not None and asked > (most := longest_input(config)):
        other = "take shorter texts (--lengths, --tokens)" if way == "whole" else "choose smaller chunks"
        raise PosswapError(f"the model reads {most} tokens at once, not {asked}: {other}, or another way to read")
    pipeline.max_seq_length = longest

    def cut(module, arguments):
        features, *rest = arguments
        real = [row[mask.bool()].tolist() for row, mask in zip(features["input_ids"], features["attention_mask"], strict=True)]
        prompt = int(torch.as_tensor(features.get("prompt_length", 0)).flatten()[0])  # may be left out of the pooling of each
        pieces = [pieces_of(ids, tokenizer, way, size, prompt) for ids in real]
        counts[:] = map(len, pieces)
        padded = tokenizer.pad({"input_ids": [ids for one in pieces for ids in one]}, return_tensors="pt")
        padded = {name: padded[name].to(features["input_ids"].device) for name in ("input_ids", "attention_mask")}
        kept = {name: value for name, value in features.items() if name != "token_type_ids"}
        return kept | padded, *rest

    def join(module, arguments, features):
        vectors = features["sentence_embedding"][:, : pipeline.truncate_dim]  # a Matryoshka model's first numbers; None: all
        pieces, places = functional.normalize(vectors, dim=-1).split(counts), torch.arange(max(counts))
        features["sentence_embedding"] = functional.normalize(torch.stack([part.mean(0) for part in pieces]), dim=-1)
        features["pieces"] = torch.stack([part[places.clamp(max=len(part) - 1)] for part in pieces])
        # sentence-transformers 6.0 takes an item of every feature for each text, of strings, too, which may be shorter.
        return {name: value for name, value in features.items() if not isinstance(value, str)}

    if way != "whole":
        pipeline[0].register_forward_pre_hook(cut)
        pipeline[-1].register_forward_hook(join)


def piece_vectors(encode: Callable, texts: Sequence[str]) -> list[torch.Tensor]:
    """Return the vectors of each text's pieces, (N, E); `encode` is of a SentenceTransformer that `read_as` has changed."""
    return [one["pieces"].cpu() for one in encode(texts, batch_size=8, output_value=None)]


def recall(documents: Sequence[torch.Tensor], queries: torch.Tensor, answers: Sequence[int]) -> torch.Tensor:
    """Return for each query (Q, E) whether its document is the nearest by cosine: (Q,) bool.

    Each of the D documents has one vector (E,), or several (N, E), the nearest of which counts.
    """
    vectors = [functional.normalize(torch.atleast_2d(one), dim=-1) for one in documents]
    if not all(one.isfinite().all() for one in (queries, *vectors)):
        raise DataError("some vectors are NaN or infinite, as of a model that diverged: there is nothing to rank")
    scores = torch.stack([(queries @ several.T).amax(-1) for several in vectors], dim=1)
    return scores.argmax(-1) == torch.tensor(answers, device=scores.device)
