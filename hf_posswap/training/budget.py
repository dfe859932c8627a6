"""What a training run may spend, and what it has spent."""

import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, ClassVar

from hf_posswap.errors import PosswapError

# The schedules of transformers.get_scheduler that need only warm-up steps and total steps.
SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "inverse_sqrt", "polynomial")
SAMPLING_STRATEGIES = ("random", "group_by_length")
PRECISIONS = ("no", "bf16", "fp16", "fp8")

# How a run is carried out, and with which seed: two runs that differ only in these have the same budget.
NOT_BUDGET = {
    "seed", "gradient_accumulation_steps", "gradient_checkpointing", "torch_compile", "auto_find_batch_size", "report_to",
    "checkpoint_every", "checkpoints_kept",
}  # fmt: skip


def check_numbers(config) -> None:
    """Raise for an option below its bound in LEAST, of the class or a parent, or a seed that NumPy does not take.

    None means not given.
    """
    if not 0 <= config.seed < 2**32:
        raise PosswapError(f"seed={config.seed} must be from 0 to {2**32 - 1}")
    least = {name: bound for kind in reversed(type(config).__mro__) for name, bound in vars(kind).get("LEAST", {}).items()}
    for name, bound in least.items():
        value = getattr(config, name)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and not bound <= one < math.inf:  # false for NaN, too
                raise PosswapError(f"{name}={one} must be {'finite and ' * isinstance(one, float)}at least {bound}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Budget and means of a training run. Names are those of transformers' TrainingArguments where it has the same option.

    >>> TrainingConfig(checkpoint_every=5).budget() == TrainingConfig(seed=1).budget() != TrainingConfig(max_steps=5).budget()
    True
    """

    LEAST: ClassVar[dict[str, float]] = {
        **dict.fromkeys(("max_steps", "batch_size", "gradient_accumulation_steps", "checkpoints_kept"), 1),
        "checkpoint_every": 0,
        **dict.fromkeys(("learning_rate", "table_learning_rate_factor", "warmup_ratio", "weight_decay", "max_grad_norm"), 0),
    }

    max_steps: Annotated[int, "Optimizer steps."] = 100
    batch_size: Annotated[int, "Sequences a step, over all processes and accumulation steps."] = 16
    learning_rate: Annotated[float, "Peak learning rate."] = 3e-4
    # These tables start at zero in a trained network, so they have far to go.
    table_learning_rate_factor: Annotated[float, "Position tables in attention learn at this multiple of the rate."] = 10.0
    lr_scheduler_type: Annotated[str, f"One of {', '.join(SCHEDULES)}."] = "cosine"
    warmup_ratio: Annotated[float, "Share of the steps in which the learning rate rises."] = 0.1
    weight_decay: Annotated[float, "Weight decay of matrices; position tables in attention, biases and norms have none."] = 0.0
    max_grad_norm: Annotated[float, "Gradients are clipped to this norm."] = 1.0
    gradient_accumulation_steps: Annotated[int, "Split each batch into this many parts, computed one after another."] = 1
    # The batch size, and so the budget, stays the same.
    auto_find_batch_size: Annotated[bool, "When out of memory, start again with more accumulation steps."] = False
    gradient_checkpointing: Annotated[bool, "Save memory: compute activations again in the backward pass."] = False
    torch_compile: Annotated[str | None, "Compiler backend, such as inductor. Default: as accelerate launch says."] = None
    # Short tuning of a trained model works better without dropout.
    dropout: Annotated[bool, "Train with the dropout of the model's config."] = True
    train_sampling_strategy: Annotated[str, "random, or group_by_length, which needs less padding."] = "random"
    skip_to: Annotated[int | None, "Train short, read long (PoSE): skip positions in each example, up to this one."] = None
    mixed_precision: Annotated[str | None, "no, bf16 or fp16. Default: as accelerate launch says."] = None
    seed: Annotated[int, "Seed of the order of examples, of dropout and of new weights."] = 0
    report_to: Annotated[tuple[str, ...], "Trackers: tensorboard, trackio, wandb and others of accelerate; repeatable."] = ()
    checkpoint_every: Annotated[int, "Save a checkpoint every N steps; 0: only when the run is stopped."] = 0
    checkpoints_kept: Annotated[int, "How many checkpoints to keep."] = 2

    def __post_init__(self):
        check_numbers(self)
        if self.warmup_ratio > 1:  # the rate would never reach its peak
            raise PosswapError(f"warmup_ratio={self.warmup_ratio} must be a share of the steps, from 0 to 1")
        if self.lr_scheduler_type == "polynomial" and self.learning_rate <= 1e-7:
            raise PosswapError(f"learning_rate={self.learning_rate} must be above 1e-7, where a polynomial schedule ends")
        if self.max_grad_norm == 0:  # in transformers, 0 is no clipping
            raise PosswapError("max_grad_norm=0 would clip gradients to nothing: give a large number to clip none")
        if self.batch_size % (parts := self.gradient_accumulation_steps):
            raise PosswapError(f"batch_size={self.batch_size} does not divide into gradient_accumulation_steps={parts}")
        names = {"lr_scheduler_type": SCHEDULES, "train_sampling_strategy": SAMPLING_STRATEGIES, "mixed_precision": PRECISIONS}
        for name, known in names.items():
            if getattr(self, name) not in (None, *known):
                raise PosswapError(f"{name}={getattr(self, name)!r} is not known; known are {', '.join(known)}")
        if self.torch_compile is not None:
            from accelerate.utils import DynamoBackend

            if self.torch_compile.upper() not in DynamoBackend.list():
                known = ", ".join(backend.lower() for backend in DynamoBackend.list())
                raise PosswapError(f"torch_compile={self.torch_compile!r} is not a backend; accelerate knows {known}")
        if self.gradient_checkpointing and not self.dropout:
            raise PosswapError("gradient_checkpointing needs training mode, dropout=True: set the config's dropouts to 0")
        if isinstance(self.report_to, str):
            raise PosswapError(f"report_to takes a tuple of names: ({self.report_to!r},)")

    def budget(self) -> dict:
        """Return the fields that two comparable runs have in common: all but seed, means and machine."""
        return {name: value for name, value in asdict(self).items() if name not in NOT_BUDGET}


@dataclass
class TrainingRun:
    """What a run did: the budget it spent and the loss at every step."""

    config: TrainingConfig
    processes: int
    gradient_accumulation_steps: int = 1  # as used: `auto_find_batch_size` may have raised it
    tokens: int = 0  # without padding, over all processes
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    points: list[dict] = field(default_factory=list)  # what `after_step` measures and puts here, kept in checkpoints

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan
