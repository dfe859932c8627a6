"""Model families that can be swapped. No family knows a scheme."""

from transformers import PreTrainedConfig

from hf_posswap.architectures.base import Architecture, Inputs, QueryKey
from hf_posswap.architectures.bert import Bert
from hf_posswap.architectures.biogpt import BioGpt
from hf_posswap.architectures.distilbert import DistilBert
from hf_posswap.architectures.electra import Electra
from hf_posswap.architectures.esm import Esm
from hf_posswap.architectures.gpt2 import GPT2
from hf_posswap.architectures.opt import OPT
from hf_posswap.architectures.roberta import Camembert, Roberta, XLMRoberta

__all__ = [
    "ARCHITECTURES",
    "GPT2",
    "OPT",
    "Architecture",
    "Bert",
    "BioGpt",
    "Camembert",
    "DistilBert",
    "Electra",
    "Esm",
    "Inputs",
    "QueryKey",
    "Roberta",
    "XLMRoberta",
    "family_of",
    "longest_input",
]


def family_of(config: PreTrainedConfig) -> Architecture:
    """Return the family of a model, swapped or not, by its config."""
    return ARCHITECTURES[config.model_type.removeprefix("posswap-")]


def longest_input(config: PreTrainedConfig) -> int:
    """Return how many tokens a model reads at most, by its config."""
    return family_of(config).longest_input(config)


ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture
    for architecture in (Bert(), BioGpt(), Camembert(), DistilBert(), Electra(), Esm(), GPT2(), OPT(), Roberta(), XLMRoberta())
}
