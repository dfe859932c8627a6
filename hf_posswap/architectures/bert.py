"""BERT: a table in `embeddings`, separate query, key and value projections, post-norm layers.

Quirks: `embeddings` carries two buffers, `position_ids` and `token_type_ids`, as long as the table; an input beyond them
fails even when the table is gone. As a decoder (`is_decoder=True`) the same modules are causal and use a cache.
"""

import torch
from torch import nn
from transformers import BertConfig, BertModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertSelfAttention

from hf_posswap.architectures.base import Architecture, QueryKey


class Bert(Architecture):
    """The BERT family as transformers has it (`model_type` "bert")."""

    model_type = "bert"
    config_class = BertConfig
    base_class = BertModel
    attention_class = BertSelfAttention

    def table_owner(self, base):
        return base.embeddings, "position_embeddings"

    def layers(self, base):
        return list(base.encoder.layer)

    def self_attentions(self, base):
        return [layer.attention.self for layer in base.encoder.layer]

    def resize(self, base, max_positions):
        device = base.embeddings.position_ids.device
        position_ids = torch.arange(max_positions, device=device).expand((1, -1))
        base.embeddings.register_buffer("position_ids", position_ids, persistent=False)
        base.embeddings.register_buffer("token_type_ids", torch.zeros_like(position_ids), persistent=False)

    def project(self, attention, hidden_states):
        shape = (*hidden_states.shape[:-1], -1, attention.attention_head_size)
        projections = (attention.query, attention.key, attention.value)
        return tuple(projection(hidden_states).view(shape).transpose(1, 2) for projection in projections)

    def output(self, attention, attention_output):
        return attention_output

    def dropout(self, attention):
        return attention.dropout.p

    def backend(self, attention):
        implementation = attention.config._attn_implementation
        return ALL_ATTENTION_FUNCTIONS.get_interface(implementation, modeling_bert.eager_attention_forward)

    def query_key(self, attention):
        # PEFT's layers call what they wrap `base_layer`.
        query, key = (getattr(layer, "base_layer", layer) for layer in (attention.query, attention.key))
        plain = type(attention.query) is type(attention.key) is nn.Linear and query.weight is not key.weight
        return QueryKey(query.weight, query.bias, key.weight, key.bias, plain)

    def is_causal(self, config):
        return config.is_decoder
