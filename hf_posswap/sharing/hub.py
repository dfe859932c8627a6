"""share: a folder with its card to the Hub. All is written here first, and what was sent is not sent again.

The client uploads contents by their hash and retries that by itself; the commit, which makes them visible all at once, it does
not, so it is retried here.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from hf_posswap.checkpoint import STUB
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.sharing.card import CARD_FILE, EVAL_RESULTS, write_card

# What a shared model consists of. Other files are refused, not left out: pickles run code where they are loaded, and what a
# training run leaves behind is no part of a model.
SUFFIXES = {".safetensors", ".json", ".txt", ".md", ".png", ".jinja", ".model"}
NAMES = {STUB, "LICENSE", "NOTICE", ".gitattributes"}
IGNORED = {".git", ".cache", ".DS_Store", "__pycache__"}

_WAITS = (1, 2, 4, 8, 16)  # seconds between tries of a commit
_BUSY = (429, 500, 502, 503, 504)


def share(
    folder: str | Path,
    repo_id: str,
    *,
    results: Sequence[str | Path] = (),
    base_model: str | None = None,
    license: str | None = None,
    private: bool | None = None,
    create_pr: bool = False,
    eval_results: Sequence[str] = (),
) -> str:
    """Write the card of a swapped model, an export or a delta and push the folder; return where it is to be seen.

    Args:
        folder, results, base_model, license, eval_results: As of `write_card`, which writes the card again with these.
        repo_id: "owner/name"; it is made where it does not exist.
        private: Of a new repository. Default: what the account or organisation has set.
        create_pr: Open a pull request: into a repository of somebody else, or to have one's own looked at first.

    The token is the client's: `hf auth login`, or HF_TOKEN.

    Raises:
        CheckpointError: The folder holds files that are no part of a shared model, or weights that cannot be read.
        PosswapError: The Hub has refused, or cannot be reached. All that was written in the folder stays, and the same call
            goes on where it was.
    """
    folder = Path(folder)
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise PosswapError(f"repo_id={repo_id!r} is no name for a repository ({error}): owner/name") from None
    fresh = not (folder / CARD_FILE).exists()
    if folder.is_dir():
        check_files(folder)
    options = {"results": results, "base_model": base_model, "license": license, "eval_results": eval_results}
    write_card(folder, repo_id=repo_id, **options)
    api = HfApi()
    try:
        if not create_pr:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        head = api.model_info(repo_id)
        if private is not None and head.private != private:
            now = "private" if head.private else "public"
            raise PosswapError(f"{repo_id} is {now} already: change that in its settings, or leave private out")
        if fresh and _fetch_card(api, repo_id, head.sha, folder):  # what somebody has written there stays around ours
            write_card(folder, repo_id=repo_id, **options)
        operations = [CommitOperationAdd(path, folder / path) for path in check_files(folder)]
        commit = _commit(api, repo_id, operations, create_pr, head.sha)
    except (HTTPError, OfflineModeIsEnabled, LocalTokenNotFoundError, ConnectionError) as error:
        raise PosswapError(f"{_reason(error, repo_id, create_pr)}. All files are in {folder}") from None
    return commit.pr_url or f"{api.endpoint}/{repo_id}"


def check_files(folder: Path) -> list[str]:
    """Return the files of a folder that are pushed, relative to it, or raise for what must not be."""
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if IGNORED & set(Path(name).parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CheckpointError(f"{path} leads out of the folder: put the file itself there")
        fitting = path.suffix in SUFFIXES or path.name in NAMES or name.startswith(f"{EVAL_RESULTS}/")
        if not fitting:
            raise CheckpointError(
                f"{path} is no part of a shared model (weights are .safetensors; known are "
                f"{', '.join(sorted(SUFFIXES | NAMES))}): move it elsewhere, or share what save_pretrained has written"
            )
        if path.suffix == ".safetensors":
            try:
                with safe_open(path, framework="pt") as file:
                    file.keys()
            except SafetensorError as error:
                raise CheckpointError(f"{path} cannot be read ({error}): save the model again") from None
        if name.endswith(".safetensors.index.json"):
            _check_index(path)
        found.append(name)
    if not any(name.endswith(".safetensors") for name in found):
        raise CheckpointError(f"{folder} has no weights (.safetensors): save the model there first")
    return found


def _check_index(path: Path) -> None:
    try:
        shards = set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{path} cannot be read: save the model again") from None
    for shard in shards:
        if not isinstance(shard, str) or Path(shard).name != shard or not (path.parent / shard).is_file():
            raise CheckpointError(f"{path} names {shard!r}, which is no file next to it: save the model again")


def _fetch_card(api: HfApi, repo_id: str, revision: str, folder: Path) -> bool:
    """Put the card that a repository has in the place of one that has just been made; False where it has none."""
    try:
        there = api.hf_hub_download(repo_id, CARD_FILE, revision=revision)
    except EntryNotFoundError:
        return False
    (folder / CARD_FILE).write_bytes(Path(there).read_bytes())
    return True


def _commit(api: HfApi, repo_id: str, operations: list[CommitOperationAdd], create_pr: bool, parent: str) -> CommitInfo:
    for wait in (*_WAITS, None):
        try:
            return api.create_commit(
                repo_id,
                operations,
                commit_message="Share a model with hf_posswap",
                create_pr=create_pr,
                parent_commit=parent,  # what somebody else has pushed meanwhile is not written over
            )
        except HfHubHTTPError as error:
            # A pull request may have been opened where the server failed afterwards.
            if wait is None or error.response.status_code not in ((429, 503) if create_pr else _BUSY):
                raise
            after = error.response.headers.get("Retry-After", "")
            time.sleep(int(after) if after.isdigit() else wait)
        except HTTPError:
            # Nobody knows whether it has arrived. Another commit of the same files is none, another pull request is one.
            if wait is None or create_pr:
                raise
            time.sleep(wait)
            parent = api.model_info(repo_id).sha
    raise AssertionError("the last try returns or raises")


def _reason(error: Exception, repo_id: str, create_pr: bool) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, OfflineModeIsEnabled):
        return "the client is set to be offline: unset HF_HUB_OFFLINE"
    if isinstance(error, LocalTokenNotFoundError) or status == 401:
        log_in = "log in (hf auth login, or HF_TOKEN) with a token that may write"
        return f"the Hub does not know who you are, or there is no {repo_id}: {log_in}"
    if status == 403:
        way = "ask for the right to" if create_pr else "open a pull request with create_pr=True (--create-pr)"
        return f"you may not write to {repo_id}: {way}, or push to a repository of your own"
    if isinstance(error, RepositoryNotFoundError) or status == 404:
        return f"there is no model {repo_id} that you may read: a pull request needs one"
    if status == 412:
        return f"somebody has changed {repo_id} meanwhile: look at what, then push again"
    if status is not None:
        return f"the Hub answered {status} ({getattr(error, 'server_message', None) or 'without a reason'}): try again later"
    return f"the Hub could not be reached ({type(error).__name__}): try again, what has arrived is not sent twice"
