"""How well a language model predicts held-out text: token by token, by position, by length, and through a sliding window.

All losses are in nats per token, -log P(token | what the model sees). What a causal model sees of token p are the tokens before
it; what a masked model sees is the whole sequence with some tokens masked, and only those count. All figures come from the
losses of single tokens:

    loss of a text        mean over its tokens
    perplexity            exp(loss); of a masked model: of the masked tokens
    loss at position p    mean over sequences of token p
    sliding window        token p is predicted from the last `window` - 1 tokens at most, which are numbered from 0 again
"""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import PreTrainedModel

from hf_posswap.architectures import family_of
from hf_posswap.errors import PosswapError
from hf_posswap.evaluating import evaluating
from hf_posswap.measure.windows import lay_windows

_TOKENS_A_BATCH = 8192  # that go through the layers at once
_LOGITS_A_SLICE = 2**25  # numbers: of a vocabulary of 50,000, 671 tokens at once


def lm_head(model: PreTrainedModel) -> nn.Module:
    """Return the module that maps the base model's last states to logits, whatever its family calls it."""
    if not has_one_head(model):
        what = f"a {type(model).__name__} has no language-modelling head in one module"
        raise PosswapError(f"{what}: load a causal or masked LM, of a family that has one (not DistilBERT or ELECTRA)")
    head = next(child for child in model.children() if child is not model.base_model)
    return getattr(head, "predictions", head)  # BertForPreTraining's module also tells whether sentences follow each other


def has_one_head(model: PreTrainedModel) -> bool:
    """Whether a model has a language-modelling head and no other, so that it has token losses."""
    return sum(child is not model.base_model for child in model.children()) == 1 and model.get_output_embeddings() is not None


@torch.no_grad()
def token_losses(model: PreTrainedModel, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Return the loss of every token of unpadded sequences, NaN where nothing is predicted: (N, L), on the CPU.

    `labels` (N, L) are transformers': the tokens to predict and -100 elsewhere; a causal model shifts them itself and needs
    none. Logits are computed for a slice of the tokens at a time: for a long text they would be larger than the model.
    PosswapError: there is no head, or it predicts NaN.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64))
    >>> losses = token_losses(model, torch.arange(40).view(2, 20))
    >>> losses.shape, losses.isnan().sum(0).tolist()[:3], bool((losses[:, 1:] > 0).all())
    (torch.Size([2, 20]), [2, 0, 0], True)
    """
    head, base = lm_head(model), model.base_model
    causal = family_of(model.config).is_causal(model.config)
    if labels is None:
        if not causal:
            raise PosswapError("this is a masked language model: call token_losses with the labels that it is to predict")
        labels = input_ids
    input_ids, labels = input_ids.cpu(), labels.cpu().long()  # cross entropy takes no int32, which a fit does
    dtype = torch.promote_types(model.dtype, torch.float32)
    losses = torch.full(labels.shape, torch.nan, dtype=dtype, device="cpu")
    first = 1 if causal else 0  # the states of token p - 1 predict token p
    at_once = max(1, _LOGITS_A_SLICE // model.config.vocab_size)
    with evaluating(model):
        if isinstance(model, FSDPModule):  # the parts below run one by one, and FSDP2 gathers shared weights for the whole only
            model(input_ids=input_ids[:1, :2].to(model.device))  # the first call settles what the whole is
            model.unshard()
        for rows in torch.arange(len(input_ids), device="cpu").split(max(1, _TOKENS_A_BATCH // input_ids.shape[1])):
            wanted = labels[rows, first:]
            chosen = wanted != -100
            states = base(input_ids=input_ids[rows].to(model.device), use_cache=False, return_dict=True).last_hidden_state
            states = states[:, : wanted.shape[1]][chosen.to(model.device)]
            found = [
                functional.cross_entropy(head(some).to(dtype), tokens.to(model.device), reduction="none").cpu()
                for some, tokens in zip(states.split(at_once), wanted[chosen].split(at_once), strict=True)
            ]
            found = torch.cat(found)
            if lost := int(found.isnan().sum()):  # means would leave them out, as tokens without a label
                raise PosswapError(f"the model predicts NaN for {lost} tokens of {len(found)}: see its weights and dtype")
            losses[rows, first:] = losses[rows, first:].masked_scatter(chosen, found)
    return losses


@torch.no_grad()
def sliding_window_losses(model: PreTrainedModel, input_ids: torch.Tensor, window: int, *, stride: int = 1) -> torch.Tensor:
    """Return the losses (N, L) of a causal model that sees at most `window` tokens at once, so that it can read longer text.

    Windows start at 0, stride, 2 stride, ..., and the last one ends with the text. The first predicts all its tokens, each
    later one those that are new: they have at least window - stride tokens before them. stride=1 is exact. The work is window /
    stride times that of reading the text once.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=16))
    >>> sliding_window_losses(model, torch.arange(40)[None], 16, stride=8).shape  # positions for 16 are enough
    torch.Size([1, 40])
    """
    if not family_of(model.config).is_causal(model.config):  # what a token is predicted from would hold the token itself
        raise PosswapError("this is a masked language model, which predicts no next token: give a causal one")
    if not 1 <= stride < window:
        raise PosswapError(f"stride={stride} must be from 1 to {window - 1}, less than the window")
    window, input_ids = min(window, input_ids.shape[1]), input_ids.cpu()
    with torch.device("cpu"):  # whatever the default device is
        windows = lay_windows(torch.ones_like(input_ids, dtype=torch.bool), window, stride, causal=True)
    ids = windows.cut({"input_ids": input_ids})["input_ids"]
    found = token_losses(model, ids, ids.masked_fill(~windows.chosen, -100))
    losses = found.new_empty(input_ids.shape)
    windows.put(found, losses)
    return losses


def mean_loss(losses: torch.Tensor) -> float:
    """Return the mean over all tokens that were predicted.

    >>> mean_loss(torch.tensor([[torch.nan, 1.0], [torch.nan, 2.0]]))
    1.5
    """
    return losses.double().nanmean().item()


def row_losses(losses: torch.Tensor) -> torch.Tensor:
    """Return a value for each row of losses (N, L), whose mean is `mean_loss`: (N,), float64.

    It is the row's own mean loss if all rows predict as many tokens. Else it is linear in the row's sum and count of tokens, so
    that the spread of the values is that of the mean loss (the ratio estimator's).

    >>> row_losses(torch.tensor([[torch.nan, 1.0, 3.0], [torch.nan, 4.0, 6.0]])).tolist()
    [2.0, 5.0]
    """
    counts, mean = losses.isfinite().sum(1).double(), mean_loss(losses)
    return mean + (losses.double().nansum(1) - counts * mean) / counts.mean()


def perplexity_of(loss: float) -> float:
    """Return exp(loss); PosswapError: it is beyond what a number holds, as after a run that diverged."""
    if loss > 700:
        raise PosswapError(f"the loss is {loss:.4g} nats a token, too much for a perplexity: lower the rate, or check the data")
    return math.exp(loss)


def row_perplexities(losses: torch.Tensor) -> torch.Tensor:
    """Return a value for each row of losses (N, L), whose mean is their perplexity: linear in `row_losses` (delta method)."""
    mean = mean_loss(losses)
    return perplexity_of(mean) * (1 + row_losses(losses) - mean)


def loss_by_position(losses: torch.Tensor, starts: Sequence[int] = (0, 8, 32, 128, 512, 2048, 8192)) -> dict[str, float]:
    """Return the mean loss in ranges of positions, which begin at `starts` and end before the next one.

    >>> loss_by_position(torch.tensor([[torch.nan, 1.0, 3.0, 4.0, 8.0]]), (0, 2, 3))
    {'0-1': 1.0, '2': 3.0, '3-4': 6.0}
    """
    length = losses.shape[1]
    starts = [start for start in starts if start < length]
    found = {}
    for low, end in zip(starts, [*starts[1:], length], strict=True):
        if losses[:, low:end].isfinite().any():
            found[f"{low}-{end - 1}" if end - low > 1 else str(low)] = mean_loss(losses[:, low:end])
    return found
