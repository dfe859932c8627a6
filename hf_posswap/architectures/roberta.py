"""RoBERTa and its kin: BERT's modules, and positions that skip padding. Layers of XLM-RoBERTa-XL are pre-norm.

Quirks: ids start after the padding index (row 2 of 514 is position 0) and count the tokens that are not padding; padding gets
the padding index. Given `inputs_embeds`, padding is unknown, and ids count all tokens.
"""

import transformers
from transformers.models.camembert.modeling_camembert import CamembertSelfAttention
from transformers.models.roberta.modeling_roberta import RobertaSelfAttention
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaSelfAttention
from transformers.models.xlm_roberta_xl.modeling_xlm_roberta_xl import XLMRobertaXLSelfAttention

from hf_posswap.architectures.bert import Bert


class Roberta(Bert):
    """The RoBERTa family as transformers has it (`model_type` "roberta")."""

    config_class = transformers.RobertaConfig
    base_class = transformers.RobertaModel
    attention_class = RobertaSelfAttention

    def first_row(self, config):
        return 0 if config.pad_token_id is None else config.pad_token_id + 1  # None: was set later, see `check_edits`

    def position_ids(self, base, inputs, past):
        embeddings = base.embeddings
        if inputs.input_ids is None:  # as in transformers: without what is cached
            return embeddings.create_position_ids_from_inputs_embeds(inputs.inputs_embeds, embeddings.padding_idx)
        return embeddings.create_position_ids_from_input_ids(inputs.input_ids, embeddings.padding_idx, past)

    def resize(self, base, max_positions):
        super().resize(base, max_positions + self.first_row(base.config))  # `token_type_ids` is gathered by position


class XLMRoberta(Roberta):
    """XLM-RoBERTa (`model_type` "xlm-roberta")."""

    config_class = transformers.XLMRobertaConfig
    base_class = transformers.XLMRobertaModel
    attention_class = XLMRobertaSelfAttention


class Camembert(Roberta):
    """CamemBERT (`model_type` "camembert")."""

    config_class = transformers.CamembertConfig
    base_class = transformers.CamembertModel
    attention_class = CamembertSelfAttention


class XLMRobertaXL(Roberta):
    """XLM-RoBERTa-XL (`model_type` "xlm-roberta-xl")."""

    config_class = transformers.XLMRobertaXLConfig
    base_class = transformers.XLMRobertaXLModel
    attention_class = XLMRobertaXLSelfAttention
