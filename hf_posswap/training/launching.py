"""Start accelerate for a training run, and shard, gather and save its model on one process or many."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState, utils
from accelerate.state import AcceleratorState, is_initialized
from accelerate.tracking import get_available_trackers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_posswap.architectures import find_family
from hf_posswap.errors import PosswapError
from hf_posswap.training.budget import TrainingConfig

ON_CPUS = "on CPUs start with: ACCELERATE_USE_CPU=true torchrun --nproc-per-node N ..."


def start_accelerator(config: TrainingConfig, accumulation_steps: int, output: Path | None) -> Accelerator:
    """Return the Accelerator of one training run; PosswapError: fewer processes than asked for, or as `check_launch`."""
    check_launch(config, accumulation_steps)
    _forget_precision(config.mixed_precision)
    ours = not is_initialized()
    accelerator = Accelerator(
        mixed_precision=config.mixed_precision,
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=accumulation_steps, sync_with_dataloader=False),
        # split_batches: without it, a schedule takes as many steps at once as there are processes.
        dataloader_config=utils.DataLoaderConfiguration(split_batches=True),
        log_with=list(config.report_to) or None,
        project_dir=output and str(output),
    )
    check_processes(accelerator)
    if ours:
        accelerator.state.made_by_train = True
    # All Accelerators of a process share one state, which would keep the compiler of the first.
    accelerator.state.dynamo_plugin = utils.TorchDynamoPlugin(backend=config.torch_compile)
    if accelerator.distributed_type == utils.DistributedType.DEEPSPEED:  # which accumulates and clips by itself
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "train_micro_batch_size_per_gpu": config.batch_size // accumulation_steps // accelerator.num_processes,
            "gradient_accumulation_steps": accumulation_steps,
            "gradient_clipping": config.max_grad_norm,
        }
    return accelerator


def check_launch(config: TrainingConfig, accumulation_steps: int) -> None:
    """Raise for a batch that does not divide among the processes, no such tracker, or float16 on a CPU."""
    check_trackers(config.report_to)
    gpu = torch.accelerator.is_available() and not utils.parse_flag_from_env("ACCELERATE_USE_CPU")
    if config.mixed_precision in ("fp16", "fp8") and not gpu:  # fp16 would be left out
        raise PosswapError(f"mixed_precision={config.mixed_precision!r} needs a GPU: on a CPU give bf16, or leave it out")
    if config.auto_find_batch_size and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise PosswapError("auto_find_batch_size works on one process: find gradient_accumulation_steps there, then pass it")
    micro_batch, count = config.batch_size // accumulation_steps, int(os.environ.get("WORLD_SIZE", 1))
    if micro_batch % count:
        raise PosswapError(f"{micro_batch} sequences do not divide into {count} processes: choose a multiple as batch_size")


def _forget_precision(wanted: str | None) -> None:
    """Let a run have its own mixed precision: all Accelerators of a process share that of the first.

    PosswapError: the user has made an Accelerator of another precision.
    """
    if not is_initialized() or AcceleratorState().distributed_type == utils.DistributedType.DEEPSPEED:
        return
    state, default = AcceleratorState(), os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if getattr(state, "made_by_train", False) and state.mixed_precision != (wanted or default):
        AcceleratorState._reset_state()
    elif wanted not in (None, state.mixed_precision):
        what = f"mixed_precision={wanted!r}, and this process has an Accelerator of {state.mixed_precision!r}"
        raise PosswapError(f"{what}, whose state all share: leave mixed_precision out, or train in another process")


def check_processes(accelerator: Accelerator | PartialState) -> None:
    """Raise where fewer processes train together than were asked for.

    Without GPUs, `accelerate launch --multi_gpu` starts processes that are not connected. With `--cpu --num_processes 2` it
    silently starts one process; what shows this is that it still sets MASTER_ADDR, the address for the others.
    """
    asked = int(os.environ.get("WORLD_SIZE", 1))
    if accelerator.num_processes != asked:
        raise PosswapError(f"WORLD_SIZE is {asked} but accelerate connected {accelerator.num_processes} process; {ON_CPUS}")
    launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ
    if accelerator.num_processes == 1 and launched and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise PosswapError(f"accelerate launch has started one process, not several (or unset MASTER_ADDR); {ON_CPUS}")


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise for a tracker that accelerate does not know, or would silently skip because it is not installed."""
    known = sorted(set(utils.LoggerType.list()) - {"all"})
    for name in names:
        if name not in known:
            raise PosswapError(f"report_to={name!r} is not a tracker; known are {', '.join(known)}")
        if name not in [str(tracker) for tracker in get_available_trackers()]:
            raise PosswapError(f"the tracker {name!r} is not installed: pip install {name.replace('_', '-')}")


@contextmanager
def sharable(model: torch.nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Inside, FSDP knows a model's layers, and FSDP2 can shard BERT's masked-LM head, whose output bias two modules share.

    accelerate gives the output layer a group of its own, and torch refuses a parameter that is in two groups. The second
    module never uses the bias (it is there for old checkpoints), so its reference is removed inside and put back after.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)  # shared by all models that the process trains
    named = getattr(plugin, "transformer_cls_names_to_wrap", None)
    family = find_family(getattr(getattr(model, "config", None), "model_type", ""))
    if plugin is not None and not named and family is not None:
        # transformers' own list also names BERT's embeddings, which cannot be a unit: the head shares their weights.
        plugin.transformer_cls_names_to_wrap = sorted({type(layer).__name__ for layer in family.layers(model.base_model)})
    head = model.get_output_embeddings() if accelerator.is_fsdp2 and hasattr(model, "get_output_embeddings") else None
    bias = getattr(head, "bias", None)
    holders = [m for m in model.modules() if bias is not None and m is not head and m._parameters.get("bias") is bias]
    for holder in holders:
        del holder.bias
    try:
        yield
    finally:
        if plugin is not None:
            plugin.transformer_cls_names_to_wrap = named
        for holder in holders:
            holder.bias = head.bias  # now the sharded one


def share_weights(model: torch.nn.Module) -> None:
    """Copy the weights of the first process to all others, in place; on one process nothing happens.

    DDP does this when training begins. FSDP does not: each process would keep the shard of its own, different model.
    """
    if PartialState().num_processes > 1:
        for tensor in model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)


def make_whole(model: torch.nn.Module) -> None:
    """Replace parameters that DeepSpeed's stage 3 has sharded by whole ones, in place; all processes must call this.

    Other models stay as they are. DeepSpeed's hooks are removed when accelerate frees its engine.
    """
    whole = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if hasattr(parameter, "ds_id"):
                if parameter.ds_id not in whole:  # tied ones stay tied
                    import deepspeed

                    with deepspeed.zero.GatheredParameters([parameter]):
                        copied = parameter.detach().clone()
                    whole[parameter.ds_id] = torch.nn.Parameter(copied, requires_grad=parameter.requires_grad)
                module._parameters[name] = whole[parameter.ds_id]


def save_trained(model: PreTrainedModel, folder: Path) -> None:
    """Save a trained model on the main process; all processes must call this, since weights that FSDP2 sharded are gathered."""
    weights = None
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        # Tied weights come back as copies; tied again, they are saved once.
        weights |= {name: weights[source] for name, source in model.all_tied_weights_keys.items() if source in weights}
    if PartialState().is_main_process:
        model.save_pretrained(folder, state_dict=weights)
