"""Measurements during training, each in a file in the run's folder, so that a resumed run has all of them."""

import json
from pathlib import Path

from accelerate import PartialState

from hf_posswap.provenance import write_json


def add_point(folder: Path, step: int, figures: dict) -> None:
    """Store the figures measured after a step of the run in a folder, on the main process; a point at it is replaced."""
    if PartialState().is_main_process:
        write_json(folder / "rows" / f"{step:08d}.json", {"step": step, **figures})


def points(folder: Path) -> list[dict]:
    """Return all points, {"step": ..., ...}, sorted by step."""
    return [json.loads(file.read_text()) for file in sorted((folder / "rows").glob("*.json"))]
