"""How far attention looks: each head's attention mass by distance, swapped or not."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from hf_posswap.architectures import family_of, longest_input
from hf_posswap.attention import observe, visible
from hf_posswap.data.calibration import check_batches
from hf_posswap.evaluating import evaluating, watching
from hf_posswap.functional.closed_form import sum_keys_by_distance, wide


@torch.no_grad()
def attention_by_distance(model: PreTrainedModel, batches: torch.Tensor | Iterable, *, reach: int = 64) -> torch.Tensor:
    """Return the mean attention mass that queries give to keys at each distance: (layers, heads, 2 * reach + 1), summing to 1.

    Distance is key position minus query position, from -reach to reach; the ends hold all that is farther. `batches` are
    token ids, or dicts with masks, as `posswap.fit` takes them; padding before a row's text is moved behind it.

    >>> from transformers import GPT2Config, GPT2Model
    >>> model = GPT2Model(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=99))
    >>> profile = attention_by_distance(model, torch.randint(99, (2, 16)), reach=8)
    >>> profile.shape, profile[..., 9:].sum().item()
    (torch.Size([2, 4, 17]), 0.0)
    """
    base = model.base_model
    architecture = family_of(model.config)
    causal = architecture.is_causal(model.config)
    attentions = architecture.attention_of_layers(base)
    profiles = [0.0 for _ in attentions]
    queries = 0

    def see(layer: int, attention, hidden_states: torch.Tensor, keywords: dict) -> None:
        here = mask.to(hidden_states.device)
        seen = observe(attention, architecture, hidden_states, visible(here, causal=causal), keywords.get("shared_positions"))
        probabilities = wide(seen.probabilities * here[:, None, :, None])
        profiles[layer] = profiles[layer] + sum_keys_by_distance(probabilities, reach).sum((0, 2)).cpu()

    with evaluating(model), watching(attentions, see):
        for batch in check_batches(batches, model, longest_input(model.config)):
            mask = batch["attention_mask"]
            queries += int(mask.sum())
            base(**{key: value.to(model.device) for key, value in batch.items()}, use_cache=False)
    return (torch.stack(profiles) / queries).float()
