"""Model families that can be swapped. No family knows a scheme."""

from hf_posswap.architectures.base import Architecture, Inputs, QueryKey
from hf_posswap.architectures.bert import Bert
from hf_posswap.architectures.gpt2 import GPT2
from hf_posswap.architectures.roberta import Camembert, Roberta, XLMRoberta

__all__ = ["ARCHITECTURES", "GPT2", "Architecture", "Bert", "Camembert", "Inputs", "QueryKey", "Roberta", "XLMRoberta"]

ARCHITECTURES: dict[str, Architecture] = {
    architecture.model_type: architecture for architecture in (Bert(), Camembert(), GPT2(), Roberta(), XLMRoberta())
}
