"""A warning for checkpoints that transformers 5 loads without their relative positions; light: it comes with the package.

transformers 4 had `position_embedding_type` "relative_key"; 5 loads such a checkpoint as an absolute model with a table that
was never trained, and reports that the vectors of distances "can be ignored". This listens to that report and changes nothing;
who silences transformers' warnings silences this one. See `rescue`.
"""

import logging
import re
import warnings

TABLE = r"attention\.self\.distance_embedding\.weight"
_LEFT_OUT = re.compile(rf"^(\w*) LOAD REPORT.* from: (.*?)\n.*{TABLE}\s*\|\s*UNEXPECTED", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class LoadReports(logging.Handler):
    """Warns when transformers reports that it has left out the relative positions of a checkpoint."""

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one message of transformers."""
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # which some of transformers' own messages raise, and its handler tells
            return
        if found := _LEFT_OUT.match(_COLOURS.sub("", said)):
            name, source = found.groups()
            warnings.warn(
                f"{source} has relative positions of transformers 4 (position_embedding_type), which this {name} leaves out: "
                "it reads absolute ones that were never trained. A BERT is loaded as it was by "
                f"hf_posswap.load_relative_key({source!r}, ...), other families only by transformers 4",
                stacklevel=2,
            )
