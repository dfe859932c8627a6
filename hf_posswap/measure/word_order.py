"""Bigram shift: has a pair of adjacent words been swapped? A task that cannot be solved without order.

Conneau et al. 2018, "What you can cram into a single $&!#* vector", section 3 (https://arxiv.org/abs/1805.01070). Each
sentence occurs twice, intact and with a swap, so both classes hold the same words and a bag of words scores 50 %. A bag of
tokens does so with WordPiece; byte-level BPE writes the first word without a space, so it scores a little more there.

For an encoder, as in the paper, a linear probe reads frozen sentence vectors: here the means of all layers' states, by ridge
regression with its penalty chosen on held-out sentences. A causal model is asked which of the two is likelier (as in Warstadt
et al. 2020, https://arxiv.org/abs/1912.00582). Only the choice of sentences is random.
"""

import random

import numpy
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.data.text import sentences_of
from hf_posswap.errors import DataError
from hf_posswap.evaluating import evaluating
from hf_posswap.extras import extra
from hf_posswap.measure.losses import token_losses


def word_order_examples(paragraphs: list[str], count: int, *, seed: int = 0) -> tuple[list[str], list[int]]:
    """Return `count` texts and labels: sentences of 6 to 24 words, each intact (0) and with two neighbours swapped (1).

    >>> word_order_examples(["The quick brown fox jumps over the lazy dog."], 2)
    (['The quick brown fox jumps over the lazy dog.', 'The quick brown fox jumps over lazy the dog.'], [0, 1])
    """
    sentences = sentences_of(paragraphs)
    usable = sorted(s for s in sentences if 6 <= len(words := s.split()) <= 24 and len({w.lower() for w in words}) > 4)
    if len(usable) * 2 < count:
        what = f"{count // 2} sentences of 6 to 24 words are needed, and the text has {len(usable)}"
        raise DataError(f"{what}: give more prose (to swap_cost, also word_order_sentences=0)")
    chance = random.Random(seed)
    texts = []
    for sentence in chance.sample(usable, count // 2):
        words = sentence.split()
        # Swapping equal neighbours would change nothing, and the last word carries the full stop.
        place = chance.choice([i for i in range(len(words) - 2) if words[i].lower() != words[i + 1].lower()])
        words[place : place + 2] = words[place + 1], words[place]
        texts += [sentence, " ".join(words)]
    return texts, [0, 1] * (count // 2)


def word_order_probe(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    train: tuple[list[str], list[int]],
    test: tuple[list[str], list[int]],
) -> float:
    """Return the share of test texts that a linear probe on the model's frozen states tells intact from swapped.

    Texts alternate, as `word_order_examples` returns them. The penalty is chosen by five folds, with a sentence and its swapped
    twin in one fold: the twin, with the same words and the other label, would give the label away.
    """
    with extra():
        from sklearn.linear_model import RidgeClassifierCV
        from sklearn.model_selection import GroupKFold
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    vectors = [sentence_vectors(model, tokenizer, texts) for texts, _ in (train, test)]
    sentences = numpy.arange(len(train[1])) // 2
    folds = list(GroupKFold(min(5, sentences[-1] + 1)).split(vectors[0], groups=sentences))
    probe = make_pipeline(StandardScaler(), RidgeClassifierCV(alphas=numpy.logspace(1, 6, 11), cv=folds))
    return float(probe.fit(vectors[0], train[1]).score(vectors[1], test[1]))


def word_order_preference(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    """Return the share of sentences that a causal model finds likelier than their swapped twins (texts alternate)."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    # A start token in front, so that the first word is predicted too. Padding stands behind, where no word sees it.
    front = 0 if start is None else 1
    tokens, labels = (torch.nn.functional.pad(ids, (front, 0), value=start) for ids in (batch["input_ids"], labels))
    losses = token_losses(model, tokens, labels).nansum(1)
    return (losses[0::2] < losses[1::2]).float().mean().item()


@torch.no_grad()
def sentence_vectors(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> numpy.ndarray:
    """Return the means over tokens of all layers' states, one after the other: (N, (layers + 1) * E)."""
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # batches of similar lengths need little padding
    vectors = []
    for start in range(0, len(texts), 64):
        chosen = [texts[i] for i in by_length[start : start + 64]]
        batch = tokenizer(chosen, padding=True, padding_side="right", truncation=True, return_tensors="pt").to(model.device)
        with evaluating(model):
            states = model.base_model(**batch, output_hidden_states=True, return_dict=True).hidden_states
        mask = batch["attention_mask"][..., None]
        vectors.append(torch.cat([(layer.float() * mask).sum(1) / mask.sum(1) for layer in states], dim=-1).cpu().numpy())
    vectors = numpy.concatenate(vectors)
    if not numpy.isfinite(vectors).all():
        raise DataError("the model's states are NaN or infinite, as after training that diverged: there is nothing to compare")
    return vectors[numpy.argsort(by_length)]
