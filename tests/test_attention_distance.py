"""attention_by_distance against the probabilities that eager attention returns."""

import pytest
import torch
from conftest import KINDS

from hf_posswap.measure import attention_by_distance


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.only(cases=KINDS)
def test_against_eager_probabilities(model, family, backend, tokens, side):
    """Attention by distance is what a loop over eager probabilities finds, without padding, for every scheme and family."""
    mask = torch.ones_like(tokens)
    if side is not None:
        mask[1, :6] = 0
        mask[1] = mask[1] if side == "left" else mask[1].flip(0)
    model.train()
    found = attention_by_distance(model, [{"input_ids": tokens, "attention_mask": mask}], reach=5)
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


def test_batches_of_several_lengths(make_model, tokens):
    """Queries count alike wherever they stand: two batches give the mean weighted by tokens."""
    model = make_model("bert")
    parts = [{"input_ids": tokens}, {"input_ids": tokens[:, :7]}]
    each = [attention_by_distance(model, [part], reach=4) for part in parts]
    together = attention_by_distance(model, parts, reach=4)
    assert torch.allclose(together, (each[0] * 40 + each[1] * 14) / 54, atol=1e-6)
    assert not any(module._forward_pre_hooks for module in model.modules())
