"""Evaluation on one process; test_distributed.py has two."""

import pytest
import torch
from transformers import BertForSequenceClassification

from hf_posswap import PosswapError
from hf_posswap.measure.metrics import Metric
from hf_posswap.training.batching import pad
from hf_posswap.training.evaluation import evaluate_batches


def _rows(count=21):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (count,), generator=generator).tolist()
    tokens = [torch.randint(2, 98, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": torch.tensor(place % 2)} for place, row in enumerate(tokens)]


def test_share_of_right_classes(make_model):
    """An `evaluate.Metric` says what is right example by example; the model's mode comes back, no gradient is kept."""
    model, rows = make_model("bert", head=BertForSequenceClassification, num_labels=2).train(), _rows()
    found = evaluate_batches(model, rows, Metric("accuracy"), collate=pad, batch_size=4, progress=False)
    assert model.training
    model.eval()
    with torch.no_grad():
        right = [model(input_ids=row["input_ids"][None]).logits.argmax() == row["labels"] for row in rows]
    assert found == {"accuracy": pytest.approx(sum(map(int, right)) / len(rows))} and 0 < found["accuracy"] < 1


def test_tokens_without_a_reference_are_left_out(make_model):
    """Of (B, L) predictions only tokens with a reference count; `predict` says what is compared."""
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"].clone()} for row in _rows()]
    for row in rows:
        row["labels"][1:] = -100

    def copy(model, batch):
        return batch["input_ids"] + (batch["labels"] == -100), batch["labels"]

    assert evaluate_batches(make_model("bert"), rows, Metric("accuracy"), collate=pad, predict=copy, progress=False) == {
        "accuracy": 1.0
    }


def test_nothing_to_evaluate(make_model):
    """An empty data set is an error, and a model that fails is left in its mode."""
    model = make_model("bert").train()
    with pytest.raises(PosswapError, match="empty"):
        evaluate_batches(model, [], Metric("accuracy"))
    with pytest.raises(KeyError):
        evaluate_batches(model, [{"input_ids": torch.tensor([1, 2])}], Metric("accuracy"), progress=False)
    assert model.training
