"""The one training loop, on accelerate, and what belongs to it.

`loop` is the loop; `budget` what a run may spend and has spent; `batching` the order of examples, padding and packing;
`run_state` checkpoints and stopping; `run_log` losses, bar and trackers; `launching` processes; `evaluation` measuring on many.
"""

from hf_posswap.training.batching import pad
from hf_posswap.training.budget import TrainingConfig, TrainingRun
from hf_posswap.training.evaluation import evaluate_batches
from hf_posswap.training.loop import train

__all__ = ["TrainingConfig", "TrainingRun", "evaluate_batches", "pad", "train"]
