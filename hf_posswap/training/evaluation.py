"""Predictions of a classifier for all rows of a data set, on one process or many."""

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_posswap.errors import PosswapError
from hf_posswap.evaluating import evaluating
from hf_posswap.training.batching import pad
from hf_posswap.training.launching import check_processes


@torch.no_grad()
def predict(model: PreTrainedModel, rows: list[dict], pad_token_id: int, batch_size: int) -> torch.Tensor:
    """Return the logits (N, C) of all rows, in their order and on all processes; each process computes its share.

    The model is moved to this process's device. `batch_size` is per process.

    PosswapError: there are no rows, or fewer processes than were asked for.
    """
    if not rows:
        raise PosswapError("there is nothing to evaluate: the data set is empty")
    # All Accelerators share their accumulation steps: this one must not change those of a training run that calls it.
    steps = GradientAccumulationPlugin(**GradientState().plugin_kwargs)
    accelerator = Accelerator(gradient_accumulation_plugin=steps)
    check_processes(accelerator)
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]["input_ids"]))  # similar lengths need little padding
    options = {"batch_size": batch_size, "collate_fn": lambda few: pad(few, pad_token_id)}
    loader = accelerator.prepare_data_loader(DataLoader([rows[place] for place in order], **options))
    model.to(accelerator.device)
    with evaluating(model):  # gather_for_metrics drops what filled up the last batch
        found = [accelerator.gather_for_metrics(model(**batch).logits.float().contiguous()).cpu() for batch in loader]
    return torch.cat(found)[torch.tensor(order).argsort()]
