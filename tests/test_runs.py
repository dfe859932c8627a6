"""Runs side by side: equal budgets or an error that names what differs; tables, pictures and a page without other files."""

import json
import re
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import stdev

import pytest
from conftest import fails, refused, rewrite, works, write_run
from scipy import stats

import hf_posswap as posswap
from hf_posswap.commands import compare as commands_compare
from hf_posswap.commands.compare import _begin, _jobs, run_all
from hf_posswap.experiments.comparison import background, check_budgets, load_runs, markdown
from hf_posswap.experiments.differences import differences, paired_table, verdict
from hf_posswap.experiments.options import RecipeConfig
from hf_posswap.experiments.page import plot, write_comparison
from hf_posswap.experiments.swap_cost import SwapCostConfig
from hf_posswap.provenance import input_hashes, without_home

ROOT = Path(__file__).parent.parent


def _matrix(root):
    """Three rows of two seeds."""
    for seed in (0, 1):
        write_run(root / f"z{seed}", {"accuracy": 0.9 + seed / 100}, seed=seed)
        for start in ("cold", "fit"):
            value = {"cold": 0.5, "fit": 0.8}[start] + seed / 10
            write_run(root / f"r-{start}-{seed}", {"accuracy": value}, scheme="rotary", start=start, seed=seed)
    return load_runs([root])


VALUES = {"original": [0.5, 0.7, 0.9], "rotary": [0.512, 0.714, 0.913], "none": [0.6, 0.5, 0.95]}


def _rows(root, values, **figures):
    """Runs of a row for each scheme, a seed for each accuracy; other figures are so many times that."""
    for scheme, found in values.items():
        for seed, value in enumerate(found):
            others = {name: factor * value for name, factor in figures.items()}
            write_run(root / f"{scheme}-{seed}", {"accuracy": value, **others}, scheme=scheme, seed=seed)
    return load_runs([root])


def test_table(tmp_path):
    """The table has a line for each row, with mean and deviation over seeds and the cost."""
    runs = _matrix(tmp_path)
    lines = markdown(runs).splitlines()
    assert lines[0] == "| positions | accuracy | tokens/s | peak MiB |"
    assert lines[2] == f"| original | 0.905 ± {stdev([0.9, 0.91]):.3f} | 1,000 | 1,024 |"
    assert lines[3].startswith("| rotary, cold | 0.550 ± 0.071") and lines[4].startswith("| rotary, fit | 0.850")
    assert "seeds [0, 1] (means ± standard deviations over them)" in background(runs) and "commit abc" in background(runs)
    assert load_runs([tmp_path / "z0" / "result.json"]) == load_runs([tmp_path / "z0"])


def test_differences_are_taken_seed_by_seed(tmp_path):
    """Differences are means over seeds of paired runs, bold where a paired t-test is sure; one seed has no spread."""
    values = VALUES | {"learned": [0.25, 0.45, 0.65]}
    runs = _rows(tmp_path, values, loss=100)
    alone = stats.ttest_rel(values["rotary"], values["original"]).pvalue  # the smallest p-value of the four that are tested
    assert differences(runs)["rotary, swap"]["loss"].p == pytest.approx(4 * alone, rel=1e-3)
    table, said = paired_table(runs).split("\n\n")
    table = table.splitlines()
    assert table[0] == "| less the original | accuracy | loss |" and len(table) == 5
    assert said.endswith("by a t-test (p < 0.05, after Holm's correction for the 4 without items).")
    for scheme in ("rotary", "none"):
        (line,) = [line for line in table if line.startswith(f"| {scheme}")]
        less = [ours - theirs for ours, theirs in zip(values[scheme], values["original"], strict=True)]
        surely = stats.ttest_rel(values[scheme], values["original"]).pvalue < 0.05
        assert f"{sum(less) / 3:+.3f} ± {stdev(less):.3f}" in line and ("**" in line) == surely == (scheme == "rotary")
    assert "| learned, swap | -0.250 ± 0.000 | -25.0 ± 0.0 |" in table  # the same three times: nothing to test
    (tmp_path / "one").mkdir()
    for scheme in ("original", "rotary"):
        (tmp_path / f"{scheme}-0").rename(tmp_path / "one" / scheme)
    assert "| rotary, swap | +0.012 | +1.200 |" in paired_table(load_runs([tmp_path / "one"]))
    write_comparison(load_runs([tmp_path / "one"]), tmp_path / "written")
    assert "t-test" not in (tmp_path / "written" / "comparison.md").read_text()
    assert paired_table([run for run in load_runs([tmp_path / "one"]) if run["config"]["scheme"] != "original"]) == ""


def test_what_was_born_with_a_scheme(tmp_path):
    """Runs from scratch are compared with the original from scratch, in whatever order they were read."""
    rows = (("original", "swap", 0.9), ("original", "scratch", 0.5), ("rotary", "scratch", 0.6), ("rotary", "fit", 0.8))
    for scheme, start, value in rows:
        write_run(tmp_path / f"{start}-{scheme}", {"accuracy": value}, scheme=scheme, start=start)
    runs = load_runs([tmp_path])
    for some in (runs, runs[::-1]):
        table = paired_table(some)
        assert "| rotary, scratch | +0.100 |" in table and "| rotary, fit | -0.100 |" in table


def test_every_budget_field_counts(tmp_path):
    """Each option of a run but scheme, start and seed is turned once, and the error names it."""
    check_budgets(_matrix(tmp_path / "equal"))
    seen = set()
    whose = "scheme start seed save_model schemes_from"
    for name in asdict(RecipeConfig()).keys() - {*whose.split()}:
        runs = load_runs([tmp_path / "equal"])
        runs[-1]["config"][name] = "else"
        try:
            check_budgets(runs)
        except posswap.PosswapError as error:
            assert f"unequal budgets: {name} is" in str(error)
            seen.add(name)
    how = "gradient_accumulation_steps gradient_checkpointing torch_compile auto_find_batch_size report_to checkpoint_every"
    assert asdict(RecipeConfig()).keys() - seen == {*how.split(), *whose.split(), "first", "checkpoints_kept"}


def test_what_cannot_be_compared(tmp_path):
    """Runs of several recipes, of unequal seeds, given twice, or without the figure asked for cannot be compared."""
    _matrix(tmp_path / "a")
    write_run(tmp_path / "b", {"accuracy": 1}, recipe="listops")
    refused("one recipe at a time", check_budgets, load_runs([tmp_path / "a", tmp_path / "b"]))
    write_run(tmp_path / "c", {"accuracy": 1}, scheme="none")
    refused(r"none, swap has seeds \[0\] and original \[0, 1\]", check_budgets, load_runs([tmp_path / "a", tmp_path / "c"]))
    write_run(tmp_path / "d", {"accuracy": 1})
    refused("original has a seed twice", check_budgets, load_runs([tmp_path / "a", tmp_path / "d"]))
    refused("'speed'; there are accuracy", markdown, load_runs([tmp_path / "a"]), figures=["speed"])
    refused("'lenght' is no option", check_budgets, load_runs([tmp_path / "a"]), ["lenght"])
    (tmp_path / "empty").mkdir()
    refused("no result.json", load_runs, [tmp_path / "empty"])


def test_a_comparison_is_runs_too(tmp_path):
    """What was compared can be compared with more: the same rows as from the runs themselves; anything else is an error."""
    write_comparison(_matrix(tmp_path / "a"), tmp_path / "written")
    for seed in (0, 1):
        write_run(tmp_path / "more" / str(seed), {"accuracy": 0.1}, scheme="none", seed=seed)
    for place in (tmp_path / "written", tmp_path / "written" / "comparison.json"):
        whole = load_runs([place, tmp_path / "more"])
        assert markdown(whole) == markdown(load_runs([tmp_path / "a", tmp_path / "more"]))
        check_budgets(whole)
    assert len(load_runs([tmp_path / "a", tmp_path / "written"])) == 6  # a run that is given twice counts once
    for scheme in ("none", "rotary"):
        runs = load_runs([write_run(tmp_path / scheme / "run", {"accuracy": 0.5}, scheme=scheme).parent])
        write_comparison([{**run, "folder": "run"} for run in runs], tmp_path / scheme)
        (tmp_path / scheme / "comparison.json").rename(tmp_path / f"{scheme}.json")
    assert len(load_runs([tmp_path / "none.json", tmp_path / "rotary.json"])) == 2  # though both runs are called "run"
    nameless = json.loads((tmp_path / "written" / "comparison.json").read_text())
    for run in nameless["runs"]:
        del run["folder"]
    (tmp_path / "nameless.json").write_text(json.dumps(nameless))
    assert len(load_runs([tmp_path / "nameless.json"])) == 6
    (tmp_path / "strange.json").write_text('{"runs": [{}]}')
    (tmp_path / "empty.json").write_text('{"runs": []}')
    strange = ("strange.json", "no whole result of a recipe, it has no recipe")
    for name, says in (strange, ("empty.json", "holds no runs"), ("nowhere", "no result.json in .*nowhere")):
        refused(says, load_runs, [tmp_path / name])


@pytest.mark.parametrize("part", [{"hardware": {}}, {"cost": {"tokens_per_second": "fast"}}, {"items": [1]}])
def test_a_comparison_of_others(part, tmp_path, program):
    """What is edited until no table can be made of it is one line."""
    write_comparison(_matrix(tmp_path / "a"), tmp_path / "written")
    rewrite(tmp_path / "written" / "comparison.json", lambda found: found["runs"][0].update(part))
    fails("does not write", program, "compare", "--collect", tmp_path / "written", "--output", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_runs_of_one_name_are_not_one(tmp_path, monkeypatch):
    """Runs whose folders have the same name all come back, and what `vary` names stands in the label."""
    monkeypatch.chdir(tmp_path)
    for steps in (10, 20):
        for scheme in ("original", "rotary"):
            write_run(Path(f"s{steps}") / scheme, {"accuracy": steps / 100}, scheme=scheme, max_steps=steps)
    runs = load_runs([Path("s10"), Path("s20")])
    refused("--vary max_steps", check_budgets, runs)
    assert "| original, max_steps 20 | 0.200 |" in markdown(runs, vary=["max_steps"])
    write_comparison(runs, Path("both"), vary=["max_steps"])
    again = load_runs([Path("both")])
    assert len(again) == 4 and markdown(again, vary=["max_steps"]) == markdown(runs, vary=["max_steps"])


def test_page(tmp_path):
    """Figures over lengths become one picture; the page holds it, escapes what it is given, and needs no other file."""
    for seed in (0, 1):
        figures = {"accuracy": 0.5, **{f"accuracy_{n}": 1 / (n + seed) for n in (128, 256, 512)}}
        write_run(tmp_path / f"runs/{seed}", figures, seed=seed, cpu="a <cpu>")
    written = write_comparison(load_runs([tmp_path / "runs"]), tmp_path / "out")
    assert [path.name for path in written] == ["comparison.json", "comparison.md", "comparison.html", "accuracy.png"]
    page = written[2].read_text()
    assert len(re.findall(r'src="data:image/png;base64,[A-Za-z0-9+/=]{1000,}"', page)) == 1
    assert not re.findall(r'(?:src|href)="(?!data:)', page) and "a &lt;cpu&gt;" in page and "<td" in page
    assert json.loads(written[0].read_text())["runs"][0]["figures"]["accuracy"] == 0.5
    write_run(tmp_path / "curve", {f"damage_{n}": 1 / (n + 1) for n in (0, 10, 100)})  # from 0 on: tokens of training
    assert plot(load_runs([tmp_path / "curve"]), "damage").axes[0].get_xscale() == "symlog"


RECIPE = """
import json, sys
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
output = Path(given["--output"])
if given["--scheme"] == "original" and "--resume" not in sys.argv:
    output.mkdir(parents=True)
    raise SystemExit("no luck")
config = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items() if name != "--output"}
config = {**json.loads(CONFIG), **config, "seed": int(given["--seed"])}
result = {"recipe": "count", "command": " ".join(sys.argv), "commit": None, "versions": {"torch": "2"}, "cost": {},
          "hardware": {"cpu": "a cpu", "threads": 1, "accelerator": None}, "config": config,
          "figures": {"score": int(given["--max-steps"]) + config["seed"]}}
output.mkdir(parents=True, exist_ok=True)
with (output / "count").open("a") as times:
    times.write("once ")
(output / "result.json").write_text(json.dumps(result))
"""


@pytest.fixture
def compare(program, tmp_path):
    """The function that starts recipes/compare.py next to a recipe that only counts, and needs no time to import."""
    (tmp_path / "count.py").write_text(RECIPE.replace("CONFIG", repr(json.dumps(asdict(RecipeConfig())))))
    (tmp_path / "compare.py").write_text((ROOT / "recipes" / "compare.py").read_text())

    def run(*arguments):
        code, _, err = program(*arguments, main=lambda: runpy.run_path(str(tmp_path / "compare.py"), run_name="__main__"))
        return code, err

    return run


def test_running_a_recipe(compare, tmp_path):
    """Every scheme, start and seed once, the original with one start; a failed run stops, and the same command goes on."""
    arguments = ["count", "--scheme", "none", "--scheme", "original", "--start", "cold", "--seed", "9"]
    arguments += ["--output", str(tmp_path / "out"), "--", "--max-steps", "5"]
    says = fails("original, swap, seed 9 failed", compare, *arguments)
    assert "compare: none, cold, seed 9, run 1 of 2" in says
    works(compare, *arguments)
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert "| original | 14.0 |" in table and "| none, cold | 14.0 |" in table
    assert [path.read_text() for path in (tmp_path / "out").rglob("count")] == ["once "] * 2  # what is finished is kept


def test_a_scheme_of_any_length_names_a_folder(monkeypatch, tmp_path):
    """Mixes of many layers that differ in the last one run in folders of their own, though names of folders end at 255."""
    folders = []
    monkeypatch.setattr(commands_compare, "_run", lambda command: folders.append(Path(command[-1])))
    mixes = [f"mixed:layers=[{', '.join(['relative:clip=16'] * 23 + [last])}]" for last in ("none", "rotary")]
    run_all(["any"], [(mix, "fit", 0) for mix in mixes], tmp_path)
    run_all(["any"], [(f"self-extend:temper={n}", "fit", 0) for n in ("1e-1", "1e+1")], tmp_path)
    assert len({folder.mkdir(parents=True) or folder for folder in folders}) == 4


THEIRS = """
from dataclasses import dataclass
from typing import ClassVar
from hf_posswap import NoPositions, register_scheme

@register_scheme
@dataclass(frozen=True, kw_only=True)
class Theirs(NoPositions):
    name: ClassVar[str] = "theirs"
"""


def test_schemes_of_others(compare, tmp_path):
    """A scheme that a user's file registers is a row like any other; without the file its name is an error before any run."""
    (tmp_path / "their_scheme.py").write_text(THEIRS)
    file, output = str(tmp_path / "their_scheme.py"), tmp_path / "out"
    arguments = [str(tmp_path / "count.py"), "--scheme", "theirs", "--scheme", "none", "--seed", "4", "--output", str(output)]
    fails("unknown scheme 'theirs'", compare, *arguments, "--", "--max-steps", "5")
    assert not output.exists()
    try:
        works(compare, *arguments, "--schemes-from", file, "--", "--max-steps", "5")
        runs = json.loads((output / "comparison.json").read_text())["runs"]
        check_budgets([*runs, {**runs[0], "config": {**runs[0]["config"], "scheme": "rotary", "schemes_from": None}}])
        other = [{**run, "config": {**run["config"], "seed": 5, "schemes_from": "another.py"}} for run in runs]
        refused(r"have schemes_from .*another\.py", check_budgets, [*runs, *other])  # the same name, and maybe another scheme
        assert {run["config"]["scheme"] for run in runs} == {"theirs", "none"}
        # The recipe is told, too; no path is published.
        assert {run["config"]["schemes_from"] for run in runs} == {without_home(file)}
    finally:
        posswap.SCHEMES.pop("theirs", None)


def test_a_folder_is_of_one_question(tmp_path):
    """Finished runs of other options would be taken for these: another recipe or other options need another folder."""
    _begin(tmp_path, {"recipe": ["a.py"], "options": ["--max-step", "5"]})  # no run has finished: that may be corrected
    _begin(tmp_path, {"recipe": ["a.py"], "options": ["--max-steps", "5"]})
    write_run(tmp_path / "runs" / "none", {})
    _begin(tmp_path, {"recipe": ["a.py"], "options": ["--max-steps", "5"]})
    for recipe, steps in (("b.py", "5"), ("a.py", "6")):
        refused("choose another --output", _begin, tmp_path, {"recipe": [recipe], "options": ["--max-steps", steps]})


def test_data_that_changed_between_runs(tmp_path, monkeypatch):
    """It is found before the runs to come, not after them."""
    monkeypatch.setattr(commands_compare, "_run", lambda command: write_run(Path(command[-1]), {}, also=also) and 0)
    monkeypatch.chdir(tmp_path)
    Path("stdlib-gpt2").mkdir()  # called as a built-in model, which is what a run reads
    Path("stdlib-gpt2", "notes").write_text("1")
    data, jobs = tmp_path / "data.csv", [("none", "swap", seed) for seed in range(3)]
    data.write_text("text,label")
    inputs = input_hashes({"beir": (str(data),), "model": posswap.embedded_model("stdlib-gpt2")})
    also = {"config": {"beir": [str(data)], "model": "stdlib-gpt2", "seed": 0}, "inputs": inputs}
    run_all(["any"], jobs[:1], tmp_path / "out")
    run_all(["any"], jobs[:2], tmp_path / "out")
    data.write_text("text,label,changed")
    run_all(["any"], jobs[:2], tmp_path / "out")
    refused("beir .* has other content than for the finished run in", run_all, ["any"], jobs, tmp_path / "out")


def test_the_order_of_runs():
    """Seed after seed, so that what is stopped has whole seeds; the original has one start."""
    jobs = _jobs(["original", "none"], ["cold", "fit"], [0, 1])
    assert jobs[:3] == [("original", "swap", 0), ("none", "cold", 0), ("none", "fit", 0)]
    assert [seed for *_, seed in jobs] == [0, 0, 0, 1, 1, 1]
    assert ("original", "scratch", 0) in _jobs(["original"], ["cold", "scratch"], [0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["recipes/nothing.py"], "there is no recipes/nothing.py"),
        (["--scheme", "original", "--scheme", "rotray"], "did you mean 'rotary'"),
        (["--collect", "here", "--", "--model", "minilm"], "not both"),
        (["--collect", "here", "--scheme", "rotary"], "not both"),
        (["--collect", "here", "--launcher", "nice"], "not both"),
        (["--seed", "0", "--seed", "-1"], "Invalid value for '--seed'"),
        (["--start", "warm"], "known are cold, swap, fit, scratch"),
        (["recipes/passkey.py", "--quick"], "leave out the recipe, or --quick"),
        ([""], "the argument after"),  # a shell's variable that is not set
        (["--launcher", "nice 'it"], "--launcher nice 'it is no command (No closing quotation): write it as for a shell"),
        (["--", "--output=elsewhere"], "--output is given by the comparison: put it before --"),
        (["--", "--max-steps", "1", "--seed", "3"], "--seed is given by the comparison"),
    ],
)
def test_bad_comparisons(arguments, says, program, tmp_path):
    """What cannot be compared is refused before the first run."""
    fails(says, program, "compare", "--output", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_the_default_recipe(program, tmp_path, monkeypatch):
    """Without a recipe `hf-posswap compare` runs what a swap costs, as a module; options after -- go to it; quick is small."""
    asked = []

    def run(command):
        asked.append(command)
        options = dict(zip(command[3::2], command[4::2], strict=False))
        write_run(Path(options["--output"]), {"kl": 0.5}, scheme=options["--scheme"], start=options["--start"])
        return 0

    monkeypatch.setattr(commands_compare, "_run", run)
    chosen = ["--scheme", "original", "--scheme", "none", "--seed", "0"]
    for name, arguments in (("all", chosen), ("quick", ["--quick"])):
        works(program, "compare", *arguments, "--output", tmp_path / name, "--", "--model", "gpt2")
    assert all(command[:3] == [sys.executable, "-m", "hf_posswap.experiments.swap_cost"] for command in asked)
    assert [command[3:5] for command in asked[:2]] == [["--model", "gpt2"]] * 2
    quick = [dict(zip(command[3::2], command[4::2], strict=False)) for command in asked[2:]]
    assert [(one["--scheme"], one["--start"], one["--seed"]) for one in quick] == [
        ("original", "swap", "0"), ("relative", "fit", "0"), ("rotary", "fit", "0")
    ]  # fmt: skip
    assert all(int(one["--max-steps"]) < SwapCostConfig.max_steps and one["--model"] == "gpt2" for one in quick)


def test_verdict(tmp_path):
    """The best row by the sense of the figure's name, and the rows that surely differ; nothing sure of one seed."""
    runs = _rows(tmp_path, VALUES, loss=1, spread=1)
    said = verdict(runs)
    assert said.startswith("**Best: the highest accuracy is 0.713, rotary, swap.** Surely different")
    assert said.endswith("rotary, swap (+0.013).")
    doubt = " The next, original (0.7), is not surely behind. Surely"
    assert verdict(runs, figures=["loss"]).startswith(f"**Best: the lowest loss is 0.6833, none, swap.**{doubt}")
    assert verdict(runs, figures=["spread"]).startswith("**The highest spread is")  # nobody says which is better
    for scheme, value, seeds in (("rotary", 9, 1), ("none", 20, 3)):  # a figure that few rows and seeds have
        for run in [run for run in runs if run["config"]["scheme"] == scheme][:seeds]:
            run["figures"] |= {"to_90_percent": value, "loss_20": 1.0, "loss_10": 1.0}
    assert verdict(runs, figures=["to_90_percent"]) == (
        "**Best: the lowest to 90 percent is 20, none, swap.** No row has an original to compare with."
    )
    assert "| rotary, swap | 9.000 (1 of 3 seeds) |" in markdown(runs, figures=["to_90_percent"], costs=())
    assert verdict(runs, figures=["loss_20", "loss_10"]).count("**") == 2  # the longest is the first
    runs = load_runs([tmp_path])
    one = [run for run in runs if run["config"]["seed"] == 0]
    assert verdict(one).endswith("One seed: no difference from the original is sure.")
    others = [run for run in one if run["config"]["scheme"] != "original"]
    says = "The next, rotary, swap (0.512), is not surely behind. No row has an original to compare with."
    assert verdict(others).endswith(says)
    write_comparison(runs, tmp_path / "written")
    assert (tmp_path / "written" / "comparison.md").read_text().startswith(said)
    page = (tmp_path / "written" / "comparison.html").read_text()
    assert page.index("<strong>Best: the highest accuracy") < page.index("<table>")
