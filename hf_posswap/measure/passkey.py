"""Passkey retrieval: a key is hidden somewhere in a long text, and asked for. Seeded texts, of an exact number of tokens.

Mohtashami & Jaggi 2023, "Landmark Attention", section 4.2 and appendix G (https://arxiv.org/abs/2305.16300). A text for a
causal model is

    filler  The pass key is 4821. Remember it.  filler  What is the pass key? The pass key is 4821

of which the model must write the last number. For an encoder it is extractive question answering, with the key's span as the
answer: [CLS] What is the pass key? [SEP] filler ... filler [SEP].

Sentences, keys and questions are tokenized one by one. The filler is the paper's five sentences over and over, or the prose of
the standard library, from a random sentence on; the last one is cut. `depth` is the share of the filler that stands before the
key, to the nearest end of a sentence. `decoys` are keys of other names ("The door key is ..."); then any of the names may be
asked for, and the answer must match the question's name to the text (multi-key retrieval, Hsieh et al. 2024, "RULER",
https://arxiv.org/abs/2404.06654). Without decoys an encoder only has to find a number.

Unlike the paper: no introductory sentence, and the key appears once, so that short texts have room for filler; keys have four
digits and all the same number of tokens; the two splits share no keys.
"""

import copy
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.attention import CACHE
from hf_posswap.data.text import Split, sentences_of, split_of, stdlib_prose
from hf_posswap.errors import DataError
from hf_posswap.evaluating import evaluating

FILLER = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
NAMES = ("pass", "door", "house", "car", "garden", "office", "school", "water", "fire", "red", "first", "last")
CANDIDATES = 10  # keys to choose from; fewer than there are names


@dataclass(frozen=True)
class PasskeyText:
    """One text. `candidates` are keys as tokens: the right one, the decoys', and some that are not in the text."""

    input_ids: list[int]
    start: int  # where the right key stands
    question_size: int  # of an encoder's text: tokens up to the first [SEP]
    candidates: list[tuple[int, ...]]

    @property
    def key(self) -> tuple[int, ...]:
        return self.candidates[0]


class PasskeyTexts:
    """Draws texts for one tokenizer and one kind of model.

    >>> from hf_posswap.experiments.models import load_tokenizer
    >>> tokenizer = load_tokenizer("stdlib-gpt2")
    >>> text = PasskeyTexts(tokenizer, "train", causal=True).draw(52, 0.5, random.Random(0))
    >>> len(text.input_ids), tokenizer.decode(text.key)
    (52, ' 6245')
    >>> print(tokenizer.decode(text.input_ids)[:71], "...", tokenizer.decode(text.input_ids)[-42:])
     The sky is blue. The pass key is 6245. Remember it. The sun is yellow. ... What is the pass key? The pass key is 6245
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        split: Split,
        *,
        causal: bool,
        filler: Literal["repeat", "text"] = "repeat",
        decoys: int = 0,
    ):
        if not 0 <= decoys < CANDIDATES:
            raise DataError(f"decoys={decoys} must be from 0 to {CANDIDATES - 1}")
        self.causal, self.decoys = causal, decoys
        self.kinds = "token_type_ids" in tokenizer.model_input_names  # RoBERTa's kin and DistilBERT have none
        # Parts are tokenized one by one, with the space in front of them: a key is the same tokens wherever it stands.
        self._tokens = lambda texts: tokenizer([f" {text}" for text in texts], add_special_tokens=False)["input_ids"]
        numbers = [str(number) for number in range(1000, 10_000)]
        keys = dict(zip(map(tuple, self._tokens(numbers)), numbers, strict=True))
        size = Counter(map(len, keys)).most_common(1)[0][0]
        self.keys = [key for key, number in keys.items() if len(key) == size and split_of(number) == split]
        if len(self.keys) < 2 * CANDIDATES:
            raise DataError(f"the tokenizer tells only {len(self.keys)} numbers of four digits apart: it cannot write keys")
        self.names = NAMES if decoys else NAMES[:1]
        self._said = dict(zip(self.names, self._tokens(f"The {name} key is" for name in self.names), strict=True))
        self._asked = dict(zip(self.names, self._tokens(f"What is the {name} key?" for name in self.names), strict=True))
        self._after = tokenizer(". Remember it.", add_special_tokens=False)["input_ids"]
        self._edges = [] if causal else [tokenizer.cls_token_id, tokenizer.sep_token_id]
        if None in self._edges:
            raise DataError("an encoder's tokenizer needs a [CLS] and a [SEP] token")
        sentences = FILLER
        if filler == "text":
            found = sentences_of(stdlib_prose(split))
            # No numbers: they could be taken for the key.
            sentences = [s for s in found if len(s.split()) <= 40 and not any(c.isdigit() for c in s)]
        self._filler = self._tokens(sentences)
        said = max(map(len, self._said.values())) + size + len(self._after)
        answer = max(map(len, self._said.values())) + size if causal else 3
        self.shortest = max(map(len, self._asked.values())) + (1 + decoys) * said + answer + 1

    def draw(self, length: int, depth: float, chance: random.Random) -> PasskeyText:
        """Return a text of exactly `length` tokens, special ones included; all but length and depth is random."""
        if length < self.shortest:
            raise DataError(f"length={length} is too short: keys and question take {self.shortest} tokens")
        names = chance.sample(self.names, 1 + self.decoys)
        keys = chance.sample(self.keys, CANDIDATES)
        said = [[*self._said[name], *key, *self._after] for name, key in zip(names, keys, strict=False)]
        front, end = [], [*self._asked[names[0]], *self._said[names[0]], *keys[0]]
        if not self.causal:
            cls, sep = self._edges
            front, end = [cls, *self._asked[names[0]], sep], [sep]
        size = length - len(front) - sum(map(len, said)) - len(end)
        first, filler, ends = chance.randrange(len(self._filler)), [], [0]  # sentences from a random one on; the last is cut
        while len(filler) < size:
            filler += self._filler[(first + len(ends) - 1) % len(self._filler)][: size - len(filler)]
            ends.append(len(filler))
        nearest = min(range(len(ends)), key=lambda place: abs(ends[place] - depth * size))
        places = [nearest, *(chance.randrange(len(ends)) for _ in range(self.decoys))]
        # Keys at one place stand in random order: the right one is not always the first of them.
        order = sorted(range(len(places)), key=lambda which: (places[which], chance.random()))
        ids, start, told = list(front), -1, 0
        for which in order:
            ids += filler[told : ends[places[which]]]
            told = ends[places[which]]
            if which == 0:
                start = len(ids) + len(self._said[names[0]])
            ids += said[which]
        return PasskeyText(ids + filler[told:] + end, start, len(front), keys)


class PasskeyExamples(Dataset):
    """Training examples drawn on access, the same for the same seed and index: one of `lengths`, any depth."""

    def __init__(self, texts: PasskeyTexts, lengths: Sequence[int], count: int, *, seed: int = 0):
        self.texts, self.lengths, self.count, self.seed = texts, tuple(lengths), count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.count:  # without it, `for example in examples` would never end
            raise IndexError(index)
        chance = random.Random(f"train {self.seed} {index}")
        text = self.texts.draw(chance.choice(self.lengths), chance.random(), chance)
        ids = torch.tensor(text.input_ids)
        if not self.texts.causal:
            span = {"start_positions": torch.tensor(text.start), "end_positions": torch.tensor(text.start + len(text.key) - 1)}
            kinds = {"token_type_ids": (torch.arange(len(ids)) >= text.question_size).long()} if self.texts.kinds else {}
            return {"input_ids": ids, **kinds, **span}
        labels = torch.full_like(ids, -100)
        labels[-len(text.key) :] = ids[-len(text.key) :]
        return {"input_ids": ids, "labels": labels}


def depth_texts(texts: PasskeyTexts, length: int, depth: float, count: int, *, seed: int = 0) -> list[PasskeyText]:
    """Return the texts of one cell of the heat map."""
    return [texts.draw(length, depth, random.Random(f"test {seed} {length} {depth} {n}")) for n in range(count)]


@torch.no_grad()
def recall_keys(model: PreTrainedModel, texts: list[PasskeyText]) -> tuple[list[bool], list[bool]]:
    """Return for each text whether a causal model writes the key, and whether it ranks the key above all candidates.

    Writing is greedy, as `generate` would write. All texts must have the same length. A candidate's rank is by the mean
    log-probability of its tokens.
    """
    size = len(texts[0].key)
    ids = torch.tensor([text.input_ids for text in texts], device=model.device)
    candidates = torch.tensor([text.candidates for text in texts], device=model.device)  # (B, candidates, size)
    with evaluating(model):
        # The long prompt is read once; candidates are a few tokens each.
        prompt = model(input_ids=ids[:, :-size], use_cache=True, logits_to_keep=1)
        cache, likelihoods = prompt[CACHE], []
        for number in range(candidates.shape[1]):
            tokens, logits = candidates[:, number], prompt.logits
            if size > 1:
                # A copy for each, since a cache with a span cannot be cut back once it has forgotten keys.
                more = model(input_ids=tokens[:, :-1], use_cache=True, **{CACHE: copy.deepcopy(cache)}).logits
                logits = torch.cat([logits, more], dim=1)
            if number == 0:
                said = (logits.argmax(-1) == tokens).all(-1)
            likelihoods.append(logits.float().log_softmax(-1).gather(-1, tokens[..., None]).mean((1, 2)))
    likelihoods = torch.stack(likelihoods, dim=1)
    ranked = (likelihoods[:, :1] > likelihoods[:, 1:]).all(-1)
    return said.tolist(), ranked.tolist()


@torch.no_grad()
def point_at_keys(model: PreTrainedModel, texts: list[PasskeyText], *, kinds: bool = True) -> list[bool]:
    """Return for each text whether the likeliest start and end of a question-answering encoder are the key's.

    kinds: Whether the model reads token types, as `PasskeyTexts.kinds` says of its tokenizer.
    """
    ids = torch.tensor([text.input_ids for text in texts], device=model.device)
    sizes = torch.tensor([[text.question_size] for text in texts], device=ids.device)
    given = {"token_type_ids": (torch.arange(ids.shape[1], device=ids.device) >= sizes).long()} if kinds else {}
    with evaluating(model):
        outputs = model(input_ids=ids, **given)
    starts = torch.tensor([text.start for text in texts], device=ids.device)
    right = outputs.start_logits.argmax(-1) == starts
    right &= outputs.end_logits.argmax(-1) == starts + len(texts[0].key) - 1
    return right.tolist()
