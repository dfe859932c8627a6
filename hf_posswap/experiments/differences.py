"""How far each row of a comparison is from the original, and which differences are sure: paired by seed, and by item.

Runs with one seed share the order of data and other random draws, whose effect cancels in their difference. So does how hard an
item is, if results keep the figure on each: see `items`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, mean, stdev

import numpy as np

from hf_posswap.experiments.comparison import ORIGINAL, figure_names, is_length, label_of, rows_of, table, top
from hf_posswap.experiments.items import half_width, holm, items_of, paired_p, parted, student_p


@dataclass
class Difference:
    """A row's figure less the original's."""

    seeds: list[float]  # seed by seed
    items: np.ndarray | None  # item by item, means over seeds; None if they were not kept
    p: float = 1.0  # `alone`, by Holm's correction for all of a table that are tested so

    @property
    def varied(self) -> bool:
        return len(self.seeds) > 1 and stdev(self.seeds) > 1e-9 * abs(mean(self.seeds))

    @property
    def alone(self) -> float:
        """The p-value by itself: over items, if they were kept, else Student's over seeds that differ, else 1."""
        if self.items is not None:
            return paired_p(self.items)
        return student_p(self.seeds) if self.varied else 1.0

    @property
    def sure(self) -> bool:
        """Whether it is unlike zero: over seeds by a t-test, if they differ, and by its p, which is corrected (p < 0.05)."""
        return len(self.seeds) > 1 and (not self.varied or student_p(self.seeds) < 0.05) and self.p < 0.05


def differences(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> dict[str, dict[str, Difference]]:
    """Return the differences of a table, {row: {figure: Difference}}; rows without an original are left out."""
    rows, found = rows_of(runs, vary), {}
    for row, members in rows.items():
        original = _original_of(row, rows)
        if row[0] != ORIGINAL and original is not None:
            names = figure_names(runs, figures)
            found[label_of(row)] = {name: _difference(members, rows[original], name) for name in names}
    cells = [one for row in found.values() for one in row.values()]
    for kept in (True, False):  # apart: F1 has no items, says little that accuracy does not, and would weaken its test
        tested = [one for one in cells if (one.items is not None) == kept and (kept or one.varied)]
        for one, p in zip(tested, holm([one.alone for one in tested]), strict=True):
            one.p = p
    return found


def _original_of(row: tuple, rows: dict[tuple, list[dict]]) -> tuple | None:
    """Return the original's row: that from scratch for such rows, if it was run; of another rate, if it has but one."""

    def beside_rates(row: tuple) -> list:
        return [pair for pair in row[2:] if pair[0] != "learning_rate"]

    for start in (row[1], ""):
        there = [one for one in rows if one[:2] == (ORIGINAL, start) and beside_rates(one) == beside_rates(row)]
        if there:
            one = (ORIGINAL, start, *row[2:])
            return one if one in there else there[0] if len(there) == 1 else None
    return None


def _difference(members: list[dict], originals: list[dict], name: str) -> Difference:
    theirs = {run["config"]["seed"]: run["figures"].get(name) for run in originals}
    pairs = [(run["figures"].get(name), theirs[run["config"]["seed"]]) for run in members]
    by_item = [items_of(some, name) for some in (members, originals)]
    same = all(one is not None for one in by_item) and len(by_item[0]) == len(by_item[1])
    by_seed = [ours - theirs for ours, theirs in pairs if None not in (ours, theirs)]
    return Difference(by_seed, by_item[0] - by_item[1] if same else None)


def paired_table(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return a table of differences from the original, with what bold means below it; empty if no original was run.

    A cell is the mean of the differences seed by seed ± their standard deviation. Bold: `Difference.sure`. A figure that is the
    same for all seeds is tested over items alone, or, without them, not at all.
    """
    names, found = figure_names(runs, figures), differences(runs, vary=vary, figures=figures)
    rows = [[label, *(_cell(cells[name]) for name in names)] for label, cells in found.items()]
    if not rows:
        return ""
    cells = [one for row in found.values() for one in row.values()]
    said, kept = "", sum(one.items is not None for one in cells)
    if max(len(one.seeds) for one in cells) > 1:
        rest = sum(one.items is None and one.varied for one in cells)
        how = f"after Holm's correction for the {rest} without items" if rest else "each by itself"
        how += ", others each by itself" * (rest > 0 and kept > 0)
        said = f"\n\nDifferences are taken seed by seed; bold ones are unlike zero by a t-test (p < 0.05, {how})"
        said += (
            f" and, for the {kept} with items, by a paired test over these: McNemar's for right and wrong answers of one "
            f"seed, else a t-test (p < 0.05 after Holm's correction for {kept})"
        ) * (kept > 0) + "."
    return table(["less the original", *(name.replace("_", " ") for name in names)], rows) + said


def interval_table(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = (), brief: bool = False) -> str:
    """Return a table of figures, and differences from the original, with 95 % intervals over items; empty without items.

    A cell is the mean over seeds ± the half width of Student's interval. With `brief` the differences alone, if there are any.
    """
    wanted, less = figure_names(runs, figures), differences(runs, vary=vary, figures=figures)
    shown = {} if brief and less else rows_of(runs, vary)
    rows = [(label_of(row), {n: items_of(some, n) for n in wanted}, "") for row, some in shown.items()]
    rows += [(f"{label}, less the original", {n: cells[n].items for n in wanted}, "+") for label, cells in less.items()]
    rows = [row for row in rows if any(values is not None for values in row[1].values())]
    names = [name for name in wanted if any(items[name] is not None for _, items, _ in rows)]
    if not names:
        return ""
    sizes = sorted({len(items[name]) for _, items, _ in rows for name in names if items[name] is not None})
    count = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
    said = f"± is Student's 95 % interval over the {count} blocks of text, queries or rows measured on, means over seeds"
    said += " (from 64 on, over 16 stretches of them, since neighbours are alike)." if sizes[-1] >= 64 else "."
    # Those may be 1, or 0, on all items, too.
    no_share = {"cosine", "kept", "beir", "kl", "ratio", "damage", "loss", "perplexity"}
    shares = {name for name in names if not no_share & {*name.split("_")}}
    yes_no = {name for name in shares if all({*run.get("items", {}).get(name, ())} <= {0, 1} for run in runs)}
    cells = [[label, *(_interval(items[name], sign, name in yes_no) for name in names)] for label, items, sign in rows]
    one_sided = any("≥" in cell or "≤" in cell for row in cells for cell in row)
    said += " Where all are right, or all wrong, ≥ and ≤ are ends of Wilson's interval." * one_sided
    return table(["interval over items", *(name.replace("_", " ") for name in names)], cells) + f"\n\n{said}"


def _cell(one: Difference) -> str:
    if not one.seeds:
        return ""
    form = "{:+.3f}" if max(map(abs, one.seeds)) < 10 else "{:+.1f}"
    if len(one.seeds) == 1:
        return form.format(one.seeds[0])
    cell = f"{form.format(mean(one.seeds))} ± {form.format(stdev(one.seeds))[1:]}"
    return f"**{cell}**" if one.sure and float(form.format(mean(one.seeds))) else cell


def _interval(values: np.ndarray | None, sign: str, yes_no: bool) -> str:
    if values is None:
        return ""
    middle, half = values.mean(), half_width(parted(values))
    digits = 3 if abs(middle) < 10 else 1
    if yes_no and not sign and middle in (0, 1):
        bound = len(values) / (len(values) + 1.96**2)  # Wilson 1927, which has one side here
        return f"{middle:.3f} (≥ {bound:.3f})" if middle else f"{middle:.3f} (≤ {1 - bound:.3f})"
    return f"{middle:{sign}.{digits}f}" + (f" ± {half:.{digits}f}" if half else "")  # items that are all alike show no spread


def verdict(runs: list[dict], *, vary: Sequence[str] = (), figures: Sequence[str] = ()) -> str:
    """Return the conclusion in a few sentences: the best row in the first figure, and which rows surely differ.

    The next row is compared with the best by the tests of `Difference.sure`, for this pair alone; other rows with the original.
    If the figure is measured over lengths, the longest is judged too. The figure's name tells whether more or less is better.
    """
    names, found = figure_names(runs, figures), differences(runs, vary=vary, figures=figures)
    family = [name for name in names if is_length(name, names[0].rpartition("_")[0])] if names else []
    longest = sorted(family, key=lambda name: int(name.rpartition("_")[2]))[-1:]
    rows = rows_of(runs, vary)
    return " ".join(_judged(rows, found, name) for name in dict.fromkeys([*names[:1], *longest]))


def _judged(rows: dict[tuple, list[dict]], found: dict[str, dict[str, Difference]], name: str) -> str:
    better, known = top(name)

    def means(name: str) -> dict[str, float]:
        """Of rows that have it for the most seeds: one that has it for its lucky seeds alone is not the best."""
        values = {row: [run["figures"][name] for run in members if name in run["figures"]] for row, members in rows.items()}
        most = max(map(len, values.values()))
        return {label_of(row): fmean(some) for row, some in values.items() if len(some) == most > 0}

    of, whom = means(name), "the original"
    # A rate that harms the original makes it a poor one to compare with.
    start = means(name.removeprefix("tuned_") if name.startswith("tuned_") else f"start_{name}")
    plain = [label_of(row) for row in rows if row[:2] == (ORIGINAL, "")]
    before, after = (better((some[row] for row in plain if row in some), default=None) for some in (start, of))
    if None not in (before, after) and better(before, after) != after:
        of["the original before its tuning"] = before
        whom += f" tuned alike, which was better before ({before:.4g})"
    best = better(of, key=of.get)
    word = f"{'lowest' if better is min else 'highest'} {name.replace('_', ' ')}"
    said = f"**{'Best: the' if known == 'best' else 'The'} {word} is {of[best]:.4g}, {best}.**"
    by_label = {label_of(row): members for row, members in rows.items() if label_of(row) in of}
    ranked = sorted(by_label, key=of.get, reverse=better is max)
    if known == "best" and ranked[0] == best and len(ranked) > 1:
        gap = _difference(by_label[best], by_label[ranked[1]], name)
        gap.p = gap.alone
        said += f" The next, {ranked[1]} ({of[ranked[1]]:.4g}), is not surely behind." * (not gap.sure)
    cells = {label: cells[name] for label, cells in found.items() if cells[name].seeds}
    if not cells:
        return f"{said} No row has an original to compare with."
    sure = [f"{label} ({mean(one.seeds):+.3g})" for label, one in cells.items() if one.sure]
    if max(len(one.seeds) for one in cells.values()) < 2:
        return f"{said} One seed: no difference from the original is sure."
    tests = "paired t-test" + " over seeds, and test over items" * any(one.items is not None for one in cells.values())
    said += f" Surely different from {whom} ({tests}, p < 0.05): {', '.join(sure) or 'none'}."
    there = {label_of(row) for row, some in rows.items() if row[0] != ORIGINAL and any(name in run["figures"] for run in some)}
    alone = len(there - cells.keys())
    return said + f" Without an original to compare with: {alone} of the rows." * (alone > 0)
