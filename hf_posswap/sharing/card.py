"""The model card, written from posswap_results.json alone, so that every figure in it was measured.

hf_posswap's text stands between two comments. Text around them, and metadata that is not ours, belong to the user and are kept
when the card is written again.
"""

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import jinja2
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml

from hf_posswap.architectures import find_family
from hf_posswap.assets import EMBEDDED_MODELS
from hf_posswap.data.tables import hub_name
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.experiments.comparison import background, markdown, row_label
from hf_posswap.experiments.page import plots
from hf_posswap.pipelines import KINDS
from hf_posswap.provenance import write_json
from hf_posswap.scheme_entry import is_repo_id
from hf_posswap.schemes import scheme_from_dict
from hf_posswap.sharing.export import CONVERT
from hf_posswap.sharing.native_decoders import GPT_NEOX
from hf_posswap.sharing.record import RESULTS_FILE, SCHEMA, data_of, gather, own_rows, read_results

CARD_FILE = "README.md"
PICTURES = "posswap_results"
EVAL_RESULTS = ".eval_results"
BEGIN, END = "<!-- written by hf_posswap: begin; text outside is yours -->", "<!-- written by hf_posswap: end -->"

_TEMPLATE = Path(__file__).parents[1] / "assets" / "card.md.jinja"
_OURS = "hf_posswap: "  # how our entries of a model index begin: the Hub gives all of one data set the first one's task

# The Hub's names of what recipes measure.
_TASKS = dict.fromkeys(("downstream_classification", "long_documents"), "text-classification")
_TASKS |= {"passkey": "text-generation", **dict.fromkeys(("long_embedder", "retrieval"), "sentence-similarity")}
_STARTS = {
    "cold": "the old table dropped",
    "swap": "a warm start without data",
    "fit": "fitted to the original before training",
    "scratch": "all weights drawn anew",
}
# The part of the fit's text that its figures were measured on.
_PARTS = {
    "report": "kept for this report: neither fitted on, nor used to choose",
    "held out": "held out of the fit, by which layers were also kept or not",
    "overlapping": "held out at each length; where one text was cut at several lengths, some of them were fitted on at another",
    "select": "by which layers were kept or not",
    "fit": "that were fitted on",
}
_UNSEEN = ("report", "held out")  # the parts whose figures may stand in metadata, which leaderboards read
_PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}


def write_card(
    folder: str | Path,
    *,
    results: str | Path | Sequence[str | Path] | None = None,
    base_model: str | None = None,
    license: str | None = None,
    repo_id: str | None = None,
    eval_results: Sequence[str] = (),
) -> Path:
    """Write README.md, posswap_results.json and pictures into the folder of a shared model; return the card's path.

    Args:
        folder: The folder of a swapped model, of an export by `export_native`, or of a delta.
        results: A folder, or several, that `hf-posswap compare` or a recipe wrote, with runs of this model's scheme. None: the
            results and `eval_results` so far, as long as the weights are the same.
        base_model: The model that was swapped, if the folder does not say: "owner/name", "owner/name@revision", or
            "local:name" for a model that is not on the Hub.
        license: The Hub's identifier of the weights' licence, usually that of the base model.
        repo_id: The repository that the card's examples load from.
        eval_results: "DATASET:TASK:FIGURE" writes a figure that a run measured on these weights to .eval_results/, for the
            Hub's own leaderboards, which take registered benchmarks only.

    Raises:
        CheckpointError: The folder holds no swapped model, or a report of other weights.
        PosswapError: Results do not belong to the model, budgets differ, or names hold markup. Nothing is written then.

    >>> import tempfile
    >>> import hf_posswap as posswap
    >>> from transformers import GPT2Config, GPT2Model
    >>> model = posswap.swap(GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=50)), "rotary")
    >>> model.save_pretrained(folder := tempfile.mkdtemp())
    >>> print(posswap.write_card(folder, base_model="local:mine", license="mit").read_text("utf-8").split("---")[1])
    <BLANKLINE>
    library_name: transformers
    license: mit
    pipeline_tag: feature-extraction
    tags:
    - hf_posswap
    - position-rotary
    <BLANKLINE>
    """
    folder = Path(folder)
    if repo_id is not None and (not is_repo_id(repo_id) or "/" not in repo_id):
        raise PosswapError(f"repo_id={repo_id!r} is no name for a repository: give owner/name")
    if license is not None and not re.fullmatch(r"[A-Za-z0-9.+-]+", license):
        raise PosswapError(f"license={license!r} is no identifier of a licence: give one such as apache-2.0 or mit")
    content = gather(folder, results, base_model)
    name = repo_id or re.sub(r"[^\w.-]", "-", folder.resolve().name)
    pictures = {}  # path -> figure
    text, index = _body(content, name, pictures)
    card = _merge(folder / CARD_FILE, text, _metadata(content, license), index, name.rpartition("/")[2])
    entries = _eval_results(content, eval_results)
    with tempfile.TemporaryDirectory(prefix=".posswap-", dir=folder) as aside:  # an error leaves the folder unchanged
        aside = Path(aside)
        write_json(aside / RESULTS_FILE, content)
        for name, figure in pictures.items():
            (aside / name).parent.mkdir(exist_ok=True)
            figure.savefig(aside / name, dpi=120)
        if entries:
            (aside / EVAL_RESULTS).mkdir()
            text = yaml.safe_dump(entries, sort_keys=False)
            (aside / EVAL_RESULTS / "hf_posswap.yaml").write_text(text, "utf-8", newline="\n")
        (aside / CARD_FILE).write_text(card, "utf-8", newline="\n")
        written = [path.relative_to(aside) for path in aside.rglob("*") if path.is_file()]
        for path in sorted(written, key=lambda path: path.name == CARD_FILE):  # the card, which points at the others, last
            (folder / path).parent.mkdir(exist_ok=True)
            (aside / path).replace(folder / path)
    # Remove pictures and figures of an earlier card.
    gone = [path for path in (folder / PICTURES).glob("*.png") if re.match(r"\d+-", path.name)]
    gone += [] if results is None and content["comparisons"] else [folder / EVAL_RESULTS / "hf_posswap.yaml"]
    for path in gone:
        if path.relative_to(folder) not in written:
            path.unlink(missing_ok=True)
    return folder / CARD_FILE


def _body(content: dict, name: str, pictures: dict) -> tuple[str, list[EvalResult]]:
    model, fit = content["model"], content["fit"]
    scheme, pipeline = scheme_from_dict(model["position_scheme"]), model.get("pipeline")
    comparisons, index = [], [_fit_entry(fit)] if fit and _part(fit) in _UNSEEN else []
    for number, comparison in enumerate(content["comparisons"]):
        shown, entries = _comparison(number, comparison, model, scheme, pictures)
        comparisons.append(shown)
        index += entries
    base = model["base_model"]
    parts = {"scheme": [type(one) for one, _ in scheme.kinds()], "family": [type(find_family(model["family"]))]}
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(_TEMPLATE.read_text("utf-8"))
    text = template.render(
        title=name.rpartition("/")[2],
        base=f"[{base['id']}](https://huggingface.co/{base['id']})" if base["on_hub"] else f"`{base['id']}` (not on the Hub)",
        model=model,
        scheme=scheme,
        options={key: value for key, value in model["position_scheme"].items() if key != "name"},
        name=name,
        auto_class=pipeline or _auto_class(model["class"]) or (model["class"] if model["kind"] == "native" else None),
        load="" if pipeline else ".from_pretrained",
        library="sentence_transformers" if pipeline else "transformers",
        tokenizer=model["tokenizer"] and not pipeline,
        exportable=_exportable(model, scheme),
        own=[name for name, kinds in parts.items() if not all(one.__module__.startswith("hf_posswap.") for one in kinds)],
        fit=fit,
        part=_PARTS[_part(fit)] if fit else "",
        tokens=_measured(fit) if fit else 0,
        parity=content["parity"],
        comparisons=comparisons,
        worse=[n for n, value in fit["after"]["by_length"].items() if value > fit["before"]["by_length"][n]] if fit else [],
        few=[n for n, count in fit["after"]["sequences"].items() if count < 5] if fit else [],
        measured=fit or any(_of_these_weights(one["runs"], model) for one in content["comparisons"]),
        one_seed=any(len({run["config"]["seed"] for run in one["runs"]}) == 1 for one in content["comparisons"]),
        results_file=RESULTS_FILE,
        schema_file=SCHEMA.name,
    )
    return text, index


def _auto_class(name: str | None) -> str | None:
    """Return the Auto class that loads a model class, ours or transformers'; None if there is none."""
    if (name or "").endswith(("DoubleHeadsModel", "WithProjection")):
        return None
    found = re.search(r"(For[A-Z]\w*|LMHeadModel)$", name or "")
    return {"LMHeadModel": "AutoModelForCausalLM"}.get(found[0], f"AutoModel{found[0]}") if found else "AutoModel"


def _exportable(model: dict, scheme) -> bool | None:
    """Whether `export_native` will probably find a class; if it does not, its error says why. None: only trying tells."""
    if model.get("span") or scheme.name not in ("learned", "sinusoidal", "none", "ladder", "rotary"):
        return False
    if scheme.name == "rotary" and (model["class"] or "").removeprefix("Posswap") not in {kind.__name__ for kind in CONVERT}:
        return False
    # A causal model has no place for the vector that marks the first token, which it has unless it was swapped cold.
    marked = getattr(scheme, "mark_first", False) and model["family"] in {kind.config_class.model_type for kind in GPT_NEOX}
    return None if marked else True


def _measured(fit: dict) -> int:
    """Return how many tokens a fit's damage was measured on: of long texts, their beginnings."""
    return sum(int(length) * count for length, count in fit["after"]["sequences"].items())


def _part(fit: dict) -> str:
    """Return the part of the text that a fit's figures were measured on: a key of `_PARTS`."""
    part = fit.get("part", "held out")
    return "overlapping" if part == "held out" and len(fit["after"]["sequences"]) > 1 else part


def _fit_entry(fit: dict) -> EvalResult:
    kl = fit["after"]["measure"] == "KL"
    return EvalResult(
        task_type="other",
        task_name=f"{_OURS}fit",
        dataset_type="fit",
        dataset_name=f"{_measured(fit)} tokens ({_part(fit)}), {fit['text']}",
        metric_type="kl" if kl else "cosine_distance",
        metric_name=f"{_OURS}{fit['after']['measure']}, to the original, mean over {'tokens' if kl else 'sequences'}",
        metric_value=fit["after"]["total"],
    )


def _comparison(number: int, comparison: dict, model: dict, scheme, pictures: dict) -> tuple[dict, list[EvalResult]]:
    runs, vary = comparison["runs"], comparison["vary"]
    recipe, meaning = runs[0]["recipe"], runs[0].get("meaning", {})
    kept = _of_these_weights(runs, model)

    def said(option: str) -> str:
        values = dict.fromkeys(run["config"].get(option) for run in runs)
        return " or ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)

    budgets = (("max_steps", "batch_size", ""), ("tune_steps", "tune_tokens", " tokens"))
    trained = [budget for budget in budgets if any(run["config"].get(budget[0]) for run in runs)]
    starts = dict.fromkeys(run["config"]["start"] for run in runs if run["config"]["scheme"] != "original")
    shown = [name for name in meaning for run in runs for one in run["figures"] if f"{one}_".startswith(f"{name}_")]
    figures = plots(runs, vary)
    drawn = {name: f"{PICTURES}/{number}-{recipe}-{name}.png" for name in figures}
    pictures |= {path: figures[name] for name, path in drawn.items()}
    section = {
        "title": runs[0].get("question", recipe),
        "starts": {start: _STARTS.get(start, start) for start in starts},
        "meaning": {name: meaning[name] for name in shown},
        "said": said,
        "steps": "".join(f"{said(steps)} steps of {said(size)}{unit}" for steps, size, unit in trained),
        "comes_with_us": all(run["config"]["model"] in EMBEDDED_MODELS for run in runs),
        "data": " or ".join(dict.fromkeys(data_of(run["config"]) for run in runs)),
        "rows": list(dict.fromkeys(row_label(run, vary) for run in own_rows(runs, scheme, model.get("span"), RESULTS_FILE))),
        "kept": (row_label(kept[0], vary), kept[0]["config"]["seed"]) if kept else None,
        "table": markdown(runs, vary=vary),
        "pictures": {f"{name.replace('_', ' ')} by scheme": path for name, path in drawn.items()},
        "background": background(runs),
        "commands": [run["command"] for run in runs],
    }
    given = kept[0]["config"].get("dataset") if kept else None
    dataset, part = hub_name(given) if given else (recipe, None)
    entries = [
        EvalResult(
            task_type=_TASKS.get(recipe, "other"),
            task_name=f"{_OURS}{recipe}",
            dataset_type=dataset,
            dataset_config=part or kept[0]["config"].get("dataset_config"),
            dataset_name=data_of(kept[0]["config"]),
            metric_type=re.sub(r"_\d+$", "", name),
            metric_name=f"{_OURS}{name}, seed {kept[0]['config']['seed']}",
            metric_value=value,
        )
        for name, value in (_of_the_end(kept[0]) if kept and _on_unseen_text(kept[0]) else {}).items()
    ]
    return section, entries


def _of_these_weights(runs: list[dict], model: dict) -> list[dict]:
    """Return the runs that saved exactly the weights in the folder; others measured a model like it."""
    return [run for run in runs if run.get("weights") == model["weights"]]


def _of_the_end(run: dict) -> dict[str, float]:
    """Return a run's figures of the weights that it saved, not of those before and during training, nor of the original."""
    other = re.compile(r"start_.*|.*_original|majority" + r"|to_.*|.*_\d+" * (run["recipe"] == "heal"))
    found = {name: value for name, value in run["figures"].items() if value is not None and not other.fullmatch(name)}
    return {name: value for name, value in found.items() if f"tuned_{name}" not in found}


def _on_unseen_text(run: dict) -> bool:
    """Whether a run was measured on another file than it was trained on."""
    trained, *others = (run["config"].get(f"{part}_file") for part in ("train", "validation", "test"))
    return trained is None or trained not in others


def _metadata(content: dict, license: str | None) -> dict:
    model = content["model"]
    base = model["base_model"]
    delta, pipeline = model["kind"] == "delta", model.get("pipeline")
    task = KINDS[pipeline] if pipeline else _PIPELINES.get(_auto_class(model["class"]))
    data = {
        "library_name": "hf_posswap" if delta else "sentence-transformers" if pipeline else "transformers",
        "pipeline_tag": None if delta else task,
        "license": license and license.lower(),  # as all of the Hub's identifiers are
        "tags": ["hf_posswap", f"position-{model['position_scheme']['name']}"],
    }
    if base["on_hub"]:
        data |= {"base_model": base["id"], "base_model_relation": "adapter" if delta else "finetune"}
    return data


def own_text(path: Path) -> str:
    """Return the user's text in a card: all but what hf_posswap has written."""
    before, after, _ = _split(path, _load(path).text)
    return before + after


def _load(path: Path) -> ModelCard:
    try:
        return ModelCard.load(path)
    except (ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): repair it, or move it away") from None


def _split(path: Path, text: str) -> tuple[str, str, bool]:
    """Return the text before and after ours, and whether ours was found. Comments count only if alone on their line."""
    text = text.replace("\r\n", "\n")
    found = re.fullmatch(rf"(.*?)^{re.escape(BEGIN)}$.*^{re.escape(END)}$(.*)", text, re.DOTALL | re.MULTILINE)
    if found:
        return found[1], found[2], True
    if re.search(rf"^({re.escape(BEGIN)}|{re.escape(END)})$", text, re.MULTILINE):
        raise CheckpointError(f"{path} has lost one of hf_posswap's comments ({BEGIN} ... {END}): put it back, or remove both")
    if re.search(r'\("\w+_model_id"', text):  # what sentence-transformers writes begins with a way to load that ours corrects
        return "", f"\n{text.strip()}\n", False
    return text.rstrip() + "\n\n" if text.strip() else "", "", False


def _merge(path: Path, text: str, ours: dict, index: list[EvalResult], name: str) -> str:
    before, after, theirs = "", "", {}
    if path.exists():
        old = _load(path)
        before, after, again = _split(path, old.text)
        theirs = {key: value for key, value in old.data.to_dict().items() if key != "model-index"}
        if "language" in theirs:  # YAML 1.1 reads Norwegian as False
            said = theirs["language"]
            languages = ["no" if one is False else one for one in (said if isinstance(said, list) else [said])]
            theirs["language"] = languages if isinstance(said, list) else languages[0]
        found = old.data.eval_results or []
        index = [*(one for one in found if not f"{one.task_name} {one.metric_name}".count(_OURS)), *index]
        if again:  # we wrote these, perhaps for another model in this folder; other values are the user's, but for a known base
            written = {}
            with suppress(PosswapError):  # results beside the card that cannot be read do not say what we wrote
                written = _metadata(read_results(path.parent), None)
            keys = ("library_name", "pipeline_tag", "base_model", "base_model_relation")
            ours_alone = {key for key in keys if theirs.get(key) == written.get(key) or (key in keys[2:] and not written)}
            theirs = {key: value for key, value in theirs.items() if key not in ours_alone}
            theirs["tags"] = [tag for tag in theirs.get("tags", []) if not tag.startswith("position-")]
    users = {"pipeline_tag", "library_name"} & theirs.keys()
    ours = {key: value for key, value in ours.items() if value is not None and key not in users}
    ours["tags"] = list(dict.fromkeys([*theirs.get("tags", []), *ours["tags"]]))
    if index:
        ours |= {"eval_results": index, "model_name": name}
    data = ModelCardData(**dict(sorted((theirs | ours).items())))
    block = f"{BEGIN}\n\n{text.strip()}\n\n{END}"
    return f"---\n{data.to_yaml()}\n---\n\n{before.lstrip(chr(10))}{block}\n{after}".rstrip() + "\n"


def _eval_results(content: dict, asked: Sequence[str]) -> list[dict]:
    entries = []
    for one in asked:
        parts = one.split(":")
        if len(parts) != 3 or not all(parts) or not is_repo_id(parts[0]):
            raise PosswapError(f"eval_results={one!r} must be DATASET:TASK:FIGURE, such as nyu-mll/glue:cola:matthews")
        dataset, task, figure = parts
        runs = [run for comparison in content["comparisons"] for run in _of_these_weights(comparison["runs"], content["model"])]
        runs = [run for run in runs if figure in _of_the_end(run) and _on_unseen_text(run)]
        if len(runs) != 1:
            what = f"eval_results={one!r}: the results have {len(runs)} runs that measured it on these weights, not one"
            raise PosswapError(f"{what}: share the folder `model` of a run with --save-model, and pass that run as results")
        (run,) = runs
        notes = f"hf_posswap {run['recipe']}, {run['config']['scheme']}, seed {run['config']['seed']}"
        entries.append(EvalResultEntry(dataset_id=dataset, task_id=task, value=run["figures"][figure], notes=notes))
    return eval_result_entries_to_yaml(entries)
