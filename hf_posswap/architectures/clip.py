"""CLIP's text model: a table of 77 positions in `embeddings`, separate projections, pre-norm layers, causal, without a cache.

Quirks: `embeddings` reads the longest input off `position_embedding.weight`, and has a buffer `position_ids` of that length.
The whole CLIPModel has images besides: its parts share a config, so text models are loaded, and swapped, by themselves.
A fit's figures are of the mean over tokens, as for other headless models; CLIP's own vector is the state where the text ends.
"""

import torch
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection
from transformers.models.clip.modeling_clip import CLIPAttention

from hf_posswap.architectures.base import Architecture


class ClipText(Architecture):
    """CLIP's text model as transformers has it (`model_type` "clip_text_model"), also with its projection."""

    config_class = CLIPTextConfig
    base_class = CLIPTextModel
    file_prefix = "text_model"
    attention_class = CLIPAttention
    table_name, layers_name, attention_name = "embeddings.position_embedding", "encoder.layers", "self_attn"
    projections = ("q_proj", "k_proj", "v_proj")
    # Before transformers 5.21 its `base_model` is itself, not the headless model in it.
    further_classes = (CLIPTextModelWithProjection,) if CLIPTextModelWithProjection.base_model_prefix == "text_model" else ()

    def resize(self, base, max_positions):
        embeddings = base.embeddings
        ids = torch.arange(max_positions, device=embeddings.position_ids.device).expand((1, -1))
        embeddings.register_buffer("position_ids", ids, persistent=False)
        table = embeddings.position_embedding
        if not table.weight.numel():  # what stock classes refuse: here of more rows than any text, and without columns
            table.weight = table.weight.new_empty(2**24, 0)

    def scaling(self, attention):
        return attention.scale

    def output(self, attention, attention_output, hidden_states):
        return attention.out_proj(attention_output)

    def is_causal(self, config):
        return True
