"""What waits for a GPU: each command is one that its program takes, and the runner goes on, resumes and keeps to its time."""

import json
import runpy
from pathlib import Path

import pytest
import typer
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import refused

from hf_posswap.experiments.recipe import main

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(recipe, monkeypatch):
    """The module recipes/gpu.py, which changes to the root."""
    monkeypatch.chdir(ROOT)
    return recipe("gpu")


@pytest.fixture
def take(gpu, tmp_path, capsys):
    """The function that takes steps in miniature; returns the exit status, the last word on each step, and steps.json."""

    def call(*only, seconds=600) -> tuple[int, dict[str, str], dict]:
        with pytest.raises(typer.Exit) as stop:
            gpu.gpu(output=tmp_path, seconds=seconds, only=list(only), miniature=True)
        *said, last = capsys.readouterr().out.splitlines()
        assert last == f"results are in {tmp_path / 'cpu'}"
        lines = [line.partition(" ") for line in said if "  " in line]
        table = tmp_path / "cpu" / "steps.json"
        rows = {name: said.strip().lstrip("0123456789. ") for name, _, said in lines}
        return int(stop.value.exit_code), rows, json.loads(table.read_text()) if table.exists() else {}

    return call


class Taken(Exception):
    """Raised in the place of a run, once its options were read."""


@pytest.mark.parametrize("miniature", [False, True])
def test_every_command_is_one_that_its_program_takes(gpu, tmp_path, monkeypatch, miniature):
    """Options are read by the recipe itself and by accelerate; a renamed one, or a value out of range, would end there."""

    def stop(config, folder, resume):
        raise Taken

    monkeypatch.setattr("hf_posswap.experiments.recipe.load_family", lambda model: (None, True))  # which a step before makes
    monkeypatch.setattr("hf_posswap.experiments.recipe.main", lambda config_class, run: main(config_class, stop))
    found, launched = gpu.steps(tmp_path, miniature), set()
    for name, (limit, command) in found.items():
        assert 0 < limit <= 200
        if command[0] == "-m" and command[1] == "pytest":
            assert (ROOT / "tests" / "test_relative_triton.py").is_file() and "tests/test_relative_triton.py" in command
            continue
        if command[0] == "-m":
            given = launch_command_parser().parse_args(command[2:])
            assert load_config_from_file(given.config_file).num_machines == (2 if name == "launch-multi_node" else 1)
            launched.add(Path(given.config_file))
            command = [given.training_script, *given.training_script_args]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(Taken):
            runpy.run_path(command[0], run_name="__main__")
        assert json.loads((tmp_path / name / "config.json").read_text())["seed"] == 0
    assert launched == set(Path("recipes/accelerate").glob("*.yaml"))


def test_a_step(gpu, take, monkeypatch):
    """One, on a model of those that are built: figures, seconds, what made them, and nothing to do for a second call."""
    every = gpu.steps  # a test is never timed: the machine may be busy
    monkeypatch.setattr(gpu, "steps", lambda *given: {"loop": (3600, every(*given)["loop"][1])})
    code, rows, done = take(seconds=3600 + 600)
    assert code == 0 and rows == {"loop": "ok"}, rows
    assert "overhead" in done["loop"]["figures"] and done["loop"]["seconds"] > 0 and done["loop"]["hardware"]["cpu"]
    assert take()[:2] == (0, {"loop": "ok, before"})


def test_it_goes_on(gpu, take, monkeypatch):
    """After a failure and after a limit; what does not fit into the time, or on the machine, is named."""
    monkeypatch.setattr(gpu, "build_models", lambda folder, miniature: folder.mkdir(parents=True, exist_ok=True))
    commands = {"bad": (60, "exit(3)"), "slow": (0.1, "import time; time.sleep(60)"), "good": (60, ""), "long": (601, "")}
    commands["launch-multi_node"] = (60, "")
    monkeypatch.setattr(gpu, "steps", lambda *_: {name: (limit, ["-c", do]) for name, (limit, do) in commands.items()})
    code, rows, done = take()
    assert code == 1 and list(done) == ["good"] and rows["good"] == "ok" and rows["bad"].startswith("failed: exit 3; ")
    assert rows["slow"].startswith("failed: not done after 0.1 s") and rows["launch-multi_node"].startswith("left out")
    assert rows["long"].startswith("left for the next call: it may take 601 s")
    commands["bad"] = (60, "")
    code, rows, done = take("bad", "good")
    assert code == 0 and rows == {"bad": "ok", "good": "ok, before"} and set(done) == {"good", "bad"}


def test_refusals(gpu, tmp_path, monkeypatch):
    """No GPU, and a step that there is not: an error in one line."""
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    refused("no CUDA device here: .* --miniature", gpu.gpu, output=tmp_path)
    refused("no step 'kernels'; there are kernel, loop", gpu.gpu, output=tmp_path, only=["kernels"], miniature=True)
