"""BERT and ERNIE: a table in `embeddings`, separate query, key and value projections, post-norm layers.

Quirks: `embeddings` carries two buffers, `position_ids` and `token_type_ids`, as long as the table; an input beyond them
fails even when the table is gone. As a decoder (`is_decoder=True`) the same modules are causal and use a cache.
"""

import torch
from transformers import BertConfig, BertModel, ErnieConfig, ErnieModel
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.ernie.modeling_ernie import ErnieSelfAttention

from hf_posswap.architectures.base import Architecture


class Bert(Architecture):
    """The BERT family as transformers has it (`model_type` "bert")."""

    config_class = BertConfig
    base_class = BertModel
    attention_class = BertSelfAttention
    table_name, layers_name, attention_name = "embeddings.position_embeddings", "encoder.layer", "attention.self"

    def resize(self, base, max_positions):
        position_ids = torch.arange(max_positions, device=base.embeddings.position_ids.device).expand((1, -1))
        for name, ids in (("position_ids", position_ids), ("token_type_ids", torch.zeros_like(position_ids))):
            if hasattr(base.embeddings, name):  # DistilBERT has no token types
                base.embeddings.register_buffer(name, ids, persistent=False)

    def output(self, attention, attention_output, hidden_states):
        return attention_output

    def is_causal(self, config):
        return config.is_decoder and getattr(config, "is_causal", True)


class Ernie(Bert):
    """ERNIE (`model_type` "ernie"): BERT with a table of tasks besides, which stays."""

    config_class = ErnieConfig
    base_class = ErnieModel
    attention_class = ErnieSelfAttention
