"""The one training loop, on accelerate, and what belongs to it.

`loop`: the loop. `budget`: what a run may spend and has spent. `batching`: order of examples, padding. `run_state`:
checkpoints and stopping. `run_log`: losses, progress bar, trackers. `launching`: processes. `evaluation`: predictions on them.
"""

from importlib import import_module

from hf_posswap.extras import extra

_HOME = {"TrainingConfig": "budget", "TrainingRun": "budget", "pad": "batching", "predict": "evaluation", "train": "loop"}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    """Import a name on first use, so that `TrainingConfig` can be imported without accelerate."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with extra():
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
