"""Result files that say how a figure was made, and that an interrupted run can resume from."""

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path, PurePosixPath, PureWindowsPath

import torch
import transformers
from filelock import FileLock, Timeout

from hf_posswap.errors import CheckpointError

LOCK = ".lock"


def prepare_output(config: dict, inputs: dict, output: Path, resume: bool) -> None:
    """Begin a run in a folder, or check that a resumed one was begun with the same configuration and the same inputs."""
    wanted = json.loads(json.dumps({"config.json": config, "inputs.json": inputs}))  # as lists, not tuples, come back from JSON
    if output.exists() and {path.name for path in output.iterdir()} - {*wanted, LOCK}:  # a run leaves these three at once
        if not resume:
            raise CheckpointError(f"{output} exists and is not empty: choose another --output, or pass --resume")
        begun = {name: read_json(output / name) for name in wanted if (output / name).exists()}  # older runs noted no inputs
        if "config.json" not in begun or begun != {name: wanted[name] for name in begun}:
            what = f"{output} was begun with another configuration, or its files had other contents (see {', '.join(wanted)})"
            raise CheckpointError(f"{what}: resume with the same, or choose another --output")
    for name, content in wanted.items():
        write_json(output / name, content)


def check_new(folder: Path, remedy: str = "choose another folder") -> None:
    """Raise CheckpointError for a folder that has something in it, or a file of that name."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already: {remedy}")


@contextmanager
def new_folder(output: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, which is renamed to `output` at the end, or deleted after an error.

    If two processes write at once, the first one gets the name, and the second ends with an error. An empty folder that is
    there already, which may be a link, a mount or where somebody works, stays and is filled.

    CheckpointError: `output` exists and is not empty, at the beginning or at the end, or cannot be made.
    """
    check_new(output, "choose another --output")
    output = output.resolve()
    name, there = f".{output.name}.{os.getpid()}.writing", output.is_dir()
    aside = output / name if there else output.with_name(name)
    try:
        aside.mkdir(parents=True)
    except OSError as error:  # which names a folder that the user did not
        raise CheckpointError(f"{output} cannot be made ({error.strerror}): choose another --output") from error
    try:
        yield aside
        if there:
            if len(list(output.iterdir())) > 1:  # somebody else wrote into it
                check_new(output, "choose another --output")
            for part in list(aside.iterdir()):
                part.rename(output / part.name)
            return
        try:
            aside.rename(output)  # replaces an empty folder, and raises for one that is not empty
        except OSError:
            check_new(output, "choose another --output")
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def lock(output: Path) -> Iterator[None]:
    """Hold the lock of an output folder: two runs that write into one folder would spoil each other's results."""
    output.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(output / LOCK).acquire(timeout=0)
    except Timeout:
        raise CheckpointError(f"{output} is in use by another run: wait for it, or choose another --output") from None
    with held:
        yield


def provenance(program: str = "hf-posswap") -> dict:
    """Return how a result was made, for its file: command (the program and its arguments), commit, versions, hardware."""
    source = Path(__file__).parent
    commit = None
    if (source.parent / ".git").exists() and shutil.which("git"):  # not an installed package, whatever lies around it
        command = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False).stdout.strip() or None
    cpu = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", cpu.read_text("utf-8")) if cpu.exists() else []
    return {
        "command": shlex.join([*program.split(), *sys.argv[1:]]),
        "commit": commit,
        "versions": {
            "hf_posswap": version("hf_posswap"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": {
            "cpu": models[0] if models else platform.machine(),
            "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def weight_hashes(folder: Path, *, modules: bool = False) -> dict[str, str]:
    """Return the SHA-256 of each weight file of a saved model: a result names the weights it was measured on.

    With `modules` also those of a pipeline's further modules, such as 2_Dense.
    """
    paths = [*folder.glob("*.safetensors"), *(folder.glob("[0-9]*_*/*.safetensors") if modules else ())]
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(paths)}


def input_hashes(options: dict, output: Path | None = None) -> dict[str, dict[str, str]]:
    """Return, for each option that names files or folders, the SHA-256 of those files and of all files below the folders.

    Files are named from the folder on; where an option takes several folders, with the folder's own name. What a run has
    written into `output` is left out, if that lies in one of the folders.
    """
    found, written = {}, output and output.resolve()
    for option, value in options.items():
        several = isinstance(value, tuple)
        hashes = {}
        for one in (one for one in (value if several else (value,)) if isinstance(one, str) and one):
            place = Path(os.path.expanduser(one))  # as the text is read
            start = place.parent if several or not place.is_dir() else place
            for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
                name = file.relative_to(start)
                hidden = any(part.startswith(".") for part in name.parts)  # such as .git
                if file.is_file() and not hidden and written not in file.resolve().parents:
                    hashes[name.as_posix()] = _sha256(file)
        if hashes:
            found[option] = hashes
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_home(text: str) -> str:
    """Return a path, or a command, with absolute paths cut to their last two parts, fit for publication."""
    if _is_absolute(text):
        return "/".join(PureWindowsPath(text).parts[1:][-2:])  # which knows / and \\
    try:
        parts = shlex.split(text)
    except ValueError:
        return text
    short = [
        name + equals + without_home(value) if _is_absolute(value) else part
        for part in parts
        for name, equals, value in [part.partition("=") if part.startswith("-") else ("", "", part)]
    ]
    return text if short == parts else shlex.join(short)


def _is_absolute(text: str) -> bool:
    """Whether a path is absolute here or elsewhere: a run may have been made on another system than it is published on."""
    return PurePosixPath(text).is_absolute() or PureWindowsPath(text).is_absolute()


def published(run: dict) -> dict:
    """Return a run without the paths of this machine, wherever they stand in it."""

    def cut(value):
        if isinstance(value, dict):
            return {name: cut(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [cut(one) for one in value]
        return without_home(value) if isinstance(value, str) and _is_absolute(value) else value

    return cut(run) | {"command": without_home(run["command"])}


def write_json(path: Path, content: dict) -> None:
    """Write a file as a whole: a process that is killed leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".writing")
    # Lists of numbers on one line each.
    text = re.sub(r"\[\n[\d\s,.eE+-]*\]", lambda numbers: re.sub(r"\s+", "", numbers[0]), json.dumps(content, indent=2))
    try:
        aside.write_text(text + "\n", "utf-8", newline="\n")
        aside.replace(path)
    except OSError as error:  # of a full disk, which names no file
        error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def read_json(path: Path, remedy: str = "write it again, or give another") -> dict:
    """Return the object in a JSON file; raise CheckpointError if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no JSON ({error}): {remedy}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must hold an object, not {type(found).__name__}: {remedy}")
    return found
