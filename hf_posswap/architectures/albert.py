"""ALBERT: BERT with groups of layers that run again and again, and embeddings of their own size, projected.

Quirks: a group runs `num_hidden_layers / num_hidden_groups` times in a row, each time all its `inner_group_num` layers;
self-attention ends with the residual and its norm; there is no decoder.
"""

from transformers import AlbertConfig, AlbertModel
from transformers.models.albert.modeling_albert import AlbertAttention

from hf_posswap.architectures.bert import Bert


class Albert(Bert):
    """The ALBERT family as transformers has it (`model_type` "albert")."""

    config_class = AlbertConfig
    base_class = AlbertModel
    attention_class = AlbertAttention

    def layers(self, base):
        runs, groups = base.config.num_hidden_layers, base.encoder.albert_layer_groups
        chosen = [groups[int(run / (runs / len(groups)))] for run in range(runs)]  # rounded as in AlbertTransformer
        return [layer for group in chosen for layer in group.albert_layers]

    def self_attentions(self, base):
        return [layer.attention for layer in dict.fromkeys(self.layers(base))]

    def own_layers(self, config):
        return min(config.num_hidden_groups, config.num_hidden_layers) * config.inner_group_num

    def embedding_size(self, config):
        return config.embedding_size

    def output(self, attention, attention_output, hidden_states):
        return attention.LayerNorm(hidden_states + attention.output_dropout(attention.dense(attention_output)))

    def dropout(self, attention):
        return attention.attention_dropout.p

    def is_causal(self, config):
        return False
