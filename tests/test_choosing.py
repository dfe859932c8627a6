"""choose: options that are "auto" are settled by damage, and nowhere else do they pass."""

from types import SimpleNamespace

import pytest
import torch
from conftest import refused
from transformers import AutoModelForCausalLM

import hf_posswap as posswap
from hf_posswap.data.calibration import TextBatches
from hf_posswap.fitting import choosing


def _text(rows=40, length=32):
    return torch.randint(2, 98, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("size", [4_000, 1])
def test_chooses_the_least_damage(make_model, monkeypatch, capsys, size):
    """Every candidate is tried once, on a share of the text; the one with the least damage wins; the model stays as it is."""
    model = make_model("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tried = {}

    def planted(trial, text, **options):
        scheme = posswap.describe(trial).new
        assert scheme not in tried
        tokens = sum(batch["input_ids"].numel() for batch in text)
        assert tokens == pytest.approx(choosing._TOKENS_A_TRIAL, rel=0.25)
        tried[scheme] = abs(scheme.theta - 1_000) + abs(scheme.fraction - 0.25)
        return SimpleNamespace(score=tried[scheme])

    monkeypatch.setattr(choosing, "fit", planted)
    scheme, text = "rotary:theta=auto,fraction=auto,layout=half", list(_text(4_000).split(size))
    chosen = posswap.choose(model, scheme, text, progress=True)
    assert "choose: 100%" in capsys.readouterr().err  # also where no terminal is
    assert chosen == posswap.Rotary(theta=1_000, fraction=0.25, layout="half")
    assert len(tried) == 4 + 2  # fractions are tried at the theta that was chosen
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert posswap.describe(model).new == posswap.Learned()


def test_all_lengths_stay():
    """Batches too small to cut are left out by length, however they alternate."""
    batches = [{"input_ids": torch.zeros(2, length, dtype=torch.long)} for length in (32, 128) * 250]
    kept = [batch["input_ids"].shape[1] for batch in choosing._thin(batches, 1)]
    assert 0.4 < kept.count(128) / len(kept) < 0.6 and len(kept) < 500


def test_trials_are_what_the_model_will_be(make_model, monkeypatch, watch):
    """Trials have the swap's span, start and window; they see the text to fit on and to select by, not that to report on."""
    seen, swaps = [], watch(choosing, "swap")

    def planted(trial, text, **options):
        rows = [[len(batch["input_ids"]) for batch in part] for part in (text, text.select, text.report)]
        seen.append((options["window"], options["steps"], rows))
        return SimpleNamespace(score=1.0)

    monkeypatch.setattr(choosing, "fit", planted)
    text = TextBatches([_text(100, 64), _text(10)], [_text(10, 64)], [_text(10, 64)])
    options = {"max_positions": 64, "span": 8, "first": 2, "warm_start": False}
    posswap.choose(make_model("gpt2"), "rotary:fraction=auto", text, window=16, steps=7, progress=False, **options)
    assert seen == [(16, 7, [[100, 10], [10], []])] * 3 and [one.kwargs for one in swaps] == [options] * 3


def test_auto_is_settled_or_refused(make_model):
    """An open option is an error in swap that names the way out; a scheme without one is an error in choose."""
    scheme = posswap.schemes.parse_scheme("rotary:theta=auto")
    assert scheme.open_options() == ["theta"] and str(scheme) == "rotary:theta=auto"
    refused(r"theta='auto'.*posswap.choose", posswap.swap, make_model("bert"), scheme)
    refused("theta, fraction", posswap.choose, make_model("bert"), "rotary", _text())
    for wrong in ("relative:clip=auto", "sinusoidal:base=auto", "rotary:layout=auto", "rotary:theta=Auto"):
        refused("auto|Auto", posswap.swap, make_model("bert"), wrong)


def test_command_line_settles_and_fits(save, program, tmp_path):
    """`--scheme rotary:fraction=auto --fit auto` saves a model whose config holds a number."""
    options = ["--fit", "auto", "--fit-tokens", "1500", "--fit-steps", "2", "--output", tmp_path / "out"]
    code, out, err = program("swap", save("gpt2"), "--scheme", "rotary:fraction=auto", *options)
    assert code == 0, err
    assert "KL" in out and "held" not in err
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert posswap.describe(model).new.fraction in (1.0, 0.5, 0.25)
