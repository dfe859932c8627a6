"""The benchmark recipe: that subjects are what they are called, that runs are complete, resumed and refused; never times."""

import importlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import hf_posswap as posswap
from hf_posswap.errors import PosswapError

RECIPES = Path(__file__).parents[1] / "recipes"
SIZES = {"layers": 1, "hidden": 32, "heads": 2, "vocab": 50}


@pytest.fixture
def recipe(monkeypatch):
    """The module recipes/benchmark_attention.py, imported as Python imports it when it is run."""
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("benchmark_attention")


@pytest.fixture
def worker(recipe):
    """The module recipes/attention_worker.py."""
    return importlib.import_module("attention_worker")


@pytest.fixture
def case(worker):
    """One tiny case; tests replace what they are about."""
    return worker.Case(
        measure="time", level="op", phase="forward", family="causal", subject="relative", batch=2, length=24, clip=3,
        dtype="float32", device="cpu", threads=1, allocator="default", dropout=0.0, calls=2, seconds=0.0, seed=0, **SIZES,
    )  # fmt: skip


def _call(recipe, monkeypatch, capsys, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmark_attention.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        recipe.main()
    return stop.value.code, capsys.readouterr()


@pytest.mark.parametrize("phase", ["forward", "train", "decode"])
@pytest.mark.parametrize("family", ["bidirectional", "causal"])
def test_subjects_of_attention_alone(worker, case, family, phase):
    """sdpa and eager agree, and so do all implementations of relative: one sum, computed in several ways."""
    case = replace(case, family=family, phase=phase)
    plain = [worker.op_step(case, name)() for name in ("sdpa", "eager")]
    ours = [worker.op_step(case, f"relative{name}")() for name in ("", "-fused", "-window", "-by-index")]
    if phase != "train":  # otherwise the gradients, one for each input
        plain, ours = [[output] for output in plain], [[output] for output in ours]
    for outputs in (plain, ours):
        for other in outputs[1:]:
            for first, second in zip(outputs[0], other, strict=True):
                torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(plain[0][0], ours[0][0], atol=1e-4)
    keys_only = worker.op_step(case, "relative-keys")()
    assert not torch.allclose(ours[0][0], keys_only[0] if phase == "train" else keys_only, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_subjects_among_models(worker, case, name):
    """Every model runs in every phase of its family; swapped ones have the scheme of their name, and tables that count."""
    visited = 0
    for subject in worker.SUBJECTS[name]:
        if subject == "relative-triton":
            continue
        scheme = "relative" if subject.startswith("relative") else subject
        for phase in ("forward", "train", *(["decode"] if name in worker.DECODERS else [])):
            this = replace(case, level="model", family=name, subject=subject, phase=phase)
            times = worker.run(this)["times_ms"]
            assert [len(times[key]) for key in ("reference_cpu", "reference_wall", "cpu", "wall")] == [2] * 4
            visited += 1
        model = worker.build_model(this, subject)
        if scheme in posswap.SCHEMES:
            assert posswap.describe(model).new.to_dict()["name"] == scheme
        if scheme == "relative":
            tables = [p for key, p in model.named_parameters() if key.endswith("_table")]
            assert len(tables) == (1 if subject == "relative-keys" else 2) and all(table.std() > 0 for table in tables)
    assert visited >= 20


def test_memory_is_that_of_the_subject(worker, case):
    """Attention that holds all scores needs more at its peak than one that does not."""
    case = replace(case, measure="memory", length=2048, family="bidirectional")
    peaks = {name: worker.run(replace(case, subject=name))["peak_mib"] for name in ("sdpa", "eager")}
    if peaks["sdpa"] is not None:  # on Linux
        assert peaks["eager"] > 2 * 2 * 2 * 2048**2 * 4 / 2**20 * 0.9  # scores and probabilities, two sequences of two heads
        assert peaks["sdpa"] < peaks["eager"] / 3


def test_old_subjects_refuse_a_new_transformers(worker, case):
    """relative_key of a transformers that has none would be measured as something else."""
    with pytest.raises(RuntimeError, match="no position_embedding_type"):
        worker.build_model(replace(case, level="model", family="old-bert"), "relative_key")


def test_worker_prints_its_error(case):
    """A case that cannot run says why, as the result."""
    case = replace(case, subject="relative-fused", phase="train", dropout=0.1)
    command = [sys.executable, str(RECIPES / "attention_worker.py"), json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "has no dropout" in json.loads(done.stdout)["error"]


def test_end_to_end(recipe, tmp_path, monkeypatch, capsys):
    """All files are written, with the A/A control; a second run repeats only what is missing; other options are refused."""
    output = tmp_path / "out"
    sizes = [f"--{name}={number}" for name, number in SIZES.items()]
    options = ["--quick", "--level=op", "--phase=decode", "--phase=forward", "--subject=causal/relative", *sizes]
    options += ["--output", output]
    code, said = _call(recipe, monkeypatch, capsys, *options)
    assert code == 0, said.err
    results = json.loads((output / "results.json").read_text())
    assert results["missing"] == 0 and not any("error" in record for record in results["cases"])
    assert {"command", "commit", "versions", "hardware", "malloc", "config"} <= set(results)
    found = [(r["case"]["measure"], r["case"]["phase"], r["case"]["subject"]) for r in results["cases"]]
    subjects = ("sdpa", "relative")
    kinds = [("time", "forward"), ("time", "decode"), ("memory", "forward")]
    assert sorted(found) == sorted((*kind, subject) for kind in kinds for subject in subjects)
    for record in results["cases"]:
        assert record["environment"]["torch"] == torch.__version__
        if record["case"]["measure"] == "time":
            ratio = record["ratio"]
            assert record["pairs"] == 2 and ratio["low"] <= ratio["median"] <= ratio["high"] and record["clock"] == "cpu"
    text = (output / "results.md").read_text()
    assert text.count("| causal/sdpa (A/A) |") == 4 and text.count("| causal/relative, clip 64 |") == 5
    assert "failed" not in text and "Unfinished" not in text
    assert len(list(output.glob("*-time-*.png"))) == 2

    journal = (output / "cases.jsonl").read_text().splitlines(keepends=True)
    assert len(journal) == 6
    (output / "cases.jsonl").write_text("".join(journal[:-1]) + journal[-1][:30])  # killed while it wrote
    ran = []
    monkeypatch.setattr(recipe, "run_case", lambda case, config: ran.append(case) or json.loads(journal[-1]))
    code, _ = _call(recipe, monkeypatch, capsys, *options)
    assert code == 0 and [recipe.key(case) for case in ran] == [json.loads(journal[-1])["key"]]
    assert json.loads((output / "results.json").read_text())["cases"] == results["cases"]

    code, said = _call(recipe, monkeypatch, capsys, *options, "--calls", 3)
    assert code == 2 and "calls 2 there, 3 now" in " ".join(said.err.split()) and len(ran) == 1


def test_failures_are_recorded(recipe, tmp_path, monkeypatch, capsys):
    """A case that takes too long, or whose interpreter is not there, is a row of its own; --retry runs it again."""
    options = ["--quick", "--measure=time", "--phase=forward", "--subject=bert/none", "--subject=old-bert/relative_key"]
    options += ["--timeout=0.01", "--old-python", tmp_path / "no-python", "--output", tmp_path / "out"]
    code, _ = _call(recipe, monkeypatch, capsys, *options)
    assert code == 0
    records = json.loads((tmp_path / "out" / "results.json").read_text())["cases"]
    assert [record["case"]["subject"] for record in records] == ["sdpa", "none", "sdpa", "relative_key"]
    assert all("longer than --timeout" in record["error"] for record in records[:2])
    assert all("cannot be started" in record["error"] for record in records[2:])
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| bert/none | failed |" in text and text.count("longer than --timeout") == 2

    ran = []
    monkeypatch.setattr(recipe, "run_case", lambda case, config: ran.append(case) or recipe._record(case, {"error": "again"}))
    _call(recipe, monkeypatch, capsys, *options)
    assert not ran
    _call(recipe, monkeypatch, capsys, *options, "--retry")
    assert len(ran) == 4 and "again" in (tmp_path / "out" / "results.md").read_text()


def test_interrupted(recipe, tmp_path, monkeypatch, capsys):
    """Ctrl-C keeps what is finished, reports it, stops the busy processes and says how to go on."""
    times = {name: [1.0, 2.0, 4.0] for name in ("reference_cpu", "reference_wall", "wall")} | {"cpu": [2.0, 2.0, 2.0]}

    def run_case(case, config):
        if case.subject != "sdpa":
            raise KeyboardInterrupt
        return recipe._record(case, {"times_ms": times})

    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(recipe, "run_case", run_case)
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **options: started.append(popen(*given, **options)) or started[-1])
    options = ["--quick", "--phase=train", "--subject=gpt2/rotary", "--busy=1", "--output", tmp_path / "out"]
    code, said = _call(recipe, monkeypatch, capsys, *options)
    assert code == 130 and "the same command goes on" in " ".join(said.out.split())
    busy = [process for process in started if "getppid" in str(process.args)]
    assert len(busy) == 1 and busy[0].returncode is not None
    text = (tmp_path / "out" / "results.md").read_text()
    assert "| gpt2/sdpa (A/A) | 1.000 (0.750–1.500) |" in text and "| gpt2/sdpa (A/A) | 2 (2.000) |" in text
    assert "3 cases are missing" in text and "1 busy process" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--subject", "rotray"], "'rotray' is not known; known are all, bidirectional/sdpa"),
        (["--phase", "backward"], "known are forward, train, decode"),
        (["--allocator", "jemalloc"], "known are default, keep"),
        (["--shape", "512"], "such as 4x512"),
        (["--clip", "0"], "clips: 0"),
        (["--calls", "0"], "calls: 0"),
        (["--hidden", "30", "--heads", "4"], "hidden 30"),
        (["--subject", "old-bert/relative_key"], "--old-python"),
        (["--subject", "causal/relative"], "levels are op, model"),
    ],
)
def test_refusals(recipe, tmp_path, monkeypatch, capsys, options, says):
    """An unknown name or an impossible number ends with what is accepted, and leaves nothing behind."""
    code, said = _call(recipe, monkeypatch, capsys, "--output", tmp_path / "out", *options)
    assert code == 2 and says in " ".join(said.err.split()) and "Traceback" not in said.err
    assert not (tmp_path / "out").exists()


def test_foreign_folder_is_kept(recipe, tmp_path, monkeypatch, capsys):
    """A folder with something else in it is not written into."""
    (tmp_path / "mine").write_text("x")
    code, said = _call(recipe, monkeypatch, capsys, "--output", tmp_path)
    assert code == 2 and "holds no benchmark" in " ".join(said.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_cases(recipe):
    """A reference is never left out, further clips are measured at one shape, and every case has a name of its own."""
    config = recipe.BenchmarkConfig(
        levels=("op", "model"),
        subjects=("all",),
        clips=(64, 16),
        threads=(1, 2),
        allocators=("default", "keep"),
        dtypes=("float32", "bfloat16"),
        old_python="python",
    )
    cases = recipe.list_cases(config)
    assert len({recipe.key(case) for case in cases}) == len(cases)
    assert {f"{case.family}/{case.subject}" for case in cases} == set(recipe.NAMES)
    assert {(case.phase, case.length) for case in cases if case.clip == 16} == {
        ("forward", 2048), ("train", 2048), ("decode", 1024)
    }  # fmt: skip
    assert {case.allocator for case in cases if case.measure == "memory"} == {"default"}
    alone = recipe.list_cases(recipe.BenchmarkConfig(subjects=("bert/rotary",), phases=("train",), shapes=("1x8",)))
    assert [case.subject for case in alone] == ["sdpa", "rotary"] * 2
    with pytest.raises(PosswapError, match="nothing to run"):
        recipe.list_cases(recipe.BenchmarkConfig(subjects=("bert/rotary",), phases=("decode",)))


def test_the_loop_and_a_bare_one_do_the_same(monkeypatch, make_model, tmp_path):
    """What recipes/benchmark_loop.py times on both sides takes the same steps: where nothing is drawn, to the same loss."""
    monkeypatch.syspath_prepend(str(RECIPES))
    make_model("gpt2").save_pretrained(tmp_path / "model")
    loop = importlib.import_module("benchmark_loop")
    loop.main(tmp_path / "out", model=str(tmp_path / "model"), batch_size=4, length=16, steps=5, pairs=2)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(results["pairs"]) == 2 and results["overhead_range"][0] <= results["overhead"] <= results["overhead_range"][1]
    for pair in results["pairs"]:
        assert pair["losses"][0] == pytest.approx(pair["losses"][1], abs=1e-4)
        assert pair["bare_seconds"] > 0 and pair["loop_seconds"] > 0
