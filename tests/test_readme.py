"""The pages say what is so: Python runs, commands have these options, figures are those of the result files."""

import json
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from conftest import refused
from hf_posswap_cli import load
from scipy import stats
from transformers import AutoModel, AutoTokenizer

import hf_posswap as posswap
from hf_posswap.commands.plot import KINDS
from hf_posswap.data.text import stdlib_prose
from hf_posswap.schemes import parse_scheme

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "notebooks/README.md", "recipes/README.md", "recipes/results/README.md")


@pytest.fixture(scope="module")
def update() -> dict:
    return runpy.run_path(str(ROOT / "recipes" / "update_readme.py"))


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text()


def test_generated_parts_are_what_the_result_files_say(update, readme):
    """Tables and sentences of the pages are what the result files give today."""
    assert update["render"](readme) == readme
    assert update["results_page"]() == (update["RESULTS"] / "README.md").read_text()


def test_a_sentence_that_no_longer_holds_is_an_error(update):
    """`holds` raises for what the files do not say, and so does the name of a row or figure that is not there."""
    environment = update["environment"]()

    def render(text: str) -> str:
        return environment.from_string(text).render()

    assert render('{{ of("passkey")("relative, fit", "accuracy_2048")|d(2) }}{{ holds(1 < 2) }}') == "0.71"
    with pytest.raises(ValueError, match="do not say"):
        render('{{ holds(of("passkey")("none, fit", "accuracy_2048") > of("passkey")("relative, fit", "accuracy_2048")) }}')
    for row, figure in (("relative", "accuracy_2048"), ("relative, fit", "accuracy")):
        with pytest.raises(KeyError):
            render(f'{{{{ of("passkey")("{row}", "{figure}") }}}}')


def test_gap(update):
    """A difference on the page and its interval are scipy's, from each item's value in the file, or all but the furthest."""

    def off(folder: str, scheme: str, name: str):
        runs = json.loads((update["RESULTS"] / folder / "comparison.json").read_text())["runs"]
        kept = {row: [run["items"][name] for run in runs if run["config"]["scheme"] == row] for row in (scheme, "original")}
        return np.mean(kept[scheme], axis=0) - np.mean(kept["original"], axis=0)

    def said(values, items) -> str:
        low, high = stats.t.interval(0.95, len(items) - 1, np.mean(items), stats.sem(items))
        return f"{values.mean():+.3f} ± {(high - low) / 2:.3f}"

    gap, worst = (update["environment"]().globals[name] for name in ("gap", "worst"))
    recall = off("long_embedder", "rotary", "recall")
    assert gap("long_embedder", "rotary, fit", "recall") == said(recall, [part.mean() for part in np.array_split(recall, 16)])
    loss = off("read_on/books", "self-extend", "loss_4096")
    rest = np.delete(loss, abs(loss).argmax())
    assert gap("read_on/books", "self-extend, fit", "loss_4096", but=1) == said(rest, rest)
    loss = off("read_on/far", "self-extend", "start_loss_4096")  # as large as that of the first range, and less certain
    assert worst("read_on/far", "self-extend, fit", kind="start_loss_") == said(loss, loss)


def test_results_page(update):
    """It shows no time of a shared machine and no spread of nothing, and its index has every result file."""
    page = (update["RESULTS"] / "README.md").read_text()
    assert "tokens/s" not in page and not re.search(r"± 0(\.0+)? ", page)
    files = [file.relative_to(update["RESULTS"]).as_posix() for file in update["RESULTS"].rglob("*.json")]
    index = page.partition("## Every result file")[2]
    assert len(files) > 30 and all(f"| [{file}]({file}) |" in index for file in files)
    assert re.search(r"\[passkey/decoys/comparison.json\].* \[README\]\(../../README.md\) \|$", page, flags=re.MULTILINE)
    blocks = "".join((update["RESULTS"] / f"{block}.md.jinja").read_text() for block in ("cost", "read_on"))
    for other, folders in update["SHOWN_IN"].items():
        assert all(folder.rpartition("/")[0] in (ROOT / other).read_text() + blocks for folder in folders), other


def test_results_say_what_made_them(update):
    """Every run of every comparison names its command, a clean commit, versions and hardware."""
    files = sorted(update["RESULTS"].rglob("comparison.json"))
    assert files
    for file in files:
        for run in json.loads(file.read_text())["runs"]:
            assert run["command"] and run["commit"] and "dirty" not in run["commit"] and run["versions"] and run["hardware"]


@pytest.mark.parametrize("page", ["README.md", "recipes/README.md"])
def test_no_figure_is_typed(page):
    """What is measured stands in generated parts; outside them there are versions and what code says, no decimals."""
    text = (ROOT / page).read_text()
    text = re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- /\1 -->|```.*?```|`[^`]*`|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"\d+\.\d+", re.sub(r"(Python|Apache|Transformers) \d+\.\d+( to \d+\.\d+)?", "", text))
    assert len(text) > 2000 and not found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def test_links():
    """Every link and picture of the pages points to a file here, and to a heading in it where it names one."""
    checked = 0
    for page in PAGES:
        for target in re.findall(r"\]\(\s*([^)\s]+)\s*\)", (ROOT / page).read_text()):
            if target.startswith("http"):
                continue
            path, _, heading = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), (page, target)
            assert not heading or heading in anchors(file), (page, target)
            checked += 1
    assert checked > 100


def test_tree(readme, update):
    """What its last line names is there; the rest is made from what is there. The folders beside the package are named, too.
    The README has at most 200 lines.
    """
    assert len(readme.splitlines()) <= 200
    assert all((ROOT / "hf_posswap" / name).is_file() for name in update["BESIDE"])
    tree = readme.partition("<!-- tree -->")[2].partition("## ")[0]
    assert all(f" {folder}/" in tree and (ROOT / folder).is_dir() for folder in ("recipes", "notebooks", "tests"))


@pytest.mark.skipif(not posswap.assets.is_installed("minilm"), reason="the embedded BERT is not installed")
def test_python_blocks(readme, tmp_path, monkeypatch, capsys):
    """The README's Python runs from top to bottom, with one layer of an embedded model for those on the Hub and less text."""
    blocks = re.findall(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", readme, flags=re.DOTALL)
    assert len(blocks) == 3
    monkeypatch.chdir(tmp_path)
    minilm = posswap.embedded_model("minilm")
    AutoModel.from_pretrained(minilm, num_hidden_layers=1).save_pretrained("small")
    AutoTokenizer.from_pretrained(minilm).save_pretrained("small")
    prose = "\n".join(stdlib_prose("validation"))  # the smaller part is read sooner
    here = {"documents": [prose[:60_000]], "texts": [prose[start : start + 1_000] for start in range(0, 9_000, 1_000)]}
    for block, output in blocks:
        block = re.sub('"(bert-base-uncased|sentence-transformers/.*)"', '"small"', block)
        block = block.replace("2048, window=512)", "64, tokens=2048)").replace(
            "posswap.fit(model, text)", "posswap.fit(model, text, steps=1)"
        )
        block = block.replace("window=128)", "window=128, steps=1)").replace("max_positions=4096", "max_positions=512")
        exec(block, here)
        printed = capsys.readouterr().out
        assert not output or printed == output
        assert "posswap.fit(model" not in block or "fitted on" in printed
    assert here["again"].config.position_scheme["name"] == "rotary" and Path("long-embedder/modules.json").is_file()


def command_lines() -> list[tuple[str, list[str]]]:
    """Every `hf-posswap ...` line of the pages, as page and arguments."""
    found = []
    for page in PAGES:
        for line in re.findall(r"^(?: {4}|\| .*`)(hf-posswap [^`\n|]*)", (ROOT / page).read_text(), flags=re.MULTILINE):
            found.append((page, shlex.split(line.partition(" # ")[0])[1:]))
    return found


def parsed(name: str, arguments: list[str]) -> dict:
    """Return the options of a command line as its command reads them, or raise for one it does not have."""
    command = load(name)
    return command.make_context(name, list(arguments[: arguments.index("--")] if "--" in arguments else arguments)).params


def test_command_lines():
    """Each command exists and has these options; placeholders stand for values."""
    seen = set()
    for page, (name, *arguments) in command_lines():
        given = parsed(name, arguments)  # an unknown option, a missing one, a word for a number
        seen.add(name)
        if name == "plot":
            assert given["kind"] in KINDS and Path(given["output"]).suffix in (".png", ".svg"), (page, arguments)
        for scheme in [given["scheme"]] if name == "swap" else given.get("scheme") or () if name == "compare" else ():
            parse_scheme(scheme)
    assert seen >= {"swap", "describe", "export", "compare", "card", "push", "leaderboard", "plot", "claims", "check"}


def test_command_lines_fit_each_other(make_model):
    """What is exported can be exported, what is described was swapped, and the card's results are of its model's scheme."""
    lines = [(name, parsed(name, arguments)) for page, (name, *arguments) in command_lines() if page == "README.md"]
    swapped = {str(given["output"]): parse_scheme(given["scheme"]) for name, given in lines if name == "swap"}
    compared = {str(given["output"]): [parse_scheme(s) for s in given["scheme"]] for name, given in lines if name == "compare"}
    assert swapped and compared
    for name, given in lines:
        if name == "export":
            model = posswap.swap(make_model("gpt2"), swapped[given["model"]])
            assert type(posswap.export_native(model).model).__name__ == "GPTNeoXForCausalLM"
        if name == "describe":
            assert given["model"] in swapped
        if name in ("card", "push"):
            scheme = swapped[str(given["folder"])]
            assert all(scheme in compared[str(folder)] for folder in given["results"] or ())
    assert {"swap", "export", "compare", "card", "push"} <= {name for name, _ in lines}


def test_the_data_of_the_results_has_a_source(tmp_path, capsys):
    """Each file that a result was measured on is in recipes/data.py by its hash; a copy is checked, another file is named."""
    data = runpy.run_path(str(ROOT / "recipes" / "data.py"))
    known = {digest for one in data["SETS"].values() for digest in one["files"].values()}
    read = [
        {
            file: digest
            for option, files in run.get("inputs", {}).items()
            for file, digest in files.items()
            if option not in ("model", "schemes_from", "head") and not file.endswith(".md")  # a note beside texts
        }
        for path in (ROOT / "recipes" / "results").rglob("comparison.json")
        for run in json.loads(path.read_text())["runs"]
    ]
    assert any(read) and set().union(*(one.values() for one in read)) <= known
    states = data["check"](tmp_path)
    assert set(states.values()) == {"missing"}
    (tmp_path / "cola").mkdir()
    (tmp_path / "cola" / "dev.csv").write_text("sentence,label\n")
    refused("differ", data["data"], tmp_path)
    assert "cola/dev.csv: another" in capsys.readouterr().out


def test_results_older_than_their_code(tmp_path):
    """A result is behind by the commits to what it measures: to its recipe and to what computes, not to what prints."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    git += ["-c", "commit.gpgsign=false", "-c", "core.hooksPath=/dev/null"]

    def commit(name: str, text: str) -> str:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        for command in (["add", "."], ["commit", "-qm", name]):
            subprocess.run([*git, *command], check=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()

    subprocess.run([*git, "init", "-q"], check=True)
    runs = [{"recipe": "passkey", "commit": commit("hf_posswap/forward.py", number)} for number in "12"]
    runs[1]["config"] = {"span": 8}
    commit("recipes/results/passkey/comparison.json", json.dumps({"runs": runs}))
    for name in ("recipes/passkey.py", "recipes/heal.py", "hf_posswap/plots.py", "hf_posswap/schemes/rotary.py"):
        last = commit(name, "")
    commit("recipes/results/heal/comparison.json", json.dumps({"runs": [{"recipe": "heal", "commit": last}]}))
    commit("recipes/results/gpu/steps.json", json.dumps({"kernel": {"commit": last}}))  # parts that are no runs count, too
    older = runpy.run_path(str(ROOT / "recipes" / "older_results.py"))["later_commits"]
    assert older(tmp_path) == {"passkey/comparison.json": 3}
    for loss, found in ((2.0, {"passkey/comparison.json": 3}), (1.01, {})):  # one that did not hold does not count
        note = {"commit": last, "figures": {"loss": [1.0, loss]}}
        commit("recipes/results/run_again.json", json.dumps({"passkey/comparison.json": {"rotary, fit, seed 0": note}}))
        assert older(tmp_path) == found
    commit("hf_posswap/forward.py", "3")
    assert older(tmp_path) == {"gpu/steps.json": 1, "heal/comparison.json": 1, "passkey/comparison.json": 1}
    commit("hf_posswap/span_mask.py", "")  # counts where one of the runs has a span
    assert older(tmp_path) == {"gpu/steps.json": 1, "heal/comparison.json": 1, "passkey/comparison.json": 2}


@pytest.mark.parametrize("name", ["update_readme", "older_results"])
def test_a_misspelt_option_does_no_work(program, name):
    """It would rewrite the pages."""
    code, out, err = program("--helb", main=lambda: runpy.run_path(str(ROOT / "recipes" / f"{name}.py"), run_name="__main__"))
    assert code == 2 and "--helb" in err and not out


def test_parts_that_name_their_commit(update):
    """Runs of a table, steps on a GPU and a card's fit are all found, and those on a GPU are named on the page."""
    found = {place: {part["commit"] for part in update["made_in"](update["read"](place))} for place in (
        "sst2/comparison.json", "gpu/nvidia-h100/steps.json", "card/posswap_results.json", "run_again.json",
    )}  # fmt: skip
    assert all(found.values()) and {"gpu/nvidia-h100", "long_embedder/540"} <= set(update["on_gpu"]())
    assert "sst2" not in update["on_gpu"]()


def test_a_run_again(tmp_path, monkeypatch):
    """A run is given the options on file, and its figures stand beside those on file."""
    again = runpy.run_path(str(ROOT / "recipes" / "run_again.py"))
    config = {"scheme": "rotary", "start": "fit", "seed": 1}
    run = {"recipe": "heal", "commit": "c", "config": config, "figures": {"loss": 1.5, "gone": 2.0}}
    command = again["again"](run, tmp_path / "run")
    wanted = ["--config", str(tmp_path / "run" / "config.json"), "--output", str(tmp_path / "run")]
    assert command == [str(ROOT / "recipes" / "heal.py"), *wanted] and json.loads(Path(wanted[1]).read_text()) == config
    original = {**run, "config": {**config, "scheme": "original"}}
    assert again["choose"]([original, run], []) is run and again["choose"]([original, run], [], "original") is original
    refused("no run of row", again["choose"], [run], [], seed=3)
    refused("no result file", again["run_again"], [str(ROOT / "recipes" / "results" / "cola" / "comparison.json")], tmp_path)
    monkeypatch.setitem(again["notes"].__globals__, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "comparison.json").write_text(json.dumps({"vary": [], "runs": [original, run]}))
    made = again["place"](tmp_path, "comparison.json", "rotary, fit, seed 1")
    made.mkdir(parents=True)
    now = {"command": "c", "commit": "d", "versions": {}, "hardware": {}, "figures": {"loss": 1.75}}
    (made / "result.json").write_text(json.dumps(now))
    figures = {"loss": [1.5, 1.75], "gone": [2.0, None]}
    assert again["notes"](tmp_path) == {"comparison.json": {"rotary, fit, seed 1": {**now, "on_file": "c", "figures": figures}}}
