"""Which examples a step sees, and padded batches."""

import torch

from hf_posswap.training.batching import (
    BatchOrder,
    MicroBatches,
    count_terms,
    count_tokens,
    pad,
    predicts_next,
)

LENGTHS = [3, 17, 5, 9, 2, 30, 8, 12, 4, 4, 11, 6, 25, 7, 10, 3, 19, 5, 1, 14]


def _rows(lengths, *, labels=True):
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(2, 98, (length,), generator=generator) for length in lengths]
    return [{"input_ids": row, "labels": row.clone()} if labels else {"input_ids": row} for row in tokens]


def test_order_is_a_new_shuffle_every_epoch():
    """Each epoch holds each example at most once; seed and epoch change the order; a step can be looked up on its own."""
    order = BatchOrder(22, 4, seed=0)
    epochs = [[order[step] for step in range(5 * epoch, 5 * epoch + 5)] for epoch in range(2)]
    for epoch in epochs:
        assert len(set(sum(epoch, []))) == 20
    assert epochs[0] != epochs[1]
    assert BatchOrder(22, 4, seed=0)[7] == epochs[1][2]
    assert BatchOrder(22, 4, seed=5)[0] != epochs[0][0]


def test_parts_of_a_batch_are_the_batch():
    """The micro-batches of a step are its batch in order, whatever their number."""
    order = BatchOrder(22, 4, seed=0)
    for parts in (1, 2, 4):
        sampler = MicroBatches(order, parts, 3, 9)
        found = list(sampler)
        assert len(found) == len(sampler) == 6 * parts
        assert sum(found, []) == sum((order[step] for step in range(3, 9)), [])


def test_batches_of_about_one_length():
    """Sorted by length there is far less padding, the longest example comes first of all, and nothing appears twice."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 200, (404,), generator=generator).tolist()

    def padding(order):
        batches = [order[step] for step in range(50)]
        assert len(set(sum(batches, []))) == 400
        return sum(max(lengths[i] for i in batch) - lengths[j] for batch in batches for j in batch)

    grouped = BatchOrder(404, 8, 0, lengths)
    assert padding(grouped) < 0.1 * padding(BatchOrder(404, 8, 0))
    used = {example for step in range(50) for example in grouped[step]}
    assert lengths[grouped[0][0]] == max(lengths[example] for example in used)
    means = [sum(lengths[i] for i in grouped[step]) for step in range(1, 50)]
    assert means != sorted(means) and means != sorted(means, reverse=True)


def test_padding(make_model):
    """Padded rows compute what they compute alone, and padding counts neither as token nor as label."""
    rows = _rows((7, 3))
    batch = pad(rows, pad_token_id=0)
    assert batch["labels"][1].tolist() == [*rows[1]["labels"].tolist(), *[-100] * 4]
    assert count_tokens(batch) == 10 and count_terms(batch, shifted=False) == 10 and count_terms(batch, shifted=True) == 8
    model = make_model("bert")
    logits = model(**batch).logits
    for row, ours in zip(rows, logits, strict=True):
        theirs = model(input_ids=row["input_ids"][None]).logits[0]
        assert torch.allclose(ours[: len(theirs)], theirs, atol=1e-5)


def test_terms_of_a_loss():
    """A batch counts by its labelled tokens, else by its examples, else by its tokens."""
    tokens = torch.ones(2, 5, dtype=torch.long)
    assert count_terms({"input_ids": tokens, "labels": torch.tensor([0, 1])}, shifted=True) == 2
    assert count_terms({"input_ids": tokens}, shifted=True) == 10
    assert count_terms({"input_ids": tokens, "attention_mask": tokens.triu()}, shifted=False) == 9


def test_heads_that_predict_the_next_token(make_model, make_swapped):
    """Causal heads predict the next token, swapped or not; BERT's masked head does not."""
    assert predicts_next(make_model("gpt2")) and predicts_next(make_swapped("gpt2", "rotary"))
    assert predicts_next(make_model("bert-decoder")) and not predicts_next(make_swapped("bert", "rotary"))
