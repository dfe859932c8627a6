"""The package as a whole: who imports whom, what an import costs, that it patches nothing; examples in docstrings; extras."""

import ast
import dataclasses
import doctest
import importlib
import pkgutil
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import hf_posswap_cli
import pytest
from conftest import refused, run_python

import hf_posswap
from hf_posswap.extras import RECIPES, MissingExtraError, extra

ROOT = Path(hf_posswap.__file__).parent


@pytest.mark.skipif(not (ROOT.parent / ".git").exists() or shutil.which("git") is None, reason="no clone")
def test_top_level():
    """Nothing stands beside what a stranger is told of."""
    asked = subprocess.run(["git", "ls-files"], cwd=ROOT.parent, capture_output=True, text=True)
    if asked.returncode:
        pytest.skip(f"git says {asked.stderr}")  # a clone of somebody else's
    names = {Path(file).parts[0] for file in asked.stdout.splitlines()}
    told = {"LICENSE", "Makefile", "README.md", "pyproject.toml", "hf_posswap", "notebooks", "recipes", "tests"}
    assert {name for name in names if not name.startswith(".")} == told


def top_level_imports(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself; imports inside functions do not count."""
    names = set()
    waiting = list(ast.parse(path.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            waiting += list(ast.iter_child_nodes(node))
    return names


# What a swap is, each imported by those after it; no wing (fitting, measure, sharing, ...) is asked by any of them.
SPINE = "attention span_cache span_mask surgery forward scheme_entry checkpoint pipelines target warm_start swapping".split()
SPINE += ["describing"]
BENEATH = "errors evaluating schemes architectures functional assets".split()
PARTS = {  # files, how many there are at least, and what of the package they may import
    "errors.py": (1, []),
    "schemes/*.py": (7, ["errors", "functional.relative_attention", "functional.closed_form", "schemes"]),
    "architectures/*.py": (4, ["errors", "architectures"]),
    "functional/*.py": (5, ["errors", "functional"]),
    "training/*.py": (8, ["errors", "evaluating", "extras", "schemes", "architectures", "training"]),
    **{f"{name}.py": (1, BENEATH + SPINE[:place]) for place, name in enumerate(SPINE)},
}


@pytest.mark.parametrize("pattern", PARTS)
def test_imports(pattern):
    """Schemes know no transformers and no family, families no scheme, tensors no model, the spine no wing, training no task."""
    count, allowed = PARTS[pattern]
    files = sorted(ROOT.glob(pattern))
    assert len(files) >= count
    for path in files:
        imports = top_level_imports(path)
        ours = {name for name in imports if name.startswith("hf_posswap.")}
        assert all(name.split(".", 1)[1].startswith(tuple(allowed)) for name in ours), (path.name, ours)
        plain = pattern.startswith(("errors", "schemes", "functional"))
        assert not plain or not any(name.startswith("transformers") for name in imports), path.name


def test_import_loads_little_and_patches_nothing():
    """Importing the package loads three modules of transformers, no library, and neither it nor a swap changes theirs."""
    code = """
import os, sys, warnings
import torch, transformers, transformers.models.auto.configuration_auto

warnings.simplefilter("ignore")  # Python 3.12 warns of a fork beside threads
if not os.fork():  # where nothing else has been imported
    warnings.simplefilter("error")
    before = set(sys.modules)
    import hf_posswap
    print(*sorted(set(sys.modules) - before), flush=True)
    os._exit(0)
assert os.wait()[1] == 0

import inspect
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers.models.bert import modeling_bert
from transformers.models.gpt2 import modeling_gpt2
from transformers import modeling_utils, masking_utils, cache_utils, modeling_rope_utils

def picture():
    found = {}
    for module in (modeling_bert, modeling_gpt2, modeling_utils, masking_utils, cache_utils, modeling_rope_utils):
        for name, value in vars(module).items():
            found[module.__name__, name] = id(value)
            if inspect.isclass(value) and value.__module__ == module.__name__:
                found |= {(module.__name__, name, key): id(member) for key, member in vars(value).items()}
    found["attention"] = tuple(modeling_utils.ALL_ATTENTION_FUNCTIONS.valid_keys())
    return found

before = picture()
filters = list(warnings.filters)
threads, generator = torch.get_num_threads(), torch.get_rng_state()
log = __import__("logging").getLogger("transformers")
handlers, level = list(log.handlers), log.level
import hf_posswap
assert log.level == level and log.handlers[:-1] == handlers and type(log.handlers[-1]).__name__ == "LoadReports"
assert picture() == before
assert list(warnings.filters) == filters
assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), generator)
sizes = {"vocab_size": 9, "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2}
for model in (BertForMaskedLM(BertConfig(**sizes, intermediate_size=8)), GPT2LMHeadModel(GPT2Config(**sizes))):
    for scheme in hf_posswap.SCHEMES:
        hf_posswap.swap(model, scheme)
    hf_posswap.restore(model)
after = picture()
changed = [key for key in before if before[key] != after.get(key)]
assert changed == [], changed
print(len(before))
"""
    loaded, members = run_python("-W", "error", "-c", code).stdout.splitlines()
    assert loaded.split() == ["hf_posswap", "hf_posswap.sharing", "hf_posswap.sharing.load_reports"] and int(members) > 1000


def modules() -> list[str]:
    return ["hf_posswap", *(m.name for m in pkgutil.walk_packages(hf_posswap.__path__, "hf_posswap."))]


def test_docstring_examples():
    """Every example in a docstring gives what it prints."""
    attempted = 0
    for name in modules():
        results = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        assert results.failed == 0, name
        attempted += results.attempted
    assert len(modules()) >= 20 and attempted > 15


def test_public_names():
    """Every name in every __all__ exists, and the package's own is complete and sorted."""
    checked = 0
    for name in modules():
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"
            checked += 1
    assert checked > 30
    assert list(hf_posswap.__all__) == sorted(hf_posswap.__all__) and set(hf_posswap._CONFIGS) == set(hf_posswap.ARCHITECTURES)


def test_registering_twice():
    """A name or family that is taken stays with its owner; the same class again is no error."""
    assert hf_posswap.register_scheme(hf_posswap.Rotary) is hf_posswap.Rotary

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Impostor(hf_posswap.Rotary):
        pass

    refused("a scheme named 'rotary' exists already", hf_posswap.register_scheme, Impostor, error=hf_posswap.PosswapError)

    class Other(type(hf_posswap.ARCHITECTURES["bert"])):
        pass

    refused("family 'bert' is registered already", hf_posswap.register_architecture, Other(), error=hf_posswap.PosswapError)
    assert type(hf_posswap.ARCHITECTURES["bert"]) is not Other
    Other.model_type = "mpnet"  # and still BERT's config: it would take the names of BERT's swapped classes
    refused("model_type is 'mpnet', config_class is of 'bert'", hf_posswap.register_architecture, Other())
    assert "mpnet" not in hf_posswap.ARCHITECTURES
    assert hf_posswap.register_architecture(hf_posswap.ARCHITECTURES["gpt2"]) is hf_posswap.ARCHITECTURES["gpt2"]


def test_help_waits_for_no_library():
    """Help, version and completion import typer, and neither torch nor transformers nor the package itself."""
    code = """
import os, sys
os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # the tests may not run under a shell
before = set(sys.modules)
import hf_posswap_cli
for options in (["--help"], ["--version"], ["--show-completion", "bash"]):
    sys.argv = ["hf-posswap", *options]
    try:
        hf_posswap_cli.main()
    except SystemExit as stop:
        assert not stop.code
print()
print(*sorted(set(sys.modules) - before))
"""
    loaded = {name.partition(".")[0] for name in run_python("-W", "error", "-c", code).stdout.splitlines()[-1].split()}
    assert "typer" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "hf_posswap", "huggingface_hub", "yaml", "tokenizers"}


def test_extras_are_not_needed(tmp_path):
    """Swap, fit, save, load, export, delta, card and the command line work where no library of the extra can be imported."""
    code = """
import sys
from pathlib import Path
for name in sys.argv[2].split():
    sys.modules[name] = None
import torch
from transformers import GPT2Config, GPT2LMHeadModel
import hf_posswap as posswap
folder = sys.argv[1]
sizes = dict(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=32, initializer_range=0.3)
GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=98)).save_pretrained(folder + "/plain")
model = posswap.swap(GPT2LMHeadModel.from_pretrained(folder + "/plain"), posswap.Rotary(mark_first=False))
report = posswap.fit(model, torch.randint(99, (40, 32)), steps=2, progress=False)
assert str(report).count("won") == 1
model.save_pretrained(folder + "/swapped")
posswap.save_delta(posswap.swap(posswap.restore(model), "rotary"), folder + "/delta")
posswap.write_card(folder + "/swapped", base_model="local:plain")
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
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {line.partition(">")[0].replace("scikit-learn", "sklearn") for line in extras["recipes"]}
    assert named == set(RECIPES) and "hf_posswap[recipes]" in extras["notebooks"]  # which draw
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
