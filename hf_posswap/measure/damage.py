"""What a swap costs against the original: in an encoder's states, in a causal model's predictions.

All costs are 0 for an unchanged model. With a language-modelling head the cost is KL(original || model) of the predictions in
nats; without, 1 - cosine of the last hidden states with the original's. Layers are compared by their relative error after a
plain layer norm, sum |h - t|^2 / sum |t - mean t|^2: that is what the next layer reads, and single outliers of real checkpoints
do not dominate.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posswap.architectures import family_of, longest_input
from hf_posswap.data.calibration import check_batches, few_tokens
from hf_posswap.errors import PosswapError
from hf_posswap.evaluating import evaluating, outputs_of, token_logits
from hf_posswap.measure.losses import mean_loss, perplexity_of, token_losses

_TOKENS_A_BATCH = 4096  # memory for logits stays the same at every length
_RANGES = (0, 1, *(2 * 4**power for power in range(1, 16)))  # where ranges of positions begin: 0, 1, 8, 32, 128, ...


@dataclass(frozen=True)
class Damage:
    """What a swap cost: in total, by layer, by position and by length; 0 is no damage."""

    measure: str  # "KL" in nats, or "1 - cosine"
    total: float
    by_layer: tuple[float, ...]  # relative error of the states after each layer
    by_position: dict[str, float]  # "0", "1-7", "8-31", ...: of single tokens
    by_length: dict[int, float]  # the total of the sequences of one length (tokens, without padding)
    sequences: dict[int, int]  # how many of each length there were


@torch.no_grad()
def damage(model: PreTrainedModel, original: PreTrainedModel, batches: torch.Tensor | Iterable) -> Damage:
    """Compare a swapped model with its original on token ids, or batches with masks, as `posswap.fit` takes them.

    Padding before a row's text is moved behind it. Without a head the total is over mean-pooled states, as sentence models use
    them; with one, over all predictions.
    """
    head = model.get_output_embeddings() is not None and original.get_output_embeddings() is not None
    positions, lengths = defaultdict(list), defaultdict(list)  # the costs of all tokens in a range, and of all sequences
    errors, spreads = 0.0, 0.0
    checked = check_batches(batches, model, min(longest_input(one.config) for one in (model, original)))
    for batch in few_tokens(checked, _TOKENS_A_BATCH // 4 if head else _TOKENS_A_BATCH):
        states, predictions = [], []
        for one in (original, model):
            given = {key: value.to(one.device) for key, value in batch.items()}
            base, family = one.base_model, family_of(one.config)
            # `output_hidden_states` does the same, but its hooks would stay on the model and cannot be pickled.
            with evaluating(one), outputs_of((*dict.fromkeys(family.layers(base)), family.reader(base))) as seen:
                outputs = (one if head else base)(**given, use_cache=False, return_dict=True)
            del seen[-2]  # the last layer's, which the reader may norm: its own are the last
            states.append([layer.float().cpu() for layer in seen])
            if head:
                predictions.append(token_logits(outputs).cpu())
        mask = batch["attention_mask"]
        if head:
            cost = _token_kl(*predictions)  # (B, L)
            rows = (cost * mask).sum(1) / mask.sum(1)
        else:
            cost = 1 - functional.cosine_similarity(states[0][-1], states[1][-1], dim=-1)
            pooled = [(one[-1] * mask[..., None]).sum(1) / mask.sum(1, keepdim=True) for one in states]
            rows = 1 - functional.cosine_similarity(*pooled, dim=-1)
        places = mask.cumsum(1) - 1  # positions without padding
        for low, end in pairwise(_RANGES):
            positions[f"{low}-{end - 1}" if low else "0"] += cost[mask & (places >= low) & (places < end)].tolist()
        for length, value in zip(mask.sum(1).tolist(), rows.tolist(), strict=True):
            lengths[length].append(value)
        flat = [[functional.layer_norm(layer, layer.shape[-1:])[mask] for layer in one] for one in states]
        errors += torch.tensor([(s - t).pow(2).sum() for t, s in zip(*flat, strict=True)])
        spreads += torch.tensor([(t - t.mean(0)).pow(2).sum() for t in flat[0]])
    lengths = dict(sorted(lengths.items()))
    return Damage(
        measure="KL" if head else "1 - cosine",
        total=fmean(value for values in (positions if head else lengths).values() for value in values),
        by_layer=tuple((errors / spreads).tolist()),
        by_position={name: fmean(values) for name, values in positions.items() if values},
        by_length={length: fmean(values) for length, values in lengths.items()},
        sequences={length: len(values) for length, values in lengths.items()},
    )


def _token_kl(target: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Return KL(target || given) of predictions, logits (B, L, V) in float32: (B, L) in nats."""
    target, given = target.log_softmax(-1), given.log_softmax(-1)
    return functional.kl_div(given, target, reduction="none", log_target=True).sum(-1)


@torch.no_grad()
def pooled_states(model: PreTrainedModel, blocks: torch.Tensor) -> torch.Tensor:
    """Return the mean over tokens of the last hidden states of unpadded blocks (N, L): (N, E), of norm 1, float32."""
    parts = blocks.to(model.device).split(max(1, _TOKENS_A_BATCH // blocks.shape[1]))
    with evaluating(model):
        pooled = [model.base_model(input_ids=rows, return_dict=True).last_hidden_state.float().mean(1) for rows in parts]
    return functional.normalize(torch.cat(pooled), dim=-1)


def pooled_cosine(model: PreTrainedModel, blocks: torch.Tensor, original: torch.Tensor) -> float:
    """Return the mean cosine of the model's pooled states with the original's, `original` (N, E): 1 is no damage."""
    return (pooled_states(model, blocks) * original).sum(-1).mean().item()


def perplexity(model: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Return exp of the mean next-token loss of a causal model over unpadded blocks (N, L), first tokens left out."""
    return perplexity_of(mean_loss(token_losses(model, blocks)))


@torch.no_grad()
def block_kl(model: PreTrainedModel, original: PreTrainedModel, blocks: torch.Tensor) -> torch.Tensor:
    """Return, for each block (N, L), the mean over tokens of KL(original || model) of next tokens, in nats: (N,) on the CPU."""
    for one in (model, original):
        if one.get_output_embeddings() is None:
            raise PosswapError(f"a {type(one).__name__} predicts no tokens: load a causal or masked LM, or call damage")
    found = []
    with evaluating(model, original):
        for rows in blocks.split(max(1, _TOKENS_A_BATCH // blocks.shape[1])):
            both = (one(input_ids=rows.to(one.device), use_cache=False, return_dict=True) for one in (original, model))
            target, given = map(token_logits, both)
            found.append(_token_kl(target.to(given.device), given).mean(1).cpu())
    return torch.cat(found)


def kl_divergence(model: PreTrainedModel, original: PreTrainedModel, blocks: torch.Tensor) -> float:
    """Return the mean over tokens of KL(original || model) of the next-token distributions, in nats: 0 is no damage."""
    return block_kl(model, original, blocks).double().mean().item()
