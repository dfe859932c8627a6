"""What a swap cost, as numbers against the original: states of an encoder, predictions of a causal model."""

import math

import torch
from transformers import PreTrainedModel

_TOKENS_A_BATCH = 4096  # memory for logits stays the same at every length


def _batches(blocks: torch.Tensor, model: PreTrainedModel):
    for rows in blocks.split(max(1, _TOKENS_A_BATCH // blocks.shape[1])):
        yield rows.to(model.device)


@torch.no_grad()
def pooled_states(model: PreTrainedModel, blocks: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of the last hidden states of unpadded blocks (N, L): (N, E), of norm 1, float32."""
    model.eval()
    pooled = [model.base_model(input_ids=rows).last_hidden_state.float().mean(1) for rows in _batches(blocks, model)]
    return torch.nn.functional.normalize(torch.cat(pooled), dim=-1)


def pooled_cosine(model: PreTrainedModel, blocks: torch.Tensor, original: torch.Tensor) -> float:
    """Return the mean cosine of the model's pooled states with the original's, `original` (N, E): 1 is unhurt."""
    return (pooled_states(model, blocks) * original).sum(-1).mean().item()


@torch.no_grad()
def perplexity(model: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Return exp of the mean next-token loss of a causal model over unpadded blocks (N, L), first tokens left out."""
    model.eval()
    total = 0.0
    for rows in _batches(blocks, model):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (blocks.shape[0] * (blocks.shape[1] - 1)))


@torch.no_grad()
def kl_divergence(model: PreTrainedModel, original: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Return the mean over tokens of KL(original || model) of the next-token distributions, in nats: 0 is unhurt."""
    model.eval(), original.eval()
    total = 0.0
    for rows in _batches(blocks, model):
        target = original(input_ids=rows.to(original.device), use_cache=False).logits.float().log_softmax(-1).to(rows.device)
        given = model(input_ids=rows, use_cache=False).logits.float().log_softmax(-1)
        total += torch.nn.functional.kl_div(given, target, reduction="sum", log_target=True).item()
    return total / blocks.numel()
