"""Evaluation on one process; test_distributed.py has two."""

import pytest
import torch
from transformers import BertForSequenceClassification

from hf_posswap import PosswapError
from hf_posswap.training.evaluation import predict


def test_logits_of_all_rows(make_model):
    """Logits are those of each row by itself, in the order of rows; the model's mode comes back, no gradient is kept."""
    model = make_model("bert", head=BertForSequenceClassification, num_labels=2).train()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (21,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(2, 98, (length,), generator=generator)} for length in lengths]
    found = predict(model, rows, 0, 4)
    assert model.training and not found.requires_grad
    model.eval()
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row["input_ids"][None]).logits for row in rows])
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)


def test_nothing_to_evaluate(make_model):
    """An empty data set is an error, and a model that fails is left in its mode."""
    model = make_model("bert").train()
    with pytest.raises(PosswapError, match="empty"):
        predict(model, [], 0, 4)
    with pytest.raises(IndexError):
        predict(model, [{"input_ids": torch.tensor([1, 2_000_000])}], 0, 4)
    assert model.training
