"""Fits on text longer than the original reads: better beyond its length, no worse within, and what is refused."""

import copy
import json
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import refused
from transformers import BertModel

import hf_posswap as posswap
from hf_posswap.contract.subject import tiny_model
from hf_posswap.data.calibration import TextBatches
from hf_posswap.fitting import layerwise, teacher
from hf_posswap.fitting.fit import fit
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


def quick(model, batches, **options):
    """A fit with few steps, no bar."""
    return fit(model, batches, **{"reconstruct": 40, "learning_rate": 3e-3, "progress": False, **options})


def beyond(reading: dict[str, float]) -> float:
    """The mean of what is past the trained length."""
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
    report = quick(long, text)
    reading = report.reading
    assert (report.window, report.part, report.longest, report.trained_positions) == (WINDOW, "report", LONG, WINDOW)
    assert report.tokens_held_out == 10 * (WINDOW + LONG) and len(report.layers) == 2
    if isinstance(original, BertModel):
        assert reading.measure == "1 - cosine" and list(reading.after) == ["32", "96"] and reading.original == {}
    else:
        assert reading.measure == "loss" and list(reading.after) == ["0-31", "32-63", "64-95"]
        assert reading.original.keys() == reading.after.keys() and beyond(reading.original) < beyond(reading.after)
    printed = str(report)
    assert all(f"{value:.4f}" in printed for one in (reading.original, reading.before, reading.after) for value in one.values())
    json.dumps(vars(reading))

    # At the length alone: read by the same judge.
    short = longer(original, scheme)
    other = quick(short, TextBatches([text[1][:, start : start + WINDOW] for start in (0, 32, 64)], [text.select[0]]))
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
    quick(broken, TextBatches(text[1:], text.select[1:], text.report[1:]))
    found = [distance(one, original, text.report[1]) for one in (long, short, before, broken)]
    assert found[0] < min(found[1:3]) and found[0] < 0.95 * found[3]


def test_memory_and_files(pair, monkeypatch, tmp_path):
    """On disk are the states of the current layer, four times the tokens for windows; no call reads more than it may."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(teacher, "_TOKENS_AT_ONCE", 128)
    original, text = pair
    sizes, read = [], []
    inner, call = layerwise.Walk.fit_layers, teacher.States._call

    def watched(self, *args):
        done = inner(self, *args)
        sizes.append(sum(path.stat().st_size for path in Path(self.folder).iterdir()))
        return done

    def watched_call(self, i):
        if self.name == "original":
            read.append(self.batches[i]["input_ids"].shape)
        return call(self, i)

    monkeypatch.setattr(layerwise.Walk, "fit_layers", watched)
    monkeypatch.setattr(teacher.States, "_call", watched_call)
    quick(longer(original, "relative:clip=4"), TextBatches([text[1]], text.select[1:], text.report[1:]), reconstruct=2)
    tokens, windows = 70 * LONG, 70 * 9 * WINDOW  # windows at 0, 8, ... 64
    opened = 60 * WINDOW  # what the closed form looks at, in both models
    states = 4 * 32 * (2 * tokens + windows + 3 * opened)
    assert len(sizes) == 2 and all(states < size < 1.1 * states for size in sizes)
    assert max(rows * length for rows, length in read if rows > 4) <= 60 * WINDOW
    assert all(length <= WINDOW for _, length in read)
    assert list(tmp_path.iterdir()) == []


def test_a_window_of_less(pair):
    """The window that is asked for is the one that is read through, also where the original reads more."""
    original, text = pair
    report = quick(longer(original, "rotary"), text, window=16, reconstruct=5)
    assert report.window == report.reading.window == 16 and set(report.after.by_length) == {16}
    assert ("0-15" in report.reading.after) == (report.reading.measure == "loss")


def test_parts_decide_apart(pair):
    """What is kept is told by the part to select by; what is reported is another part, whatever it says."""
    original, text = pair
    compare = layerwise.Walk._compare
    with patch.object(layerwise.Walk, "_compare", autospec=True, side_effect=compare) as watched:
        quick(longer(original, "relative:clip=4"), text, reconstruct=2)
    seen = [walk.batches[i]["input_ids"] for walk, _, i in (call.args for call in watched.mock_calls)]
    looked = {tuple(row.tolist()) for ids in seen for row in ids}
    rows = [{tuple(row.tolist()) for ids in part for row in ids} for part in (text, text.select, text.report)]
    assert rows[0] & looked and rows[1] <= looked and not rows[2] & looked


BAD = {
    "more than it reads": ({"window": 33}, "window=33 must be a number of tokens from 4 to 32"),
    "no number": ({"window": 8.0}, "number of tokens from 4"),
    "too small": ({"window": 3}, "number of tokens from 4"),
    "nothing longer": ({"window": 32, "batches": torch.ones(60, 32, dtype=torch.long)}, "no batch is longer.*leave window out"),
    "longer than the model": (
        {"batches": torch.ones(9, 129, dtype=torch.long)},
        "cut the batches, or swap with max_positions=129",
    ),
    "no text to select by": ({"batches": TextBatches([torch.ones(60, 96, dtype=torch.long)])}, "no batches"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_windows(make_model, name):
    """A window that cannot be is refused with the remedy."""
    options, says = BAD[name]
    model = posswap.swap(make_model("gpt2"), "rotary", max_positions=128)
    refused(says, quick, model, **{"batches": torch.ones(60, 96, dtype=torch.long), **options})


def test_far_beyond_the_fit(make_model, tmp_path):
    """A model knows what it was fitted to, also once it is loaded, and says so when it reads far beyond."""
    model = posswap.swap(make_model("gpt2"), "rotary", max_positions=300)
    quick(model, torch.randint(2, 98, (60, WINDOW)), reconstruct=2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
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
