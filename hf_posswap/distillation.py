"""Tuning a swapped model towards its original on text without labels: the loss for `training.train`."""

from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import PreTrainedModel


def distillation_loss(original: PreTrainedModel) -> Callable[[torch.nn.Module, dict], torch.Tensor]:
    """Return `loss(model, batch)` of a model against its original on batches of unpadded `input_ids`; 0 where they agree.

    With a language-modelling head: KL(original || model) of the predictions, the mean over tokens in nats. Without: the
    squared error of hidden states relative to their mean square, the mean over layers. The original follows the batches to
    their device.
    """
    head = original.get_output_embeddings() is not None

    def loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        if original.device != batch["input_ids"].device:
            original.to(batch["input_ids"].device)
        with torch.no_grad():
            wanted = original(**batch, output_hidden_states=not head, use_cache=False)
        given = model(**batch, output_hidden_states=not head, use_cache=False)
        if head:
            target, got = (
                (outputs.logits if "logits" in outputs else outputs.prediction_logits).float().log_softmax(-1).flatten(0, 1)
                for outputs in (wanted, given)
            )
            return functional.kl_div(got, target, reduction="batchmean", log_target=True)
        layers = zip(given.hidden_states[1:], wanted.hidden_states[1:], strict=True)
        return torch.stack([(s - t).pow(2).mean() / t.pow(2).mean() for s, t in layers]).mean()

    return loss
