"""Measure a model on a labelled data set, on one process or many, with metrics of Hugging Face's `evaluate`."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin, broadcast_object_list
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from hf_posswap.errors import PosswapError
from hf_posswap.training.batching import IGNORED
from hf_posswap.training.launching import check_processes


def predicted_classes(model: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predicted class and the label of each example, (B,), or of each token, (B, L)."""
    return model(**batch).logits.argmax(-1), batch["labels"]


@torch.no_grad()
def evaluate_batches(
    model: torch.nn.Module,
    dataset: Dataset,
    metric,
    *,
    collate: Callable[[list[dict]], dict] | None = None,
    batch_size: int = 32,
    predict: Callable[[torch.nn.Module, dict], tuple[torch.Tensor, torch.Tensor]] = predicted_classes,
    progress: bool = True,
    description: str = "evaluating",
) -> dict:
    """Return the result of `metric` for `model` on `dataset`, on all processes; each example counts once.

    `metric` is an `evaluate.Metric`, or has its `add_batch(predictions=, references=)` and `compute()`.
    `predict(model, batch)` returns predictions and references, one row for each example. If they are per token, (B, L), L may
    differ between batches; tokens whose reference is -100 are left out, and the metric gets the rest as one sequence.
    The model is moved to this process's device, and is in evaluation mode for the call. `batch_size` is per process.

    Raises:
        PosswapError: An empty data set, or fewer processes than were asked for.
    """
    if not len(dataset):
        raise PosswapError("there is nothing to evaluate: the data set is empty")
    # All Accelerators share their accumulation steps: this one must not change those of a training run that calls it.
    steps = GradientAccumulationPlugin(**GradientState().plugin_kwargs)
    accelerator = Accelerator(gradient_accumulation_plugin=steps)
    check_processes(accelerator)
    loader = accelerator.prepare_data_loader(DataLoader(dataset, batch_size=batch_size, collate_fn=collate))
    was_training = model.training
    model.to(accelerator.device).eval()
    try:
        hidden = None if progress and accelerator.is_main_process else True  # None: drawn in a terminal only
        for batch in tqdm(loader, desc=description, unit="batch", leave=False, disable=hidden):
            pair = tuple(tensor.contiguous() for tensor in predict(model, batch))
            if pair[1].dim() > 1:  # processes see batches of different lengths
                pair = accelerator.pad_across_processes(pair, dim=1, pad_index=IGNORED)
            predictions, references = accelerator.gather_for_metrics(pair)  # drops what filled up the last batch
            if accelerator.is_main_process:
                if references.dim() > 1:
                    counted = references != IGNORED
                    predictions, references = predictions[counted], references[counted]
                metric.add_batch(predictions=predictions.cpu(), references=references.cpu())
    finally:
        model.train(was_training)
    result = metric.compute() if accelerator.is_main_process else None
    return broadcast_object_list([result])[0]
