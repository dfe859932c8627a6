"""A warning for checkpoints that transformers 5 loads without their relative positions. `import hf_posswap` installs it.

transformers 4 had `position_embedding_type` "relative_key". Version 5 loads such a checkpoint as an absolute model with an
untrained table, and reports that the vectors of distances "can be ignored". This handler listens to that report and changes
nothing; silencing transformers' warnings silences it, too. See `rescue`.
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
        try:
            said = record.getMessage()
        except (TypeError, ValueError):  # some of transformers' own messages are malformed; its handler reports them
            return
        if found := _LEFT_OUT.match(_COLOURS.sub("", said)):
            name, source = found.groups()
            warnings.warn(
                f"{source} has relative positions of transformers 4 (position_embedding_type), which this {name} leaves out: "
                "it has untrained absolute positions instead. To load a BERT as it was, use "
                f"hf_posswap.load_relative_key({source!r}, ...); other families need transformers 4",
                stacklevel=2,
            )
