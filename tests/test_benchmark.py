"""The benchmarks: that models are what they are called, that ratios are paired, and what is refused; never times."""

from dataclasses import replace
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from conftest import refused

import hf_posswap as posswap
from hf_posswap.schemes import parse_scheme
from hf_posswap.schemes.relative import RelativePositions


@pytest.fixture
def benchmark(recipe):
    return recipe("benchmark_attention")


@pytest.fixture
def config(benchmark):
    """One tiny run; tests replace what they are about."""
    sizes = {"layers": 1, "hidden": 32, "heads": 2, "vocab": 50}
    return benchmark.Config(scheme="relative:clip=3", shape=("2x24",), phase=("forward",), calls=2, seconds=0.0, **sizes)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_models_are_what_they_are_called(benchmark, config, family):
    """Schemes, backends and implementations reach the model, and tables count."""
    for scheme, attention, implementation in (
        ("original", "eager", None), ("rotary", "sdpa", None), ("relative:clip=3", "eager", None),
        ("relative:clip=3", "sdpa", "window"),
    ):  # fmt: skip
        one = replace(config, family=family, scheme=scheme, attention=attention, implementation=implementation)
        model = benchmark.build_model(one, 512)
        assert model.config._attn_implementation == attention and not model.training
        assert posswap.describe(model).new == parse_scheme("learned" if scheme == "original" else scheme)
        layers = [part for part in model.modules() if isinstance(part, RelativePositions)]
        assert [part.implementation for part in layers] == [implementation or "auto"] * scheme.startswith("relative")
        assert all(table.std() > 0 for part in layers for table in part.parameters())


@pytest.mark.parametrize(("phase", "family"), [("forward", "bert"), ("train", "bert"), ("decode", "gpt2")])
def test_phases(benchmark, config, monkeypatch, phase, family):
    """Each is what it is called: a training step has gradients, a forward has none, a decoded token grows the cache."""
    build, models, seen = benchmark.build_model, [], []
    monkeypatch.setattr(benchmark, "build_model", lambda *given: models.append(build(*given)) or models[-1])
    step = benchmark.make_step(replace(config, family=family), phase, 2, 24)
    models[0].register_forward_hook(lambda module, given, out: seen.append(out.last_hidden_state))
    step()
    step()
    assert [(one.shape[1], one.requires_grad) for one in seen] == [(1 if phase == "decode" else 24, phase == "train")] * 2


def test_ratios_are_paired(benchmark, config, monkeypatch):
    """Times are medians over pairs of calls, with quartiles; the reference is called first, and both equally often."""
    called = []
    ticks = iter([0, 1, 1, 3] * 3 + [0, 1, 1, 3, 0, 2, 2, 3, 0, 1, 1, 4])  # 3 pairs of warm-up, then 1:2, 2:1, 1:3
    monkeypatch.setattr(benchmark.time, "process_time", lambda: next(ticks))
    steps = [lambda: called.append("reference"), lambda: called.append("ours")]
    found = benchmark.paired_times(replace(config, calls=3), steps)
    assert called == ["reference", "ours"] * 6
    assert found["ratio"] == 2 and found["quartiles"] == [1.25, 2.5] and found["pairs"] == 3 and found["clock"] == "CPU time"
    assert (found["reference_ms"], found["ms"]) == (1000, 1000)


def test_end_to_end(benchmark, config, tmp_path):
    """A run has time and memory of each phase and shape."""
    result = benchmark.run(config, tmp_path, False)
    assert result["figures"]["forward_2x24_ratio"] > 0 and result["details"]["forward_2x24"]["pairs"] == 2
    if Path("/proc/self/clear_refs").exists():
        assert result["figures"]["forward_2x24_mib"] >= 0


def test_memory_is_that_of_the_subject(benchmark, config):
    """Attention that holds all scores needs more at its peak than one that does not."""
    configs = [replace(config, scheme="original", attention=name) for name in ("sdpa", "eager")]
    peaks = [benchmark.peak_memory(one, "forward", 2, 2048) for one in configs]
    if peaks[0] is not None:  # on Linux
        assert peaks[1] > 2 * 2 * 2048**2 * 4 / 2**20 * 0.9  # scores of two sequences of two heads
        assert peaks[0] < peaks[1] / 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"phase": ("backward",)}, "known are forward, train, decode"),
        ({"phase": ("decode",)}, "--family gpt2"),
        ({"shape": ("512",)}, "such as 4x512"),
        ({"calls": 0}, "calls=0"),
        ({"hidden": 30, "heads": 4}, "hidden=30"),
        ({"scheme": "rotary", "implementation": "fused"}, "not for rotary"),
    ],
)
def test_refusals(benchmark, config, options, says):
    """An unknown name or an impossible number ends with what is accepted."""
    refused(says, replace, config, **options)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_loop_and_a_bare_one_do_the_same(recipe, make_model, tmp_path, precision):
    """What recipes/benchmark_loop.py times on both sides takes the same steps: where nothing is drawn, to the same loss."""
    make_model("gpt2").save_pretrained(tmp_path / "model")
    loop = recipe("benchmark_loop")
    sizes = {"batch_size": 4, "length": 16, "steps": 3, "pairs": 2}
    config = loop.Config(model=str(tmp_path / "model"), mixed_precision=precision, **sizes)
    AcceleratorState._reset_state()  # a process keeps the precision it began with
    try:
        result = loop.run(config, tmp_path, False)
    finally:
        AcceleratorState._reset_state()
    figures, pairs = result["figures"], result["details"]["pairs"]
    assert loop.load(loop.Config(model="stdlib-gpt2", scheme="original")).config.n_positions == 256
    assert len(pairs) == 2 and figures["least_overhead"] <= figures["overhead"] <= figures["most_overhead"]
    for pair in pairs:
        assert pair["losses"][0] == pytest.approx(pair["losses"][1], abs=1e-4)
        assert pair["bare_seconds"] > 0 and pair["loop_seconds"] > 0


def test_the_verbs_are_measured(recipe):
    """recipes/benchmark_swap.py does each verb, and says what it takes."""
    verbs = recipe("benchmark_swap")
    config = verbs.Config(layers=1, hidden=48, texts=20, length=32, steps=1, scheme="relative:clip=4")
    found = verbs.verbs(config, "gpt2")
    assert list(found) == ["model", "swap", "fit", "save", "restore", "load"]
    assert all(found[verb].keys() == {"seconds", "memory"} and found[verb]["memory"] > 0 for verb in list(found)[1:])
    refused("known are bert, gpt2", verbs.Config, family=("t5",))
    refused("hidden=512 must be a multiple of 24", verbs.Config, hidden=512)
