"""Distillation of the original into a swapped model on unlabelled text: the loss for `training.train`."""

from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posswap.architectures import longest_input
from hf_posswap.errors import PosswapError
from hf_posswap.evaluating import evaluating, token_logits
from hf_posswap.measure.windows import lay_windows
from hf_posswap.target import find_target

_TOKENS_AT_ONCE = 4096  # in windows, which have four times the tokens of the text


def distillation_loss(
    original: PreTrainedModel, *, text_weight: float = 0.0, window: int | None = None
) -> Callable[[torch.nn.Module, dict[str, torch.Tensor]], torch.Tensor]:
    """Return `loss(model, batch)` of a model against its original on batches of unpadded `input_ids`; 0 where they agree.

    With a language-modelling head: KL(original || model) of the predictions, the mean over tokens in nats. Without: the
    squared error of hidden states relative to their mean square, the mean over layers. The original reads without dropout; it
    is moved to the device of the batches.

    `text_weight` w makes it (1 - w) KL + w CE for a causal model, where CE is the cross-entropy of the text's own next
    tokens (Hinton et al. 2015, https://arxiv.org/abs/1503.02531, section 2). That also tunes the model to this text, so compare
    it with an original tuned in the same way.

    A batch longer than `window` the original, a causal model, reads through windows of so many tokens that slide by a quarter:
    what it says of a token is from the first window that has it, where most text stands before it.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2)).eval()
    >>> batch = {"input_ids": torch.arange(8)[None]}
    >>> abs(distillation_loss(model)(model, batch).item()) < 1e-6
    True
    """
    if not 0 <= text_weight <= 1:
        raise PosswapError(f"text_weight={text_weight} must be from 0 to 1")
    head = original.get_output_embeddings() is not None
    target, architecture = find_target(original, dispatched=True)
    most = longest_input(target.config)
    if window is not None and not 1 <= window <= most:
        raise PosswapError(f"window={window} must be from 1 to {most}, which the original reads at once")
    if (text_weight or window) and not (head and architecture.is_causal(target.config)):
        what = f"text_weight={text_weight}" if text_weight else f"window={window}"
        raise PosswapError(f"{what} needs a causal model with its head, which predicts the next token")

    asked = {"output_hidden_states": not head, "use_cache": False, "return_dict": True}

    def predictions(batch: dict) -> torch.Tensor:
        """Return what the original says of each token, (B, L, V)."""
        ids = batch["input_ids"]
        if window is None or ids.shape[1] <= window:
            return token_logits(original(**batch, **asked))
        with torch.device("cpu"):  # whatever the default device is
            windows = lay_windows(torch.ones(ids.shape, dtype=torch.bool), window, max(1, window // 4), causal=True)
        said = None
        for part in windows.split(_TOKENS_AT_ONCE):
            logits = token_logits(original(**part.cut({"input_ids": ids}), **asked))
            said = logits.new_empty(*ids.shape, logits.shape[-1]) if said is None else said
            part.put(logits, said)
        return said

    def loss(model: torch.nn.Module, batch: dict) -> torch.Tensor:
        ids = batch["input_ids"]
        if original.device != ids.device:
            original.to(ids.device)
        with torch.no_grad(), evaluating(original):
            wanted = predictions(batch) if head else original(**batch, **asked)
        given = model(**batch, **asked)
        if head:
            wanted, given = wanted.log_softmax(-1), token_logits(given).log_softmax(-1)
            divergence = functional.kl_div(given.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True)
            if not text_weight:
                return divergence
            text = functional.nll_loss(given[:, :-1].flatten(0, 1), ids[:, 1:].flatten().long())
            return (1 - text_weight) * divergence + text_weight * text
        layers = zip(given.hidden_states[1:], wanted.hidden_states[1:], strict=True)
        return torch.stack([(s - t).pow(2).mean() / t.pow(2).mean() for s, t in layers]).mean()

    return loss
