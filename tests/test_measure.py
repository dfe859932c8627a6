"""Pooled cosine, word order and modes: against formulas written out, and models that are as they were afterwards."""

import numpy
import pytest
import sklearn.linear_model
import torch
from sklearn.linear_model import RidgeClassifier, RidgeClassifierCV
from transformers import BertModel

from hf_posswap.evaluating import evaluating, watching
from hf_posswap.measure import (
    kl_divergence,
    perplexity,
    pooled_cosine,
    pooled_states,
    token_losses,
    word_order_preference,
    word_order_probe,
)
from hf_posswap.measure import word_order as module


def sentence_vector(model, row: torch.Tensor) -> torch.Tensor:
    """Mean pooling of sentence-transformers, then its Normalize, token by token.

    sum_t mask_t h_t / max(sum_t mask_t, 1e-9), as in `sentence_transformers.models.Pooling` with `pooling_mode="mean"`.
    """
    mask = torch.ones_like(row)
    states = model(input_ids=row[None], attention_mask=mask[None]).last_hidden_state[0]
    total = torch.zeros(states.shape[-1])
    for token in range(len(row)):
        total += mask[token] * states[token]
    pooled = total / max(mask.sum().item(), 1e-9)
    return pooled / pooled.square().sum().sqrt()


@torch.no_grad()
def test_pooled_cosine_is_that_of_sentence_transformers(make_model, make_swapped, tokens):
    """The cosine is of means over all tokens, as in sentence-transformers; other poolings would be far off."""
    original, model = make_model("bert", head=BertModel), make_swapped("bert", "none", head=BertModel)
    wanted = [torch.stack([sentence_vector(one, row) for row in tokens]) for one in (original, model)]
    torch.testing.assert_close(pooled_states(original, tokens), wanted[0], atol=1e-5, rtol=0)
    found = pooled_cosine(model, tokens, pooled_states(original, tokens))
    assert found == pytest.approx((wanted[0] * wanted[1]).sum(-1).mean().item(), abs=1e-5) and found < 0.99
    states = [one(input_ids=tokens).last_hidden_state for one in (original, model)]
    for pool in (lambda one: one[:, 0], lambda one: one.max(1).values):
        other = torch.nn.functional.cosine_similarity(*map(pool, states), dim=-1).mean().item()
        assert abs(other - found) > 1e-3


def test_the_probe_keeps_twins_together(monkeypatch):
    """The penalty is that of a naive search over folds of whole sentences; with twins parted it would be another one."""
    generator = numpy.random.default_rng(0)
    sentences = generator.normal(size=(60, 1, 20)) * 3
    marks = numpy.stack([-numpy.ones(20), numpy.ones(20)])[None] * 0.15
    vectors = (sentences + marks + generator.normal(size=(60, 2, 20)) * 0.3).reshape(120, 20)
    labels, alphas, chosen = [0, 1] * 60, numpy.logspace(1, 6, 11), []

    class Watched(RidgeClassifierCV):
        def fit(self, x, y):
            chosen.append((super().fit(x, y).alpha_, x, self.cv))
            return self

    monkeypatch.setattr(sklearn.linear_model, "RidgeClassifierCV", Watched)
    monkeypatch.setattr(module, "sentence_vectors", lambda model, tokenizer, texts: vectors[: len(texts)])
    share = word_order_probe(None, None, (["text"] * 120, labels), (["text"] * 40, labels[:40]))
    ((alpha, scaled, folds),) = chosen
    assert len(folds) == 5 and sorted(place for _, test in folds for place in test) == list(range(120))
    for train, test in folds:
        assert not {place // 2 for place in train} & {place // 2 for place in test}
    labels = numpy.array(labels)
    right = [[RidgeClassifier(one).fit(scaled[a], labels[a]).score(scaled[b], labels[b]) for a, b in folds] for one in alphas]
    assert alpha == alphas[numpy.mean(right, axis=1).argmax()] and 0.5 < share <= 1


def test_measures_leave_modes_alone(make_model, gpt2_tokenizer, tokens):
    """A model in training, with one module that is not, is measured without dropout and stays as it was."""
    model, original = make_model("gpt2"), make_model("gpt2")
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5
    model.train().transformer.wte.eval()
    modes = [part.training for part in model.modules()]
    texts = ["a b c d", "a c b d"]
    for measure in (
        lambda: perplexity(model, tokens),
        lambda: kl_divergence(model, original, tokens),
        lambda: pooled_states(model, tokens).sum().item(),
        lambda: token_losses(model, tokens).nansum().item(),
        lambda: word_order_preference(model, gpt2_tokenizer, texts),
    ):
        assert measure() == measure()
        assert [part.training for part in model.modules()] == modes


def test_nothing_stays_when_looking_fails(make_model, tokens):
    """After an error modes are back and hooks are gone."""
    model = make_model("bert").train()
    layers = [module for module in model.modules() if type(module).__name__.endswith("SelfAttention")]

    def see(index, module, hidden_states, keywords):
        assert module is layers[index] and hidden_states.shape[:2] == tokens.shape and not module.training
        raise KeyError(index)

    with pytest.raises(KeyError, match="0"), evaluating(model), watching(layers, see):
        model(input_ids=tokens)
    assert len(layers) > 1 and all(module.training and not module._forward_pre_hooks for module in model.modules())
