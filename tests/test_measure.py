"""Pooled cosine, word order, attention by distance and modes: against formulas written out, and models left as they were."""

import random

import numpy
import pytest
import sklearn.linear_model
import torch
from conftest import KINDS, WORDS, refused
from sklearn.linear_model import RidgeClassifier, RidgeClassifierCV
from transformers import BertModel

from hf_posswap import measure
from hf_posswap.data.calibration import check_batches
from hf_posswap.evaluating import evaluating, watching
from hf_posswap.measure import word_order as module
from hf_posswap.measure.losses import row_perplexities


@torch.no_grad()
def test_pooled_cosine_is_that_of_sentence_transformers(make_model, make_swapped, tokens):
    """The cosine is of means over all tokens, as in sentence-transformers; other poolings would be far off."""
    original, model = make_model("bert", head=BertModel), make_swapped("bert", "none", head=BertModel)
    states = [one(input_ids=tokens).last_hidden_state for one in (original, model)]
    wanted = [torch.nn.functional.normalize(one.mean(1), dim=-1) for one in states]  # `pooling_mode="mean"`, then `Normalize`
    torch.testing.assert_close(measure.pooled_states(original, tokens), wanted[0], atol=1e-5, rtol=0)
    found = measure.pooled_cosine(model, tokens, measure.pooled_states(original, tokens))
    assert found == pytest.approx((wanted[0] * wanted[1]).sum(-1).mean().item(), abs=1e-5) and found < 0.99
    for pool in (lambda one: one[:, 0], lambda one: one.max(1).values):
        other = torch.nn.functional.cosine_similarity(*map(pool, states), dim=-1).mean().item()
        assert abs(other - found) > 1e-3


@torch.no_grad()
def test_word_order_against_a_loop(make_model, gpt2_tokenizer, bert_tokenizer):
    """Two neighbours, never the last word, are swapped; a causal model prefers one, an encoder tells states apart."""
    chance, model = random.Random(0), make_model("gpt2")
    paragraphs = [" ".join(chance.choices(WORDS, k=chance.randint(6, 20))) for _ in range(60)]
    texts, labels = measure.word_order_examples(paragraphs, 80)
    assert labels == [0, 1] * 40
    for one, other in zip(texts[::2], texts[1::2], strict=True):
        words = [text.split() for text in (one, other)]
        first, second = (place for place, (a, b) in enumerate(zip(*words, strict=True)) if a != b)
        assert second == first + 1 < len(words[0]) - 1 and sorted(words[0]) == sorted(words[1])
    start = gpt2_tokenizer.bos_token_id
    losses = [measure.token_losses(model, torch.tensor([[start, *gpt2_tokenizer(one)["input_ids"]]])).nansum() for one in texts]
    wanted = numpy.mean([one < other for one, other in zip(losses[::2], losses[1::2], strict=True)])
    assert measure.word_order_preference(model, gpt2_tokenizer, texts) == pytest.approx(wanted)
    losses = [measure.token_losses(model, bert_tokenizer(one, return_tensors="pt")["input_ids"]).nansum() for one in texts]
    wanted = numpy.mean([one < other for one, other in zip(losses[::2], losses[1::2], strict=True)])
    assert measure.word_order_preference(model, bert_tokenizer, texts) == pytest.approx(wanted)  # [CLS] is a start already
    encoder = make_model("bert", head=BertModel)
    for text, vector in zip(texts, module.sentence_vectors(encoder, bert_tokenizer, texts), strict=True):
        states = encoder(**bert_tokenizer(text, return_tensors="pt"), output_hidden_states=True).hidden_states
        torch.testing.assert_close(torch.tensor(vector), torch.cat(states, -1)[0].mean(0), rtol=1e-4, atol=1e-4)


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
    share = measure.word_order_probe(None, None, (["text"] * 120, labels), (["text"] * 40, labels[:40]))
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
    for call in (
        lambda: measure.perplexity(model, tokens),
        lambda: measure.kl_divergence(model, original, tokens),
        lambda: measure.pooled_states(model, tokens).sum().item(),
        lambda: measure.token_losses(model, tokens).nansum().item(),
        lambda: measure.word_order_preference(model, gpt2_tokenizer, texts),
    ):
        assert call() == call()
        assert [part.training for part in model.modules()] == modes


def test_a_diverged_model_is_not_scored(make_model, gpt2_tokenizer, bert_tokenizer):
    """NaN is no preference and no state."""
    texts, labels = ["a b c d", "a c b d"] * 4, [0, 1] * 4
    for family, says, call in (
        ("gpt2", "predicts NaN", lambda model: measure.word_order_preference(model, gpt2_tokenizer, texts)),
        ("bert", "NaN or infinite", lambda model: measure.word_order_probe(model, bert_tokenizer, *[(texts, labels)] * 2)),
    ):
        model = make_model(family)
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        refused(says, call, model)
    refused("too much for a perplexity", row_perplexities, torch.tensor([[torch.nan, 800.0]]))


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


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.only(cases=(*KINDS, "self-extend", "alibi"))
def test_against_eager_probabilities(model, family, backend, tokens, side):
    """Attention by distance is what a loop over eager probabilities finds, without padding, for every scheme and family."""
    mask = torch.ones_like(tokens)
    if side is not None:
        mask[1, :6] = 0
        mask[1] = mask[1] if side == "left" else mask[1].flip(0)
    model.train()
    batch = {"input_ids": tokens, "attention_mask": mask}
    found = measure.attention_by_distance(model, [batch], reach=5)
    ((tokens, mask),) = (one.values() for one in check_batches(batch, model, 20))
    assert model.training and found.shape == (2, 2, 11)
    assert torch.allclose(found.sum(-1), torch.ones(2, 2), atol=1e-5)
    model.eval().set_attn_implementation("eager")
    with torch.no_grad():
        layers = model.base_model(input_ids=tokens, attention_mask=mask, output_attentions=True).attentions
    naive = torch.zeros(2, 2, 11)
    for layer, probabilities in enumerate(layers):
        for row in range(2):
            for i in mask[row].nonzero().flatten().tolist():
                for j in range(tokens.shape[1]):
                    naive[layer, :, min(max(j - i, -5), 5) + 5] += probabilities[row, :, i, j]
    assert torch.allclose(found, naive / mask.sum(), atol=1e-5)
    if family != "bert":
        assert found[..., 6:].abs().max() < 1e-7


@pytest.mark.parametrize("scheme", ["rotary", "relative:clip=4", "alibi", "self-extend:group=2,near=4"])
def test_a_span_is_seen(make_swapped, family, backend, scheme, tokens):
    """Behind a span there is no attention, but to first tokens; what is left sums to 1."""
    model = make_swapped(family, scheme, backend, span=3, first=0)
    mask = torch.ones_like(tokens)
    mask[1, 12:] = 0
    for given in ({"input_ids": tokens}, {"input_ids": tokens, "attention_mask": mask}):
        found = measure.attention_by_distance(model, [given], reach=5)
        assert found[..., :3].abs().max() == found[..., 8:].abs().max() == 0
        assert torch.allclose(found.sum(-1), torch.ones(2, 2), atol=1e-5)


def test_batches_of_several_lengths(make_model, tokens):
    """Queries count alike wherever they stand: two batches give the mean weighted by tokens."""
    model = make_model("bert")
    parts = [{"input_ids": tokens}, {"input_ids": tokens[:, :7]}]
    each = [measure.attention_by_distance(model, [part], reach=4) for part in parts]
    for given in (parts, (part["input_ids"] for part in parts)):
        together = measure.attention_by_distance(model, given, reach=4)
        assert torch.allclose(together, (each[0] * 40 + each[1] * 14) / 54, atol=1e-6)
    refused("no batches", measure.attention_by_distance, model, [])
    assert not any(module._forward_pre_hooks for module in model.modules())
