"""Figures with the items they are means of: intervals and paired tests against scipy, and what a comparison makes of them."""

import math
import shutil

import numpy as np
import pytest
import torch
from conftest import refused, write_run
from scipy import stats

from hf_posswap.experiments.comparison import budgets, check_budgets, load_runs
from hf_posswap.experiments.differences import differences, interval_table, paired_table, verdict
from hf_posswap.experiments.items import averaged, half_width, holm, items_of, paired_p, parted
from hf_posswap.experiments.page import write_comparison
from hf_posswap.measure.losses import mean_loss, row_losses, row_perplexities

DRAWN = np.random.default_rng(1)


@pytest.fixture(autouse=True)
def drawn_anew(monkeypatch):
    """Each test draws the same numbers, whichever run before it."""
    monkeypatch.setitem(globals(), "DRAWN", np.random.default_rng(1))


def test_values_of_rows():
    """Their means are the loss of all tokens and its perplexity, and their spread is that of a jackknife over rows."""
    losses = torch.from_numpy(DRAWN.gamma(4, size=(60, 8)))
    losses[torch.from_numpy(DRAWN.random((60, 8)) < 0.5)] = torch.nan  # rows of differing counts, as with masks
    for values, figure in ((row_losses(losses), mean_loss), (row_perplexities(losses), lambda x: math.exp(mean_loss(x)))):
        without = [figure(torch.cat([losses[:row], losses[row + 1 :]])) for row in range(60)]
        assert values.mean().item() == pytest.approx(figure(losses), abs=1e-12)
        assert stats.sem(values) == pytest.approx(np.std(without) * 59 / 60**0.5, rel=0.05)


def test_intervals_and_tests_against_scipy():
    """Student's interval is the bootstrap's; right and wrong answers have the exact permutation test, other values nearly."""
    values = DRAWN.gamma(3, size=200)
    interval = stats.bootstrap((values,), np.mean, random_state=np.random.default_rng(1)).confidence_interval
    assert half_width(values) == pytest.approx((interval.high - interval.low) / 2, rel=0.05)
    for ours, theirs, within in (
        (DRAWN.random(12) < 0.9, DRAWN.random(12) < 0.3, 1e-9),
        (DRAWN.normal(0.5, 1, 12), DRAWN.normal(0, 1, 12), 0.2),
    ):
        ours, theirs = ours.astype(float), theirs.astype(float)
        wanted = stats.permutation_test((ours, theirs), lambda a, b: np.mean(a - b), permutation_type="samples").pvalue
        assert paired_p(ours - theirs) == pytest.approx(wanted, rel=within) and wanted < 0.6
    assert paired_p(np.zeros(9)) == 1.0


def test_neighbours_that_are_alike(tmp_path):
    """If neighbouring blocks of a text are alike, means of parts give an interval that holds the mean as often as it says."""
    steps = DRAWN.normal(size=(400, 288))
    blocks = sum(steps[:, lag : lag + 256] * 0.7**lag for lag in range(32))  # an autoregression; its mean is 0

    def misses(of):
        return np.mean([abs(text.mean()) > half_width(of(text)) for text in blocks])

    assert misses(list) > 0.3 and misses(parted) < 0.1
    assert len(parted(blocks[0, :63])) == 63
    text = blocks[0] + 3.0
    assert paired_p(text) == pytest.approx(stats.ttest_1samp(parted(text), 0).pvalue, rel=1e-9)
    table = interval_table(_runs(tmp_path, {"original": [{"loss": text.tolist()}]}, seeds=(0,)))
    assert f"± {half_width(parted(text)):.3f} |" in table and "16 stretches" in table


def test_all_right_or_all_wrong(tmp_path):
    """Student's interval would have no width: the table has the end of Wilson's, but not for what is no right or wrong."""
    figures = {"accuracy": [1.0] * 20, "f1": [0.0] * 20, "cosine": [1.0] * 20}
    changed = {"accuracy": [1.0, 0.0] * 10, "f1": [0.0] * 20, "cosine": [1.0, 0.5] * 10}
    table = interval_table(_runs(tmp_path, {"original": [figures], "rotary": [changed]}, seeds=(0,)))
    wilson = stats.binomtest(20, 20).proportion_ci(method="wilson").low
    assert "Wilson" not in interval_table(_runs(tmp_path / "one", {"original": [{"cosine_128": [1.0] * 20}]}, seeds=(0,)))
    assert f"| original | 1.000 (≥ {wilson:.3f}) | 0.000 (≤ {1 - wilson:.3f}) | 1.000 |" in table and "Wilson" in table


def test_holm():
    """An adjusted value is the level at which the step-down procedure begins to reject."""
    p_values = [0.012, 0.04, 0.001, 0.3, 0.012, 0.9]
    adjusted = holm(p_values)
    for level in np.linspace(0.001, 0.999, 333):
        rejected = set()
        for rank, place in enumerate(sorted(range(6), key=p_values.__getitem__)):
            if p_values[place] > level / (6 - rank):
                break
            rejected.add(place)
        assert rejected == {place for place in range(6) if adjusted[place] <= level}


def _runs(root, rows: dict, seeds=(0, 1, 2), **options):
    """Runs whose figures are the means of items: {row: [{figure: values} for each seed]}."""
    for scheme, found in rows.items():
        for seed, figures in zip(seeds, found, strict=True):
            parts = averaged(figures)
            also = {"items": parts["items"]} if parts["items"] else {}
            write_run(root / f"{scheme}-{seed}", parts["figures"], also=also, scheme=scheme, seed=seed, **options)
    return load_runs([root])


def test_bold_needs_seeds_and_items(tmp_path):
    """Three seeds that agree are not enough if the items do not: bold, verdict and interval say so, and in what."""
    hard = DRAWN.normal(3, 1, 40)  # how hard an item is, which cancels between rows

    def row(*, less: float, spread: float):
        return [{"loss": (hard - less + spread * DRAWN.normal(0, 1, 40)).tolist()} for _ in range(3)]

    noise = DRAWN.permutation(np.repeat([-1.0, 1.05], 20))  # on some items better, on others worse, alike in all seeds
    rows = {"original": row(less=0, spread=0.001), "rotary": row(less=0.1, spread=0.01)}
    alike = enumerate(rows["original"])
    rows["none"] = [{"loss": (np.array(one["loss"]) + noise + 0.001 * seed).tolist()} for seed, one in alike]
    runs = _runs(tmp_path / "a", rows)
    cells = {label: found["loss"] for label, found in differences(runs).items()}
    assert cells["rotary, swap"].sure and not cells["none, swap"].sure
    theirs = [items_of([run for run in runs if run["config"]["scheme"] == name], "loss") for name in ("original", "none")]
    wanted = stats.ttest_rel(*theirs).pvalue
    assert cells["none, swap"].p == pytest.approx(wanted, rel=1e-3) and wanted > 0.05
    table, says = paired_table(runs).split("\n\n")
    assert table.count("**") == 2 and "| rotary, swap | **-0.1" in table
    assert "each by itself" in says and "for the 2 with items" in says and says.endswith("Holm's correction for 2).")
    assert "(paired t-test over seeds, and test over items, p < 0.05): rotary, swap (-0." in verdict(runs)
    intervals = interval_table(runs)
    low, high = stats.t.interval(0.95, 39, loc=theirs[0].mean(), scale=stats.sem(theirs[0]))
    assert f"| original | {theirs[0].mean():.3f} ± {(high - low) / 2:.3f} |" in intervals
    assert "| rotary, swap, less the original | -0.1" in intervals and "over the 40 blocks" in intervals
    bare = [{name: value for name, value in run.items() if name != "items"} for run in runs]
    assert "| none, swap | **+0.0" in paired_table(bare) and interval_table(bare) == ""
    pairs = [[run for run in some if run["config"]["scheme"] != "rotary"] for some in (runs, bare)]
    doubts = ["is not surely behind" in verdict(pair) for pair in pairs]
    assert doubts == [True, False]
    some = [run if run["config"]["scheme"] == "original" else less for run, less in zip(runs, bare, strict=True)]
    assert interval_table(some).count("\n|") == 2  # a row without items is left out: the rule and the original


def test_rows_that_no_seed_changes(tmp_path):
    """Equal figures for all seeds, of a swap without a fit, are tested over items alone; without items not at all."""
    hard = DRAWN.normal(3, 1, 40)
    worse = hard + 1 + 0.1 * DRAWN.normal(0, 1, 40)
    runs = _runs(tmp_path, {name: [{"loss": row.tolist()}] * 3 for name, row in (("original", hard), ("none", worse))})
    assert differences(runs)["none, swap"]["loss"].sure
    bare = [{name: value for name, value in run.items() if name != "items"} for run in runs]
    assert not differences(bare)["none, swap"]["loss"].sure
    five = {"original": [{"loss": 1.0}] * 5, "none": [*[{"loss": 1.1}] * 4, {"loss": 1.0}]}
    assert differences(_runs(tmp_path / "five", five, seeds=range(5)))["none, swap"]["loss"].sure  # Student's, not McNemar's


def test_rows_with_other_items_are_not_paired(tmp_path):
    """A row of another number of items, or that has kept none, is tested over seeds alone."""
    rows = {"original": [{"loss": [1.0, 2.0, 3.0]}] * 2, "rotary": [{"loss": [1.0, 2.0]}] * 2, "none": [{"loss": 1.0}] * 2}
    found = differences(_runs(tmp_path, rows, seeds=(0, 1)))
    assert all(one["loss"].items is None and len(one["loss"].seeds) == 2 for one in found.values()) and len(found) == 2


def test_what_tuning_harmed(tmp_path):
    """If the original was better before its tuning, the conclusion names that figure, and may call it the best."""
    rows = {"original": [{"loss": 3.2 + n / 100, "start_loss": 3.0} for n in range(3)]}
    rows["rotary"] = [{"loss": 3.1 + n / 90, "start_loss": 3.3} for n in range(3)]
    said = verdict(_runs(tmp_path / "a", rows), figures=["loss"])
    assert said.startswith("**Best: the lowest loss is 3, the original before its tuning.**")
    assert "different from the original tuned alike, which was better before (3) (" in said and "rotary, swap (-0.0989)" in said
    for name, before in (("a", 3.9), ("b", 2.9)):
        rows = {"original": [{"tuned_loss": 3.2, "loss": before}] * 3, "rotary": [{"tuned_loss": 3.1, "loss": 3.3}] * 3}
        runs = _runs(tmp_path / f"tuned-{name}", rows)
        for vary in ([], ["max_steps"]):
            assert ("which was better before (2.9)" in verdict(runs, vary=vary, figures=["tuned_loss"])) == (before == 2.9)
    runs[-1]["config"]["max_steps"] = 7
    assert verdict(runs, vary=["max_steps"], figures=["tuned_loss"]).endswith("to compare with: 1 of the rows.")


def test_one_name_and_other_content(tmp_path):
    """Runs on files of one name are compared if the content is the same, as far as results know it."""

    def runs(digest: str | None, **options) -> list[dict]:
        also = {"inputs": {"model": {"weights": digest}}} if digest else {}
        return load_runs([write_run(tmp_path / f"{digest}{options}", {"loss": 1.0}, also=also, **options).parent])

    first, old = runs("a", scheme="rotary"), runs(None)
    check_budgets([*old, *first, *runs("a", scheme="none")])
    says = r"other content \(SHA-256\) under the name model 'minilm': remove one and run .*--vary model"
    refused(says, check_budgets, [*old, *first, *runs("b", scheme="none")])
    refused("other content", check_budgets, [*first, *runs("b", scheme="rotary", seed=1)], ["model"])  # in one row, never


def test_tokens_of_rows(tmp_path):
    """The fit's tokens stand beside those of training, rows of one budget together."""
    for number, (scheme, start) in enumerate((("original", "swap"), ("rotary", "cold"), ("rotary", "fit"))):
        pace = "documents_per_second" if number == 0 else "tokens_per_second"  # of an embedder, tuned before
        spent = {"cost": {"tokens": 2000, pace: 9.0}}
        write_run(tmp_path / str(number), {"loss": 1.0}, also=spent, scheme=scheme, start=start)
    write_run(tmp_path / "untold", {"loss": 1.0}, scheme="none")
    assert budgets(load_runs([tmp_path])) == (
        "Tokens: 2,000 forward and back in training (original / rotary, cold); a fit on 65,536, 100 steps a layer, and 2,000 "
        "forward and back in training (rotary, fit)."
    )


def test_a_comparison_that_moved(tmp_path):
    """A page collected from a comparison.json, wherever it was moved, is the page that was collected from the runs."""
    rows = {name: [{"loss": DRAWN.normal(3, 1, 9).tolist()} for _ in range(2)] for name in ("original", "rotary")}
    runs = _runs(tmp_path / "runs", rows, seeds=(0, 1), report_to=("none",))
    for run in runs:
        run["config"]["beir"] = run["details"] = [str(tmp_path / "set")]
    write_comparison(runs, tmp_path / "out" / "first")
    assert str(tmp_path) not in (tmp_path / "out" / "first" / "comparison.json").read_text()
    shutil.copytree(tmp_path / "out", tmp_path / "far" / "away" / "out")
    write_comparison(load_runs([tmp_path / "far/away/out/first"]), tmp_path / "second")
    for file in ("comparison.md", "comparison.html"):
        assert (tmp_path / "out/first" / file).read_text() == (tmp_path / "second" / file).read_text()
    assert len(load_runs([tmp_path / "runs", tmp_path / "out" / "first"])) == 4  # the same runs


def test_rates_that_suit_each_row(tmp_path):
    """With one original, rows at other rates are compared with it; with several, only a row of the same rate."""
    for name, value, rate in (("original", 0.5, 1e-3), ("rotary", 0.6, 1e-4), ("none", 0.4, 1e-3)):
        write_run(tmp_path / name, {"accuracy": value}, scheme=name, learning_rate=rate)
    found = differences(load_runs([tmp_path]), vary=["learning_rate"])
    assert {row: round(cells["accuracy"].seeds[0], 6) for row, cells in found.items()} == {
        "rotary, swap, learning_rate 0.0001": 0.1,
        "none, swap, learning_rate 0.001": -0.1,
    }
    write_run(tmp_path / "original-too", {"accuracy": 0.7}, scheme="original", learning_rate=1e-2)
    assert [*differences(load_runs([tmp_path]), vary=["learning_rate"])] == ["none, swap, learning_rate 0.001"]
    assert not differences(load_runs([tmp_path / "original", tmp_path / "rotary"]), vary=["learning_rate", "scheme"])
