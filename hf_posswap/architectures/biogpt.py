"""BioGPT: OPT's table and attention in other places; default ids count on from the cache, padding included."""

from transformers import BioGptConfig, BioGptModel
from transformers.models.biogpt.modeling_biogpt import BioGptAttention, BioGptLearnedPositionalEmbedding

from hf_posswap.architectures.opt import OPT


class BioGpt(OPT):
    """The BioGPT family as transformers has it (`model_type` "biogpt")."""

    config_class = BioGptConfig
    base_class = BioGptModel
    reader_class = None
    attention_class = BioGptAttention
    table_class = BioGptLearnedPositionalEmbedding

    def position_ids(self, base, inputs, past):
        return None
