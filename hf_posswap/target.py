"""Find the transformers model to swap in what was given, or say why it cannot be swapped."""

import gc
import re
import sys

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import ARCHITECTURES, Architecture, find_family
from hf_posswap.checkpoint import SWAPPED_CLASSES, SwappedConfig, SwappedModel
from hf_posswap.errors import PosswapError, UnsupportedModelError
from hf_posswap.pipelines import unwrap

# Families that people ask for, and why they cannot be swapped.
_PAIRS = "its encoder and its decoder each have a table, and a scheme would have to go into both"
_BUCKETS = "it has no table: its positions are a bias on scores already"
_ROTARY = "it has no table: its positions are rotary already"
WHY_NOT = {
    "bart": _PAIRS,
    "clip": "load its text model by itself, as a CLIPTextModel (from 5.21 on also ...WithProjection), and swap that",
    "encoder-decoder": "swap its encoder and its decoder, each by itself, then compose them",
    **dict.fromkeys(("gpt_neox", "llama", "mistral", "modernbert", "qwen2", "qwen3", "roformer"), _ROTARY),
    "gpt_neo": "it has local layers and attention that takes no other implementation, so a scheme cannot be put in",
    "mpnet": "besides its table it has a bias by distance, in attention that takes no other implementation",
    "mt5": _BUCKETS,
    "t5": _BUCKETS,
    "whisper": _PAIRS,
}


def unsupported(kind: str, what: str) -> UnsupportedModelError:
    """Return the error that says why a family cannot be swapped, and which can."""
    if kind in WHY_NOT:
        return UnsupportedModelError(f"cannot swap {what}: {WHY_NOT[kind]}. posswap.ARCHITECTURES are the families that can be")
    known = f"positions can be swapped in {', '.join(sorted(ARCHITECTURES))} models"
    way = "For another family with a learned table, register it in Python: posswap.register_architecture"
    return UnsupportedModelError(f"cannot swap {what}; {known}. {way}")


def find_target(model, *, dispatched: bool = False) -> tuple[PreTrainedModel, Architecture]:
    """Return the transformers model to work on and its family, or raise saying why it cannot be swapped.

    `dispatched`: accept a model that accelerate has spread over devices or offloaded: callers that write look at its weights.
    """
    model = unwrap(model)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        model = model.get_base_model()
    if isinstance(model, torch._dynamo.eval_frame.OptimizedModule) or getattr(model, "_compiled_call_impl", None):
        raise UnsupportedModelError("this model is compiled already: swap, describe or restore it before that")
    if not isinstance(model, PreTrainedModel):
        what = f"a {type(model).__name__} cannot be swapped"
        raise UnsupportedModelError(f"{what}: pass a model of transformers, PEFT or sentence-transformers")
    kind = model.config.model_type
    architecture = find_family(kind)
    if architecture is None:
        raise unsupported(kind, f"a {kind!r} model ({type(model).__name__})")
    if not dispatched and any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):  # torch's DTensors
        raise UnsupportedModelError("this model's weights are sharded (fully_shard): swap, restore or save before that")
    if not isinstance(model, SwappedModel) and type(model) not in SWAPPED_CLASSES:
        raise UnsupportedModelError(
            f"{type(model).__name__} is not one of transformers' own {kind} classes, so a swapped copy of it could not be "
            f"loaded again: swap the {architecture.base_class.__name__} inside it, or use one of "
            f"{', '.join(sorted(c.__name__ for c in SWAPPED_CLASSES if issubclass(c.config_class, architecture.config_class)))}"
        )
    positions = getattr(model.config, "position_embedding_type", "absolute")
    if positions == "rotary":
        raise UnsupportedModelError(f"this {type(model).__name__} has rotary positions already: there is no table to replace")
    if positions not in ("absolute", None):
        what = f"this checkpoint has {positions!r} positions, which transformers 5 loads as absolute ones"
        way = "load it with posswap.load_relative_key(path, auto_class)"
        raise UnsupportedModelError(f"{what} that were never trained: {way}")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError("this model is quantized: swap the full-precision checkpoint, then quantize")
    if not isinstance(model, SwappedModel) and any(map(_for_swapped, (getattr(model, "peft_config", None) or {}).values())):
        what = "this adapter was trained on a swapped model and has been put on a plain one, which it does not fit"
        raise PosswapError(f"{what}: load the swapped model, or swap this one without the adapter, then load the adapter")
    if isinstance(model.config, SwappedConfig) and not isinstance(model, SwappedModel):
        what = f"this {type(model).__name__} was made from the config of a swapped model, and has a table all the same"
        way = f"make a {SWAPPED_CLASSES[type(model)].__name__}, as an Auto class's from_config does"
        raise UnsupportedModelError(f"{what}: {way}")
    base = model.base_model
    owner, name = architecture.table_owner(base)
    table = getattr(owner, name, None)
    if isinstance(base, SwappedModel) and not isinstance(model, SwappedModel):
        what = f"the model inside this {type(model).__name__} was swapped by itself, or with another head that shares it"
        raise UnsupportedModelError(f"{what}: posswap.restore that one, then swap this one, or load this one again")
    if table is None or (not isinstance(model, SwappedModel) and type(table) is not architecture.table_class):
        what = f"{type(table).__name__}, not a learned table ({architecture.table_class.__name__})"
        why = "something else has changed this model's positions"
        raise UnsupportedModelError(f"{type(owner).__name__}.{name} is {what}: {why}: load it again")
    if not dispatched and any(p.is_meta for p in table.parameters()):
        raise UnsupportedModelError("this model's weights are on the meta device: load them first, then swap")
    if any(p.is_inference() for p in base.parameters()):
        raise UnsupportedModelError("this model was made inside torch.inference_mode() and cannot be changed: load it outside")
    attentions = architecture.self_attentions(base)
    weights = [getattr(layer, "weight", None) for one in attentions for layer in one.modules()]
    if any(callable(one) and not isinstance(one, nn.Module) for one in weights):  # a module is torch's parametrization
        raise UnsupportedModelError("this model's projections are quantized: swap, describe or restore it before that")
    for module in (base, owner, *architecture.layers(base), *attentions):  # compiled, they pass by the hooks of a fit
        if isinstance(module, torch._dynamo.eval_frame.OptimizedModule) or module._compiled_call_impl:
            kind = type(getattr(module, "_orig_mod", module)).__name__
            raise UnsupportedModelError(f"{kind} is compiled already: swap, describe or restore it before that")
    # accelerate's dispatch (device_map over several devices, offload) and other patchers set `forward` on the instance, which
    # would keep calling the old attention: the swap would silently do nothing.
    for module in () if dispatched else (base, owner, *attentions):
        if "forward" in vars(module):
            what = f"the forward of {type(module).__name__} is replaced on the instance"
            why = "device_map with several devices, offload or another patcher"
            raise UnsupportedModelError(f"{what} ({why}): swap on one device, save, and load the result with device_map")
    return model, architecture


def has_adapters(model: PreTrainedModel) -> bool:
    """Whether PEFT's adapters or prompts are beside the weights; `model` may be PEFT's, or a pipeline."""
    return any(re.search(r"\.base_layer\.|lora_|prompt_encoder\.", name) for name, _ in model.named_parameters())


def check_no_adapters(model: PreTrainedModel) -> None:
    """Raise if there are."""
    if has_adapters(model):
        what = "there are adapters or learned prompts beside the model's weights"
        raise UnsupportedModelError(f"{what}: merge them first (merge_and_unload), or take them off")


def _for_swapped(adapter) -> bool:
    """Whether a PEFT config names a swapped model, by its class or by the base's config."""
    if (adapter.auto_mapping or {}).get("base_model_class", "").startswith("Posswap"):
        return True
    try:
        config, _ = PreTrainedConfig.get_config_dict(adapter.base_model_name_or_path or "", local_files_only=True)
    except OSError:
        return False
    return str(config.get("model_type")).startswith("posswap-")


def check_not_in_composite(model: PreTrainedModel) -> None:
    """Raise if a model is a part of another one, an EncoderDecoderModel or a BLIP-2: that one's config would not follow.

    A module does not know its parent, but the garbage collector finds what refers to it. It searches all objects of the
    process, so it is asked only where models of other families have been imported.
    """
    own = {architecture.base_class.__module__ for architecture in ARCHITECTURES.values()}
    own |= {"transformers.models.auto.modeling_auto"}
    if not any(name.startswith("transformers.models.") and ".modeling_" in name for name in {*sys.modules} - own):
        return
    holders = [one for one in gc.get_referrers(model) if isinstance(one, dict)]
    parts = [one for one in holders if all(isinstance(value, (nn.Module, type(None))) for value in one.values())]
    spaces = [one for names in parts for one in gc.get_referrers(names) if isinstance(one, dict)]
    for owner in (one for space in spaces for one in gc.get_referrers(space)):
        whole = isinstance(owner, PreTrainedModel) and owner.base_model is not model
        if whole and any(part is model for part in owner.children()):
            what = f"this model is a part of {type(owner).__name__}, whose saved config would not record it"
            raise UnsupportedModelError(f"{what}: swap or restore the parts first, then compose them")
