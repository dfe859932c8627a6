"""Layers that are one module, as in ALBERT: they are fitted together, and counted, watched and measured one by one."""

import pytest
import torch
from conftest import changes, snapshot
from torch import nn
from torch.nn import functional

import hf_posswap as posswap
from hf_posswap.contract.subject import tiny_model
from hf_posswap.fitting.fit import fit
from hf_posswap.fitting.layerwise import _stages
from hf_posswap.measure.attention_distance import attention_by_distance
from hf_posswap.measure.damage import damage

TEXT = torch.randint(2, 98, (60, 20), generator=torch.Generator().manual_seed(0))


def make(**sizes):
    """A tiny ALBERT; with larger weights, tokens would become one another when a layer runs again and again."""
    return tiny_model("albert", "sdpa", initializer_range=0.1, **sizes)


def test_stages():
    """The shortest runs of layers that share no module with others."""
    modules = {name: nn.Identity() for name in "abcd"}
    for layers, lengths in (("abcd", [1, 1, 1, 1]), ("aaabb", [3, 2]), ("ababcdcd", [4, 4]), ("abac", [3, 1]), ("a", [1])):
        stages = _stages([modules[name] for name in layers])
        assert [len(stage) for stage in stages] == lengths and [i for one in stages for i in one] == list(range(len(layers)))


@pytest.mark.parametrize(
    ("scheme", "sizes", "long"),
    [
        ("relative:clip=4", {"num_hidden_layers": 4}, {}),
        ("rotary", {"num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2}, {}),
        ("rotary", {"num_hidden_layers": 3}, {"span": 12}),
    ],
)
def test_a_fit_wins_at_every_depth(scheme, sizes, long):
    """Less error in every layer than after the swap, on other text; the report has all layers, and restore undoes it."""
    model = make(**sizes)
    plain, depth = snapshot(model), sizes["num_hidden_layers"] * sizes.get("inner_group_num", 1)
    posswap.swap(model, scheme, max_positions=64, **long)
    found = posswap.describe(model)
    assert (found.layers, found.layers_patched) == (depth, depth)
    text = torch.cat([TEXT, TEXT.flip(1), TEXT.flip(0)], dim=1) if long else TEXT
    report = fit(model, text, reconstruct=20, learning_rate=3e-3, progress=False)
    assert [layer.layer for layer in report.layers] == list(range(depth)) and str(report)
    assert all(layer.after < layer.before for layer in report.layers)
    wins = [after < before for before, after in zip(report.before.by_layer, report.after.by_layer, strict=True)]
    assert len(wins) == depth and all(wins) and report.after.total < report.before.total
    assert (report.window, report.longest) == ((32, 60) if long else (None, 20))
    posswap.restore(model)
    assert {name for _, name in changes(model, plain)} == set()


@torch.no_grad()
def test_measures_by_layer():
    """Attention by distance and damage count a layer that runs again as another, as transformers' own outputs do."""
    model, other = make(num_hidden_layers=3), make(num_hidden_layers=3, seed=1)
    batches = [{"input_ids": rows} for rows in TEXT.split(30)]
    found = attention_by_distance(model, batches, reach=19)
    model.set_attn_implementation("eager")
    attentions = model(TEXT, output_attentions=True).attentions
    wanted = torch.stack([torch.stack([a.diagonal(k, -2, -1).sum(-1) for k in range(-19, 20)], -1) for a in attentions])
    torch.testing.assert_close(found, wanted.sum(1) / TEXT.numel())
    states = [
        [functional.layer_norm(layer, (32,)) for layer in one.albert(TEXT, output_hidden_states=True).hidden_states[1:]]
        for one in (model, other)
    ]
    errors = [float((s - t).pow(2).sum() / (t - t.mean((0, 1))).pow(2).sum()) for t, s in zip(*states, strict=True)]
    assert damage(other, model, batches).by_layer == pytest.approx(errors, rel=1e-3)
