"""ELECTRA: BERT's modules; embeddings have `embedding_size` dimensions, projected if the hidden size differs."""

from transformers import ElectraConfig, ElectraModel
from transformers.models.electra.modeling_electra import ElectraSelfAttention

from hf_posswap.architectures.bert import Bert


class Electra(Bert):
    """The ELECTRA family as transformers has it (`model_type` "electra"), discriminators and generators."""

    config_class = ElectraConfig
    base_class = ElectraModel
    attention_class = ElectraSelfAttention

    def embedding_size(self, config):
        return config.embedding_size
