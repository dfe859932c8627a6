"""Inputs that a swapped model cannot take get an error that names the length, the maximum and the remedy."""

import pytest
import torch

import hf_posswap as posswap


@pytest.mark.parametrize("backend", ["eager"])
def test_too_long_input(model, family, case):
    """An input beyond the last position says its length, the maximum and the remedy; one that just fits runs."""
    limit = case.max_positions or 32
    model(torch.full((1, limit), 5))
    too_long = f"reaches {limit + 1} positions.*set up for {limit}.*posswap.swap.*max_positions={limit + 1}.*truncate"
    tokens = torch.full((1, limit + 1), 5)
    for inputs in (
        {"input_ids": tokens},
        {"inputs_embeds": model.get_input_embeddings()(tokens)},
        {"input_ids": tokens[:, :4], "position_ids": torch.tensor([[0, 1, 2, limit]])},
    ):
        with pytest.raises(posswap.PosswapError, match=too_long):
            model(**inputs)
    with pytest.raises(posswap.PosswapError, match="must not be negative, the smallest is -1"):
        model(tokens[:, :4], position_ids=torch.tensor([[0, 1, 2, -1]]))


def test_no_input_and_two_inputs(make_swapped, family):
    """No tokens, or tokens and embeddings at once, get the family's own error."""
    model = make_swapped(family, "rotary")
    for inputs in ({}, {"input_ids": torch.ones(1, 3).long(), "inputs_embeds": torch.ones(1, 3, 32)}):
        with pytest.raises(ValueError, match="input_ids"):
            model(**inputs)
