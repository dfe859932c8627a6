"""share: push a folder with its card to the Hub. All files are written locally first, and nothing is uploaded twice.

The client uploads files by their hash, and retries by itself. The commit is made here, since `upload_folder` may split it: so
weights, card and deletions become visible at once. It is tried again if the Hub is busy.
"""

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, errors
from safetensors import SafetensorError, safe_open

from hf_posswap.checkpoint import CONFIG_CLASSES, STUB, SWAPPED_CLASSES, is_stub
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.fitting.report import FIT_FILE
from hf_posswap.provenance import read_json
from hf_posswap.sharing.card import CARD_FILE, EVAL_RESULTS, PICTURES, own_text, write_card
from hf_posswap.sharing.delta import ABOUT
from hf_posswap.sharing.parity import PARITY_FILE
from hf_posswap.sharing.record import RESULTS_FILE

# Files of a shared model, at the top of its folder. Others are refused, not skipped: pickles can run code when they are loaded,
# and notes, access tokens and remains of training do not belong to a model.
OF_ONE_MODEL = {  # deleted from the repository when another model takes its place there
    *(RESULTS_FILE, FIT_FILE, PARITY_FILE, ABOUT, STUB, "config.json", "generation_config.json"),
    *("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"),
}
NAMES = OF_ONE_MODEL | {
    *(CARD_FILE, "LICENSE", "NOTICE", ".gitattributes", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.txt", "vocab.json", "merges.txt", "bpe.codes"),
}
MODULE = r"\d+_\w+/(\w*config\.json|model\.safetensors)"  # the further modules of a sentence-transformers pipeline
VARIANT = r"model\.safetensors\.index\.\w+\.json"
PATTERNS = rf"[\w.-]+\.(safetensors|png)|{PICTURES}/[\w.-]+\.png|{re.escape(EVAL_RESULTS)}/[\w.-]+\.yaml|{MODULE}|{VARIANT}"
IGNORED = {".git", ".cache", ".DS_Store", "__pycache__"}

_WAITS = (1, 2, 4, 8, 16)  # seconds between tries of a commit


def share(
    folder: str | Path,
    repo_id: str,
    *,
    results: str | Path | Sequence[str | Path] | None = None,
    base_model: str | None = None,
    license: str | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    overwrite: bool = False,
    eval_results: Sequence[str] = (),
) -> str:
    """Write the card of a swapped model, an export or a delta and push the folder; return the URL of the model or pull request.

    Args:
        folder, results, base_model, license, eval_results: As in `write_card`, which writes the card again with these.
        repo_id: "owner/name"; the repository is created if it does not exist.
        private: Whether a new repository is private. Default: the setting of the account or organisation.
        create_pr: Open a pull request, for somebody else's repository, or for a review in your own.
        overwrite: Replace text in the Hub's card that the folder's card lacks, and a model there that was not shared with
            hf_posswap. Old files of a model that was are always deleted: transformers would go on loading its weights.

    The access token is the client's: from `hf auth login`, or HF_TOKEN.

    Raises:
        CheckpointError: The folder holds files that do not belong to a shared model, or weights that cannot be read.
        PosswapError: The Hub has refused, or cannot be reached. Files in the folder stay, and the same call tries again
            without sending twice what has arrived.
    """
    folder = Path(folder)
    new = [name for name in (CARD_FILE, RESULTS_FILE) if not (folder / name).exists()]
    check_files(folder)
    options = {"results": results, "base_model": base_model, "license": license, "eval_results": eval_results}
    write_card(folder, repo_id=repo_id, **options)
    api = HfApi()
    try:
        if not create_pr:
            api.create_repo(repo_id, private=private, exist_ok=True)
        head = api.model_info(repo_id)
        if private is not None and head.private != private:
            now = "private" if head.private else "public"
            raise PosswapError(f"{repo_id} is {now} already: change that in its settings, or leave private out")
        there = [file.rfilename for file in head.siblings or ()]
        held = [path for path in there if _of_a_model(path)]
        if held and RESULTS_FILE not in there and not (overwrite or create_pr):
            other = f"{repo_id} holds a model that was not shared with hf_posswap"
            raise PosswapError(f"{other}: choose another name, or pass overwrite=True (--overwrite)")
        if not overwrite and _take_over(api, repo_id, head.sha, folder, new):
            write_card(folder, repo_id=repo_id, **options)
        files = check_files(folder)
        operations = [CommitOperationAdd(path, folder / path) for path in files]
        # Old files of another model: transformers would go on loading its weights.
        operations += [CommitOperationDelete(path) for path in held if path not in files]
        commit = _commit(api, repo_id, operations, create_pr, head.sha)
    except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.LocalTokenNotFoundError, ConnectionError) as error:
        raise PosswapError(f"{_reason(error, repo_id, create_pr)}. All files are in {folder}") from None
    except PosswapError:
        raise
    except ValueError as error:  # the Hub's own check of the card
        raise PosswapError(f"the Hub refuses the card: {error}. All files are in {folder}") from None
    return commit.pr_url or f"{api.endpoint}/{repo_id}"


def check_files(folder: Path) -> list[str]:
    """Return the files to push, relative to the folder; raise CheckpointError for files that must not be pushed."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if IGNORED & set(Path(name).parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{path} leads out of the folder: put the file itself there")
        if name not in NAMES and not re.fullmatch(PATTERNS, name):
            names = ", ".join(sorted(NAMES))
            raise CheckpointError(f"{path} is no part of a shared model (weights, pictures, {names}): move it elsewhere")
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt") as file:
                    file.keys()
            except SafetensorError as error:
                raise CheckpointError(f"{path} cannot be read ({error}): save the model again") from None
        found.append(name)
    _check_code(folder, found)
    for path in folder.glob("*.safetensors.index*.json"):
        shards = read_json(path).get("weight_map")
        if not isinstance(shards, dict) or not {file.name for file in folder.iterdir()}.issuperset(map(str, shards.values())):
            raise CheckpointError(f"{path} names what is no file next to it: save the model again")
    return found


def _check_code(folder: Path, files: Sequence[str]) -> None:
    """Raise if the folder holds or names code that trust_remote_code would run, except for our stub and what it imports."""
    stub = (folder / STUB).read_text("utf-8") if (folder / STUB).is_file() else None
    imports = set(re.findall(r"^    (\w+),$", stub or "", re.MULTILINE))
    ours = {kind.__name__ for kind in (*SWAPPED_CLASSES.values(), *CONFIG_CLASSES.values())}
    allowed = {f"{Path(STUB).stem}.{name}" for name in imports & ours}
    named = set()
    for path in (folder / name for name in files if name.endswith("config.json")):
        found = read_json(path).get("auto_map") or {}
        named |= set(map(str, found.values() if isinstance(found, dict) else [found]))
        if found and (path != folder / "config.json" or not named <= allowed):
            raise CheckpointError(f"{path} has an auto_map to other code, and what is shared is run: save the model again")
    modules = json.loads((folder / "modules.json").read_text("utf-8")) if "modules.json" in files else []
    if foreign := [one for one in modules if not str(one.get("type")).startswith("sentence_transformers.")]:
        kind = foreign[0].get("type")
        raise CheckpointError(f"modules.json names {kind!r:.100}, and what is shared is run: share sentence-transformers' own")
    if stub is not None and not (is_stub(stub) and named == {f"{Path(STUB).stem}.{name}" for name in imports}):
        raise CheckpointError(f"{folder / STUB} is not what save_pretrained writes, and is run: save the model again")


def _of_a_model(name: str) -> bool:
    """Whether a file on the Hub belongs to the model there; others, such as a licence, belong to the repository."""
    weights = rf"{MODULE}|[\w.-]+\.safetensors|.*\.index\.json|{VARIANT}|pytorch_model.*\.bin|adapter_(config\.json|model\.bin)"
    drawn = rf"{PICTURES}/\d+-.*\.png|{re.escape(EVAL_RESULTS)}/hf_posswap\.yaml"
    return name in OF_ONE_MODEL or re.fullmatch(f"{weights}|{drawn}", name) is not None


def _take_over(api: HfApi, repo_id: str, revision: str, folder: Path, new: list[str]) -> bool:
    """Replace a card that was just created by the repository's, whose text is then kept; return whether this was done.

    `new` are the files that were just created: results come with the card, since they tell what in it is ours.

    PosswapError: the repository's card has text that the folder's has not.
    """
    try:
        there = Path(api.hf_hub_download(repo_id, CARD_FILE, revision=revision))
    except errors.EntryNotFoundError:
        return False
    theirs, ours = (own_text(path) for path in (there, folder / CARD_FILE))
    if CARD_FILE in new:
        for name in new:
            with suppress(errors.EntryNotFoundError):
                (folder / name).write_bytes(Path(api.hf_hub_download(repo_id, name, revision=revision)).read_bytes())
        return True
    if theirs.strip() and theirs.split() != ours.split():
        more = f"the card of {repo_id} has text that {folder / CARD_FILE} has not"
        way = f"hf download {repo_id} {CARD_FILE}, and copy its text into the folder's card"
        raise PosswapError(f"{more}: {way}, or push with overwrite=True (--overwrite)")
    return False


def _commit(api: HfApi, repo_id: str, operations: list[CommitOperationAdd], create_pr: bool, parent: str) -> CommitInfo:
    about = {"commit_message": "Share a model with hf_posswap", "create_pr": create_pr}
    waits = iter(_WAITS)
    while True:
        try:  # `parent_commit` refuses to overwrite what somebody else has pushed meanwhile
            return api.create_commit(repo_id, operations, parent_commit=parent, **about)
        except errors.HTTPError as error:
            status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None  # None: it broke
            # Not if the commit may have arrived: a second try would open a second pull request.
            again = status in ((429, 503) if create_pr else (429, 500, 502, 503, 504, None))
            wait = next(waits, None)
            if wait is None or not again or (status is None and api.model_info(repo_id).sha != parent):
                raise
            after = error.response.headers.get("Retry-After", "") if status else ""
            time.sleep(int(after) if after.isdigit() else wait)


def _reason(error: Exception, repo_id: str, create_pr: bool) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "the client is set to be offline: unset HF_HUB_OFFLINE"
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
        log_in = "log in (hf auth login, or HF_TOKEN) with a token that may write"
        return f"the Hub does not know who you are, or there is no {repo_id}: {log_in}"
    if status == 403:
        way = "ask for the right to" if create_pr else "open a pull request with create_pr=True (--create-pr)"
        return f"you may not write to {repo_id}: {way}, or push to a repository of your own"
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return f"there is no model {repo_id} that you may read: a pull request needs one"
    if status == 412:
        return f"somebody has changed {repo_id} meanwhile: look at the change, then push again"
    if status is not None:
        return f"the Hub answered {status} ({getattr(error, 'server_message', None) or 'without a reason'}): try again later"
    return f"the Hub could not be reached ({type(error).__name__}): try again; what has arrived is not sent twice"
