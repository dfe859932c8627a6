"""Model families that can be swapped. No family knows a scheme."""

from transformers import PreTrainedConfig

from hf_posswap.architectures.albert import Albert
from hf_posswap.architectures.base import Architecture, Inputs, QueryKey
from hf_posswap.architectures.bert import Bert, Ernie
from hf_posswap.architectures.biogpt import BioGpt
from hf_posswap.architectures.clip import ClipText
from hf_posswap.architectures.distilbert import DistilBert
from hf_posswap.architectures.electra import Electra
from hf_posswap.architectures.esm import Esm
from hf_posswap.architectures.gpt2 import GPT2
from hf_posswap.architectures.opt import OPT
from hf_posswap.architectures.roberta import Camembert, Roberta, XLMRoberta, XLMRobertaXL
from hf_posswap.errors import UnsupportedModelError

__all__ = [
    "ARCHITECTURES", "GPT2", "OPT", "Albert", "Architecture", "Bert", "BioGpt", "Camembert", "ClipText", "DistilBert",
    "Electra", "Ernie", "Esm", "Inputs", "QueryKey", "Roberta", "XLMRoberta", "XLMRobertaXL", "family_of", "find_family",
    "longest_input",
]  # fmt: skip


def find_family(model_type: str) -> Architecture | None:
    """Return the family of a `model_type`, swapped or not; None if it is unknown."""
    return ARCHITECTURES.get(model_type.removeprefix("posswap-"))


def family_of(config: PreTrainedConfig) -> Architecture:
    """Return the family of a model that can be swapped, or is, by its config; of others, UnsupportedModelError."""
    family = find_family(config.model_type)
    if family is None:
        raise UnsupportedModelError(f"a {config.model_type!r} model is none of these: {', '.join(sorted(ARCHITECTURES))}")
    return family


def longest_input(config: PreTrainedConfig) -> int:
    """Return a model's longest input, in tokens, by its config."""
    return family_of(config).longest_input(config)


_KNOWN = (
    Albert, Bert, BioGpt, Camembert, ClipText, DistilBert, Electra, Ernie, Esm, GPT2, OPT, Roberta, XLMRoberta, XLMRobertaXL,
)  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {family.model_type: family for family in (kind() for kind in _KNOWN)}
