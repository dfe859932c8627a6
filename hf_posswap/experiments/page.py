"""A comparison as one HTML file to share: conclusion, tables, pictures, and the configuration of every run."""

import base64
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from markdown_it import MarkdownIt

from hf_posswap.experiments import comparison
from hf_posswap.experiments.differences import interval_table, paired_table, verdict
from hf_posswap.provenance import published, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEMPLATE = Path(__file__).parents[1] / "assets" / "comparison.html.jinja"


def write_comparison(runs: list[dict], output: Path, *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> list[Path]:
    """Check budgets; write comparison.json, comparison.md, a self-contained comparison.html and PNGs; return their paths."""
    comparison.check_budgets(runs, vary)
    runs = [published(run) | {"folder": Path(os.path.relpath(run["folder"], output)).as_posix()} for run in runs]
    comparison.check_budgets(runs, vary)  # paths that are cut short must not make one row of two
    asked = {"vary": vary, "figures": figures}
    parts = [part(runs, **asked) for part in (verdict, comparison.markdown, interval_table, paired_table)]
    pictures = {output / f"{name}.png": figure for name, figure in plots(runs, **asked).items()}
    text = "\n\n".join(part for part in (*parts, comparison.budgets(runs, vary), comparison.background(runs)) if part) + "\n"
    output.mkdir(parents=True, exist_ok=True)
    written = [output / "comparison.json", output / "comparison.md", output / "comparison.html"]
    for file, figure in pictures.items():
        figure.savefig(file, dpi=150)
    write_json(written[0], {"format": 1, "vary": list(vary), "runs": runs})
    written[1].write_text(text, "utf-8", newline="\n")
    written[2].write_text(_page(runs, text, pictures), "utf-8", newline="\n")
    return [*written, *pictures]


def _page(runs: list[dict], text: str, pictures: Iterable[Path]) -> str:
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=True).from_string(_TEMPLATE.read_text("utf-8"))
    return template.render(
        title=": ".join(filter(None, (runs[0]["recipe"], runs[0]["config"].get("model")))),
        tables=MarkdownIt("commonmark", {"html": False}).enable("table").render(text),
        pictures={file.stem: base64.b64encode(file.read_bytes()).decode() for file in pictures},
        runs=runs,
        dumps=json.dumps,
    )


def plot(
    runs: list[dict], name: str, vary: Sequence[str] = (), *, trained: int | None = None, title: str = "", dark: bool = False
) -> "Figure":
    """Draw one figure with all seeds: lines over lengths if runs have `name_128`, `name_256`, ..., else a bar for each row."""
    from hf_posswap.plots import plot_bars, plot_loss_by_length, plot_recovery

    label = name.replace("_", " ") + (", nats a token" if name.endswith("loss") else "")
    look = {"label": label, "title": title, "dark": dark}
    lengths = sorted({int(n.removeprefix(f"{name}_")) for run in runs for n in run["figures"] if comparison.is_length(n, name)})
    if len(lengths) == 1 and any(name in run["figures"] for run in runs):
        lengths = []
    lines = {}
    for row, members in comparison.rows_of(runs, vary).items():
        for n in lengths or [None]:
            values = [run["figures"].get(f"{name}_{n}" if lengths else name) for run in members]
            if known := [value for value in values if value is not None]:
                lines.setdefault(comparison.label_of(row), {})[n] = known
    if not lengths:
        return plot_bars({row: points[None] for row, points in lines.items()}, **look)
    if lengths[0] == 0:  # these are tokens of training, not lengths of an input
        return plot_recovery(lines, **look)
    return plot_loss_by_length(lines, trained, **look)


def families(names: Sequence[str], least: int = 2) -> list[str]:
    """Return the figures that have at least so many lengths: `loss` if there are `loss_128` and `loss_256`."""
    found = dict.fromkeys(name.rpartition("_")[0] for name in names)
    return [family for family in found if sum(comparison.is_length(name, family) for name in names) >= least]


def plots(runs: list[dict], vary: Sequence[str] = (), figures: Sequence[str] = ()) -> "dict[str, Figure]":
    """Draw a picture for each family of figures over lengths (`loss_128`, `loss_256`, ...), or else of the first figure."""
    names = comparison.figure_names(runs, figures)
    return {name: plot(runs, name, vary) for name in families(names) or names[:1]}
