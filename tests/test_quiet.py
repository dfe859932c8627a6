"""What an import costs: `hf-posswap --help` waits for no library, importing the package for transformers alone, and what comes
with an extra is missed only by those who need it."""

import sys
from pathlib import Path

import hf_posswap_cli
import pytest
from conftest import run_python

from hf_posswap.extras import RECIPES, MissingExtraError, extra

_LOADED = "print(*sorted(set(sys.modules) - before))"


def test_help_waits_for_no_library():
    """Help, version and completion import typer, and neither torch nor transformers nor the package itself."""
    for option in ("--help", "--version", "--show-completion=bash"):
        code = f"""
import os, sys
os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # the tests may not run under a shell
before = set(sys.modules)
import hf_posswap_cli
sys.argv = ["hf-posswap", *{option.split("=")!r}]
try:
    hf_posswap_cli.main()
except SystemExit as stop:
    assert not stop.code
print()
{_LOADED}
"""
        loaded = {name.partition(".")[0] for name in run_python("-W", "error", "-c", code).stdout.splitlines()[-1].split()}
        heavy = loaded & {"torch", "transformers", "numpy", "hf_posswap", "huggingface_hub", "yaml", "tokenizers"}
        assert "typer" in loaded and not heavy, (option, heavy)


def test_import_loads_itself_and_nothing_more():
    """Next to what transformers' Auto classes need, importing the package loads three of its modules and no library."""
    code = f"""
import sys
from pathlib import Path
import torch, transformers, transformers.models.auto.configuration_auto
before = set(sys.modules)
import hf_posswap
{_LOADED}
"""
    assert run_python("-W", "error", "-c", code).stdout.split() == [
        "hf_posswap",
        "hf_posswap.sharing",
        "hf_posswap.sharing.load_reports",
    ]


def test_extras_are_not_needed(tmp_path):
    """Swap, fit, save, load, export, delta, card and the command line work where no library of the extra can be imported."""
    code = """
import sys
from pathlib import Path
for name in sys.argv[2].split():
    sys.modules[name] = None
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
import hf_posswap as posswap
folder = sys.argv[1]
sizes = dict(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=32, initializer_range=0.3)
GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=98)).save_pretrained(folder + "/plain")
model = posswap.swap(GPT2LMHeadModel.from_pretrained(folder + "/plain"), posswap.Rotary(mark_first=False))
report = posswap.fit(model, torch.randint(99, (40, 32)), reconstruct=2, progress=False)
assert str(report).count("won") == 1
model.save_pretrained(folder + "/swapped")
again = AutoModelForCausalLM.from_pretrained(folder + "/swapped")
native = posswap.export_native(again)
assert type(native.model).__name__ == "GPTNeoXForCausalLM"
native.save_pretrained(folder + "/native")
posswap.save_delta(posswap.swap(posswap.restore(model), "rotary"), folder + "/delta")
posswap.write_card(folder + "/swapped", base_model="local:plain")
assert "local" not in (posswap.describe(again).model_class)
from hf_posswap_cli import main
for arguments, status in (
    (["describe", folder + "/plain"], 0),
    (["swap", folder + "/plain", "--scheme", "relative:clip=4", "--output", folder + "/by-command"], 0),
    (["export", folder + "/swapped", "--output", folder + "/exported"], 0),
    (["plot", "table", "sinusoidal", "--output", folder + "/table.png"], 2),
    (["compare"], 2),
):
    sys.argv = ["hf-posswap", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == status, (arguments, stop.code)
"""
    done = run_python("-c", code, tmp_path, " ".join(RECIPES))
    assert done.stderr.count('pip install "hf_posswap[recipes]"') == 2 and "Traceback" not in done.stderr


def test_the_extra_is_what_pyproject_says():
    """The names that an error sends to the extra are those of the extra."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = {line.partition(">")[0].replace("scikit-learn", "sklearn") for line in project["optional-dependencies"]["recipes"]}
    assert named == set(RECIPES)
    assert not named & {line.partition(">")[0] for line in project["dependencies"]}


def test_missing_extra_is_one_line(monkeypatch):
    """Only a library of the extra is sent there; another one that is missing keeps its own error."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(MissingExtraError, match=r'scipy, which is not installed: pip install "hf_posswap\[recipes\]"'), extra():
        import scipy  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="nowhere"), extra():
        import nowhere  # noqa: F401


def test_summaries():
    """A command's line in the list is about the command that is there, and fits on a line."""
    for name, (_, summary) in hf_posswap_cli.COMMANDS.items():
        command = hf_posswap_cli.load(name)
        assert command.name == name and command.help and len(summary) <= 61, name
