"""Measurements during training, each in a file in the run's folder, so that a resumed run has all of them."""

import json
from pathlib import Path

from accelerate import PartialState

from hf_posswap.provenance import write_json


class Curve:
    """Points {"step": ..., ...} of one run, stored below its folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "rows"

    def add(self, step: int, figures: dict) -> None:
        """Store the figures measured after a step, on the main process; a point at this step is replaced."""
        if PartialState().is_main_process:
            write_json(self.folder / f"{step:08d}.json", {"step": step, **figures})

    def points(self) -> list[dict]:
        """Return all points, sorted by step."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]
