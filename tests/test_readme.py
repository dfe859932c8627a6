"""What the pages show can be done: Python blocks run, and every command line has the options it is given."""

import json
import re
import shlex
from pathlib import Path
from statistics import mean

import pytest

import hf_posswap as posswap
from hf_posswap.commands.plot import KINDS
from hf_posswap.data.text import stdlib_prose
from hf_posswap.schemes import parse_scheme
from hf_posswap_cli import load

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "notebooks/README.md", "recipes/README.md")


@pytest.mark.skipif(not posswap.assets.is_installed("minilm"), reason="the embedded BERT is not installed")
def test_python_blocks(tmp_path, monkeypatch, capsys):
    """The README's Python runs from top to bottom, with an embedded model for the one on the Hub and less text to fit."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 1
    monkeypatch.chdir(tmp_path)
    Path("some.txt").write_text("\n".join(stdlib_prose("train"))[:60_000])
    here = {}
    for block in blocks:
        block = block.replace('"bert-base-uncased"', repr(posswap.embedded_model("minilm")))
        block = block.replace("max_length=512)", "max_length=64, tokens=2048)").replace(
            "posswap.fit(model, text)", "posswap.fit(model, text, reconstruct=1)"
        )
        exec(block, here)
    assert here["again"].config.position_scheme["name"] == "rotary"
    assert posswap.describe(here["model"]).swapped is False
    assert "learned -> rotary" in capsys.readouterr().out


def figures_of(comparison: Path) -> set[float]:
    """Every mean over the seeds of a row that a comparison has."""
    rows = {}
    for run in json.loads(comparison.read_text())["runs"]:
        for name, value in run["figures"].items():
            rows.setdefault((run["config"]["scheme"], run["config"]["start"], name), []).append(value)
    return {mean(values) for values in rows.values()}


def test_figures_in_sentences():
    """A number that is typed next to the link to a comparison is some mean in it, if not surely of the row that is meant."""
    checked = []
    for page in PAGES:
        passages = re.split(r"\n\n|\n(?=\|)", (ROOT / page).read_text())
        for passage in passages:
            links = re.findall(r"\(((?:recipes/)?results/[\w/-]+/comparison)\.md\)", passage)
            means = {value for link in links for value in figures_of((ROOT / page).parent / f"{link}.json")}
            for number in re.findall(r"(?<![\d.,±-])\d+\.\d+(?!\d|\.\d)(?! ±)", passage) if links else ():
                digits = len(number.partition(".")[2])
                assert any(round(value, digits) == float(number) for value in means), (page, number, links)
                checked.append(number)
    assert len(checked) >= 15


def command_lines() -> list[tuple[str, list[str]]]:
    """Every `hf-posswap ...` line of the pages, as page and arguments."""
    found = []
    for page in PAGES:
        for line in re.findall(r"^(?: {4}|\| .*`)(hf-posswap [^`\n|]*)", (ROOT / page).read_text(), flags=re.MULTILINE):
            found.append((page, shlex.split(line.partition(" # ")[0])[1:]))
    return found


def test_command_lines():
    """Each command exists and has these options; placeholders stand for values."""
    seen = set()
    for page, (name, *arguments) in command_lines():
        command = load(name)
        before_recipe = arguments[: arguments.index("--")] if "--" in arguments else arguments
        given = command.make_context(name, list(before_recipe)).params  # an unknown option, a missing one, a word for a number
        seen.add(name)
        if name == "plot":
            assert given["kind"] in KINDS and Path(given["output"]).suffix in (".png", ".svg"), (page, arguments)
        for scheme in [given["scheme"]] if name == "swap" else given.get("scheme") or () if name == "compare" else ():
            parse_scheme(scheme)
    assert seen >= {"swap", "describe", "export", "compare", "card", "push", "leaderboard", "plot", "claims", "check"}
