"""OPT: a table inside `decoder`, separate projections, causal; layers are pre-norm, those of the 350m checkpoint post-norm.

Quirks: the table begins with two unused rows and adds this offset itself: ids count from 0. Default ids count unmasked tokens,
and padding has -1. Word vectors may be smaller than hidden states (`word_embed_proj_dim`), position vectors are not. Queries
are scaled before the scores. The causal head calls `decoder` directly, not the model around it.
"""

import torch
from transformers import OPTConfig, OPTModel
from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoder, OPTLearnedPositionalEmbedding

from hf_posswap.architectures.base import Architecture


class OPT(Architecture):
    """The OPT family as transformers has it (`model_type` "opt"), and Galactica, which has no biases."""

    config_class = OPTConfig
    base_class = OPTModel
    reader_class = OPTDecoder
    attention_class = OPTAttention
    table_name, layers_name, attention_name = "embed_positions", "layers", "self_attn"  # in the reader, the decoder
    table_class = OPTLearnedPositionalEmbedding
    projections = ("q_proj", "k_proj", "v_proj")

    def reader(self, base):
        return getattr(base, "decoder", base)

    def first_row(self, config):
        return 2

    def first_id(self, config):
        return 0

    def position_ids(self, base, inputs, past):
        mask = inputs.attention_mask
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return None
        return (mask.cumsum(-1) * mask - 1).long()[:, torch.arange(inputs.shape[-1], device=mask.device) + past]

    def output(self, attention, attention_output, hidden_states):
        return attention.out_proj(attention_output)

    def is_causal(self, config):
        return getattr(config, "is_causal", True)
