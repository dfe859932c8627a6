"""Tiny random models, and the schemes, families and attention backends that tests are spread over.

A test that takes a `case` is not run with every family and backend: see `spread`.
"""

import gc
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import zlib
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from unittest.mock import call

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test may reach the network
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: more threads than cores wait for each other, spinning

import hf_posswap_cli
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertModel, BertTokenizer, PreTrainedModel, PreTrainedTokenizerFast, RobertaModel

import hf_posswap as posswap
from hf_posswap.contract import subject
from hf_posswap.contract.subject import BACKENDS, FAMILIES, tiny_model
from hf_posswap.experiments.options import RecipeConfig


@dataclass(frozen=True)
class Case:
    """A scheme, and the longest input that it is set up for."""

    scheme: posswap.Scheme
    max_positions: int | None = None


CASES = {
    "learned": Case(posswap.Learned()),
    "learned-tile": Case(posswap.Learned(extend="tile"), 64),
    "learned-interpolate": Case(posswap.Learned(extend="interpolate"), 48),
    "sinusoidal": Case(posswap.Sinusoidal()),
    "sinusoidal-halves": Case(posswap.Sinusoidal(layout="halves", base=500), 64),
    "sinusoidal-raw": Case(posswap.Sinusoidal(project=False)),
    "sinusoidal-raw-t2t": Case(posswap.Sinusoidal(layout="tensor2tensor", project=False), 64),
    "ladder-add": Case(posswap.Ladder(rung="centred"), 64),
    "ladder-concatenate": Case(posswap.Ladder(rung="dials", combine="concatenate")),
    "relative": Case(posswap.Relative(clip=4)),
    "relative-keys": Case(posswap.Relative(clip=4, values=False), 64),
    "relative-shared": Case(posswap.Relative(clip=3, share_heads=True)),
    "relative-shared-keys": Case(posswap.Relative(clip=40, values=False, share_heads=True)),
    "relative-sinusoidal": Case(posswap.Relative(clip=12, vectors="sinusoidal"), 64),
    "relative-key-query": Case(posswap.Relative(clip=4, key_query=True)),
    "rotary": Case(posswap.Rotary(), 64),
    "rotary-half": Case(posswap.Rotary(layout="half", theta=100)),
    "rotary-partial": Case(posswap.Rotary(fraction=0.5)),
    "rotary-linear": Case(posswap.Rotary(fraction=0.5, layout="half", scaling={"rope_type": "linear", "factor": 2.0}), 64),
    "rotary-unmarked": Case(posswap.Rotary(mark_first=False)),
    "self-extend": Case(posswap.SelfExtend(group=3, near=5, temper=0.5), 64),
    "self-extend-partial": Case(posswap.SelfExtend(group=4, near=2, fraction=0.5, mark_first=False)),
    "alibi": Case(posswap.Alibi(), 64),
    "alibi-fixed": Case(posswap.Alibi(slopes="fixed")),
    "buckets": Case(posswap.Buckets(buckets=6, reach=20)),
    "mixed": Case(posswap.Mixed(layers=["rotary", "relative:clip=4"]), 64),
    "none": Case(posswap.NoPositions()),
}


# One of each kind of module, for what depends on the kind alone: a table, a projection, a buffer, tables in attention, nothing.
KINDS = ("learned-tile", "sinusoidal", "ladder-concatenate", "relative", "relative-sinusoidal", "rotary", "none")


def spread(
    start: int, families: tuple = FAMILIES, backends: tuple = BACKENDS, cases: tuple = tuple(CASES)
) -> list[tuple[str, str, str]]:
    """Return the (scheme, family, backend) that a feature is tested with: each scheme once, its partners in turn.

    Each feature starts its turn elsewhere, so that all together every scheme meets every family with every backend:
    `test_contract.test_every_pair_is_met` counts that.
    """
    turns = range(start, start + len(cases))
    period = math.lcm(len(families), len(backends))
    partners = [(families[turn % len(families)], backends[(turn + turn // period) % len(backends)]) for turn in turns]
    return [(case, *partner) for case, partner in zip(cases, partners, strict=True)]


def pytest_configure(config):
    """Keep one thread: the models are too small for more, and sums come out in one order. Imports need no collector."""
    gc.disable()
    torch.set_num_threads(1)
    config.addinivalue_line("markers", "only(families=, backends=, cases=): with which of them a test makes sense")


@pytest.fixture(scope="module", autouse=True)
def settled():
    """Keep the collector from walking through what earlier files have imported and left, and through all that is imported to
    collect them: `train` asks it at its end, and `swap` for what holds the model, which together took a quarter of all time.
    """
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc):
    """Hand out `case`, `family` and `backend`: spread to a test that takes a case, in full to others."""
    marks = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    given = {name.strip() for names in marks for name in (names.split(",") if isinstance(names, str) else names)}
    axes = [name if name in metafunc.fixturenames and name not in given else None for name in ("case", "family", "backend")]
    wanted = list(filter(None, axes))
    if not wanted:
        return
    only = {"families": FAMILIES, "backends": BACKENDS}
    for mark in [*metafunc.definition.iter_markers("only")][::-1]:  # the nearest comes first
        only |= mark.kwargs
    cases = only.pop("cases", tuple(CASES))
    start = zlib.crc32(metafunc.function.__name__.encode())
    rows = spread(start, **only, cases=cases) if "case" in wanted else [(None, *pair) for pair in product(*only.values())]
    rows = list(dict.fromkeys(tuple(value for name, value in zip(axes, row, strict=True) if name) for row in rows))
    ids = ["-".join(row) for row in rows]
    metafunc.parametrize(wanted, [[CASES.get(value, value) for value in row] for row in rows], ids=ids)


def _make_swapped(family: str, scheme, backend: str = "eager", *, max_positions=None, span=None, first=None, seed=0, **options):
    plain = tiny_model(family, backend, seed=seed, **options)
    model = posswap.swap(plain, scheme, max_positions=max_positions, span=span, first=first)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # zero tables and a constant would hide that they are not used
        for parameter in subject.position_parameters(model):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def snapshot(model: PreTrainedModel) -> dict[str, dict]:
    """Everything that a swap, a restore or a fit may change in a model: tensors copied, objects by identity."""
    modules, config = dict(model.named_modules()), model.config.to_dict()
    config.get("position_scheme", {}).pop("fitted_length", None)  # a fit notes what it was fitted to
    return {
        "weights": {name: value.clone() for name, value in (*model.state_dict().items(), *model.named_buffers())},
        "parameters": {name: (id(p), p.dtype, p.requires_grad, p.grad is None) for name, p in model.named_parameters()},
        "modules": {name: (type(one), one.training, id(getattr(one, "config", None))) for name, one in modules.items()},
        "attributes": {name: sorted(vars(one)) for name, one in modules.items()},
        "hooks": {name: [*one._forward_pre_hooks, *one._forward_hooks] for name, one in modules.items()},
        "config": config,
    }


def changes(model: PreTrainedModel, before: dict[str, dict]) -> set[tuple[str, str]]:
    """What is another than in the snapshot, as (part, name); tensors bit for bit, NaN too."""
    after, found = snapshot(model), set()
    for part, values in before.items():
        for name in values.keys() | after[part].keys():
            one, other = values.get(name), after[part].get(name)
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                same = one.shape == other.shape and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
            else:
                same = one is None if other is None else one == other
            found |= set() if same else {(part, name)}
    return found


@pytest.fixture
def make_model():
    """The factory of plain models: `make_model(family, backend, head=, seed=, **config)`."""
    return tiny_model


@pytest.fixture
def make_swapped():
    """The factory of swapped models with random position parameters: `make_swapped(family, scheme, backend, ...)`."""
    return _make_swapped


@pytest.fixture
def make():
    """The factory of swapped models with random position parameters, here for 64 tokens."""
    return lambda family, scheme, backend="sdpa", **options: _make_swapped(family, scheme, backend, max_positions=64, **options)


@pytest.fixture
def model(family, backend, case) -> PreTrainedModel:
    """A swapped model of the matrix, with random position parameters."""
    return _make_swapped(family, case.scheme, backend, max_positions=case.max_positions)


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two rows of 20 tokens, none of them special."""
    return torch.randint(2, 98, (2, 20), generator=torch.Generator().manual_seed(5))


WORDS = "the a cat dog sat ran on under mat log and then it was happy sad".split()


@pytest.fixture
def bert_tokenizer():
    """A WordPiece tokenizer with a handful of words, built here."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})


@pytest.fixture
def gpt2_tokenizer():
    """A word-level tokenizer with an end-of-text token, built here."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<|endoftext|>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def write_run(
    folder: Path, figures: dict[str, float], *, recipe: str = "passkey", cpu: str = "a cpu", also: dict | None = None, **options
) -> Path:
    """Write the result file of a run with these options of its recipe, and `also` these entries; return its path."""
    result = {
        "format": 1, "recipe": recipe, "command": f"python recipes/{recipe}.py --seed {options.get('seed', 0)}",
        "commit": "abc", "versions": {"hf_posswap": "0.1.0", "torch": "2", "transformers": "5"},
        "hardware": {"cpu": cpu, "threads": 1, "accelerator": None}, "config": asdict(RecipeConfig(**options)),
        "figures": figures, "cost": {"tokens_per_second": 1000.0, "peak_memory_bytes": 2**30, "processes": 1},
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(result | (also or {})))
    return folder / "result.json"


def write_card_run(folder, *, weights=None, **changes):
    """Write the result file of a run, with losses that no card is to hold, and perhaps the weights that it kept."""
    figures = {"accuracy": 0.5 + 0.1 * (changes.get("start") == "fit") + 0.01 * changes.get("seed", 0), "accuracy_512": 0.25}
    also = {"meaning": {"accuracy": "share of keys said in full"}, "inputs": {"train_file": {"rows.csv": "a hash"}}}
    also |= {"details": {"losses": [1.0] * 99}} | ({"weights": weights} if weights else {})
    write_run(folder, figures, also=also, **{"model": "tiny", **changes})


@pytest.fixture
def results(tmp_path):
    """Three rows of two seeds: the original, and rotary as it is and fitted."""
    for seed in (0, 1):
        write_card_run(tmp_path / f"runs/original-{seed}", seed=seed)
        for start in ("swap", "fit"):
            write_card_run(tmp_path / f"runs/rotary-{start}-{seed}", seed=seed, scheme="rotary:theta=500", start=start)
    return tmp_path / "runs"


@pytest.fixture
def swapped(make_model, tmp_path):
    """A folder with a swapped model; where it came from, it does not say."""
    model = posswap.swap(make_model("bert"), posswap.Rotary(theta=500), max_positions=128)
    model.save_pretrained(tmp_path / "swapped")
    return tmp_path / "swapped"


def refused(says: str, call, *arguments, error: type[Exception] = posswap.PosswapError, **options) -> None:
    """A call with these arguments is an error of ours, or of this class, that says this, a regular expression."""
    with pytest.raises(error, match=says):
        call(*arguments, **options)


def fails(says: str, run, *arguments, **options) -> str:
    """A command with these arguments ends with status 2 and a paragraph that says this, and no traceback: return that."""
    code, *_, err = run(*arguments, **options)
    assert code == 2 and says in err and "Traceback" not in err, err
    return err


def works(run, *arguments, **options) -> str:
    """A command with these arguments ends well; return what it prints."""
    code, printed, *err = run(*arguments, **options)
    assert code == 0, (printed, err)
    return printed


def rewrite(path: Path, change) -> None:
    """Let `change` edit what a JSON or safetensors file holds, in place."""
    if path.suffix == ".json":
        change(content := json.loads(path.read_text()))
        path.write_text(json.dumps(content))
    else:
        change(content := {name: value.clone() for name, value in load_file(path).items()})  # not the file, mapped
        save_file(content, path, {"format": "pt"})


def run_python(*arguments, **options) -> subprocess.CompletedProcess:
    """Run another Python with these arguments, and options of `subprocess.run`; it must end well."""
    options = {"capture_output": True, "text": True, "timeout": 600} | options
    done = subprocess.run([sys.executable, *map(str, arguments)], check=False, **options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def run_checks(file: Path, **variables: str) -> str:
    """Run the `check_...` of a file as tests, in a process with these variables and not this conftest; return what it says."""
    command = ["-m", "pytest", "--noconftest", "-n", "0", "-o", "python_functions=check_*", "-p", "no:cacheprovider", file]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"} | variables
    return run_python(*command, env=environment, cwd=file.parents[1]).stdout


@pytest.fixture
def save(make_model, bert_tokenizer, gpt2_tokenizer, tmp_path):
    """The function that saves a tiny headless encoder or GPT-2, with its tokenizer: `save(family, **config)` is the folder."""

    def write(family: str, **options) -> Path:
        usual = {"bert": {"head": BertModel}, "roberta": {"head": RobertaModel, "pad_token_id": bert_tokenizer.pad_token_id}}
        usual["gpt2"] = {"bos_token_id": 1, "eos_token_id": 1}
        make_model(family, **usual[family] | options).save_pretrained(tmp_path / family)
        (gpt2_tokenizer if family == "gpt2" else bert_tokenizer).save_pretrained(tmp_path / family)
        return tmp_path / family

    return write


@pytest.fixture
def program(monkeypatch, capsys):
    """The function that runs `hf-posswap` here with some arguments; it returns the exit status, the output and the errors."""

    def run(*arguments, main=hf_posswap_cli.main) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hf-posswap", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return stop.value.code or 0, said.out, " ".join(said.err.split())

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def watch(monkeypatch):
    """The function that lets functions of a module or class go on as ever, and returns the list of their calls from then on."""

    def on(owner, *names) -> list:
        calls = []
        for name in names:
            real = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, _real=real, **k: calls.append(call(*a, **k)) or _real(*a, **k))
        return calls

    return on


class Operations(TorchDispatchMode):
    """Tells `see` of each operation of torch: its name, its arguments and the tensors that it makes."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **kwargs or {})
        self.see(str(operation), args, [one for one in tree_leaves(made) if torch.is_tensor(one)])
        return made


@pytest.fixture
def recipe(monkeypatch):
    """The function that imports a recipe by its name, as Python does when the recipe is run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "recipes"))
    return importlib.import_module
