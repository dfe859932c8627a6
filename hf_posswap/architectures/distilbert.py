"""DistilBERT: BERT without token types, and other names; an encoder only.

Quirk: with `sinusoidal_pos_embds` transformers fills the table with sines again whenever it builds the model.
"""

from transformers import DistilBertConfig, DistilBertModel
from transformers.models.distilbert.modeling_distilbert import DistilBertSelfAttention

from hf_posswap.architectures.bert import Bert


class DistilBert(Bert):
    """The DistilBERT family as transformers has it (`model_type` "distilbert")."""

    config_class = DistilBertConfig
    base_class = DistilBertModel
    attention_class = DistilBertSelfAttention
    layers_name, attention_name = "transformer.layer", "attention"
    projections = ("q_lin", "k_lin", "v_lin")

    def set_longest_input(self, config, positions):
        super().set_longest_input(config, positions)
        config.sinusoidal_pos_embds = False

    def output(self, attention, attention_output, hidden_states):
        return attention.out_lin(attention_output)

    def is_causal(self, config):
        return False
