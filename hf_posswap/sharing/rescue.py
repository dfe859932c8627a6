"""Load BERT checkpoints with the relative positions that transformers 4 had, and that transformers 5 dropped.

`position_embedding_type` "relative_key" (Shaw et al. 2018) and "relative_key_query" (Huang et al. 2020, method 4): a table of
2 P - 1 vectors in each layer, shared by all heads, for distances up to P - 1 in both directions; nothing is added to the
embeddings. transformers 5 loads such a checkpoint as an absolute model with an untrained table (`load_reports` warns of it).

Row r of their table is for the distance query - key = r - (P - 1). Ours, with clip = P - 1, counts key - query: it is flipped.
"""

import warnings

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hf_posswap.checkpoint import CONFIG_CLASSES, SwappedModel
from hf_posswap.errors import CheckpointError, PosswapError, UnsupportedModelError
from hf_posswap.scheme_entry import config_entry, on_hub
from hf_posswap.schemes.relative import Relative, RelativePositions
from hf_posswap.sharing.load_reports import TABLE

KINDS = ("relative_key", "relative_key_query")


def load_relative_key(
    path_or_id: str, auto_class: type = AutoModel, *, max_positions: int | None = None, **hub
) -> PreTrainedModel:
    """Load a BERT checkpoint of transformers 4 with relative positions; outputs equal those of transformers 4.57.6.

    Args:
        path_or_id: A folder or a Hub repository.
        auto_class: AutoModel, AutoModelForMaskedLM, ...: the head to load it with.
        max_positions: The longest input in tokens. Default: the checkpoint's. Longer distances use the outermost vectors.
        hub: Options of `from_pretrained`: revision, token, cache_dir, local_files_only, force_download, subfolder, dtype.

    Returns:
        A swapped model; once saved, it loads with the Auto classes wherever hf_posswap is imported.

    Raises:
        PosswapError: An unknown option, or a max_positions below the checkpoint's.
        UnsupportedModelError: Another family, or a checkpoint with absolute positions.
        CheckpointError: A layer's table is missing.
    """
    allowed = {"revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder", "dtype"}
    if unknown := sorted(set(hub) - allowed):
        raise PosswapError(f"unknown option {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    fields, _ = PreTrainedConfig.get_config_dict(path_or_id, **{key: hub[key] for key in hub if key != "dtype"})
    kind = fields.pop("position_embedding_type", "absolute")
    found = f"{path_or_id} is {fields.get('model_type')} with {kind!r} positions"
    if kind not in KINDS:
        raise UnsupportedModelError(f"{found}: use from_pretrained")
    if fields.get("model_type") != "bert":
        raise UnsupportedModelError(f"{found}, and only bert's can be loaded here: use transformers 4, as 5 drops them")
    config_class = CONFIG_CLASSES["bert"]
    trained = fields.get("max_position_embeddings", config_class().max_position_embeddings)
    if (max_positions or trained) < trained:
        raise PosswapError(f"max_positions={max_positions} must be at least the checkpoint's {trained}")
    scheme = Relative(clip=trained - 1, values=False, share_heads=True, key_query=kind == "relative_key_query")
    entry = config_entry(scheme, trained, max_positions or trained, on_hub(str(path_or_id)))
    own = {"position_scheme": entry, "max_position_embeddings": max_positions or trained}
    fields = {name: value for name, value in fields.items() if name not in ("model_type", "architectures", "auto_map")}
    config = config_class(**fields | own)
    model_class = (getattr(auto_class, "_model_mapping", None) or {}).get(config_class, None)
    if model_class is None:
        raise UnsupportedModelError(f"{auto_class.__name__} is no Auto class with a BERT: AutoModel and AutoModelFor... are")
    # Not SwappedModel.from_pretrained, which refuses missing or misshapen position weights. These files have an absolute table
    # that the model never read, and lack the vectors that are added to embeddings, which are zero here.
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # the load report would list both as faults
    try:
        model, info = super(SwappedModel, model_class).from_pretrained(
            path_or_id,
            config=config,
            key_mapping={TABLE: "attention.self.positions.key_table"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **hub,
        )
    finally:
        transformers_logging.set_verbosity(verbosity)
    misfits = {name for name, *_ in info["mismatched_keys"]}
    unread = {name for name in (*info["missing_keys"], *misfits) if ".position_embeddings." not in f".{name}"}
    if lost := sorted(name for name in unread if name in misfits or name.endswith(".positions.key_table")):
        raise CheckpointError(f"{path_or_id} says {kind}, and what that needs is missing or misshapen: {', '.join(lost)}")
    if unread:
        warnings.warn(f"new weights, which the checkpoint lacks: {', '.join(sorted(unread))}", stacklevel=2)
    # transformers would save the tables under their old names.
    model._weight_conversions = None
    # As after a swap: an adapter that names this checkpoint as its base would be loaded onto an absolute model.
    model.name_or_path = model.config._name_or_path = ""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, RelativePositions):
                module.key_table.copy_(module.key_table.flip(0))
    return model
