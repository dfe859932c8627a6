"""ESM-1b and other ESM models with a table: BERT's modules, RoBERTa's ids, pre-norm layers. (ESM-2 has rotary positions.)

Quirks: embeddings are multiplied by the mask, and rescaled by the share of masked tokens; `inputs_embeds` are used as they are,
without positions; queries are scaled before the scores, and `scaling` is 1; there is no cache.
"""

from transformers import EsmConfig, EsmModel
from transformers.models.esm.modeling_esm import EsmSelfAttention, create_position_ids_from_input_ids

from hf_posswap.architectures.roberta import Roberta


class Esm(Roberta):
    """The ESM family as transformers has it (`model_type` "esm"), with `position_embedding_type` "absolute"."""

    config_class = EsmConfig
    base_class = EsmModel
    attention_class = EsmSelfAttention
    embeddings_read_mask = True

    def position_ids(self, base, inputs, past):
        if inputs.input_ids is None:
            return base.embeddings.create_position_ids_from_inputs_embeds(inputs.inputs_embeds)
        return create_position_ids_from_input_ids(inputs.input_ids, base.embeddings.padding_idx)

    def resize(self, base, max_positions):
        pass

    def scaling(self, attention):
        return attention.attention_head_size**-0.5
