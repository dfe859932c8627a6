"""Cards, results files and leaderboards: written from what was measured, checked against the schema, nobody's markup."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import refused, rewrite, works, write_card_run
from huggingface_hub import ModelCard
from transformers import DistilBertForSequenceClassification, GPT2DoubleHeadsModel

import hf_posswap as posswap
from hf_posswap.experiments.comparison import load_runs
from hf_posswap.provenance import weight_hashes
from hf_posswap.schemes import parse_scheme
from hf_posswap.sharing.card import BEGIN, END, _body
from hf_posswap.sharing.record import RESULTS_FILE, _comparison, read_results

ROOT = Path(__file__).parent.parent
BASE = "local:tiny"


@pytest.fixture
def fitted(make_model, tmp_path):
    """A folder with a fitted GPT-2 and the report of its fit."""
    model = posswap.swap(make_model("gpt2", seed=3), "rotary:theta=500", max_positions=64)
    report = posswap.fit(model, torch.randint(2, 98, (40, 32)), steps=5, progress=False)
    assert report.part == "select"
    report = replace(report, part="report", tokens_held_out=999)  # as if the batches had come in parts, and some were longer
    model.save_pretrained(tmp_path / "fitted")
    report.save(tmp_path / "fitted")
    return tmp_path / "fitted", report


def test_a_card(fitted, results):
    """A card says what was swapped, what it cost, how to load it and what its limits are; the Hub can read its metadata."""
    folder, report = fitted
    path = posswap.write_card(folder, results=[results], base_model="org/tiny@f00", license="MIT", repo_id="me/tiny-rotary")
    text, card = path.read_text(), ModelCard.load(path)
    assert card.data.base_model == "org/tiny" and card.data.license == "mit" and card.data.pipeline_tag == "text-generation"
    assert {"hf_posswap", "position-rotary"} <= set(card.data.tags)
    (found,) = card.data.eval_results  # the comparison is of other weights
    assert (found.metric_type, found.metric_value) == ("kl", report.after.total)
    assert found.dataset_name == "128 tokens (report), given"
    assert f"transformers {transformers.__version__}, " in text
    assert f"| mean over all | {report.before.total:.4f} | {report.after.total:.4f} |" in text
    assert f"| sequences of 32 tokens (4 of them) | {report.before.by_length[32]:.4f} |" in text
    assert "| rotary:theta=500, fit | 0.605 ± 0.007 | 0.250 |" in text and "*rotary:theta=500, fit*" in text
    for words in (
        "reads 64 tokens", "the base model reads 32", "revision `f00`", "`theta=500`", 'from_pretrained("me/tiny-rotary")',
        "trust_remote_code=True", "a cpu", "seeds [0, 1]", "commit abc", "*accuracy*: share of keys said in full",
        "python recipes/passkey.py --seed 1", "whether one of them is this folder's is not recorded",
    ):  # fmt: skip
        assert words in text, words
    content = json.loads((folder / RESULTS_FILE).read_text())
    assert content["fit"]["after"]["total"] == report.after.total and len(content["comparisons"][0]["runs"]) == 6
    assert "losses" not in json.dumps(content) and str(results) not in json.dumps(content)
    assert content == read_results(folder) and len(content["comparisons"][0]["runs"][0]["inputs"]["train_file"]) == 64


def test_which_part_of_the_text(fitted):
    """The card says which part a figure is of; metadata, which leaderboards read, has none of text that was fitted on."""
    folder, report = fitted
    parts = {"held out": "held out of the fit", "select": "by which layers were kept", "fit": "were fitted on"}
    for part, says in parts.items():
        replace(report, part=part, after=replace(report.after, measure="1 - cosine")).save(folder)
        card = ModelCard.load(posswap.write_card(folder, base_model=BASE))
        known = [(one.metric_type, one.metric_value) for one in card.data.eval_results or []]
        assert says in card.text and known == [("cosine_distance", report.after.total)] * (part == "held out"), part


def test_the_example():
    """The card that is checked in as an example is what would be written today from the results next to it."""
    folder = ROOT / "recipes" / "results" / "card"
    text, index = _body(read_results(folder), "minilm-rotary", pictures := {})
    assert text.strip() in (folder / "README.md").read_text()
    assert [one.metric_type for one in index] == ["cosine_distance"]  # of text that was held out of the fit
    assert set(pictures) == {str(path.relative_to(folder)) for path in (folder / "posswap_results").iterdir()}


def test_whose_weights(swapped, tmp_path):
    """A run that has kept these weights is named, and its row alone is the model's own, with what they did at its end."""
    for seed, kept in enumerate(({"model.safetensors": "another"}, weight_hashes(swapped))):
        write_card_run(tmp_path / f"runs/original-{seed}", seed=seed)
        write_card_run(tmp_path / f"runs/rotary-{seed}", seed=seed, scheme="rotary:theta=500.0", weights=kept, save_model=True)
    rewrite(tmp_path / "runs/rotary-1/result.json", lambda run: run["figures"].update(start_loss=1, loss_64=1, tuned_loss_64=2))
    asked = {"results": [tmp_path / "runs"], "base_model": BASE, "eval_results": ["org/bench:task:accuracy"]}
    card = posswap.write_card(swapped, **asked)
    assert "those of *rotary:theta=500.0, swap*, seed 1." in card.read_text()
    found = {one.metric_name.removeprefix("hf_posswap: "): one.metric_value for one in ModelCard.load(card).data.eval_results}
    assert found == {"accuracy, seed 1": 0.51, "accuracy_512, seed 1": 0.25, "tuned_loss_64, seed 1": 2}
    text = (kept := swapped / ".eval_results" / "hf_posswap.yaml").read_text()
    assert "id: org/bench" in text and "value: 0.51" in text and "seed 1" in text
    assert posswap.write_card(swapped) == card and kept.read_text() == text  # as `push` does, which is not told again
    (dense := swapped / "2_Dense" / "model.safetensors").parent.mkdir()
    dense.touch()
    refused("the results have 0 runs that measured", posswap.write_card, swapped, **asked)  # a further module has changed
    assert "| rotary:theta=500.0, swap |" in posswap.write_card(swapped).read_text()  # as of a folder that knows no modules
    dense.unlink()
    rewrite(tmp_path / "runs/rotary-0/result.json", lambda run: run.update(weights=weight_hashes(swapped)))
    refused("the results have 2 runs that measured", posswap.write_card, swapped, **asked)  # whose figure would it be?
    write_card_run(tmp_path / "other/original", seed=0)
    write_card_run(tmp_path / "other/rotary", seed=0, scheme="rotary:theta=500")
    card = posswap.write_card(swapped, results=str(tmp_path / "other"), base_model=BASE)
    text = card.read_text()
    assert not kept.exists()
    assert "those of *" not in text and "one seed, hence no spread" in text and not ModelCard.load(card).data.eval_results
    assert sorted(path.name for path in (swapped / "posswap_results").iterdir()) == ["0-passkey-accuracy.png"]
    assert posswap.write_card(swapped).read_text() == text  # what was given before is known
    (swapped / "posswap_results" / "3d-mine.png").write_bytes(b"x")
    posswap.write_card(swapped, results=[])
    assert [path.name for path in (swapped / "posswap_results").iterdir()] == ["3d-mine.png"]


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("retrieval", "nothing was trained, on data/gutenberg. Fits read up to 65,536 tokens, 40 or 200 steps a layer."),
        ("read_on/tuned", "each run had 500 steps of 4,096 tokens, peak learning rate 0.0006"),
    ],
)
def test_results_without_training(place, says):
    """Results of recipes that do not train, or train after they measure, fit into a card, too; it says what rows differ in."""
    content, file = read_results(ROOT / "recipes/results/card"), ROOT / "recipes/results" / place / "comparison.json"
    own = next(run["config"] for run in load_runs([file]) if run["config"]["scheme"] != "original")
    span = {name: own[name] for name in ("span", "first")} if own.get("span") else None
    content["model"] |= {"position_scheme": parse_scheme(own["scheme"]).to_dict(), "span": span}
    content["comparisons"] = [_comparison(file, parse_scheme(own["scheme"]), span)]
    assert says in _body(content, "x", {})[0]


def test_the_data_of_the_kept_run(swapped, tmp_path):
    """Metadata name the data of the run whose weights these are; a run that was measured on its training text has no figure."""
    for data, kept in (("a", None), ("b", weight_hashes(swapped))):
        for scheme in ("original", "rotary:theta=500"):
            write_card_run(place := tmp_path / "runs" / data / scheme[:3], scheme=scheme, weights=kept)
            rewrite(place / "result.json", lambda run, data=data: run["config"].update(dataset=f"org/{data}"))
    file = tmp_path / "comparison.json"
    file.write_text(json.dumps({"vary": ["dataset"], "runs": load_runs([tmp_path / "runs"])}))
    for options, found in (
        ({}, [("org/b", None)] * 3),
        ({"dataset_config": "small"}, [("org/b", "small")] * 2 + [("org/b", None)]),
        ({"train_file": "text.csv", "test_file": "text.csv"}, [("org/b", None)]),
    ):
        rewrite(file, lambda content, options=options: [run["config"].update(options) for run in content["runs"]])
        # The user's own entry of the same data set gives ours its task; they are known again all the same.
        entry = "- name: x\n  results:\n  - task:\n      type: text-generation\n      name: mine\n    dataset:\n      name: b\n"
        entry += "      type: org/b\n    metrics:\n    - type: accuracy\n      value: 0.9\n"
        (swapped / "README.md").write_text(f"---\nmodel-index:\n{entry}---\n")
        for _ in range(2):
            card = ModelCard.load(posswap.write_card(swapped, results=[file], base_model=BASE))
        index = [(one.dataset_type, one.dataset_config) for one in card.data.eval_results or ()]
        assert sorted(index, key=str) == sorted(found, key=str) and ", on org/a" in card.text and " or org/b" in card.text


def test_the_base_is_remembered(make_model, tmp_path):
    """A revision that the folder does not say, and that was given once, stays in a card that is written again."""
    model = posswap.swap(make_model("bert"), "none")
    model.config.position_scheme["base_model"] = {"id": "org/tiny", "revision": None}
    model.save_pretrained(tmp_path)
    for given in ("org/tiny@f00", None):
        assert "revision `f00`" in posswap.write_card(tmp_path, base_model=given).read_text()


def test_what_the_user_wrote_stays(swapped, results):
    """Text around the comments, metadata and results of other sources survive a second writing, and ours is not doubled."""
    (swapped / "README.md").write_text(
        "---\nlanguage: no\nbase_model: org/twin\npipeline_tag: sentence-similarity\ntags:\n- mine\n"
        "model-index:\n- name: x\n  results:\n  - task:\n      type: text-classification\n"
        "    dataset:\n      name: IMDB\n      type: imdb\n    metrics:\n    - type: accuracy\n      value: 0.9\n"
        "---\n\nWords before.\n"
    )
    posswap.write_card(swapped, results=[results], base_model=BASE)
    path = swapped / "README.md"
    path.write_text(path.read_text() + "\nWords after.\n")
    posswap.write_card(swapped, results=[results], base_model=BASE, license="mit")
    card, text = ModelCard.load(path), path.read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index("Words before.") < text.index(BEGIN) < text.index(END) < text.index("Words after.")
    assert card.data.pipeline_tag == "sentence-similarity"
    assert card.data.language == "no" and card.data.base_model == "org/twin"
    assert card.data.tags[0] == "mine" and card.data.license == "mit"
    assert [one.dataset_type for one in card.data.eval_results].count("imdb") == 1
    path.write_text(text.replace(END, ""))
    refused(
        "has lost one of hf_posswap's comments", posswap.write_card, swapped, base_model=BASE, error=posswap.CheckpointError
    )


@pytest.mark.parametrize(
    ("kind", "family", "scheme", "says"),
    [
        ("native", "bert", "rotary:mark_first=false", "RoFormerForMaskedLM|largest absolute differences|no position_ids"),
        ("delta", "bert", "relative:clip=4", 'load_delta(base,|the positions alone|("path/to/tiny", dtype="float32")'),
        ("swapped", "bert", "relative:clip=4", "There is no third way|eager or sdpa|were not compared with the base model's"),
        ("swapped", "gpt2", "rotary", "from hf_posswap.checkpoint import PosswapGPT2DoubleHeadsModel|no Auto class for it"),
        ("native", "gpt2", "sinusoidal", "import GPT2DoubleHeadsModel|= GPT2DoubleHeadsModel.from_pretrained"),
    ],
)
def test_other_kinds(make_model, tmp_path, kind, family, scheme, says):
    """An export names its certificate, a delta its base; each says how it is loaded, and the code names what there is."""
    model = posswap.swap(make_model(family, **({"head": GPT2DoubleHeadsModel} if family == "gpt2" else {})), scheme)
    if kind == "delta":
        posswap.save_delta(model, tmp_path / kind)
    else:
        (posswap.export_native(model) if kind == "native" else model).save_pretrained(tmp_path / kind)
    text = posswap.write_card(tmp_path / kind, base_model=BASE).read_text()
    assert [words for words in says.split("|") if words not in text] == []
    assert ModelCard(text).data.library_name == ("hf_posswap" if kind == "delta" else "transformers")
    assert ("With transformers alone" in text) == (kind == "native") and read_results(tmp_path / kind)["model"]["kind"] == kind


@pytest.mark.parametrize(
    ("family", "scheme", "span", "exportable"),
    [
        ("roberta", "rotary", None, True), ("gpt2", "rotary", None, None), ("gpt2", "rotary:mark_first=false", None, True),
        ("bert", "rotary", 8, False), ("bert", "learned", 8, False), ("bert", "self-extend", None, False),
        ("clip_text_model", "rotary", None, False), ("clip_text_model", "sinusoidal", None, True),
        ("distilbert", "rotary", None, False),
    ],
)  # fmt: skip
def test_span_and_export(make_model, tmp_path, family, scheme, span, exportable):
    """The card names a span, and offers the export where there is one."""
    head = {"head": DistilBertForSequenceClassification} if family == "distilbert" else {}  # RoFormer's is another one
    model = posswap.swap(make_model(family, **head), scheme, span=span)
    model.save_pretrained(tmp_path)
    text = posswap.write_card(tmp_path, base_model=BASE).read_text()
    assert ("As a stock class" in text, "There is no third way" in text) == (exportable is True, exportable is False)
    assert "It reads 32 tokens; the base model reads 32." in text  # without the row of a RoBERTa's padding
    assert ("| attention | to distances below 8 and the first 1 token |" in text) == (span is not None)
    if not exportable:
        refused("no class of transformers|no native counterpart|mark_first", posswap.export_native, model)
    if exportable is None:
        posswap.export_native(posswap.swap(make_model(family), scheme, warm_start=False))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: r["config"].pop("fit_tokens"), "'fit_tokens' is a required property"),
        (lambda r: r["config"].update(max_steps=7), "unequal budgets: max_steps"),
        (lambda r: r["config"].update(model="<script>alert(1)</script>"), "would read as markup"),
        (lambda r: r["config"].update(dataset="glue\n---\nlicense: mit"), "would read as markup"),
        (lambda r: r["config"].update(dataset="[here](https://evil.example)"), "would read as markup"),
        (lambda r: r.update(command="x\n```\n# Free money"), "would read as markup"),
        (lambda r: r["hardware"].update(cpu="a | b"), "would read as markup"),
        (lambda r: r["figures"].update({"<b>": 1.0}), "does not match"),
        (lambda r: r.update(format=2), "format 2, and this version reads 1"),
        (lambda r: r["config"].update(dataset="a\u202eb"), "would read as markup"),
    ],
)  # fmt: skip
def test_results_that_are_refused(swapped, results, change, says):
    """Results without seeds or budget, with unequal ones, or with markup in a name are refused, and nothing is written."""
    rewrite(next(results.rglob("result.json")), change)
    before = sorted(os.listdir(swapped))
    refused(says, posswap.write_card, swapped, results=[results], base_model=BASE)
    assert sorted(os.listdir(swapped)) == before


def test_folders_that_are_refused(swapped, fitted, results, make_model, tmp_path):
    """Not swapped, no folder, no base, bad names, results of another scheme, a report of other weights, figures of nothing."""
    make_model("bert").save_pretrained(tmp_path / "plain")
    posswap.swap(make_model("bert"), "none").save_pretrained(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    cases = [
        (tmp_path / "none", {"results": [results]}, "no run with none, the model's .*; it has original, rotary:theta=500"),
        (tmp_path / "plain", {}, "has not been swapped"),
        (tmp_path / "empty", {}, "has no weights"),
        (swapped, {"base_model": "local:/home/me/tiny"}, "give a name after local:"),
        (swapped, {"repo_id": "tiny"}, "give owner/name"),
        (swapped, {"license": "a: b"}, "no identifier of a licence"),
        (tmp_path / "nothing", {}, "there is no folder"),
        (swapped, {"base_model": None}, "give base_model"),
        (swapped, {"base_model": "a/b/c"}, "is no name on the Hub"),
        (swapped, {"base_model": "local:<img src=x>"}, "would read as markup"),
        (swapped, {"results": [tmp_path / "nothing"]}, "there are no results in"),
        (swapped, {"results": [results], "eval_results": ["glue"]}, "must be DATASET:TASK:FIGURE"),
        (swapped, {"results": [results], "eval_results": ["a/b:t:accuracy"]}, "have 0 runs that measured"),
    ]
    for folder, options, says in cases:
        refused(says, posswap.write_card, folder, **{"base_model": BASE} | options)
    injected = "os; __import__('os').system('id') #DoubleHeadsModel"
    rewrite(swapped / "config.json", lambda config: config.update(architectures=[injected]))
    refused("which does not exist", posswap.write_card, swapped, base_model=BASE, error=posswap.CheckpointError)
    folder, report = fitted
    rewrite(folder / "config.json", lambda config: config["position_scheme"].update(theta=12345))  # not what was measured
    refused("of another scheme", posswap.write_card, folder, base_model=BASE, error=posswap.CheckpointError)
    posswap.swap(make_model("gpt2", seed=9), "rotary:theta=500").save_pretrained(folder)
    refused("of other weights", posswap.write_card, folder, base_model=BASE, error=posswap.CheckpointError)
    refused("save the fitted model there first", report.save, tmp_path / "empty", error=posswap.CheckpointError)
    trained = "holds other weights than those that this report is of: save model and report right after the fit"
    refused(trained, report.save, folder, error=posswap.CheckpointError)


@pytest.mark.filterwarnings("ignore:the fit was undone")
def test_a_head_that_was_trained_later(make_model, tmp_path):
    """KL is measured through the head: a report is of the head that was there, tied or not, and of headless models of none."""
    rows = torch.randint(2, 98, (12, 16), generator=torch.Generator().manual_seed(1))
    for tied in (True, False):
        model = posswap.swap(make_model("gpt2", tie_word_embeddings=tied), "rotary")
        report = posswap.fit(model, rows, progress=False, steps=1)
        for name, part in (("whole", model), ("headless", model.base_model)):
            part.save_pretrained(tmp_path / f"{name}-{tied}")
            report.save(tmp_path / f"{name}-{tied}")
    model.lm_head.weight.data.mul_(2)
    model.save_pretrained(tmp_path / "changed")
    refused("another head .lm_head.weight", report.save, tmp_path / "changed", error=posswap.CheckpointError)


def test_no_paths_of_this_machine(swapped, results):
    """Absolute paths of the user's machine keep their last two parts only."""
    place = "/home/alice/secret/models/tiny"
    for file in results.rglob("result.json"):
        rewrite(file, lambda run: run.update(config=run["config"] | {"model": place}, command=f"python x.py --model={place}"))
    text = posswap.write_card(swapped, results=[results], base_model=BASE).read_text()
    assert "--model=models/tiny" in text and "`models/tiny`" in text
    assert "alice" not in text + (swapped / RESULTS_FILE).read_text()


def test_markup_in_reports(make_model, tmp_path):
    """What lies next to the weights is checked as results are: an export's certificate, the base in a config."""
    model = posswap.swap(make_model("bert"), "rotary:mark_first=false")
    posswap.export_native(model).save_pretrained(tmp_path / "native")
    found = json.loads((parity := tmp_path / "native" / "parity.json").read_text())
    for place, value in (("source", "<img src=x>"), ("random", {"<b>": 1.0})):
        parity.write_text(json.dumps(found | {"certificate": found["certificate"] | {place: value}}))
        refused("markup|does not match", posswap.write_card, tmp_path / "native", base_model=BASE)
    model.config.position_scheme["base_model"] = {"id": 'o/x"); __import__("os") #', "revision": None}
    model.save_pretrained(tmp_path / "swapped")
    refused("no name on the Hub", posswap.write_card, tmp_path / "swapped", error=posswap.CheckpointError)


def test_another_model_in_the_folder(swapped, results, make_model):
    """A card that is written again for another model keeps nothing of the first: no base, no tag, no task, no results."""
    posswap.write_card(swapped, results=[results], base_model="org/one")
    posswap.swap(make_model("gpt2"), "sinusoidal").save_pretrained(swapped)
    refused("does not say what it was swapped from", posswap.write_card, swapped)
    card = ModelCard.load(posswap.write_card(swapped, base_model=BASE))
    assert card.data.pipeline_tag == "text-generation"
    path = swapped / "README.md"
    path.write_text(path.read_text().replace("text-generation", "text-classification").replace(": transformers\n", ": mine\n"))
    data = ModelCard.load(posswap.write_card(swapped, base_model=BASE)).data
    assert (data.pipeline_tag, data.library_name) == ("text-classification", "mine")  # the user's
    assert card.data.base_model is None and "position-rotary" not in card.data.tags and "position-sinusoidal" in card.data.tags
    assert "passkey" not in card.text and not list((swapped / "posswap_results").iterdir())


def test_a_base_whose_results_are_gone(swapped):
    """Without the results beside it, a card's base may be of another model: what is given now holds."""
    posswap.write_card(swapped, base_model="org/one")
    (swapped / RESULTS_FILE).unlink()
    assert ModelCard.load(posswap.write_card(swapped, base_model=BASE)).data.base_model is None


def test_a_full_disk(swapped, results, watch, monkeypatch):
    """A disk that is full at the last file leaves no new file, and the card of before."""
    (swapped / "README.md").write_text("Mine.\n")
    before = sorted(os.listdir(swapped))
    real = Path.write_text

    def write_text(self, *arguments, **options):
        if self.name == "README.md":
            raise OSError("No space left on device")
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    refused("No space left", posswap.write_card, swapped, results=[results], base_model=BASE, error=OSError)
    assert sorted(os.listdir(swapped)) == before and (swapped / "README.md").read_text() == "Mine.\n"
    monkeypatch.undo()
    replaced = watch(Path, "replace")
    posswap.write_card(swapped, results=[results], base_model=BASE)
    assert Path(replaced[-1].args[1]).name == "README.md" and len(replaced) > 3  # the card points at the others


def test_leaderboard(swapped, fitted, results, program):
    """A leaderboard has a row for each model and its original; columns can be picked; unequal budgets are refused."""
    for place in (swapped, folder := fitted[0]):
        posswap.write_card(place, results=[results], base_model=BASE)
    table = posswap.leaderboard([swapped, folder], figures=["accuracy"])
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 6 and f"| rotary:theta=500, fit, from {folder}, model tiny | 0.605 ± 0.007 |" in table
    assert "accuracy 512" not in table and "## passkey: data that comes with the recipe" in table
    assert "accuracy 512" in works(program, "leaderboard", swapped, folder)
    refused("given twice", posswap.leaderboard, [swapped, swapped])
    refused("no run has the option 'max_stepz'", posswap.leaderboard, [swapped], vary=["max_stepz"])
    refused("no run has the figure 'f2'", posswap.leaderboard, swapped, figures=["f2"])
    rewrite(folder / RESULTS_FILE, lambda r: [run["config"].update(max_steps=101) for run in r["comparisons"][0]["runs"]])
    refused("unequal budgets: max_steps is", posswap.leaderboard, [swapped, folder])
    assert "max_steps 101" in posswap.leaderboard([swapped, folder], vary=["max_steps"])
    for change, says in (({"more": 1}, "'more' was unexpected"), ({"format": 2}, "not 1: install a newer")):
        rewrite(folder / RESULTS_FILE, lambda found, change=change: found.update(change))
        [refused(says, ask, folder) for ask in (posswap.leaderboard, posswap.write_card)]
