"""The package as a whole: who imports whom, that importing patches nothing, and that the examples in docstrings run."""

import ast
import dataclasses
import doctest
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest
from conftest import run_python

import hf_posswap

ROOT = Path(hf_posswap.__file__).parent


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


@pytest.mark.parametrize(
    ("folder", "files", "forbidden"),
    [
        ("schemes", 7, ("transformers", "hf_posswap.architectures", "hf_posswap.attention", "hf_posswap.swapping")),
        (
            "architectures",
            4,
            ("hf_posswap.schemes", "hf_posswap.attention", "hf_posswap.swapping", "hf_posswap.checkpoint"),
        ),
    ],
)
def test_import_direction(folder, files, forbidden):
    """Schemes know no transformers and no family; families know no scheme."""
    visited = sorted((ROOT / folder).glob("*.py"))
    assert len(visited) >= files
    allowed = {"hf_posswap.errors", "hf_posswap.functional.relative_attention", "hf_posswap.functional.closed_form"}
    for path in visited:
        imports = top_level_imports(path)
        assert not {name for name in imports if name.startswith(forbidden)}, path.name
        ours = {name for name in imports if name.startswith("hf_posswap.")}
        assert all(name.startswith((f"hf_posswap.{folder}", *allowed)) for name in ours), (path.name, ours)


def test_relative_attention_knows_no_models():
    """Functions of tensors import torch, triton and each other."""
    for path in sorted((ROOT / "functional").glob("*.py")):
        ours = {name for name in top_level_imports(path) if name.startswith(("hf_posswap", "transformers"))}
        assert all(name.startswith(("hf_posswap.errors", "hf_posswap.functional")) for name in ours), (path.name, ours)


# What a swap is, each imported by those after it; no wing (fitting, measure, sharing, ...) is asked by any of them.
SPINE = (
    "attention",
    "span_cache",
    "surgery",
    "forward",
    "checkpoint",
    "pipelines",
    "target",
    "warm_start",
    "swapping",
    "describing",
)


def test_the_spine_asks_no_wing():
    """Each part of the spine imports schemes, families, functions of tensors, and the parts before it."""
    for place, name in enumerate(SPINE):
        beneath = ("errors", "evaluating", "schemes", "architectures", "functional", "assets", *SPINE[:place])
        imports = top_level_imports(ROOT / f"{name}.py")
        ours = {one for one in imports if one.startswith("hf_posswap.")}
        assert len(imports) > 2 and all(one.split(".")[1] in beneath for one in ours), (name, ours)


def test_training_knows_no_recipe():
    """The loop takes any model and any data: it imports errors, schemes and its own parts."""
    visited = sorted((ROOT / "training").glob("*.py"))
    assert len(visited) >= 8
    allowed = tuple(f"hf_posswap.{name}" for name in ("errors", "evaluating", "extras", "schemes", "architectures", "training"))
    for path in visited:
        ours = {name for name in top_level_imports(path) if name.startswith("hf_posswap.")}
        assert all(name.startswith(allowed) for name in ours), (path.name, ours)


def test_schemes_import_without_transformers():
    """The schemes alone can be imported where importing transformers fails."""
    code = """
import sys, types
sys.modules["transformers"] = None
package = types.ModuleType("hf_posswap")
package.__path__ = [sys.argv[1]]
sys.modules["hf_posswap"] = package
import hf_posswap.schemes
assert len(hf_posswap.schemes.SCHEMES) >= 5
print(hf_posswap.schemes.parse_scheme("rotary:theta=5"))
"""
    assert run_python("-c", code, ROOT).stdout.strip() == "rotary:theta=5"


def test_import_patches_nothing():
    """Importing the package, and swapping a model, changes no class and no function of transformers."""
    code = """
import inspect, torch
import transformers
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
warnings = list(__import__("warnings").filters)
threads, generator = torch.get_num_threads(), torch.get_rng_state()
log = __import__("logging").getLogger("transformers")
handlers, level = list(log.handlers), log.level
import hf_posswap
assert log.level == level and log.handlers[:-1] == handlers and type(log.handlers[-1]).__name__ == "LoadReports"
assert picture() == before
assert list(__import__("warnings").filters) == warnings
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
    assert int(run_python("-W", "ignore", "-c", code).stdout) > 1000


def modules() -> list[str]:
    """Every module of the package, by name."""
    return ["hf_posswap", *(m.name for m in pkgutil.walk_packages(hf_posswap.__path__, "hf_posswap."))]


def test_docstring_examples():
    """Every example in a docstring gives what it prints."""
    visited, attempted = 0, 0
    for name in modules():
        module = sys.modules.get(name) or importlib.import_module(name)
        results = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert results.failed == 0, name
        visited, attempted = visited + 1, attempted + results.attempted
    assert visited >= 20 and attempted > 15


def test_public_names():
    """Every name in every __all__ exists, and the package's own is complete and sorted."""
    checked = 0
    for name in modules():
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"
            checked += 1
    assert checked > 30
    assert list(hf_posswap.__all__) == sorted(hf_posswap.__all__)
    wanted = {"swap", "describe", "restore", "Learned", "Sinusoidal", "Relative", "Rotary", "NoPositions", "SCHEMES"}
    wanted |= {"ARCHITECTURES", "register_scheme", "register_architecture", "PosswapError"}
    assert wanted <= set(hf_posswap.__all__)


def test_every_public_thing_has_a_docstring():
    """Modules, public classes and public functions say what they are."""
    checked = 0
    for name in modules():
        module = importlib.import_module(name)
        tree = ast.parse(Path(module.__file__).read_text())
        assert ast.get_docstring(tree), name
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{name}.{node.name}"
                checked += 1
    assert checked > 40


def test_registries():
    """Names in the registries are those of their entries; every scheme has a one-line summary."""
    assert [scheme.name for scheme in hf_posswap.SCHEMES.values()] == list(hf_posswap.SCHEMES)
    assert [family.model_type for family in hf_posswap.ARCHITECTURES.values()] == list(hf_posswap.ARCHITECTURES)
    assert {"learned", "sinusoidal", "relative", "rotary", "none"} <= set(hf_posswap.SCHEMES)
    assert {"bert", "gpt2"} <= set(hf_posswap.ARCHITECTURES)
    assert all(scheme.summary and "\n" not in scheme.summary for scheme in hf_posswap.SCHEMES.values())


def test_registering_twice():
    """A name or family that is taken stays with its owner; the same class again is no error."""
    assert hf_posswap.register_scheme(hf_posswap.Rotary) is hf_posswap.Rotary

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Impostor(hf_posswap.Rotary):
        pass

    with pytest.raises(hf_posswap.PosswapError, match="a scheme named 'rotary' exists already"):
        hf_posswap.register_scheme(Impostor)
    with pytest.raises(hf_posswap.PosswapError, match="must be a dataclass, a subclass of Scheme, with a `name`"):
        hf_posswap.register_scheme(int)

    class Other(type(hf_posswap.ARCHITECTURES["bert"])):
        pass

    with pytest.raises(hf_posswap.PosswapError, match="family 'bert' is registered already"):
        hf_posswap.register_architecture(Other())
    assert type(hf_posswap.ARCHITECTURES["bert"]) is not Other
    assert hf_posswap.register_architecture(hf_posswap.ARCHITECTURES["gpt2"]) is hf_posswap.ARCHITECTURES["gpt2"]
