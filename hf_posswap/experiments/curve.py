"""What a run measures while it trains, kept in files of its folder: a run that was stopped and resumed has all of it."""

import json
from pathlib import Path

from accelerate import PartialState

from hf_posswap.provenance import write_json


class Curve:
    """Points {"step": ..., ...} of one run, below its folder."""

    def __init__(self, folder: Path):
        self.folder = folder / "rows"

    def add(self, step: int, figures: dict) -> None:
        """Keep what was measured after a step, on the main process; what was there before is replaced."""
        if PartialState().is_main_process:
            write_json(self.folder / f"{step:08d}.json", {"step": step, **figures})

    def points(self) -> list[dict]:
        """Return all points by their steps."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]
