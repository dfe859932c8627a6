"""Measures of a model before and after a swap: damage, losses, retrieval, attention, word order."""

from hf_posswap.measure.attention_distance import attention_by_distance
from hf_posswap.measure.damage import Damage, damage, kl_divergence, perplexity, pooled_cosine, pooled_states
from hf_posswap.measure.losses import loss_by_position, mean_loss, sliding_window_losses, token_losses
from hf_posswap.measure.word_order import word_order_examples, word_order_preference, word_order_probe

__all__ = [
    "Damage", "attention_by_distance", "damage", "kl_divergence", "loss_by_position", "mean_loss", "perplexity",
    "pooled_cosine", "pooled_states", "sliding_window_losses", "token_losses", "word_order_examples",
    "word_order_preference", "word_order_probe",
]  # fmt: skip
