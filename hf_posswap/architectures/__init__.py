"""Model families that can be swapped. No family knows a scheme."""

from hf_posswap.architectures.base import Architecture, Inputs, QueryKey
from hf_posswap.architectures.bert import Bert
from hf_posswap.architectures.gpt2 import GPT2

__all__ = ["ARCHITECTURES", "GPT2", "Architecture", "Bert", "Inputs", "QueryKey"]

ARCHITECTURES: dict[str, Architecture] = {architecture.model_type: architecture for architecture in (Bert(), GPT2())}
