"""Which examples a step sees, and padded batches."""

import torch

from hf_posswap.training.batching import (
    BatchOrder,
    count_terms,
)


def test_order_is_a_new_shuffle_every_epoch():
    """Each epoch holds each example at most once; seed and epoch change the order; a step can be looked up on its own."""
    order = BatchOrder(22, 4, seed=0)
    epochs = [[order[step] for step in range(5 * epoch, 5 * epoch + 5)] for epoch in range(2)]
    for epoch in epochs:
        assert len(set(sum(epoch, []))) == 20
    assert epochs[0] != epochs[1]
    assert BatchOrder(22, 4, seed=0)[7] == epochs[1][2]
    assert BatchOrder(22, 4, seed=5)[0] != epochs[0][0]


def test_terms_of_a_loss():
    """A batch counts by its labelled tokens, else by its examples, else by its tokens."""
    tokens = torch.ones(2, 5, dtype=torch.long)
    assert count_terms({"input_ids": tokens, "labels": torch.tensor([0, 1])}, shifted=True) == 2
    assert count_terms({"input_ids": tokens}, shifted=True) == 10
    assert count_terms({"input_ids": tokens, "attention_mask": tokens.triu()}, shifted=False) == 9
