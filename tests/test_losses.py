"""Losses token by token against one forward a token and transformers' own loss."""

import pytest
import torch
from conftest import refused
from torch.nn import functional
from transformers import BertForPreTraining, BertForSequenceClassification, BertModel

from hf_posswap.experiments.text_tasks import mask_tokens, masked_lm_loss
from hf_posswap.measure import kl_divergence
from hf_posswap.measure.losses import mean_loss, sliding_window_losses, token_losses


@pytest.mark.parametrize(("length", "window", "stride"), [(30, 8, 1), (30, 8, 3), (32, 8, 4), (20, 32, 5), (9, 8, 7)])
def test_sliding_window_against_one_context_at_a_time(make_model, monkeypatch, length, window, stride):
    """In float64 every token is predicted once, from what its window holds (here once all); positions start at 0 in each."""
    monkeypatch.setattr("hf_posswap.measure.losses._LOGITS_A_SLICE", 99 * 4)  # several slices
    monkeypatch.setattr("hf_posswap.measure.losses._TOKENS_A_BATCH", 28)  # and batches
    model = make_model("gpt2", n_positions=window).double()
    tokens = torch.randint(2, 98, (2, length), generator=torch.Generator().manual_seed(0))
    tokens = tokens.int() if stride > 3 else tokens  # an embedding takes either
    losses = sliding_window_losses(model, tokens, window, stride=stride)
    for row in range(2):
        for place in range(1, length):
            start = 0
            while start + window <= place:  # the first window that reaches this token
                start = min(start + stride, length - window)
            logits = model(tokens[row : row + 1, start:place]).logits[0, -1]
            assert losses[row, place].item() == pytest.approx(-logits.log_softmax(-1)[tokens[row, place]].item(), abs=1e-12)
    assert losses.dtype == torch.float64 and losses[:, 0].isnan().all() and losses.isnan().sum() == 2


def test_refusals(make_model):
    """A stride that would leave tokens out, a model without a head for tokens, and a masked one without labels are refused."""
    tokens = torch.ones(1, 20, dtype=torch.long)
    for stride in (0, 8, 9):
        refused("from 1 to 7", sliding_window_losses, make_model("gpt2"), tokens, 8, stride=stride)
    refused("predicts no next token", sliding_window_losses, make_model("bert"), tokens, 8)
    for head, says in ((BertModel, "no language-modelling head"), (None, "labels")):
        refused(says, token_losses, make_model("bert", head=head), tokens)
    for head in (BertModel, BertForSequenceClassification):
        refused("predicts no tokens", kl_divergence, make_model("bert"), make_model("bert", head=head), tokens)


def test_a_head_beside_others(make_model, tokens):
    """What BertForPreTraining predicts of tokens is measured as BertForMaskedLM's, which has the same head alone."""
    model, alone = make_model("bert", head=BertForPreTraining), make_model("bert")
    labels = tokens.where(tokens % 3 == 0, -100)
    expected = functional.cross_entropy(model(tokens).prediction_logits.flatten(0, 1), labels.flatten())
    assert mean_loss(token_losses(model, tokens, labels)) == pytest.approx(expected.item(), rel=1e-5)
    alone.load_state_dict(model.state_dict(), strict=False)
    assert kl_divergence(model, alone, tokens) == pytest.approx(0, abs=1e-6)


def test_no_prediction_is_no_missing_label(make_model):
    """A model that predicts NaN is refused: a mean over other tokens would make it look good."""
    model, tokens = make_model("gpt2"), torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        model.transformer.wte.weight[tokens[1, 7]] = torch.nan
    refused("predicts NaN for", token_losses, model, tokens[1:])
    assert token_losses(make_model("gpt2"), tokens).isnan().sum() == 2


def test_masked_losses(make_model, bert_tokenizer):
    """The mean over masked tokens is transformers' own loss; so is the loss for training, gradients and all."""
    model = make_model("bert").double()
    tokens = torch.randint(5, len(bert_tokenizer), (6, 20), generator=torch.Generator().manual_seed(0))
    inputs, labels = mask_tokens(tokens, bert_tokenizer, 0.3, seed=3)
    losses = token_losses(model, inputs, labels)
    expected = model(input_ids=inputs, labels=labels).loss
    assert torch.equal(losses.isfinite(), labels != -100)
    assert mean_loss(losses) == pytest.approx(expected.item(), abs=1e-12)
    skipped = {"position_ids": torch.arange(20).expand(6, 20) + 7, "input_ids": inputs, "labels": labels}
    model(**skipped).loss.backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    masked_lm_loss(model, skipped).backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)  # logits go through float32
    assert not model.cls._forward_pre_hooks
