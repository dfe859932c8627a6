"""The notebooks run from top to bottom, and what they print is what stands in them.

Numbers may differ by a tenth, or by two in the last digit that is shown, since machines round differently; by half in another
Python, whose standard library, on which models are measured, is another text. A cell tagged `varies` runs, but what it prints
is not compared.

    python tests/test_notebooks.py     # run them all, or those named, and write their outputs
"""

import re
import subprocess
import sys
from math import log10
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
# Of a number. The text is the standard library of the Python that runs: the notebooks were made with this one.
SHARE = 0.1 if sys.version_info[:3] == (3, 11, 7) else 0.5
NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*\.?\d*(?:e-?\d+)?")

# In a process of its own: a kernel's libraries warn, and a test's warnings are errors. One kernel for all, emptied in between:
# to import the libraries five times takes longer than some notebooks. What is left is no affair of the collector (gc.freeze).
RUN = """
import sys, nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient
names, output, folder = sys.argv[3:], sys.argv[2], sys.argv[1]
kernel = KernelManager(kernel_name="python3")
options = {"coalesce_streams": True, "allow_errors": True, "resources": {"metadata": {"path": folder}}}
wipe = "%reset -f\\nimport gc, matplotlib\\ngc.freeze(), matplotlib.rcdefaults()\\n%config InlineBackend.figure_formats=['png']"
for name in names:
    notebook = nbformat.read(f"{folder}/{name}", as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(wipe))
    NotebookClient(notebook, km=kernel, timeout=600, **options).execute()
    del notebook.cells[0]
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), 1):
        cell.metadata.pop("execution", None)
        for counted in (cell, *(one for one in cell.outputs if "execution_count" in one)):
            counted.execution_count = count
    nbformat.write(notebook, f"{output}/{name}")
kernel.shutdown_kernel(now=True)
"""


def run(names: list[str], output: Path) -> None:
    """Run notebooks in their own folder, and write them with their outputs, errors too."""
    command = [sys.executable, "-c", RUN, str(FOLDER), str(output), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("notebooks")
    run(NOTEBOOKS, folder)
    return folder


def shown(cell) -> tuple[str, list[str]]:
    """Return the text that a cell shows, and the kinds of its outputs."""
    texts, kinds = [], []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        picture = any(kind.startswith("image/") for kind in data)
        kinds.append("picture" if picture else "error" if output.output_type == "error" else output.get("name", "value"))
        texts.append("" if picture else output.get("text") or data.get("text/markdown") or data.get("text/plain", ""))
    return "".join(texts), kinds


def assert_same_text(actual: str, expected: str) -> None:
    """The same words, and numbers that differ by `SHARE` at most."""
    words = [re.sub(r"[\s-]+", " ", NUMBER.sub("#", text)) for text in (actual, expected)]
    assert words[0] == words[1]
    pairs = zip(*(NUMBER.findall(text) for text in (actual, expected)), strict=True)
    for one, other in (pair for pair in pairs if pair[0] != pair[1]):  # a commit may look like a number too large for a float
        values = [float(number.replace(",", "")) for number in (one, other)]
        if "e" in other:  # where only the size is told
            assert values[0] * values[1] > 0 and abs(log10(values[0] / values[1])) <= 2, (one, other, actual)
        else:
            digits = len(other.partition(".")[2])
            least = 2.1 * 10**-digits if digits else 0
            assert values[0] == pytest.approx(values[1], rel=SHARE, abs=least), (one, other, actual)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks(name, fresh):
    """Every cell runs and shows what it showed: text, numbers, a picture where there was one, nothing on stderr."""
    committed, now = (nbformat.read(folder / name, as_version=4) for folder in (FOLDER, fresh))
    compared = 0
    for old, new in zip(committed.cells, now.cells, strict=True):
        if old.cell_type != "code":
            continue
        (expected, kinds), (actual, kinds_now) = shown(old), shown(new)
        assert kinds_now == kinds and not {"error", "stderr"} & set(kinds), (old.source, actual)
        if "varies" not in old.metadata.get("tags", []):
            assert_same_text(actual, expected)
            compared += bool(expected) or "picture" in kinds
    assert compared >= 5


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_fit_to_be_read(name):
    """One of five, in the list, small, run in order, no machine's paths in it, and it ends with what to try next."""
    assert len(NOTEBOOKS) == 5 and f"]({name})" in (FOLDER / "README.md").read_text()
    notebook = nbformat.read(FOLDER / name, as_version=4)
    assert (FOLDER / name).stat().st_size < 600_000
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    text = "\n".join(shown(cell)[0] + cell.source for cell in notebook.cells)
    assert not re.search(r"/(home|root|work|tmp|Users)/", text)
    assert notebook.cells[0].source.startswith("# ") and "## What to try next" in notebook.cells[-1].source
    prose = sum(cell.cell_type == "markdown" for cell in notebook.cells)
    assert prose >= len(counts) / 2


def test_numbers_are_compared():
    """A word or a number that is different is noticed; rounding is not."""
    assert_same_text("cost 1,000.0  and -0.31", "cost 1,040.0 and -0.30")
    assert_same_text("less than 1e-7, 0.001", "less than 1e-6, 0.003")
    for other in ("0.019", "-0.009", "1e-3"):
        with pytest.raises(AssertionError):
            assert_same_text(other, "1e-9" if "e" in other else "0.001" if other == "0.019" else "0.009")
    for other in ("cost 2,600.0 and -0.30", "price 1,000.0 and -0.30", "cost 1,000.0 and -0.90", "cost 1,000.0 and"):
        with pytest.raises((AssertionError, ValueError)):
            assert_same_text("cost 1,000.0 and -0.30", other)


if __name__ == "__main__":
    run(sys.argv[1:] or NOTEBOOKS, FOLDER)
    for notebook in sys.argv[1:] or NOTEBOOKS:
        cells = nbformat.read(FOLDER / notebook, as_version=4).cells
        failed = [shown(cell)[0] for cell in cells if "error" in shown(cell)[1]]
        print("wrote", FOLDER / notebook, *failed)
