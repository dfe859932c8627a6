"""What a fit is measured and told with: damage, the report, text at hand, memory; and layers that are one module."""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from conftest import changes, refused, snapshot
from test_fitting import batch as padded
from test_fitting import quick, text
from torch import nn
from torch.nn import functional
from transformers import BertForPreTraining, BertForTokenClassification, BertModel, GPT2DoubleHeadsModel, GPT2Model

import hf_posswap as posswap
from hf_posswap.contract.subject import tiny_model
from hf_posswap.data import calibration
from hf_posswap.fitting import layerwise
from hf_posswap.fitting.fit import fit
from hf_posswap.fitting.layerwise import _stages
from hf_posswap.measure.attention_distance import attention_by_distance
from hf_posswap.measure.damage import damage


@pytest.fixture(params=[("bert", None), ("bert", BertModel), ("gpt2", None), ("gpt2", GPT2Model), ("opt", None)], ids=str)
def pair(request, make_model):
    """A model that nothing has been done to, and one whose attention is another."""
    family, head = request.param
    options = {"word_embed_proj_dim": 32, "do_layer_norm_before": True} if family == "opt" else {}
    models = [make_model(family, head=head, **options) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return models


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
def test_the_side_of_padding_does_not_matter(make_model, family):
    """A text is read from its first token, whether padding stands before or behind it."""
    ids, reports = text(60, 22), []
    for side in ((8, 0), (0, 8)):
        ids_padded = functional.pad(ids, side)
        batch = {"input_ids": ids_padded, "attention_mask": (ids_padded > 0).long()}
        reports.append(quick(posswap.swap(make_model(family), "alibi"), batch, steps=2))
    assert reports[0].after == reports[1].after and reports[0].longest == 22


def test_errors_of_half_precision(make_model):
    """Sums of squares over many tokens are no float16: errors are numbers, and a fit makes them smaller."""
    report = quick(posswap.swap(make_model("gpt2", n_embd=64).half(), "rotary"), text(1100), steps=2)
    assert all(0 < one.after < one.before for one in report.layers)


def test_a_token_alone(make_model):
    """It has no spread to divide errors by, and spoils no step of a fit on other text."""
    report = fit(posswap.swap(make_model("gpt2"), "rotary"), [text(1100), torch.tensor([[5]])], steps=20, progress=False)
    assert all(one.reconstructed for one in report.layers)


def test_copies_with_other_padding(make_model):
    """A text that is held out is left out of the fit, however its batches are padded."""
    ids = text(20, 12)
    wider = functional.pad(ids.roll(5, 0), (0, 8))
    wide = {"input_ids": torch.cat([wider, text(1, 20, 7)]), "attention_mask": torch.cat([wider > 0, torch.ones(1, 20) > 0])}
    fitted, held = (
        {tuple(row[row > 0].tolist()) for one in part for row in one["input_ids"]}
        for part in calibration.split_batches(calibration.check_batches([ids, wide], make_model("bert"), 32))
    )
    assert len(held) > 2 and not fitted & held


@pytest.mark.parametrize("side", ["left", "right"])
def test_damage_is_a_naive_loop(pair, side):
    """Damage is what a loop over rows, read alone, and tokens finds, for both measures; modes of single modules stay."""
    batch = padded(side)
    rows = [ids[kept > 0] for ids, kept in zip(*batch.values(), strict=True)] + list(text(5, 12))
    pair[1].train().base_model.get_input_embeddings().eval()
    modes = [[module.training for module in one.modules()] for one in pair]
    found = damage(pair[1], pair[0], iter([batch, text(5, 12)]))
    assert modes == [[module.training for module in one.modules()] for one in pair]
    head = pair[0].get_output_embeddings() is not None
    single, lengths, layers = defaultdict(list), defaultdict(list), [[], []]
    for ids in rows:
        with torch.no_grad():
            outs = [one.eval()(ids[None], output_hidden_states=True) for one in pair]
        states = [torch.cat(out.hidden_states[1:]) for out in outs]  # (layers, L, E)
        for own, one in zip(layers, states, strict=True):
            own.append(functional.layer_norm(one, one.shape[-1:]))
        if head:
            target, other = (out.logits[0].log_softmax(-1) for out in outs)
            costs = functional.kl_div(other, target, log_target=True, reduction="none").sum(-1)
        else:
            costs = 1 - torch.cosine_similarity(*(one[-1] for one in states), dim=-1)
            pooled = 1 - torch.cosine_similarity(*(one[-1].mean(0) for one in states), dim=0)
        lengths[len(ids)] += costs.tolist() if head else [pooled.item()]
        for place, cost in enumerate(costs.tolist()):
            single["0" if place == 0 else "1-7" if place < 8 else "8-31"].append(cost)
    assert found.measure == ("KL" if head else "1 - cosine") and found.total > 1e-3
    assert found.total == pytest.approx(fmean(value for values in lengths.values() for value in values), rel=1e-4, abs=1e-6)
    for got, wanted in ((found.by_position, single), (found.by_length, lengths)):
        assert got == pytest.approx({name: fmean(values) for name, values in wanted.items()}, rel=1e-3, abs=1e-6)
    errors = []
    for target, other in zip(*(torch.cat(one, dim=1) for one in layers), strict=True):
        errors.append(float((other - target).pow(2).sum() / (target - target.mean(0)).pow(2).sum()))
    assert found.by_layer == pytest.approx(errors, rel=0.05)  # the spread is taken about each batch's own mean


def test_own_text(make_model, monkeypatch, capsys):
    """Without batches a causal model writes, an encoder gets random tokens; without a head, or a way to write, an error."""
    for name in ("written_text", "random_tokens"):
        function = getattr(calibration, name)
        monkeypatch.setattr(calibration, name, lambda model, _f=function, **o: _f(model, **{"tokens": 2500} | o))
    reports = []
    for family in ("gpt2", "bert-decoder", "bert"):
        model = posswap.swap(make_model(family), "relative:clip=4")
        state = torch.get_rng_state()
        reports.append(fit(model, steps=10, learning_rate=3e-3, progress=family == "gpt2"))
        shown = capsys.readouterr().err  # what takes long is not silent
        words = ("making text", "measuring", "22/22")
        assert all(word in shown for word in words) if family == "gpt2" else not shown
        assert torch.equal(torch.get_rng_state(), state)
    assert [report.text for report in reports] == ["written by the model"] * 2 + ["random tokens"]
    assert set(reports[0].after.by_length) == {32} and set(reports[2].after.by_length) == {16, 32}
    for family, head in (("gpt2", GPT2Model), ("bert-decoder", type(make_model("bert")))):
        refused("pass batches", fit, posswap.swap(make_model(family, head=head), "relative:clip=4"), progress=False)
    longer, teacher = posswap.swap(make_model("gpt2"), "rotary"), make_model("gpt2", n_positions=40)
    teacher.set_input_embeddings(longer.get_input_embeddings())  # of one model, as far as can be seen
    report = fit(longer, original_model=teacher, steps=20, progress=False)
    assert set(report.after.by_length) == {32}
    model = make_model("gpt2")
    plain, settings = calibration.written_text(model, tokens=200), model.generation_config
    settings.num_beams, settings.max_new_tokens, settings.repetition_penalty = 3, 4, 9.0
    assert plain.shape == (6, 32) and torch.equal(calibration.written_text(model, tokens=200), plain)
    assert model.generation_config is settings
    assert not torch.equal(calibration.written_text(model, tokens=200, seed=1), plain)
    model.config.bos_token_id = 50256  # GPT2Config's default, which small vocabularies do not have
    assert calibration.written_text(model, tokens=64).max() < model.config.vocab_size


KINDS = {
    "pretraining": ("bert", {"head": BertForPreTraining}, "KL"),
    "token classes": ("bert", {"head": BertForTokenClassification}, "1 - cosine"),
    "headless": ("gpt2", {"head": GPT2Model}, "1 - cosine"),
    "two heads": ("gpt2", {"head": GPT2DoubleHeadsModel}, "KL"),
    "cross-attention": ("bert-decoder", {"add_cross_attention": True}, "KL"),
    "scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "KL"),
    "upcast": ("gpt2", {"reorder_and_upcast_attn": True}, "KL"),
    "dropout": ("gpt2", {"attn_pdrop": 0.5, "resid_pdrop": 0.5}, "KL"),
}


@pytest.mark.parametrize(
    ("name", "scheme"), [(name, ("relative:clip=4", "rotary")[turn % 2]) for turn, name in enumerate(KINDS)]
)
def test_kinds(make_model, name, scheme):
    """A fit helps models with heads and settings of all kinds, in training mode with checkpointed activations."""
    family, options, measure = KINDS[name]
    model = posswap.swap(make_model(family, "eager", **options), scheme).train()
    model.base_model.gradient_checkpointing = True
    ids = text()
    given = {"input_ids": ids, "token_type_ids": (ids > 50).long()} if family == "bert" else ids
    report = quick(model, given, steps=20)
    assert report.after.measure == measure and report.after.total < report.before.total


@pytest.mark.parametrize(
    ("family", "scheme"), [("bert", "relative:clip=4"), ("bert-decoder", "rotary"), ("gpt2", "relative:clip=4")]
)
def test_what_stands_under_padding_does_not_matter(make_model, family, scheme, monkeypatch):
    """Neither as queries nor as keys do masked tokens leave a trace in a fit, nor in the closed form that it starts from."""
    models = [posswap.swap(make_model(family).double(), scheme) for _ in range(2)]
    mask = padded("right", rows=60)["attention_mask"]
    before, evidence, inner = models[0](text()).logits, [], layerwise.Walk._evidence

    def watched(self, *args):
        for one in inner(self, *args):
            evidence.append(one.tokens(one.query).sum(1))
            yield one

    monkeypatch.setattr(layerwise.Walk, "_evidence", watched)
    for model, filling in zip(models, (0, 7), strict=True):
        quick(model, {"input_ids": torch.where(mask.bool(), text(60), filling), "attention_mask": mask})
    found = [model(text()).logits for model in models]
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    half = len(evidence) // 2
    assert half >= 4 and not torch.equal(found[0], before)
    torch.testing.assert_close(evidence[:half], evidence[half:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [[40], [1] * 40, [2] * 20, [7, 33], [39, 1]], ids=str)
def test_a_tenth_is_held_out(make_model, rows):
    """However sequences come in batches, every tenth of a length is held out, and none is lost."""
    parts = [*text().split(rows), text(3, 9), text(1, 5)]
    both = calibration.split_batches(calibration.check_batches(parts, make_model("bert"), 32))
    fitted, held = (calibration.few_tokens(part, 100) for part in both)
    ids = [[row.tolist() for one in part for row in one["input_ids"]] for part in (fitted, held)]
    assert sorted(ids[0] + ids[1]) == sorted(row.tolist() for part in parts for row in part)
    assert [row for row in ids[1] if len(row) == 20] == text()[9::10].tolist()
    assert [len(row) for row in ids[1]].count(9) == 1 and max(one["input_ids"].numel() for one in fitted) <= 100


def test_states_that_overflow(make_model):
    """Weights that are finite, and states that are not: there is no telling whether a fit wins."""
    model = make_model("bert")
    model.bert.encoder.layer[1].output.dense.weight.data.fill_(3e38)
    refused("states of the model are NaN", quick, posswap.swap(model, "rotary"))


def test_report(make_model, capsys):
    """Figures are of held-out text, without padding; all is printed, and a verdict names short text and damage that grew."""
    model = posswap.swap(make_model("gpt2"), "relative:clip=4")
    report = quick(model, [padded("right"), text(10, 12)])
    assert capsys.readouterr() == ("", "")
    assert (report.tokens, report.tokens_held_out) == (36 * 20 - 12 * 5 + 108, 20 + 15 + 20 * 2 - 5 * 1 + 12 + 5 - 5)
    assert set(report.after.by_length) <= {12, 15, 20} and len(report.layers) == 2 and report.text == "given"
    for layer in report.layers:
        assert layer.solved is not None and layer.kept == (layer.solved < layer.before) and layer.after < layer.before
    printed = str(report)
    for one in (report.before, report.after):
        for value in (one.total, *one.by_layer, *one.by_length.values(), *one.by_position.values()):
            assert f"{value:.4f}" in printed
    assert all(f"{value:.4f}" in printed for layer in report.layers for value in (layer.before, layer.solved, layer.after))
    assert "given" in printed and f"{report.tokens:,}" in printed and "the fit won back" in printed
    assert (report.longest, report.trained_positions, report.score) == (20, 32, report.after.total)
    short = "no sequence was longer than 20 tokens, and the original reads 32"
    assert short in printed and short not in str(replace(report, longest=32))
    assert " ".join(printed.split()).endswith("more steps win more, and so may training the whole model")
    worse = replace(report, after=replace(report.after, total=report.before.total + 0.1))
    for one, told in ((worse, "the text to select by"), (replace(worse, window=32), "the last layer's error")):
        said = " ".join(str(one).split())
        assert f"{told} " in said and "though the damage in the first table grew" in said and "won back" not in said


TEXT = text(60)


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
    report = quick(model, text)
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
    found = attention_by_distance(model, TEXT.split(30), reach=19)
    model.set_attn_implementation("eager")
    attentions = model(TEXT, output_attentions=True).attentions
    wanted = torch.stack([torch.stack([a.diagonal(k, -2, -1).sum(-1) for k in range(-19, 20)], -1) for a in attentions])
    torch.testing.assert_close(found, wanted.sum(1) / TEXT.numel())
    states = [
        [functional.layer_norm(layer, (32,)) for layer in one.albert(TEXT, output_hidden_states=True).hidden_states[1:]]
        for one in (model, other)
    ]
    errors = [float((s - t).pow(2).sum() / (t - t.mean((0, 1))).pow(2).sum()) for t, s in zip(*states, strict=True)]
    assert damage(other, model, TEXT).by_layer == pytest.approx(errors, rel=1e-3)
    longer = posswap.swap(other, "rotary", max_positions=64)
    refused("exceeds the positions for 32: cut the batches", damage, longer, model, text(2, 40))
