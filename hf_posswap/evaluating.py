"""Evaluate or watch a model, and leave it as it was: its modes restored, its hooks removed."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput


@contextmanager
def evaluating(*models: nn.Module, mode: bool = False) -> Iterator[None]:
    """Put models into evaluation mode, or with `mode` into training mode; afterwards each module has its own mode back.

    >>> layer = nn.Dropout().train()
    >>> with evaluating(layer):
    ...     print(layer.training)
    False
    >>> layer.training
    True
    """
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        for model in models:
            model.train(mode)
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def exactly(model: PreTrainedModel) -> Iterator[None]:
    """Compute without autocast, which rounds, and goes on with its copies of weights when those are rewritten."""
    try:
        with torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def watching(modules: Iterable[nn.Module], see: Callable[[int, nn.Module, torch.Tensor, dict], None]) -> Iterator[None]:
    """Before each forward of a module call `see(index, module, hidden_states, keywords)`.

    A module that runs several times in a forward of the model may be listed as often: then each run has its own index.
    Some families pass hidden states as the first argument, others by name.
    """
    modules = list(modules)
    places = {module: cycle([i for i, one in enumerate(modules) if one is module]) for module in modules}

    def watch(module, args, kwargs):
        see(next(places[module]), module, args[0] if args else kwargs["hidden_states"], kwargs)

    with ExitStack() as hooks:  # which are removed at its end
        for module in places:
            hooks.enter_context(module.register_forward_pre_hook(watch, with_kwargs=True))
        yield


@contextmanager
def outputs_of(modules: Iterable[nn.Module]) -> Iterator[list[torch.Tensor]]:
    """Collect what modules return inside, forward after forward; of several outputs the first."""
    seen: list[torch.Tensor] = []

    def see(module, args, output):
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    with ExitStack() as hooks:
        for module in modules:
            hooks.enter_context(module.register_forward_hook(see))
        yield seen


def token_logits(outputs: ModelOutput) -> torch.Tensor:
    """Return the predictions of tokens among a model's outputs, (B, L, V) in float32; a ...ForPreTraining has others, too."""
    return (outputs.logits if "logits" in outputs else outputs.prediction_logits).float()
