"""GPT-2: a table `wpe`, one fused projection `c_attn` for query, key and value, pre-norm layers, causal.

Quirks: `c_attn` is a Conv1D, whose weight is stored transposed, (E, 3E); `reorder_and_upcast_attn` sends eager attention
another way; cross-attention is the same class with `is_cross_attention` set.
"""

from transformers import GPT2Config, GPT2DoubleHeadsModel, GPT2Model
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.pytorch_utils import Conv1D

from hf_posswap.architectures.base import Architecture, QueryKey


class GPT2(Architecture):
    """The GPT-2 family as transformers has it (`model_type` "gpt2")."""

    config_class = GPT2Config
    base_class = GPT2Model
    attention_class = GPT2Attention
    table_name, layers_name, attention_name = "wpe", "h", "attn"
    further_classes = (GPT2DoubleHeadsModel,)

    def project(self, attention, hidden_states):
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        fused = attention.c_attn(hidden_states).split(attention.split_size, dim=2)
        return tuple(states.view(shape).transpose(1, 2) for states in fused)

    def output(self, attention, attention_output, hidden_states):
        return attention.resid_dropout(attention.c_proj(attention_output))

    def dropout(self, attention):
        return attention.attn_dropout.p

    def backend(self, attention):
        if attention.config._attn_implementation == "eager" and attention.reorder_and_upcast_attn:
            return lambda attention, query, key, value, mask, **_: attention._upcast_and_reordered_attn(query, key, value, mask)
        return super().backend(attention)

    def query_key(self, attention):
        fused = getattr(attention.c_attn, "base_layer", attention.c_attn)  # PEFT's name for what it wraps
        size, weight, bias = attention.split_size, fused.weight.T, fused.bias  # (3E, E), a view
        plain = type(attention.c_attn) is Conv1D
        return QueryKey(weight[:size], bias[:size], weight[size : 2 * size], bias[size : 2 * size], plain)

    def is_causal(self, config):
        return getattr(config, "is_causal", True)
