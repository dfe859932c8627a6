"""Swap the position scheme of pretrained Transformers models.

    import hf_posswap as posswap
    model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased")
    posswap.swap(model, posswap.Rotary(theta=10_000), max_positions=2048)

Importing registers the swapped model types with transformers' Auto classes, and listens to its reports for checkpoints that
it loads without their relative positions (`load_relative_key`); it does nothing else.
"""

from transformers.utils.logging import add_handler

from hf_posswap.architectures import ARCHITECTURES, Architecture
from hf_posswap.assets import embedded_model
from hf_posswap.calibration import text_batches
from hf_posswap.checkpoint import register_architecture
from hf_posswap.choosing import choose
from hf_posswap.delta import load_delta, save_delta
from hf_posswap.errors import (
    CheckpointError,
    DataError,
    PosswapError,
    SequenceTooLongError,
    UnknownSchemeError,
    UnsupportedModelError,
)
from hf_posswap.export import NativeExport, export_native
from hf_posswap.fitting import FitReport, fit
from hf_posswap.rescue import LoadReports, load_relative_key
from hf_posswap.schemes import (
    SCHEMES,
    Ladder,
    Learned,
    NoPositions,
    Relative,
    Rotary,
    Scheme,
    Sinusoidal,
    register_scheme,
    set_relative_implementation,
)
from hf_posswap.sharing.card import write_card
from hf_posswap.sharing.hub import share
from hf_posswap.sharing.results_file import leaderboard
from hf_posswap.swap import describe, original, restore, swap

__version__ = "0.1.0"

add_handler(LoadReports())

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "CheckpointError",
    "DataError",
    "FitReport",
    "Ladder",
    "Learned",
    "NativeExport",
    "NoPositions",
    "PosswapError",
    "Relative",
    "Rotary",
    "SCHEMES",
    "Scheme",
    "SequenceTooLongError",
    "Sinusoidal",
    "UnknownSchemeError",
    "UnsupportedModelError",
    "choose",
    "describe",
    "embedded_model",
    "export_native",
    "fit",
    "leaderboard",
    "load_delta",
    "load_relative_key",
    "original",
    "register_architecture",
    "register_scheme",
    "restore",
    "save_delta",
    "set_relative_implementation",
    "share",
    "swap",
    "text_batches",
    "write_card",
]
