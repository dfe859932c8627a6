"""Swap the position scheme of pretrained Transformers models.

    import hf_posswap as posswap
    model = AutoModelForMaskedLM.from_pretrained("bert-base-uncased")
    posswap.swap(model, posswap.Rotary(theta=10_000), max_positions=2048)

Importing registers the swapped model types with transformers' Auto classes, and watches its load reports for checkpoints whose
relative positions it drops (`load_relative_key`). Everything else is imported on first use.
"""

from importlib import import_module
from types import ModuleType

from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils.logging import add_handler

from hf_posswap.sharing.load_reports import LoadReports

__version__ = "0.1.0"

_PUBLIC = {
    "architectures": "ARCHITECTURES Architecture",
    "assets": "embedded_model",
    "checkpoint": "register_architecture",
    "data.calibration": "text_batches",
    "describing": "describe",
    "errors": "CheckpointError DataError PosswapError SequenceTooLongError UnknownSchemeError UnsupportedModelError",
    "fitting.choosing": "choose",
    "fitting.fit": "FitReport fit",
    "schemes": "SCHEMES Alibi Buckets Ladder Learned Mixed NoPositions Relative Rotary Scheme SelfExtend Sinusoidal "
    "register_scheme set_relative_implementation",
    "sharing.card": "write_card",
    "sharing.delta": "load_delta save_delta",
    "sharing.export": "NativeExport export_native",
    "sharing.hub": "share",
    "sharing.leaderboard": "leaderboard",
    "sharing.rescue": "load_relative_key",
    "swapping": "original restore swap",
}
_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    """Import a public name on first use (PEP 562): a swap does not need the training loop, nor a loaded model the plots."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _SwappedConfigs(ModuleType):
    """A stand-in module where transformers finds our configs; they are imported late, since that imports its models."""

    def __getattr__(self, name: str):
        return getattr(import_module("hf_posswap.checkpoint"), name)


_CONFIGS = """
albert bert biogpt camembert clip_text_model distilbert electra ernie esm gpt2 opt roberta xlm-roberta xlm-roberta-xl
""".split()
for _model_type in _CONFIGS:
    # As in transformers' own mapping: a model type, the name of its config, and the module to import it from when needed.
    CONFIG_MAPPING._mapping.setdefault(f"posswap-{_model_type}", f"Posswap{CONFIG_MAPPING._mapping[_model_type]}")
    CONFIG_MAPPING._modules[f"posswap_{_model_type}".replace("-", "_")] = _SwappedConfigs("hf_posswap")

add_handler(LoadReports())
