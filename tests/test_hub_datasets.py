"""Data sets of a Hub on loopback, read by the real client in processes of their own: like GLUE and wikitext, and faults."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from hub import File, Hub, Repo
from transformers import BertTokenizer

RECIPES = Path(__file__).parents[1] / "recipes"
COLA = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["wrong", "right"])})
SENTENCES = [f"The cat sat on {number} {'mats' if number % 2 else 'hats'}." for number in range(60)]
READ = """
import json, sys, time
time.sleep = lambda seconds: None  # the client waits between its tries
from hf_posswap.errors import PosswapError
from hf_posswap.data.tables import TableConfig, read_task
from hf_posswap.data.text import read_documents
seen = []
for name in sys.argv[1:]:
    try:
        if name.startswith("text "):
            seen.append(read_documents(name.removeprefix("text "), split="validation"))
        else:
            task = read_task(TableConfig(dataset=name))
            seen.append([task.label_names, len(task.train), len(task.validation), task.validation.texts[0]])
    except PosswapError as error:
        seen.append(str(error))
print(json.dumps(seen))
"""


def _parquet(folder: Path, columns: dict, features=None) -> File:
    path = folder / "rows.parquet"
    datasets.Dataset.from_dict(columns, features).to_parquet(path)
    return File(path.read_bytes())


def _card(config: str, splits: tuple[str, ...]) -> File:
    files = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
    return File(f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n".encode())


@pytest.fixture
def hub(tmp_path):
    """GLUE's CoLA, whose test labels are secret, wikitext, a private data set and one that is a script."""
    with Hub.serve() as hub:
        labels = [number % 2 for number in range(60)]
        part = {"sentence": SENTENCES[:20], "label": labels[:20]}
        whole, held = (_parquet(tmp_path, rows, COLA) for rows in ({"sentence": SENTENCES, "label": labels}, part))
        secret = _parquet(tmp_path, {"sentence": SENTENCES[:5], "label": [-1] * 5}, COLA)
        lines = _parquet(tmp_path, {"text": ["", " = A title = \n", "The cat sat on the mat. \n"]})
        contents = {
            "nyu-mll/glue": {
                "README.md": _card("cola", ("train", "validation", "test")),
                "cola/train-00000-of-00001.parquet": whole,
                "cola/validation-00000-of-00001.parquet": held,
                "cola/test-00000-of-00001.parquet": secret,
            },
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


def _run(hub, home, command, **variables):
    environment = os.environ | hub.environment(home) | variables
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300, check=False)


def _read(hub, home, *names, **variables):
    done = _run(hub, home, ["-c", READ, *names], **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_reading(hub, tmp_path):
    """By the names that people write, with labels' names; once read, without a network; what cannot be is an error."""
    expected = [["wrong", "right"], 60, 20, SENTENCES[0]]
    text = "text wikitext:wikitext-2-raw-v1"
    names = ("glue/cola", "nyu-mll/glue:cola", text, "glue/nothing", "other/private", "other/script", "no/such")
    seen = dict(zip(names, _read(hub, tmp_path, *names), strict=True))
    assert seen["glue/cola"] == seen["nyu-mll/glue:cola"] == expected
    assert seen[text] == [" = A title = \n", "The cat sat on the mat. \n"]
    for name, says in (
        ("glue/nothing", "nothing.*cola"),
        ("other/private", "exist"),
        ("other/script", "scripts are no longer supported"),
        ("no/such", "exist"),
    ):
        assert re.search(f"cannot read the Hub data set .*{says}", seen[name]), seen[name]
    assert _read(hub, tmp_path, "glue/cola", HF_HUB_OFFLINE="1") == [expected]


@pytest.mark.parametrize("status", [503, 0])
def test_faults(hub, tmp_path, status):
    """A Hub that answers with an error, or cuts the connection, is an error of one line; the same again goes on."""
    for method in ("GET", "HEAD"):
        hub.fail_next(method, "datasets", status, times=1000)
    assert _read(hub, tmp_path, "glue/cola")[0].startswith("cannot read the Hub data set nyu-mll/glue, cola: ")
    hub.faults.clear()
    hub.fail_next("GET", "/cola/validation-", status)
    first, again = _read(hub, tmp_path, "glue/cola", "glue/cola")
    assert again[1:3] == [60, 20]
    assert status == 0 or first.startswith("cannot read the Hub data set")  # a cut connection may be asked again at once


def test_recipe(hub, make_model, tmp_path):
    """A recipe learns from a Hub data set as from a file."""
    options = ["--dataset", "glue/cola", "--max-steps", "2", "--batch-size", "8", "--report-to", "none"]
    make_model("bert").save_pretrained(tmp_path / "model")
    words = sorted({word.lower() for sentence in SENTENCES for word in sentence.rstrip(".").split() if word.isalpha()})
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *map(str, range(10)), *words]
    BertTokenizer(vocab={word: number for number, word in enumerate(words)}).save_pretrained(tmp_path / "model")
    options += ["--model", str(tmp_path / "model")]
    recipe = str(RECIPES / "downstream_classification.py")
    done = _run(hub, tmp_path / "home", [recipe, *options, "--output", str(tmp_path / "run")])
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["data"]["source"] == "glue/cola" and result["data"]["labels"] == ["wrong", "right"]
