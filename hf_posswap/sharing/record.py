"""posswap_results.json: what is known of one shared model, as data. Its card is written from it, and leaderboards read it.

The format is assets/posswap_results.schema.json (JSON Schema, draft 2020-12). Every file is checked against it before use. Its
names end up in tables and pages, so text that Markdown, HTML or YAML would read as markup is refused.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import transformers
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import family_of, find_family, longest_input
from hf_posswap.checkpoint import CONFIG_CLASSES, SWAPPED_CLASSES
from hf_posswap.errors import CheckpointError, DataError, PosswapError
from hf_posswap.experiments.comparison import check_budgets, load_runs
from hf_posswap.fitting.report import FIT_FILE
from hf_posswap.pipelines import kind_of
from hf_posswap.provenance import published, read_json, weight_hashes
from hf_posswap.scheme_entry import is_repo_id, read_config_entry, scheme_in
from hf_posswap.schemes import Scheme, parse_scheme
from hf_posswap.sharing.delta import ABOUT, download
from hf_posswap.sharing.parity import PARITY_FILE

FORMAT = 1
RESULTS_FILE = "posswap_results.json"
SCHEMA = Path(__file__).parents[1] / "assets" / "posswap_results.schema.json"
LOCAL = "local:"

# Only these entries of a run's result file are shared; curves and matrices are not.
_OF_A_RUN = ("format", "recipe", "question", "meaning", "command", "commit", "note")
_OF_A_RUN += ("versions", "hardware", "config", "figures", "cost", "weights")


def gather(folder: Path, results: str | Path | Sequence[str | Path] | None = None, base_model: str | None = None) -> dict:
    """Return the content of `RESULTS_FILE` for a folder with a swapped model, its native export or a delta.

    What `results` and `base_model` are, and what is raised, is said at `card.write_card`.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}: save the model there first")
    weights = weight_hashes(folder, modules=True)
    if not weights:
        raise CheckpointError(f"{folder} has no weights (.safetensors): save the model there first")
    kind, entry, about = _read_model(folder)
    scheme = scheme_of(entry, folder)
    known = folder / RESULTS_FILE
    before = _checked(known, known, remedy="remove it, and the card writes it anew") if known.is_file() else {}
    old = before.get("model", {})
    if old.get("family") != about["family"]:  # the folder held another model
        old = {}
    known = entry.get("base_model") or {}
    known = known if known.get("id") else {}
    if results is None:
        same = old.get("weights", {"": ""}).items() <= weights.items()  # older files have none of a pipeline's further modules
        comparisons = before.get("comparisons") if same else []
    else:
        given = [results] if isinstance(results, str | Path) else results
        places = dict.fromkeys(Path(place).resolve() for place in given)
        comparisons = [_comparison(place, scheme, entry.get("span")) for place in places]
    content = {
        "format": FORMAT,
        "model": {
            "kind": kind,
            **about,
            "weights": weights,
            "pipeline": (pipeline := kind_of(folder)),
            "reads": _limit(folder, about["max_positions"]) if pipeline else None,
            "tokenizer": (folder / "tokenizer_config.json").is_file(),
            "position_scheme": scheme.to_dict(),
            "span": entry.get("span"),
            "trained_positions": entry["trained_positions"],
            "base_model": _base_model(known, base_model, old.get("base_model", {}), folder),
        },
        "fit": _report(folder / FIT_FILE, "report", scheme),
        "parity": _report(folder / PARITY_FILE, "certificate", scheme),
        "comparisons": comparisons,
    }
    content = json.loads(json.dumps(content))  # as it will be read back: with lists for tuples, and text for integer keys
    check(content, f"the results of {folder}")
    return content


def _read_model(folder: Path) -> tuple[str, dict, dict]:
    """Return the kind of the folder ("swapped", "native" or "delta"), the scheme's entry, and facts about the model."""
    if (folder / ABOUT).is_file():
        found = read_json(folder / ABOUT)
        try:
            entry = found["position_scheme"] | {"base_model": found["base_model"]}
            entry["trained_positions"]
            about = {"class": None, "max_positions": found["max_positions"], "dtype": found.get("dtype")}
            return "delta", entry, {"family": found["model_type"], **about}
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / ABOUT} lacks {error}: save the delta again") from None
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has neither config.json nor {ABOUT}: give the folder of a saved model")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # False: do not ask the user
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {str(error).splitlines()[0]}") from None
    ours = find_family(config.model_type) is not None  # some of these count padding in their config's number
    longest = longest_input(config) if ours else getattr(config, "max_position_embeddings", None)
    about = {"class": _class_name(config, folder), "max_positions": longest}
    if type(config) in CONFIG_CLASSES.values():
        read_config_entry(config)  # raises if it is invalid
        return "swapped", config.position_scheme, {"family": family_of(config).model_type, **about}
    if (folder / PARITY_FILE).is_file():
        report = _report(folder / PARITY_FILE, "certificate")
        entry, about["max_positions"] = report.get("position_scheme"), report.get("longest") or longest
        if not isinstance(entry, dict) or "trained_positions" not in entry:
            raise CheckpointError(f"{folder / PARITY_FILE} does not say which scheme was exported: export the model again")
        return "native", entry, {"family": config.model_type, **about}
    raise CheckpointError(f"{folder} holds a {config.model_type} model that has not been swapped: give one, an export, a delta")


def _limit(folder: Path, longest: int) -> int | None:
    """Return after how many tokens a pipeline cuts texts; None: it reads as many as the model."""
    names = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
    given = [read_json(folder / file).get(name) for file, name in names.items() if (folder / file).is_file()]
    return min((one for one in given if one and one < longest), default=None)


def _class_name(config: PreTrainedConfig, folder: Path) -> str | None:
    """Return the class that config.json names, for the card's code; raise unless it is ours or transformers'."""
    name = (config.architectures or [None])[0]
    known = getattr(transformers, str(name), None)
    ours = [kind.__name__ for kind in SWAPPED_CLASSES.values()]
    if name is None or name in ours or (isinstance(known, type) and issubclass(known, PreTrainedModel)):
        return name
    raise CheckpointError(f"{folder / 'config.json'} names the class {name!r:.100}, which does not exist: save the model again")


def scheme_of(entry: dict, folder: Path) -> Scheme:
    """Return the scheme in an entry of config.json; `folder` is for the message if it cannot be read."""
    try:
        return scheme_in(entry)
    except PosswapError as error:
        raise CheckpointError(f"{folder} holds a position scheme that cannot be used: {error}") from None


def _report(path: Path, name: str, scheme: Scheme | None = None) -> dict | None:
    if not path.is_file():
        return None
    found = read_json(path)
    report = found.get(name)
    weights = found.get("weights")  # a variant may lie beside them
    same = isinstance(weights, dict) and weights and weights.items() <= weight_hashes(path.parent).items()
    if not isinstance(report, dict) or not same:
        raise CheckpointError(f"{path} is of other weights than the folder's, or broken: write it again, or remove it")
    entry = report.get("position_scheme")
    if scheme is not None and (not isinstance(entry, dict) or scheme_of(entry, path) != scheme):
        raise CheckpointError(f"{path} is of another scheme than the folder's: write it again, or remove it")
    return report


def _base_model(known: dict, given: str | None, before: dict, folder: Path) -> dict:
    """Return the base model: from the folder, from the user, or from the card that was there before."""
    if given is None:
        if not (found := known or before):
            what = f"{folder} does not say what it was swapped from"
            raise PosswapError(f"{what}: give base_model (--base-model), owner/name[@revision], or {LOCAL}NAME")
        name, on_hub = found["id"], found.get("on_hub", True)
        if on_hub and not is_repo_id(name):
            raise CheckpointError(f"{folder} has the base {name!r:.100}, which is no name on the Hub: save the model again")
        revision = found.get("revision") or (before.get("revision") if before.get("id") == name else None)
        return {"id": name, "revision": revision, "on_hub": on_hub}
    on_hub = not given.startswith(LOCAL)
    name, _, revision = given.partition("@") if on_hub else (given.removeprefix(LOCAL), "", None)
    if on_hub and not is_repo_id(name):
        raise PosswapError(f"base_model={given!r} is no name on the Hub: owner/name, or {LOCAL}NAME")
    if not on_hub and (not name or "/" in name or "\\" in name):
        raise PosswapError(f"base_model={given!r}: give a name after {LOCAL}, not a path")
    if name != known.get("id", name):
        raise PosswapError(f"{folder} was swapped from {known['id']}, not from {name}: leave out base_model")
    return {"id": name, "revision": revision or known.get("revision"), "on_hub": on_hub}


def _comparison(place: Path, scheme: Scheme, span: dict | None) -> dict:
    """Read a comparison.json, or the runs below a folder."""
    if not place.exists():
        raise DataError(f"there are no results in {place}: give what `hf-posswap compare` or a recipe wrote")
    file = place / "comparison.json" if place.is_dir() else place
    vary, found = (read_json(file).get("vary", []), load_runs([file])) if file.is_file() else ([], load_runs([place]))
    runs = [{name: run[name] for name in _OF_A_RUN if name in run} | _digests(run) for run in found]
    _check({"vary": vary, "runs": runs}, str(file), comparison=True)
    runs = [published(run) for run in runs]
    own_rows(runs, scheme, span, file)
    return {"vary": vary, "runs": runs}


def _digests(run: dict) -> dict[str, dict[str, str]]:
    """Return the inputs of a run, if it notes them: for each option that names files, one SHA-256 of all their hashes."""
    if not (inputs := run.get("inputs")):
        return {}
    texts = {name: json.dumps(files, sort_keys=True) for name, files in inputs.items() if not isinstance(files, str)}
    return {"inputs": inputs | {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}}


def own_rows(runs: list[dict], scheme: Scheme, span: dict | None, where: str | Path) -> list[dict]:
    """Return the runs with this scheme, however it is spelled, and this span; raise DataError if there are none."""
    own = []
    for run in runs:
        config = run["config"]
        same_span = {name: config.get(name) for name in span} == span if span else config.get("span") is None
        if same_span and config["scheme"] != "original" and _parsed(config["scheme"]) == scheme:
            own.append(run)
    if not own:
        there = ", ".join(sorted({_positions(run["config"]["scheme"], run["config"]) for run in runs}))
        what = f"{where} has no run with {_positions(scheme, span or {})}, the model's positions; it has {there}"
        raise DataError(f"{what}: write the card with --results that have one")
    return own


def _positions(scheme: Scheme | str, span: dict) -> str:
    return f"{scheme} (span {span['span']}, first {span.get('first')})" if span.get("span") else str(scheme)


def data_of(config: dict) -> str:
    """Return the name of the data that a run was trained on."""
    if config.get("dataset"):
        return ", ".join(filter(None, (config["dataset"], config.get("dataset_config"))))
    return "/".join(Path(config["train_file"]).parts[-2:]) if config.get("train_file") else "data that comes with the recipe"


def _parsed(scheme: str) -> Scheme | None:
    try:
        return parse_scheme(scheme)
    except PosswapError:  # somebody else's own scheme, which is not registered here
        return None


def check(content: dict, where: str) -> None:
    """Raise DataError if results do not fit the schema, and PosswapError if they compare unequal budgets."""
    _check(content, where)
    for comparison in content["comparisons"]:
        check_budgets([{**run, "folder": run["command"]} for run in comparison["runs"]], comparison["vary"])


def _check(content: dict, where: str, *, comparison: bool = False) -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    if comparison:
        schema = {"$defs": schema["$defs"], **schema["properties"]["comparisons"]["items"]}
    try:
        error = best_match(Draft202012Validator(schema).iter_errors(content))
        json.dumps(content, allow_nan=False)
    except ValueError:
        raise DataError(f"{where} holds figures that are NaN or infinite: the runs have diverged, leave them out") from None
    if error is not None:
        place = "/".join(map(str, error.absolute_path)) or "the file"
        says = error.message if len(error.message) < 300 else error.message[:200] + " ..."
        if error.validator == "pattern" and "u0000" in str(error.validator_value):
            says = f"{error.instance!r:.200} has characters that Markdown, HTML or YAML would read as markup: rename it"
        raise DataError(f"{where} does not fit {SCHEMA.name}: {place}: {says}")


def read_results(folder_or_id: str | Path) -> dict:
    """Return the checked `RESULTS_FILE` of a folder, or of a Hub repository: owner/name or owner/name@revision.

    Raises:
        CheckpointError: There is no such file.
        DataError: It does not fit the schema.
    """
    folder = Path(folder_or_id)
    if folder.is_dir():
        path = folder / RESULTS_FILE
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {RESULTS_FILE}: write it with `hf-posswap card {folder}`")
    else:
        name, _, revision = str(folder_or_id).partition("@")
        path = download(name, RESULTS_FILE, revision or None)
    return _checked(path, folder_or_id)


def _checked(path: Path, where: str | Path, **options) -> dict:
    content = read_json(path, **options)
    if (version := content.get("format")) != FORMAT:
        raise CheckpointError(f"{where} has format {version!r}, not {FORMAT}: install a newer hf_posswap")
    check(content, str(where))
    return content
