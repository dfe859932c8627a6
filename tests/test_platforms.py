"""What another system lacks: Windows POSIX calls, UTF-8 as the default and case in names; an Apple GPU float64."""

import ast
import json
import ntpath
import os
import signal
import subprocess
import sys
from pathlib import Path, PurePath, PureWindowsPath

import pytest
import torch
from conftest import refused, write_run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import hf_posswap as posswap
from hf_posswap.commands import compare
from hf_posswap.contract.subject import tiny_model
from hf_posswap.data.text import read_documents
from hf_posswap.errors import DataError, Interrupted
from hf_posswap.experiments import page
from hf_posswap.experiments.comparison import load_runs
from hf_posswap.measure.attention_distance import attention_by_distance
from hf_posswap.provenance import published
from hf_posswap.schemes.importing import load_scheme

ROOT = Path(__file__).parents[1]


def code_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text("utf-8")
    cells = json.loads(path.read_text("utf-8"))["cells"]
    lines = [line for cell in cells if cell["cell_type"] == "code" for line in "".join(cell["source"]).split("\n")]
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


def test_text_files_name_their_encoding():
    """A text file is read and written as UTF-8, by name, and written with one kind of line ends: hashes are of bytes."""
    found, wrong = [one for part in ("hf_posswap", "recipes", "notebooks") for one in (ROOT / part).rglob("*")], []
    for path in (one for one in found if one.suffix in (".py", ".ipynb") and ".ipynb_checkpoints" not in one.parts):
        for call in (node for node in ast.walk(ast.parse(code_of(path))) if isinstance(node, ast.Call)):
            name, named = getattr(call.func, "attr", getattr(call.func, "id", "")), {word.arg for word in call.keywords}
            values = [*call.args, *(word.value for word in call.keywords)]
            given = "encoding" in named or len(call.args) > {"read_text": 0, "write_text": 1}.get(name, 3)
            binary = name == "open" and any(
                {"b"} <= {*str(one.value)} <= {*"rwxab+"} for one in values if isinstance(one, ast.Constant)
            )
            if name in ("read_text", "write_text", "open") and not (given or binary):
                wrong.append(f"{path.relative_to(ROOT)}: {ast.unparse(call)}: name the encoding")
            elif name == "write_text" and "newline" not in named:
                wrong.append(f"{path.relative_to(ROOT)}: {ast.unparse(call)}: name the newline")
    assert not wrong, "\n".join(wrong)


SLEEPS = ["-c", "import time; time.sleep(60)"]


def test_ctrl_c_without_groups(monkeypatch, tmp_path):
    """Where processes have no groups, the run gets the Ctrl-C itself, and is waited for."""
    begun = []

    class Run(subprocess.Popen):
        def wait(self, *given):
            begun.append(self)
            if len(begun) > 1:
                return super().wait(*given)
            self.terminate()  # as the terminal stops it
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Run)
    monkeypatch.delattr(os, "killpg")
    command = [sys.executable, *SLEEPS]
    refused("the same command does the rest", compare.run_all, command, [("none", "swap", 0)], tmp_path, error=Interrupted)
    assert begun[0].returncode == -signal.SIGTERM


def test_a_gpu_step_without_groups(monkeypatch, recipe, tmp_path):
    """Where processes have no groups, a step whose time is over is killed itself."""
    monkeypatch.delattr(os, "killpg")
    assert recipe("gpu").run(SLEEPS, 0, tmp_path / "log", on_cpu=True) == "not done after 0 s"


def test_python_may_lie_in_a_folder_with_spaces(monkeypatch, tmp_path):
    """What starts the runs is this Python, not the parts of its path that a shell would see."""
    seen = []
    monkeypatch.setattr(sys, "executable", r"C:\Program Files\python.exe")
    monkeypatch.setattr(compare, "run_all", lambda command, *rest: seen.append(command))
    refused("no result.json", compare.compare, output=tmp_path)
    assert seen[0][0] == r"C:\Program Files\python.exe"


def test_paths_of_any_system_are_cut():
    """A run that was made on one system may be published on another: neither home is told, and all paths have slashes."""
    command = r"python 'C:\Users\alice\recipe.py' --train-file=/home/alice/data/train.csv"
    files = {"train_file": r"C:\Users\alice\data\train.csv", "test_file": "/home/alice/data/t.csv"}
    assert published({"command": command, "config": files}) == {
        "command": "python alice/recipe.py --train-file=data/train.csv",
        "config": {"train_file": "data/train.csv", "test_file": "data/t.csv"},
    }


def test_folders_of_runs_have_slashes(monkeypatch, tmp_path):
    """A comparison that was written on Windows finds its runs elsewhere."""
    write_run(tmp_path / "runs" / "one", {"accuracy": 0.5})
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(page, "Path", PureWindowsPath)
    monkeypatch.setattr(os.path, "relpath", lambda path, start: r"..\runs\one")
    written = page.write_comparison(load_runs([tmp_path / "runs"]), tmp_path / "out")
    assert json.loads(written[0].read_text("utf-8"))["runs"][0]["folder"] == "../runs/one"


def test_files_are_read_in_one_order(monkeypatch, tmp_path):
    """Windows sorts paths without case: the same texts would be split and fitted on in another order there."""
    for name in ("a", "B", "c"):
        (tmp_path / f"{name}.txt").write_text(f"text {name}", "utf-8")
    monkeypatch.setattr(PurePath, "__lt__", lambda one, other: ntpath.normcase(one) < ntpath.normcase(other))
    assert read_documents(tmp_path, split=None) == ["text B", "text a", "text c"]


def test_names_with_a_drive():
    """A path that is not there is no data set of the Hub, and one of a scheme's file no module C."""
    refused("no such file or folder", read_documents, r"C:\texts", error=DataError)
    refused(r"there is no file C:\\mine.py", load_scheme, r"C:\mine.py")


class OnApple(torch.Tensor):
    """A tensor that says it is on an Apple GPU, and is on the CPU."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor):
        if raw.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"an Apple GPU has no {raw.dtype}")
        options = {"storage_offset": raw.storage_offset(), "dtype": raw.dtype, "device": "meta"}  # a device of every torch
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), **options)
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl
    device, is_meta = property(lambda self: torch.device("mps:0")), property(lambda self: False)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, device = tree_leaves((args, kwargs)), kwargs.get("device")
        ours = [one for one in leaves if isinstance(one, OnApple)]
        between = func._overloadpacket.__name__ in ("_to_copy", "copy_", "index", "index_put_", "_index_put_impl_")
        if ours and not between and any(type(one) is torch.Tensor and one.dim() for one in leaves):
            raise RuntimeError(f"{func}: tensors are on the CPU and on an Apple GPU")
        there = ours if device is None else device.type != "cpu"
        known = {id(one.raw): one for one in ours}  # what is written in place is returned itself

        def raw(one):
            if isinstance(one, OnApple):
                return one.raw
            return torch.device("cpu") if isinstance(one, torch.device) else one

        found = func(*tree_map(raw, args), **tree_map(raw, kwargs))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        new = lambda one: OnApple(one) if there and type(one) is torch.Tensor else one  # noqa: E731
        return tree_map(lambda one: known[id(one)] if id(one) in known else new(one), found)


class Apple(TorchDispatchMode):
    """Inside, "mps:0" is a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return OnApple.__torch_dispatch__(func, types, args, kwargs)


@pytest.fixture
def apple():
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter's data cannot become of another class
    with Apple():
        yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("bert", "rotary"), ("bert", "sinusoidal"), ("gpt2", "alibi"), ("gpt2", "relative:clip=4,vectors=sinusoidal")],
)
def test_no_float64_on_an_apple_gpu(apple, family, scheme):
    """Swap, fit, measure, export and restore never ask for what such a device lacks, and give what a CPU gives."""
    blocks, outputs = torch.randint(3, 98, (16, 32), generator=torch.Generator().manual_seed(0)), []
    for device in ("cpu", "mps:0"):
        model = tiny_model(family, "eager").to(device)
        before = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        posswap.swap(model, scheme)
        posswap.fit(model, blocks, steps=1, progress=False)
        profile = attention_by_distance(model, [blocks[:2]], reach=4)
        logits = model(blocks[:2].to(device), **({} if family == "bert" else {"use_cache": False})).logits
        outputs.append((logits.cpu(), profile))
        posswap.restore(model)
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
        if family == "bert":
            cold = {"warm_start": False} if scheme == "rotary" else {}  # no tokenizer says where a first token's vector goes
            assert posswap.export_native(posswap.swap(model, scheme, **cold)).certificate.largest < 1e-3
    for ours, theirs in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)  # a step of Adam goes by the sign of gradients near 0, too
