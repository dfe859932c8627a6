"""The one training loop, on accelerate, and what belongs to it.

`loop` is the loop; `budget` what a run may spend and has spent; `batching` the order of examples, padding and packing;
`run_state` checkpoints and stopping; `run_log` losses, bar and trackers; `launching` processes; `evaluation` measuring on many.
"""

from importlib import import_module

from hf_posswap.extras import extra

_HOME = {
    "TrainingConfig": "budget",
    "TrainingRun": "budget",
    "evaluate_batches": "evaluation",
    "pad": "batching",
    "train": "loop",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    """Import a name when it is first asked for: what a budget is can be known without accelerate."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra():
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
