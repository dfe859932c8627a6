"""Generate recipes/results/README.md from its template, blocks of README.md, and the table of claims in notebooks/README.md.

    python recipes/update_readme.py

The templates recipes/results/*.jinja have the text. Every number and table is read from the committed result files:
comparison.json (recipes/compare.py) and result.json (any recipe). `holds(...)` after a sentence raises if the results no
longer support it.

The tests compare the pages with what this writes, so the pages cannot go out of date.
"""

import ast
import json
import re
from dataclasses import fields
from math import exp, sqrt
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill, shorten

from jinja2 import Environment, StrictUndefined

from hf_posswap import ARCHITECTURES, SCHEMES
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.commands.claims import check_claims
from hf_posswap.commands.claims import markdown as claims_table
from hf_posswap.experiments.comparison import label_of, made_in, markdown, row_label, rows_of, starts_table, table
from hf_posswap.experiments.differences import differences, interval_table
from hf_posswap.experiments.items import half_width, items_of, parted
from hf_posswap.terminal import run_program

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "recipes" / "results"
PICTURES = {
    "read_on/reading-on.png": "Reading past 256 tokens: a GPT-2 with rotary positions (self-extend), fitted on 1,024 without\n"
    "labels, stays near the original's sliding window; trained on 2 million tokens, both, it is better",
    "length_extrapolation/reading-past-the-trained-length.png": "Past the 256 tokens that a GPT-2 was trained on, "
    "its own table breaks at once;\nrelative and rotary positions fitted to 256 tokens fade slowly; a sliding window holds",
}

# Other pages that show figures of a result file.
SHOWN_IN = {
    "README.md": (
        *("card/", "cola/comparison", "cola/fit-100/", "fit/minilm/", "fit/minilm-400/", "fit/stdlib-gpt2/"),
        *("fit/stdlib-gpt2-400/", "passkey/decoys/", "read_on/books/comparison", "read_on/books-1024/", "read_on/far/"),
        *("read_on/span/", "read_on/span-16384/", "read_on/span-262k/", "swap_cost/stdlib-gpt2/"),
    ),
    "notebooks/02_see_the_schemes.ipynb": ("ladder/",),
    "notebooks/04_read_the_results.ipynb": (
        *("cola/comparison", "length_extrapolation/", "movie_reviews/comparison", "passkey/comparison", "sst2/comparison"),
    ),
}

# Files of the package that are not of its spine.
BESIDE = ("cli.py", "drawing.py", "errors.py", "evaluating.py", "extras.py", "plots.py", "provenance.py", "terminal.py")


def read(place: str) -> dict:
    """Return the content of a result file."""
    return json.loads((RESULTS / place).read_text("utf-8"))


def schemes() -> str:
    """Return a table of schemes (class, options, attention), and how many classes of each family can be swapped."""
    rows = []
    for name, scheme in SCHEMES.items():
        options = ", ".join(f"`{field.name}`" for field in fields(scheme)) or "none"
        where = ", ".join(scheme.implementations or ("any",))
        rows.append([f"`{scheme.__name__}`", f"`{name}`", options, scheme.summary, where])
    found = table(["in Python", "as a string", "options", "what it is", "attention"], rows, align="---")
    kinds = [kind.config_class.model_type for kind in SWAPPED_CLASSES]
    heads = ", ".join(f"{family} {kinds.count(family)}" for family in sorted(ARCHITECTURES))
    said = f"Families and their classes (ALBERT: no `mixed`; CLIP's second: Transformers 5.21): {heads}."
    return f"{found}\n\n{fill(said, 128, break_on_hyphens=False)}"


def tree() -> str:
    """Return the package's tree: a line for each folder, with the first line of its docstring, and the names of the files."""

    def line(folder: Path) -> str:
        first = (ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))) or "").partition("\n")[0].rstrip(".")
        return f"      {folder.name + '/':<18}{shorten(first, 104, placeholder=' ...')}"

    package = ROOT / "hf_posswap"
    spine = sorted(path.name for path in package.glob("*.py") if path.name not in (*BESIDE, "__init__.py"))
    said = f"The swap itself: {' '.join(spine)}."
    files = fill(said, 128, initial_indent=" " * 6, subsequent_indent=" " * 6)
    folders = sorted(path.parent for path in package.glob("*/__init__.py"))
    return "\n".join(["    hf_posswap/", *map(line, folders), files])


def rows(file: Path) -> dict[str, dict[str, list[float]]]:
    """Return the figures in a result file as {row: {figure: [value for each seed]}}; rows are named as in its tables."""
    content, found = read(file), {}
    for run in content["runs"]:
        row, curve = found.setdefault(row_label(run, content["vary"]), {}), run.get("details", {}).get("curve") or [{}]
        ends = {f"{name} {when}": x for when, point in (("start", curve[0]), ("end", curve[-1])) for name, x in point.items()}
        starts = run.get("details", {}).get("start_loss")  # by length, of a language model
        starts = {f"start_loss_{n}": x for n, x in starts.items()} if isinstance(starts, dict) else {}
        for name, value in (starts | ends | run["figures"] | run["cost"]).items():
            row.setdefault(name, []).append(value)
    return found


def environment() -> Environment:
    """Return the jinja environment, with the functions that templates may call: tables, figures, `holds`."""
    files = RESULTS.rglob("comparison.json")
    figures = {file.parent.relative_to(RESULTS).as_posix(): rows(file) for file in files}

    def of(folder: str):
        """Return a function of row and figure: the mean over seeds, their deviation if `spread`, the least if `least`."""
        kinds = {(False, False): mean, (True, False): stdev, (False, True): min}
        return lambda row, name, spread=False, least=False: kinds[spread, least](figures[folder][row][name])

    def sure(folder: str, row: str, figure: str) -> bool:
        """Whether a row's figure is bold in the comparison's table of differences from the original."""
        content = read(f"{folder}/comparison.json")
        return differences(content["runs"], vary=content["vary"])[row][figure].sure

    def kept(folder: str, row: str, name: str):
        """Return a row's figure on each item, the mean over seeds, (N,); None if it has none."""
        runs = rows_of((content := read(f"{folder}/comparison.json"))["runs"], content["vary"])
        return items_of(next(some for key, some in runs.items() if label_of(key) == row), name)

    def above(folder: str, row: str, name: str, other: str = "original", base: str | None = None, but: int = 0):
        """Return how much a row's figure is above another's (of the folder `base`), rounded as it is shown, and the half width
        of its interval over items, without the `but` items furthest from 0.
        """
        off = kept(folder, row, name) - kept(base or folder, other, name)
        off = off[sorted(abs(off).argsort()[: len(off) - but])]
        return round(off.mean().item(), 3), half_width(parted(off))

    def gap(folder: str, row: str, name: str, other: str = "original", base: str | None = None, but: int = 0) -> str:
        """Return what `above` returns, as text."""
        return "{:+.3f} ± {:.3f}".format(*above(folder, row, name, other, base, but))

    def ranges(folder: str, kind: str) -> list[str]:
        """Return the names of losses by range, such as "loss_256", those of the first tokens first."""
        return [name for name in figures[folder]["original"] if name.removeprefix(kind).isdigit()]

    def worst(folder: str, *labels: str, kind: str = "loss_") -> str:
        """Return the largest that these rows' losses are above the original's at any range; of equal ones the least certain."""
        return "{:+.3f} ± {:.3f}".format(*max(above(folder, row, name) for row in labels for name in ranges(folder, kind)))

    def apart(folder: str, row: str, kind: str = "loss_") -> str:
        """Return how much a row's losses are above the original's at each range of reading on, rounded as in tables."""
        off = ((kept(folder, row, name) - kept(folder, "original", name)).mean() for name in ranges(folder, kind))
        return ", ".join(f"{value:+.3f}" for value in off)

    def holds(*conditions: bool) -> str:
        if not all(conditions):
            raise ValueError(f"the result files do not say what this sentence says: {conditions}")
        return ""

    environment = Environment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["d"] = lambda value, digits: f"{value:.{digits}f}"
    functions = (sure, kept, gap, worst, apart, holds, exp, sqrt, abs, of, read, index, on_gpu, again, again_table)
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals |= {"m": of("fit/minilm"), "g": of("fit/stdlib-gpt2"), "rows": figures}
    environment.globals |= {"table": comparison_table, "ladder": ladder_table}
    environment.globals["generated"] = {f.stem: read(f)["details"] for f in RESULTS.glob("read_on/generation/*.json")}
    return environment


def tidy(text: str) -> str:
    """Remove standard deviations that round to zero."""
    return re.sub(r" ± 0(\.0+)?(?= )", "", text)


def comparison_table(place: str, *figures: str) -> str:
    """Return the table of one comparison, that of its intervals if it has items, and the line with its provenance."""
    content = read(f"{place}/comparison.json")
    asked = {"vary": content["vary"], "figures": figures}
    # Without tokens/s: the machines also did other work. The paired benchmark compares times.
    means = tidy(markdown(content["runs"], **asked, costs=("peak_memory_bytes",)))
    intervals, _, note = tidy(interval_table(content["runs"], **asked, brief=True)).partition("\n\n")
    items = re.search("over the (.*?) blocks", note)  # what ± means is said once, at the head of the page
    # Cold and plain swaps are far off; those differences are in the file.
    intervals = re.sub(r"\n\| [^|]*, (cold|swap)\b[^|]* less the original \|.*", "", intervals)
    if "less the original" not in intervals:  # the means again
        intervals = ""
    return "\n\n".join(filter(None, [means, intervals, source(place, content["runs"], items[1] if items else "")]))


def source(place: str, runs: list[dict], items: str = "") -> str:
    """Return the line below a table: recipe, seeds, how many items its intervals are over, commits, processors, files."""
    seeds, commits, processors = (
        ", ".join(sorted({str(value) for value in values}))
        for values in zip(*((run["config"]["seed"], run["commit"], processor(run)) for run in runs), strict=True)
    )
    processors = re.sub(r"AMD |Intel\(R\) |\(R\)| Processor", "", processors)
    said = [runs[0]["recipe"], f"seeds {seeds}", *([f"{items} items"] if items else []), f"commit {commits}", processors]
    page = f"[all figures]({place}/comparison.md), " if (RESULTS / place / "comparison.md").exists() else ""
    return f"{'; '.join(said)}; {page}[runs]({place}/comparison.json)."


def processor(run: dict) -> str:
    """Return what a run was computed on, without the number of threads."""
    return run["hardware"]["accelerator"] or run["hardware"]["cpu"]


def ladder_table(place: str, figure: str) -> str:
    """Return one figure of a comparison of starts, and the line with its provenance."""
    runs = read(f"{place}/comparison.json")["runs"]
    return f"{tidy(starts_table(runs, figure))}\n\n{source(place, runs)}"


def again() -> dict[tuple[str, str], tuple[dict, str, float]]:
    """Return {(result, run): (note, figure, difference)} of what was run again: the figure furthest off, as a share of it."""
    found = {}
    for result, runs in read("run_again.json").items():
        for label, note in runs.items():
            shared = {name: pair for name, pair in note["figures"].items() if None not in pair}
            off = {name: abs(now - was) / (max(abs(was), abs(now)) or 1) for name, (was, now) in shared.items()}
            furthest = max(off, key=off.get)
            found[result, label] = note, furthest, off[furthest]
    return found


def again_table(least: float) -> str:
    """Return the table of the runs whose furthest figure differs by `least` or more."""
    lines = []
    for (result, label), (note, name, off) in again().items():
        if off >= least:
            of_row = rows(RESULTS / result)[label.rpartition(", seed")[0]][name]
            was, now, low, high = (f"{value:.4g}" for value in (*note["figures"][name], min(of_row), max(of_row)))
            seeds = f"{low} to {high}" if len(of_row) > 1 else "one seed"
            lines.append([f"[{Path(result).parent}]({result})", label, note["on_file"], f"`{name}`", was, now, seeds])
    return table(["result", "run", "commit on file", "furthest figure", "on file", "again", "all seeds on file"], lines)


def on_gpu() -> list[str]:
    """Return the folders of result files with runs on a GPU."""
    files = sorted(RESULTS.rglob("*.json"))
    found = [file for file in files if any(run["hardware"]["accelerator"] for run in made_in(json.loads(file.read_bytes())))]
    return [file.parent.relative_to(RESULTS).as_posix() for file in found]


def index(kinds: dict[str, str]) -> str:
    """Every result file: what is in it and where on this page, the commit that measured it, and other pages that show it."""
    rows = []
    for file in sorted(RESULTS.rglob("*.json")):
        place = file.relative_to(RESULTS)
        content = read(file)
        runs = content.get("runs") or [content]
        commits = sorted({str(run["commit"]) for run in made_in(content)})
        kind = next(words for prefix, words in kinds.items() if place.as_posix().startswith(prefix))
        pages = [page for page, starts in SHOWN_IN.items() if place.as_posix().startswith(starts)]
        links = ", ".join(f"[{Path(page).stem}](../../{page})" for page in pages)
        kept = [what for what in ("inputs", "items") if all(run.get(what) for run in runs)]
        rows.append([f"[{place}]({place})", kind, ", ".join(commits), ", ".join(kept), links])
    return table(["result file", "what is in it", "measured at", "kept", "also in"], rows, align="---")


def results_page(name: str = "README") -> str:
    """Return a page, by default recipes/results/README.md, as its template and the result files have it."""
    return wrap(environment().from_string((RESULTS / f"{name}.md.jinja").read_text("utf-8")).render())


def wrap(page: str) -> str:
    """Wrap lines of prose again after figures were filled in; tables and commands stay as they are."""
    parts = re.sub(r"\n{3,}", "\n\n", page).split("\n\n")
    for number, part in enumerate(parts):
        if part.startswith(("|", "#", "!", "<", "`", "- `")):
            continue
        lines = [f"- {item}" for item in part[2:].split("\n- ")] if part.startswith("- ") else [part]
        lines = [" ".join(line.split()) for line in lines]  # also where a tag of the template was
        parts[number] = "\n".join(
            fill(line, 128, subsequent_indent="  " * line.startswith("- "), break_long_words=False, break_on_hyphens=False)
            for line in lines
        )
    return "\n\n".join(parts).strip() + "\n"


def render(readme: str) -> str:
    """Return the README with the generated blocks replaced."""
    cost, far = results_page("cost").strip(), results_page("read_on").strip()
    for name, block in (("schemes", schemes()), ("cost", cost), ("read-on", far), ("tree", tree())):
        readme = replace_block(readme, name, block)
    return readme


def replace_block(page: str, name: str, block: str) -> str:
    """Return the page with the text between <!-- name --> and <!-- /name --> replaced."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    page, count = re.subn(pattern, lambda m: f"{m[1]}{block}\n{m[2]}", page, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"the page must have one <!-- {name} --> block, it has {count}")
    return page


def draw() -> None:
    """Draw the picture of README.md and one of the results: perplexity by how far into a text, or by its length."""
    from hf_posswap.plots import plot_loss_by_length  # matplotlib: no page needs it

    window, fitted, far = "original, sliding window", "relative, fit", "self-extend, fit"
    shown = {
        "read_on/far": {
            window: ("original", "start_loss"), "self-extend, long fit": (far, "start_loss"),
            "original, trained": ("original", "loss"), "self-extend, trained": (far, "loss"),
        },
        "length_extrapolation": {
            "learned, repeated": ("learned:extend=tile, fit", "loss"), fitted: (fitted, "loss"),
            "rotary, fit": ("rotary, fit", "loss"), window: ("original", "loss"),
        },
    }  # fmt: skip
    for (picture, title), (folder, chosen) in zip(PICTURES.items(), shown.items(), strict=True):
        found = rows(RESULTS / folder / "comparison.json")
        found = {row.partition(", learning_rate")[0]: figures for row, figures in found.items()}
        sizes = [int(size) for name in found["original"] if (size := name.removeprefix("loss_")).isdigit()]
        lines = {name: {n: [exp(x) for x in found[row][f"{kind}_{n}"]] for n in sizes} for name, (row, kind) in chosen.items()}
        figure = plot_loss_by_length(lines, 256, "", label="perplexity")
        figure.suptitle(title, fontsize=10)
        if folder == "read_on/far":  # all of them read 4,096 tokens
            figure.axes[0].set_xlabel("position in the text, up to this token (trained with 256)")
        figure.savefig(RESULTS / picture, dpi=120)


def update() -> None:
    """Write README.md, recipes/results/README.md with its pictures, and the claims in notebooks/README.md."""
    draw()
    page = ROOT / "README.md"
    page.write_text(render(page.read_text("utf-8")), "utf-8", newline="\n")
    (RESULTS / "README.md").write_text(results_page(), "utf-8", newline="\n")
    page = ROOT / "notebooks" / "README.md"
    page.write_text(replace_block(page.read_text("utf-8"), "claims", claims_table(check_claims())), "utf-8", newline="\n")


if __name__ == "__main__":
    run_program("update_readme", update)
