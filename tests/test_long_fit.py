"""Fits on text longer than the original reads, and the windows that it reads it through, against a naive loop."""

import copy
import json
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import refused
from test_fitting import quick
from transformers import BertLMHeadModel, BertModel

import hf_posswap as posswap
from hf_posswap.contract.subject import tiny_model
from hf_posswap.data.calibration import TextBatches
from hf_posswap.fitting import layerwise, teacher
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.fitting.teacher import Teacher
from hf_posswap.measure.damage import kl_divergence, pooled_states
from hf_posswap.measure.reading import LongText
from hf_posswap.measure.windows import lay_windows
from hf_posswap.target import find_target

WINDOW, LONG = 32, 96  # tokens; the tiny models read 32


@torch.no_grad()
def written(model, rows: int, length: int = LONG, seed: int = 0) -> torch.Tensor:
    """Text by the original behind its window, so that no model predicts it better; random tokens for an encoder."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 98, (rows, length), generator=generator)
    if isinstance(model, BertModel):
        return ids
    for place in range(1, length):
        start = max(0, -(-(place - WINDOW) // (WINDOW // 4)) * (WINDOW // 4))
        chances = model(ids[:, start:place]).logits[:, -1].softmax(-1)
        ids[:, place] = torch.multinomial(chances, 1, generator=generator)[:, 0]
    return ids


def beyond(reading: dict[str, float]) -> float:
    values = [value for key, value in reading.items() if key not in ("0-31", "32")]
    assert values
    return sum(values) / len(values)


@torch.no_grad()
def distance(model, original, ids: torch.Tensor) -> float:
    """1 - cosine of each token's last state with the original's in its window, past the trained length."""
    wanted = torch.empty(*ids.shape, 32)
    causal = not isinstance(original, BertModel)
    windows = lay_windows(torch.ones_like(ids, dtype=torch.bool), WINDOW, WINDOW // 4, causal=causal)
    windows.put(original.base_model(**windows.cut({"input_ids": ids})).last_hidden_state, wanted)
    got = model.base_model(ids).last_hidden_state
    return 1 - torch.cosine_similarity(got, wanted, dim=-1)[:, WINDOW:].mean().item()


KINDS = {"gpt2": ("gpt2", None), "bert-decoder": ("bert-decoder", None), "bert": ("bert", BertModel)}


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    """An original, and text in three parts of the length that it reads and of three times that."""
    family, head = KINDS[request.param]
    model = tiny_model(family, "sdpa", head=head)
    with torch.no_grad():  # as in trained models, a token's place says less than the token
        owner, name = find_target(model)[1].table_owner(model.base_model)
        getattr(owner, name).weight.mul_(0.3)
    sizes = ((60, 0), (10, 1), (10, 2))
    return model, TextBatches(*([rows[:, :WINDOW], rows] for rows in (written(model, n, seed=s) for n, s in sizes)))


def longer(model, scheme: str):
    """A swapped copy that reads four times what the original does."""
    return posswap.swap(copy.deepcopy(model), scheme, max_positions=128)


def test_it_reads_on(pair, monkeypatch):
    """Beyond its length the model comes nearer the original than by a fit at the length, or with wrong targets."""
    original, text = pair
    scheme = "rotary" if original.config.model_type == "gpt2" else "relative:clip=4"
    long = longer(original, scheme)
    report = quick(long, text, steps=40)
    reading = report.reading
    assert (report.window, report.part, report.longest, report.trained_positions) == (WINDOW, "report", LONG, WINDOW)
    assert report.tokens_held_out == 10 * (WINDOW + LONG) and len(report.layers) == 2
    if isinstance(original, BertModel):
        assert reading.measure == "1 - cosine" and list(reading.after) == ["32", "96"] and reading.original == {}
        assert "the first table is of the first 32 tokens of each text" in " ".join(str(report).split())
        assert "1 - cosine at lengths up to" in str(report)  # a batch with padding has shorter ones
    else:
        assert reading.measure == "loss" and list(reading.after) == ["0-31", "32-63", "64-95"]
        assert reading.original.keys() == reading.after.keys() and beyond(reading.original) < beyond(reading.after)
    printed = str(report)
    assert all(f"{value:.4f}" in printed for one in (reading.original, reading.before, reading.after) for value in one.values())
    json.dumps(vars(reading))
    if isinstance(original, BertLMHeadModel):  # what follows is about fits, which the other two stand for
        return

    # At the length alone: read by the same judge.
    short = longer(original, scheme)
    cut = TextBatches([text[1][:, start : start + WINDOW] for start in (0, 32, 64)], [text.select[0]])
    other = quick(short, cut, steps=40)
    assert other.window is None and other.reading is None and other.part == "select" and str(other)
    masked = [{"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)} for ids in text.report]
    judged = LongText(posswap.original(short), short.architecture, masked, WINDOW).read(short)
    assert beyond(reading.after) < min(beyond(reading.before), beyond(judged))

    # Tokens from other places of their windows.
    advance = teacher.Teacher.advance

    def shifted(self, indices):
        advance(self, indices)
        for i, windowed in enumerate(self.parts):
            if windowed[0][1] is not None:
                self.states.write("said-0", i, self.said(0, i).roll(WINDOW // 2, dims=1))

    monkeypatch.setattr(teacher.Teacher, "advance", shifted)
    broken, before = longer(original, scheme), longer(original, scheme)
    quick(broken, TextBatches(text[1:], text.select[1:], text.report[1:]), steps=40)
    found = [distance(one, original, text.report[1]) for one in (long, short, before, broken)]
    assert found[0] < min(found[1:3]) and found[0] < 0.95 * found[3]


def test_memory_and_files(pair, monkeypatch, tmp_path, watch):
    """On disk are the states of the current layer, four times the tokens for windows; no call reads more than it may. What is
    kept is told by the part to select by; what is reported is another part, whatever it says.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(teacher, "_TOKENS_AT_ONCE", 128)
    original, text = pair
    parts = [[text[1]], text.select[1:], text.report[1:]]
    sizes, inner, calls = [], layerwise.Walk.fit_layers, watch(teacher.States, "_call")
    compared = watch(layerwise.Walk, "_compare")

    def watched(self, *args):
        done = inner(self, *args)
        sizes.append(sum(path.stat().st_size for path in Path(self.ours.folder).iterdir()))
        return done

    monkeypatch.setattr(layerwise.Walk, "fit_layers", watched)
    quick(longer(original, "relative:clip=4"), TextBatches(*parts), steps=2)
    tokens, windows = 70 * LONG, 70 * 9 * WINDOW  # windows at 0, 8, ... 64
    opened = 60 * WINDOW  # what the closed form looks at, in both models
    states = 4 * 32 * (2 * tokens + windows + 3 * opened)
    assert len(sizes) == 2 and all(states < size < 1.1 * states for size in sizes)
    read = [one.args[0].batches[one.args[1]]["input_ids"].shape for one in calls if one.args[0].name == "original"]
    assert max(rows * length for rows, length in read if rows > 4) <= 60 * WINDOW
    assert all(length <= WINDOW for _, length in read)
    assert list(tmp_path.iterdir()) == []
    seen = [walk.batches[i]["input_ids"] for walk, _, i in (call.args for call in compared)]
    looked = {tuple(row.tolist()) for ids in seen for row in ids}
    rows = [{tuple(row.tolist()) for ids in part for row in ids} for part in parts]
    assert rows[0] & looked and rows[1] <= looked and not rows[2] & looked


def test_windows_and_scores(pair, monkeypatch):
    """The window that is asked for is the one that is read through, also where the original reads more; an undone fit is judged
    by the last error before it, a kept one by that after it.
    """
    original, text = pair
    kept = quick(longer(original, "rotary"), text, window=16, steps=5)
    assert kept.window == kept.reading.window == 16 and set(kept.after.by_length) == {16}
    assert ("0-15" in kept.reading.after) == (kept.reading.measure == "loss")
    assert kept.score == kept.layers[-1].after
    monkeypatch.setattr(layerwise.Walk, "error_unfitted", property(lambda walk: 0.01, lambda walk, value: None), raising=False)
    with pytest.warns(UserWarning, match="was undone"):
        undone = quick(longer(original, "rotary"), text, steps=5)
    assert undone.score == 0.01 < undone.layers[-1].after


BAD = {
    "more than it reads": ({"window": 33}, "window=33 must be a number of tokens from 4 to 32"),
    "no number": ({"window": 8.0}, "number of tokens from 4"),
    "too small": ({"window": 3}, "number of tokens from 4"),
    "nothing longer": ({"window": 32, "batches": torch.arange(1920).view(60, 32) % 99}, "no batch is longer.*leave window out"),
    "longer than the model": ({"batches": torch.ones(9, 129).long()}, "cut the batches, or swap with max_positions=129"),
    "no text to select by": ({"batches": TextBatches([torch.ones(60, 96, dtype=torch.long)])}, "no batches"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_windows(make_model, name):
    options, says = BAD[name]
    model = posswap.swap(make_model("gpt2"), "rotary", max_positions=128)
    refused(says, quick, model, **{"batches": torch.ones(60, 96, dtype=torch.long), **options})


def test_far_beyond_the_fit(make_model, tmp_path):
    """A model knows what it was fitted to, also once it is loaded, and says so when it reads far beyond."""
    model = posswap.swap(make_model("gpt2"), "rotary", max_positions=300)
    quick(model, torch.randint(2, 98, (60, WINDOW)), steps=2)
    model.save_pretrained(tmp_path)
    loaded, beyond = type(model).from_pretrained(tmp_path), torch.ones(1, 301, dtype=torch.long)
    remedy = "max_positions=301\\){}, or truncate"  # where the original is kept, a swap starts from it
    refused(remedy.format(", which starts from the original, and fit it again"), model, beyond)
    refused(remedy.format(""), loaded, beyond)
    loaded(torch.ones(1, 8 * WINDOW, dtype=torch.long))
    with pytest.warns(UserWarning, match=f"fitted to texts of at most {WINDOW} tokens"):
        loaded(torch.ones(1, 8 * WINDOW + 1, dtype=torch.long))
    posswap.swap(loaded, "rotary", max_positions=400)  # longer, as it was fitted
    with pytest.warns(UserWarning, match=f"fitted to texts of at most {WINDOW} tokens"):
        loaded(torch.ones(1, 8 * WINDOW + 1, dtype=torch.long))
    for wrong in ("long", True, 0):
        loaded.config.position_scheme["fitted_length"] = wrong
        loaded.config.save_pretrained(tmp_path)
        refused(f"fitted_length={wrong!r}", type(model).from_pretrained, tmp_path, error=posswap.CheckpointError)


WIDTH, STRIDE = 8, 2


def masks() -> torch.Tensor:
    """Four sequences: whole, padded, shorter than a window, with a hole."""
    mask = torch.ones(4, 21, dtype=torch.bool)
    mask[1, 15:] = mask[2, 5:] = mask[3, 9] = False
    return mask


def starts_of(real: list[bool]) -> list[int]:
    end = max(place for place, one in enumerate(real) if one) + 1
    return sorted({*range(0, end - WIDTH, STRIDE), end - WIDTH}) if end > WIDTH else [0]


def naive(mask: torch.Tensor, causal: bool) -> dict[tuple[int, int], int]:
    """Where the window starts that each token of each sequence is taken from."""
    found = {}
    for row, real in enumerate(mask.tolist()):
        for token in (place for place, one in enumerate(real) if one):
            holding = [start for start in starts_of(real) if start <= token < start + WIDTH]
            middle = min(holding, key=lambda start: abs(token - start - (WIDTH - 1) / 2))
            found[row, token] = holding[0] if causal else middle
    return found


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_a_teacher_says(make_model, family, tmp_path, monkeypatch):
    """Its states are the original's in each token's window; an encoder's less their mean at each place of the fitted text."""
    monkeypatch.setattr("hf_posswap.fitting.teacher._TOKENS_AT_ONCE", 3 * WIDTH)  # windows come in parts
    model, mask = make_model(family), masks()
    ids = torch.randint(2, 98, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    short = {"input_ids": ids[:2, :6], "attention_mask": mask[:2, :6]}
    batches = [{"input_ids": ids, "attention_mask": mask}, short, {"input_ids": ids.flip(0), "attention_mask": mask}]
    teacher = Teacher(model, find_target(model)[1], batches, range(2), tmp_path, WIDTH)
    taken = naive(mask, causal=family == "gpt2")
    edges = {(row, int(place)) for row, real in enumerate(mask) for place in real.nonzero()[[0, -1], 0]}
    for index in range(2):
        teacher.advance(range(index, index + 1))
        outs = {}  # of each window of each sequence
        for row, real in enumerate(mask):
            for start in starts_of(real.tolist()):
                given = {key: value[row : row + 1, start : start + WIDTH] for key, value in batches[0].items()}
                outs[row, start] = model.base_model(**given, output_hidden_states=True).hidden_states[index + 1][0]
        said, short_said = teacher.said(0, 0), teacher.said(0, 1)
        if family == "gpt2" and index == 1:  # whose last hidden state has gone through its last norm
            said, short_said = model.transformer.ln_f(said), model.transformer.ln_f(short_said)
        whole = model.base_model(**short, output_hidden_states=True).hidden_states[index + 1]
        torch.testing.assert_close(short_said[short["attention_mask"]], whole[short["attention_mask"]], rtol=1e-4, atol=1e-5)
        traces = torch.zeros(WIDTH, 1)
        if family == "bert":
            inner = mask.clone()
            inner[tuple(zip(*edges, strict=True))] = False
            at = [[out[k] for (row, start), out in outs.items() if inner[row, start + k]] for k in range(WIDTH)]
            means = torch.stack([torch.stack(some).mean(0) for some in at])
            traces = means - means.mean(0)
        for (row, token), start in taken.items():
            wanted = outs[row, start][token - start] - (0 if (row, token) in edges else traces[token - start])
            torch.testing.assert_close(said[row, token], wanted, rtol=1e-4, atol=1e-4)
        teacher.states.move_on()
    assert len(edges) == 8
    if family == "bert":
        (pooled,) = LongText(model, find_target(model)[1], batches[:1], WIDTH).pooled
        for row, mean in enumerate(pooled):
            own = [outs[number, start][token - start] for (number, token), start in taken.items() if number == row]
            torch.testing.assert_close(mean, torch.stack(own).mean(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_its_card(make_model, family, tmp_path):
    """The card has the report's table of text longer than the original reads, and says what its others are of."""
    model = posswap.swap(make_model(family), "rotary", max_positions=64)
    report = posswap.fit(model, torch.randint(2, 98, (60, 64)), steps=5, progress=False)
    model.save_pretrained(tmp_path), report.save(tmp_path)
    text = posswap.write_card(tmp_path, base_model="local:tiny").read_text()
    assert "The figures above are of the first 32 tokens of each text" in text
    for name in report.reading.after:
        kinds = [report.reading.original] if family == "gpt2" else []
        values = [f"{kind[name]:.4f}" for kind in (*kinds, report.reading.before, report.reading.after)]
        assert f"{name}{' tokens' * (family == 'bert')} | {' | '.join(values)} |\n" in text
    copy.deepcopy(model).half().save_pretrained(tmp_path, variant="fp16")  # beside what was fitted
    posswap.write_card(tmp_path, base_model="local:tiny"), report.save(tmp_path)
    for spoil in (lambda file: file.write_text('{"model_type": "roformer"}'), Path.unlink):
        spoil(tmp_path / "config.json")
        refused("holds no swapped model", report.save, tmp_path, error=posswap.CheckpointError)


ASKED = [("bert", None, None), ("bert", BertModel, 16), ("bert-decoder", None, 16)]


@pytest.mark.parametrize(("family", "head", "window"), ASKED)
def test_models_that_return_tuples(make_model, tokens, family, head, window):
    """A model with `return_dict=False` in its config is measured like any other, at a length and through a window."""
    model = posswap.swap(make_model(family, head=head, return_dict=False), "rotary:mark_first=false")
    assert quick(model, steps=1, window=window).before.total > 0
    original = posswap.original(model)
    assert distillation_loss(original)(model, {"input_ids": tokens}) > 0
    assert head or kl_divergence(model, original, tokens) > 0
    assert (pooled_states(model, tokens) - pooled_states(original, tokens)).abs().max() > 1e-3
    assert posswap.export_native(model).certificate
