"""A Hub on loopback and the real client, in processes of their own: data sets like GLUE and wikitext, with faults; and the
scenarios of sharing, in share_job.py.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from conftest import run_python
from hub import File, Hub, Repo
from share_job import SCENARIOS

COLA = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["wrong", "right"])})
SENTENCES = [f"The cat sat on {number} {'mats' if number % 2 else 'hats'}." for number in range(60)]
READ = """
import json, sys, time
time.sleep = lambda seconds: None  # the client waits between its tries
from hf_posswap.errors import PosswapError
from hf_posswap.data.tables import TableConfig, read_task
from hf_posswap.data.text import read_documents
for line in sys.stdin:
    kind, *arguments = json.loads(line)
    try:
        if kind == "text":
            seen = read_documents(*arguments, split="validation")
        else:
            task = read_task(TableConfig(dataset=kind))
            seen = [task.label_names, len(task.train), len(task.validation), task.validation.texts[0]]
    except PosswapError as error:
        seen = str(error)
    print("=>", json.dumps(seen), flush=True)
"""


def _parquet(folder: Path, columns: dict, features=None) -> File:
    path = folder / "rows.parquet"
    datasets.Dataset.from_dict(columns, features).to_parquet(path)
    return File(path.read_bytes())


def _card(config: str, splits: tuple[str, ...]) -> File:
    files = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
    return File(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n".encode())


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """GLUE's CoLA, whose test labels are secret, and copies of it; wikitext, a private data set and one that is a script."""
    tmp_path = tmp_path_factory.mktemp("data")
    with Hub.serve() as hub:
        labels = [number % 2 for number in range(60)]
        part = {"sentence": SENTENCES[:20], "label": labels[:20]}
        whole, held = (_parquet(tmp_path, rows, COLA) for rows in ({"sentence": SENTENCES, "label": labels}, part))
        secret = _parquet(tmp_path, {"sentence": SENTENCES[:5], "label": [-1] * 5}, COLA)
        lines = _parquet(tmp_path, {"text": ["", " = A title = \n", "The cat sat on the mat. \n"]})
        glue = {
            "README.md": _card("cola", ("train", "validation", "test")),
            "cola/train-00000-of-00001.parquet": whole,
            "cola/validation-00000-of-00001.parquet": held,
            "cola/test-00000-of-00001.parquet": secret,
        }
        contents = {
            "nyu-mll/glue": glue,
            "faulty/glue503": glue,
            "faulty/glue0": glue,
            "Salesforce/wikitext": {
                "README.md": _card("wikitext-2-raw-v1", ("train", "validation")),
                "wikitext-2-raw-v1/train-00000-of-00001.parquet": lines,
                "wikitext-2-raw-v1/validation-00000-of-00001.parquet": lines,
            },
            "other/private": {"train.parquet": whole},
            "other/script": {"script.py": File(b"raise SystemExit('code of a stranger was run')")},
        }
        for name, tree in contents.items():
            hub.repos[f"datasets/{name}"] = Repo(f"datasets/{name}", private="private" in name)
            hub.repos[f"datasets/{name}"].commit("main", tree, "data", None)
        yield hub


class Reader:
    """A process that reads from this Hub whatever it is asked for."""

    def __init__(self, hub, home, **variables):
        environment = os.environ | hub.environment(home) | variables
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-c", READ], text=True, env=environment, **pipes)

    def __call__(self, *asked):
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(next(line for line in self.process.stdout if line.startswith("=> "))[3:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the process keeps what it has read."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def read(hub, home):
    """The process that reads."""
    with Reader(hub, home) as reader:
        yield reader


def test_reading(hub, home, read):
    """Data sets are read by the names that people write, once read also without a network; others are an error."""
    expected = [["wrong", "right"], 60, 20, SENTENCES[0]]
    assert read("glue/cola") == read("nyu-mll/glue:cola") == expected
    assert read("text", "wikitext:wikitext-2-raw-v1") == [" = A title = \n", "The cat sat on the mat. \n"]
    for name, says in (
        ("glue/nothing", "nothing.*cola"),
        ("other/private", "exist"),
        ("other/script", "scripts are no longer supported"),
        ("no/such", "exist"),
    ):
        seen = read(name)
        assert re.search(f"cannot read the Hub data set .*{says}", seen), seen
    with Reader(hub, home, HF_HUB_OFFLINE="1") as offline:
        assert offline("glue/cola") == expected


@pytest.mark.parametrize("status", [503, 0])
def test_faults(hub, read, status):
    """A Hub that answers with an error, or cuts the connection, is an error of one line; the same again goes on."""
    for method in ("GET", "HEAD"):
        hub.fail_next(method, "datasets", status, times=1000)
    assert read(f"faulty/glue{status}/cola").startswith(f"cannot read the Hub data set faulty/glue{status}, cola: ")
    hub.faults.clear()
    hub.fail_next("GET", "/cola/validation-", status)
    first, again = (read(f"faulty/glue{status}/cola") for _ in range(2))
    hub.faults.clear()
    assert again[1:3] == [60, 20]
    assert status == 0 or first.startswith("cannot read the Hub data set")  # a cut connection may be asked again at once


JOB = Path(__file__).parent / "share_job.py"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What all scenarios said."""
    root = tmp_path_factory.mktemp("share")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        hub = Hub(None, f"http://127.0.0.1:{free.getsockname()[1]}")  # where the job is to run one
    done = run_python(JOB, root, env=os.environ | hub.environment(root / "home") | {"TQDM_DISABLE": "1"})
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(outcome, name):
    """The scenario went as it should."""
    assert not outcome[name], outcome[name]
