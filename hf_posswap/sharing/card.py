"""The model card: written from posswap_results.json alone, so that no figure in it can be anything but what was measured.

What hf_posswap writes stands between two comments. Text around them, and metadata that is not ours, are the user's, and stay
when the card is written again.
"""

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

import jinja2
import yaml
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

import hf_posswap
from hf_posswap.assets import EMBEDDED_MODELS
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.results import write_json
from hf_posswap.runs import background, markdown, plots, row_label
from hf_posswap.schemes import scheme_from_dict
from hf_posswap.sharing.results_file import RESULTS_FILE, SCHEMA, data_of, gather, own_rows

CARD_FILE = "README.md"
PICTURES = "posswap_results"
EVAL_RESULTS = ".eval_results"
BEGIN, END = "<!-- written by hf_posswap: begin; text outside is yours -->", "<!-- written by hf_posswap: end -->"

_TEMPLATE = Path(__file__).parents[1] / "assets" / "card.md.jinja"
_OURS = "hf_posswap: "  # how our entries of a model index begin

# What a recipe asks, and what its figures are.
_QUESTIONS = {
    "swap_cost": (
        "What swaps like this one cost, and what tuning wins back",
        "`cosine N`: of mean-pooled states with the original's on held-out blocks of N tokens, 1 is unhurt; `perplexity N`: on "
        "held-out blocks of N tokens; `kl`: of predictions to the original's; `word order`: whether two swapped neighbours in "
        "a sentence are noticed, 0.5 is chance; `tuned`: after the training steps.",
    ),
    "downstream_classification": ("Does it learn a task?", "Figures are those of the validation rows."),
    "long_documents": (
        "Does reading more of a document help?",
        "The original is cut at what it can read, a swapped model reads more of the same documents; `long`: of the documents "
        "alone that the original cannot read as a whole.",
    ),
    "language_modeling": ("Language modelling", "`perplexity N`: on held-out blocks of N tokens."),
    "length_extrapolation": (
        "Loss at lengths beyond the trained one",
        "`loss N`: nats a token on held-out blocks of N tokens; the original's is that behind a sliding window; `tuned`: after "
        "the training steps.",
    ),
    "passkey": (
        "Does it find a key in a long text?",
        "`accuracy N`: share of keys said in full, in texts of N tokens, over all depths; `candidates N`: share of texts in "
        "which the key is likelier than nine others.",
    ),
    "listops": ("Nested expressions (ListOps)", "`majority`: what guessing the commonest answer gets."),
}
_STARTS = {
    "cold": "the old table dropped",
    "swap": "a warm start without data",
    "fit": "fitted to the original before training",
    "scratch": "all weights drawn anew",
}
_TASKS = {
    "downstream_classification": "text-classification",
    "long_documents": "text-classification",
    "passkey": "text-generation",
}
_PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": "multiple-choice",
}
_KINDS = {
    "swapped": "a swapped model, with a model type of its own: it cannot be loaded as a plain one by mistake",
    "native": "a native export: a stock class of transformers that computes what the swapped model does",
    "delta": "a delta: the positions alone, for weights that everybody has",
}


def write_card(
    folder: str | Path,
    *,
    results: Sequence[str | Path] = (),
    base_model: str | None = None,
    license: str | None = None,
    repo_id: str | None = None,
    eval_results: Sequence[str] = (),
) -> Path:
    """Write README.md, posswap_results.json and pictures into the folder of a shared model; return the card's path.

    Args:
        folder: A swapped model, what `export_native` saved, or a delta.
        results: Folders that `hf-posswap compare` or a recipe wrote, with runs of this model's scheme.
        base_model: What it was swapped from, where the folder does not say: "owner/name", "owner/name@revision", or
            "local:name" for a model that is not on the Hub.
        license: Of the weights, by the Hub's identifiers: that of the base model, as a rule.
        repo_id: Where it will be loaded from, for the examples.
        eval_results: "DATASET:TASK:FIGURE" for the Hub's own leaderboards, which take registered benchmarks only: the mean of
            that figure goes into .eval_results/.

    Raises:
        CheckpointError: There is no swapped model in the folder, or what lies next to it is of other weights.
        PosswapError: Results do not belong to the model, budgets differ, or names hold markup. Nothing is written then.

    >>> import tempfile
    >>> import hf_posswap as posswap
    >>> from transformers import GPT2Config, GPT2Model
    >>> model = posswap.swap(GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64, vocab_size=50)), "rotary")
    >>> model.save_pretrained(folder := tempfile.mkdtemp())
    >>> print(posswap.write_card(folder, base_model="local:mine", license="mit").read_text().split("---")[1])
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
    content = gather(folder, [Path(place) for place in results], base_model)
    pictures = {}  # name -> figure
    text, index = _body(content, repo_id or folder.name, pictures)
    card = _merge(folder / CARD_FILE, text, _metadata(content, index, license, repo_id or folder.name))
    entries = _eval_results(content, eval_results)
    with tempfile.TemporaryDirectory(prefix=".posswap-", dir=folder) as aside:  # all of it, or nothing
        aside = Path(aside)
        write_json(aside / RESULTS_FILE, content)
        for name, figure in pictures.items():
            (aside / name).parent.mkdir(exist_ok=True)
            figure.savefig(aside / name, dpi=120)
        if entries:
            (aside / EVAL_RESULTS).mkdir()
            (aside / EVAL_RESULTS / "hf_posswap.yaml").write_text(yaml.safe_dump(entries, sort_keys=False))
        (aside / CARD_FILE).write_text(card, encoding="utf-8")
        shutil.rmtree(folder / PICTURES, ignore_errors=True)  # of a card before this one
        for path in sorted(path for path in aside.rglob("*") if path.is_file()):
            target = folder / path.relative_to(aside)
            target.parent.mkdir(exist_ok=True)
            path.replace(target)
    return folder / CARD_FILE


def _body(content: dict, name: str, pictures: dict) -> tuple[str, list[EvalResult]]:
    model, fit, parity = (content[part] for part in ("model", "fit", "parity"))
    scheme = scheme_from_dict(model["position_scheme"])
    options = {key: value for key, value in model["position_scheme"].items() if key != "name"}
    comparisons, index = [], []
    for number, comparison in enumerate(content["comparisons"]):
        shown, entries = _comparison(number, comparison, model, scheme, fit is not None, pictures)
        comparisons.append(shown)
        index += entries
    base = model["base_model"]
    template = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False).from_string(_TEMPLATE.read_text())
    text = template.render(
        title=name.rpartition("/")[2],
        version=hf_posswap.__version__,
        base=f"[{base['id']}](https://huggingface.co/{base['id']})"
        if base["on_hub"]
        else f"`{base['id']}`, which is not on the Hub,",
        model=model,
        kind=_KINDS[model["kind"]],
        scheme=scheme,
        scheme_name=scheme.name,
        summary=type(scheme).summary,
        options=options,
        name=name,
        auto_class=_auto_class(model["class"]),
        exportable=_exportable(model, scheme),
        fit=fit,
        fit_text={"given": "text that was given"}.get(fit["text"], fit["text"]) if fit else "",
        measure=_measure(fit) if fit else "",
        damage=_damage(fit) if fit else "",
        parity=parity,
        differences=_differences(parity) if parity else "",
        comparisons=comparisons,
        limits=_limits(content, scheme),
        results_file=RESULTS_FILE,
        schema_file=SCHEMA.name,
    )
    return text, index


def _auto_class(name: str | None) -> str:
    """Return the Auto class that loads a class of transformers, or of ours."""
    found = re.search(r"(For[A-Z]\w*|LMHeadModel)$", name or "")
    return {"LMHeadModel": "AutoModelForCausalLM"}.get(found[0], f"AutoModel{found[0]}") if found else "AutoModel"


def _exportable(model: dict, scheme) -> bool:
    """Whether `export_native` is likely to find a class; it says why where it does not."""
    marked = getattr(scheme, "mark_first", False) and model["family"] != "bert"
    return scheme.name in ("learned", "sinusoidal", "none") or (scheme.name == "rotary" and not marked)


def _measure(fit: dict) -> str:
    if fit["after"]["measure"] == "KL":
        return "KL of its predictions from the original's, in nats"
    return "1 - cosine of its mean-pooled last states with the original's"


def _damage(fit: dict) -> str:
    lines = ["| | after the swap | after the fit |", "|---|---:|---:|"]
    lines.append(f"| **all** | {fit['before']['total']:.4f} | **{fit['after']['total']:.4f}** |")
    for kind, title in (("by_length", "sequences of {} tokens"), ("by_position", "position {}")):
        keys = list(fit["before"][kind])
        for key in keys if len(keys) <= 8 else []:
            lines.append(f"| {title.format(key)} | {fit['before'][kind][key]:.4f} | {fit['after'][kind][key]:.4f} |")
    for layer, values in enumerate(zip(fit["before"]["by_layer"], fit["after"]["by_layer"], strict=True)):
        lines.append(f"| states after layer {layer}, relative error | {values[0]:.4f} | {values[1]:.4f} |")
    return "\n".join(lines)


def _differences(parity: dict) -> str:
    lines = ["| tokens | random | text |", "|---|---:|---:|"]
    for length, value in parity["random"].items():
        lines.append(
            f"| {length} | {value:.2g} | {format(parity['text'][length], '.2g') if length in parity['text'] else ''} |"
        )
    return "\n".join(lines)


def _comparison(
    number: int, comparison: dict, model: dict, scheme, fitted: bool, pictures: dict
) -> tuple[dict, list[EvalResult]]:
    runs, vary = comparison["runs"], comparison["vary"]
    recipe, config = runs[0]["recipe"], runs[0]["config"]
    rows = {}
    for run in own_rows(runs, scheme):
        rows.setdefault(row_label(run, vary), []).append(run)
    same = [run["config"]["seed"] for run in runs if run.get("weights") == model["weights"]]
    # Whether an unfitted model was swapped cold or warm, and what it was trained on since, nobody has written down.
    alike = [label for label, row in rows.items() if any(run.get("weights") == model["weights"] for run in row)]
    alike = alike or [label for label, row in rows.items() if fitted and row[0]["config"]["start"] == "fit"]
    starts = dict.fromkeys(run["config"]["start"] for run in runs if run["config"]["scheme"] != "original")
    about = "".join(f"{words} " for words in _QUESTIONS.get(recipe, ())[1:])
    about += f"*original*: not swapped; {'; '.join(f'*{one}*: {_STARTS.get(one, one)}' for one in starts)}.\n\n"
    comes = ", which comes with hf_posswap" if config["model"] in EMBEDDED_MODELS else ""
    about += (
        f"The base model here is `{config['model']}`{comes}; each run had {config['max_steps']:,} steps of "
        f"{config['batch_size']}, peak learning rate {config['learning_rate']:g}, on {data_of(config)}. "
    )
    if len(alike) == 1:
        about += f"Nearest to this model is the row *{alike[0]}*. "
    else:
        about += f"Rows with this model's positions: {', '.join(f'*{label}*' for label in rows)}. "
    if same:
        about += f"The weights in this folder are those of seed {same[0]}."
    else:
        about += "Each run made its model anew, from the base model and its seed: none of them is the weights in this folder."
    figures = plots(runs, vary)
    drawn = {name: f"{PICTURES}/{number}-{recipe}-{name}.png" for name in figures}
    pictures |= {path: figures[name] for name, path in drawn.items()}
    shown = {
        "title": _QUESTIONS.get(recipe, (recipe,))[0],
        "about": about,
        "table": markdown(runs, vary=vary),
        "pictures": {f"{name.replace('_', ' ')} by scheme": path for name, path in drawn.items()},
        "background": background(runs),
        "commands": [run["command"] for run in runs],
    }
    entries, row = [], rows[alike[0]] if len(alike) == 1 else []
    for name in row[0]["figures"] if row else ():
        values = [run["figures"][name] for run in row if run["figures"].get(name) is not None]
        if values and not vary:
            spread = f", standard deviation {stdev(values):.3g}" if len(values) > 1 else ""
            entries.append(
                EvalResult(
                    task_type=_TASKS.get(recipe, "other"),
                    task_name=f"{_OURS}{recipe}",
                    dataset_type=config.get("dataset") or recipe,
                    dataset_name=data_of(config),
                    metric_type=re.sub(r"_\d+$", "", name),
                    metric_name=f"{name} (mean over {len(values)} seed{'s' if len(values) > 1 else ''}{spread})",
                    metric_value=mean(values),
                )
            )
    return shown, entries


def _limits(content: dict, scheme) -> list[str]:
    model, fit = content["model"], content["fit"]
    longest, trained = model["max_positions"], model["trained_positions"]
    limits = ["It has what its base model has of biases and limits: read that one's card first."]
    if model["kind"] == "native":
        limits.append(f"The class says nothing of longer inputs than {longest:,} tokens: transformers may not refuse them.")
    else:
        limits.append(f"Inputs of more than {longest:,} tokens are an error.")
    looked = fit["longest"] if fit else 0
    if longest > trained and model["kind"] != "delta":
        limits.append(
            f"It takes more than the {trained:,} tokens that its base model was trained with; what it makes of them is known "
            "only as far as a table above has such lengths."
        )
    if fit and looked < trained:
        limits.append(f"No sequence of the fit was longer than {looked:,} tokens.")
    if fit and fit["text"] == "random tokens":
        limits.append("It was fitted on random tokens, which is worse than fitting on text.")
    if not fit and not content["comparisons"]:
        limits.append("Nothing was measured: whether it still does what its base model does is not known.")
    if scheme.name == "relative" and model["kind"] != "native":
        limits.append("No stock class of transformers computes its attention, and it takes eager or sdpa attention only.")
    if any(len({run["config"]["seed"] for run in one["runs"]}) == 1 for one in content["comparisons"]):
        limits.append("A comparison has one seed, hence no spread: small differences in it mean nothing.")
    return limits


def _metadata(content: dict, index: list[EvalResult], license: str | None, name: str) -> dict:
    model = content["model"]
    base = model["base_model"]
    data = {
        "library_name": "hf_posswap" if model["kind"] == "delta" else "transformers",
        "pipeline_tag": None if model["kind"] == "delta" else _PIPELINES.get(_auto_class(model["class"])),
        "license": license,
        "tags": ["hf_posswap", f"position-{model['position_scheme']['name']}"],
    }
    if base["on_hub"]:
        data |= {"base_model": base["id"], "base_model_relation": "adapter" if model["kind"] == "delta" else "finetune"}
    return data | {"eval_results": index, "model_name": name.rpartition("/")[2]}


def _merge(path: Path, text: str, ours: dict) -> str:
    """Return the whole card: ours, and what the user has written around it."""
    block, before, after, theirs, results = f"{BEGIN}\n\n{text.strip()}\n\n{END}", "", "", {}, []
    if path.exists():
        try:
            old = ModelCard.load(path)
        except (ValueError, yaml.YAMLError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): mend it, or move it away") from None
        found = [old.text.count(mark) for mark in (BEGIN, END)]
        if found == [1, 1] and old.text.index(BEGIN) < old.text.index(END):
            before, after = old.text.split(BEGIN)[0], old.text.split(END)[1]
        elif found == [0, 0]:
            before = old.text.rstrip() + "\n\n"
        else:
            raise CheckpointError(
                f"{path} has lost one of hf_posswap's comments ({BEGIN} ... {END}): put it back, or remove both"
            )
        theirs = old.data.to_dict()
        results = [one for one in old.data.eval_results or [] if not (one.task_name or "").startswith(_OURS)]
    theirs = {key: value for key, value in theirs.items() if key not in ("model-index", "eval_results", "model_name")}
    tags = list(dict.fromkeys([*theirs.get("tags", []), *ours["tags"]]))
    ours = {key: value for key, value in ours.items() if value is not None} | {"tags": tags}
    ours["eval_results"] = [*results, *ours["eval_results"]] or None
    if not ours["eval_results"]:
        del ours["eval_results"], ours["model_name"]
    data = ModelCardData(**dict(sorted((theirs | ours).items())))
    whole = f"---\n{data.to_yaml()}\n---\n\n{before.lstrip()}{block}\n{after}".rstrip() + "\n"
    if ModelCard(whole).data.to_dict() != data.to_dict():  # read as it will be read
        raise PosswapError("the card's metadata does not come back as it was written: this is a defect, please report it")
    return whole


def _eval_results(content: dict, asked: Sequence[str]) -> list[dict]:
    scheme = scheme_from_dict(content["model"]["position_scheme"])
    entries = []
    for one in asked:
        parts = one.split(":")
        if len(parts) != 3 or not all(parts):
            raise PosswapError(f"eval_results={one!r} must be DATASET:TASK:FIGURE, such as nyu-mll/glue:cola:matthews")
        dataset, task, figure = parts
        try:
            validate_repo_id(dataset)
        except HFValidationError as error:
            raise PosswapError(f"eval_results={one!r}: {error}") from None
        own = [run for comparison in content["comparisons"] for run in own_rows(comparison["runs"], scheme)]
        starts = {run["config"]["start"] for run in own if figure in run["figures"]}
        if len(starts) != 1:
            known = sorted({name for run in own for name in run["figures"]})
            raise PosswapError(
                f"eval_results={one!r}: the results have {len(starts)} rows of this model's scheme with {figure!r}, and one is "
                f"needed; figures are {', '.join(known) or 'none'}"
            )
        runs = [run for run in own if figure in run["figures"]]
        values = [run["figures"][figure] for run in runs]
        seeds = [run["config"]["seed"] for run in runs]
        notes = f"hf_posswap {runs[0]['recipe']}, {runs[0]['config']['scheme']}, mean over seeds {seeds}"
        entries.append(EvalResultEntry(dataset_id=dataset, task_id=task, value=mean(values), notes=notes))
    return eval_result_entries_to_yaml(entries)
