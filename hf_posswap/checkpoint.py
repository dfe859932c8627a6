"""Swapped models as transformers sees them: own classes, own `model_type`, an entry in config.json.

A swapped model must never load as a plain one, and a scheme without parameters leaves no trace in the weights. So every head
gets a subclass with a `model_type` such as `posswap-bert`, whose `__init__` builds the family's model and installs the scheme
of the config. `AutoModelFor...from_pretrained` finds it once hf_posswap is imported; otherwise a small file saved next to the
weights imports it (given trust_remote_code) or says what to install. Stock classes refuse the table's shape
(`PositionEmbedding`).
"""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from hf_posswap.architectures import ARCHITECTURES, Architecture
from hf_posswap.attention import add_positioned_class
from hf_posswap.errors import CheckpointError, PosswapError
from hf_posswap.forward import positioned_forward
from hf_posswap.scheme_entry import AVERAGED, DIGEST, digest, is_edited, read_config_entry, sign, span_in
from hf_posswap.schemes import AttentionPositions, PositionEmbedding, Scheme
from hf_posswap.surgery import check_edits, geometry_of, install, position_modules, state_of

STUB = "modeling_hf_posswap.py"

SWAPPED_CLASSES: dict[type, type] = {}  # transformers' class -> our subclass; filled when a family is registered
READER_CLASSES: dict[type, type] = {}  # the same for what is inside the headless model: see `Architecture.reader`
CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {}  # "bert" -> the config class of "posswap-bert"


class InitialisesPositions:
    """Mixin in front of every model that transformers initialises by itself: the whole one, and the `reader` inside it."""

    def _init_weights(self, module):
        """As the family does; also fill our modules, which transformers leaves empty when it builds a model to load."""
        if isinstance(module, (AttentionPositions, PositionEmbedding)):
            for name, value in module.initial_values().items():
                init.copy_(attrgetter(name)(module), value)  # of a module inside, too
        else:
            super()._init_weights(module)
        if DIGEST in module._buffers:
            init.copy_(getattr(module, DIGEST), self._digest())

    def _initialize_weights(self, module, *rest):
        """As in transformers; a digest that it finds loaded must be that of the config's scheme.

        Here, not in `from_pretrained`, which a model around this one (EncoderDecoderModel, the user's own) does not call.
        """
        done = getattr(module, "_is_hf_initialized", False)
        super()._initialize_weights(module, *rest)
        kept = None if done or is_edited(self.config) else module._buffers.get(DIGEST)
        if kept is not None and not kept.is_meta and not torch.equal(kept.cpu(), self._digest()):
            raise CheckpointError(
                f"{self.name_or_path or type(self).__name__}: position_scheme in config.json, with all options of its class, "
                "is not the one that these weights were saved with. Get the file again, or, if the change is meant, add "
                f'"edited": true to it. {AVERAGED}'
            )

    def _digest(self) -> torch.Tensor:
        return digest(*read_config_entry(self.config), span_in(self.config.position_scheme))


class SwappedModel(InitialisesPositions):
    """Mixin in front of a transformers class: the same model with the position scheme of its config."""

    architecture: Architecture
    _keys_to_ignore_on_load_missing: ClassVar = [rf"\.?{DIGEST}$"]  # checkpoints of version 0.1.0 have none

    def __init__(self, config: PreTrainedConfig, *args, **kwargs):
        scheme, trained_positions = read_config_entry(config)
        geometry = geometry_of(config, self.architecture.longest_input(config), trained_positions)
        scheme.check(geometry)
        super().__init__(config, *args, **kwargs)
        span, classes = span_in(config.position_scheme), SWAPPED_CLASSES | READER_CLASSES
        embedding = install(self, self.architecture, scheme, geometry, span=span, classes=classes)
        sign(embedding, self._digest(), guard=not is_edited(config))
        self.init_weights()  # of our modules, the others are; a learned table from scratch starts as the family's tables do

    @property
    def position_scheme(self) -> Scheme:
        return state_of(self).scheme

    def save_pretrained(self, *args, **kwargs):
        """As in transformers, but not with a config that says another length, or with layers of a mix moved."""
        check_edits(self)
        super().save_pretrained(*args, **kwargs)

    def _prepare_position_ids_for_generation(self, *args, **kwargs):
        """As in transformers, which counts from 0 for every family: here in the family's own ids, as a forward counts."""
        return super()._prepare_position_ids_for_generation(*args, **kwargs) + self.architecture.first_id(self.config)

    def resize_position_embeddings(self, new_num_position_embeddings: int):
        longest = new_num_position_embeddings
        raise PosswapError(f"a swap sets the longest input: call posswap.swap(model, scheme, max_positions={longest})")

    def init_continuous_batching(self, *args, **kwargs):
        """As in transformers, for `generate_batch`, whose paged cache knows no distances, spans and ids of a family."""
        ours = [module for module in self.modules() if isinstance(module, AttentionPositions)]
        span, first = state_of(self).span is not None, self.architecture.first_id(self.config)  # there ids count from 0
        if span or first or any(one.needs_key_positions or one.attend is not None or one.bias is not None for one in ours):
            kind = f"{self.position_scheme.name} positions{' with a span' * span}{f' counted from {first}' * (first > 0)}"
            raise PosswapError(f"{kind} cannot use the paged cache of generate_batch: call generate with a padded batch")
        return super().init_continuous_batching(*args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoModel"):
        """Do nothing: transformers would save a copy of this module with the model, where we save `STUB`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but position parameters that the checkpoint lacks are an error, and so are pickled weights."""
        kwargs |= {"output_loading_info": True, "use_safetensors": True}
        try:
            model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            place = f"the weights of {pretrained_model_name_or_path}"
            raise CheckpointError(f"{place} cannot be read ({error}), truncated or corrupted: get them again") from error
        _check_loaded(model, info, str(pretrained_model_name_or_path))
        return (model, info) if output_loading_info else model


def register_architecture(architecture: Architecture) -> Architecture:
    """Register a family with `swap`, and its swapped classes with transformers' Auto classes.

    Its heads are those in the Auto mappings and its `further_classes`. PosswapError: its `model_type` is taken, or not its
    config's.
    """
    if not isinstance(architecture, Architecture):
        raise PosswapError(f"{architecture!r} must be an instance of a subclass of Architecture")
    known, kind = ARCHITECTURES.get(architecture.model_type), architecture.config_class.model_type
    if architecture.model_type != kind:  # the classes made here would take the names of that family's
        raise PosswapError(f"model_type is {architecture.model_type!r}, config_class is of {kind!r}: set both to one family's")
    if architecture.model_type in CONFIG_CLASSES:
        if type(known) is type(architecture):
            return known
        raise PosswapError(f"the family {architecture.model_type!r} is registered already, with {type(known).__name__}")
    ARCHITECTURES[architecture.model_type] = architecture
    add_positioned_class(architecture)
    config_class = _config_class(architecture)
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)  # built-in ones are named on import
    for model_class in (architecture.base_class, *architecture.further_classes):
        _swapped_class(model_class, config_class, architecture)
    if (reader := architecture.reader_class) is not None:
        own = {"architecture": architecture, "forward": positioned_forward(reader)}
        READER_CLASSES[reader] = _model_class(InitialisesPositions, reader, own)
    for auto_class in vars(modeling_auto).values():
        if not (isinstance(auto_class, type) and issubclass(auto_class, _BaseAutoModelClass)):
            continue
        mapping = auto_class._model_mapping
        if mapping is None or architecture.config_class not in mapping:
            continue
        listed = mapping[architecture.config_class]
        for model_class in listed if isinstance(listed, tuple) else (listed,):
            swapped = _swapped_class(model_class, config_class, architecture)
            auto_class.register(config_class, swapped)
            config_class.loaded_by[auto_class.__name__] = swapped.__name__
            # Trainer shifts labels that it smooths, and pipelines warn, by classes' names, under whatever key
            mapping._model_mapping[f"{config_class.model_type} {swapped.__name__}"] = swapped.__name__
    if architecture.config_class in TOKENIZER_MAPPING:
        tokenizer = TOKENIZER_MAPPING[architecture.config_class]
        tokenizer = [kind for kind in (tokenizer if isinstance(tokenizer, tuple) else (tokenizer,)) if kind is not None]
        AutoTokenizer.register(config_class, tokenizer_class=tokenizer[-1])
    return architecture


def _check_loaded(model: "SwappedModel", info: dict, source: str) -> None:
    """Raise unless position weights are complete, all read and finite."""
    found = {part for one in position_modules(model, model.architecture) for part in one.modules()}
    ours = {place: one for place, one in model.named_modules() if one in found}

    def among_ours(keys) -> list[str]:
        return sorted(one for one in keys if one.rpartition(".")[0] in ours and not one.endswith(DIGEST))

    if lost := among_ours([*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]):
        raise CheckpointError(f"{source} lacks position weights ({', '.join(lost)}): save the swapped model again")
    if unread := among_ours(info["unexpected_keys"]):
        raise CheckpointError(f"{source} has position weights that its scheme does not read: {', '.join(unread)}. Get it again")
    for place, module in ours.items():
        empty = module._non_persistent_buffers_set - getattr(module, "initial_values", dict)().keys()
        if empty := empty | {name for name, value in vars(module).items() if isinstance(value, torch.Tensor) and value.is_meta}:
            what = f"{type(module).__name__} makes {', '.join(sorted(empty))} in __init__, and no checkpoint holds that"
            raise CheckpointError(f"{what}: compute it in forward, or register a persistent buffer")
        for one, value in module.named_parameters(recurse=False):
            if not value.is_meta and not torch.isfinite(value).all():
                raise CheckpointError(f"{source}: {place}.{one} holds NaN or infinite numbers: get the checkpoint again")


class SwappedConfig:
    """Mixin in front of a family's config: what it saves can be loaded without importing hf_posswap."""

    loaded_by: ClassVar[dict[str, str]]  # Auto class -> our class, by name
    importable: ClassVar[bool]  # whether an import of hf_posswap is enough to have these classes

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in transformers, and also write `STUB`: here, so that push_to_hub uploads it as a new file."""
        if not self.importable:
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        classes = {"AutoConfig": type(self).__name__, **self.loaded_by}
        imports = "".join(f"    {name},\n" for name in sorted(set(classes.values())))
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        (Path(save_directory) / STUB).write_text(_STUB_TEXT.format(imports=imports), "utf-8", newline="\n")
        self.auto_map = {auto_class: f"{Path(STUB).stem}.{name}" for auto_class, name in classes.items()}
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            del self.auto_map  # it belongs in the file, not in the config that `restore` compares

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Do nothing, as `SwappedModel.register_for_auto_class`."""


# transformers checks the imports of this file first, and tells users to install a package that is missing.
_STUB_TEXT = '''"""The position scheme of this model is in config.json; what it means is in hf_posswap: pip install hf_posswap

With `import hf_posswap` the Auto classes load this model. Without, trust_remote_code=True does, by these imports alone.
"""

from hf_posswap.checkpoint import (  # noqa: F401
{imports})
'''


def is_stub(text: str) -> bool:
    """Whether this is what is saved as `STUB`, and no other code."""
    return re.fullmatch(re.escape(_STUB_TEXT).replace(re.escape("{imports}"), r"(?:    Posswap\w+,\n)*"), text) is not None


def _config_class(architecture: Architecture) -> type[PreTrainedConfig]:
    own = {
        "__annotations__": {"position_scheme": dict[str, Any] | None},
        "model_type": f"posswap-{architecture.model_type}",
        "position_scheme": None,
        "loaded_by": {},
        "importable": type(architecture).__module__.startswith("hf_posswap."),
    }
    words = "with a `position_scheme`: format, trained_positions, name and options."
    CONFIG_CLASSES[architecture.model_type] = _subclass(SwappedConfig, architecture.config_class, words, own)
    return CONFIG_CLASSES[architecture.model_type]


def _swapped_class(model_class: type, config_class: type, architecture: Architecture) -> type:
    if model_class not in SWAPPED_CLASSES:
        own = {"__annotations__": {"config": config_class}, "config_class": config_class, "architecture": architecture}
        if model_class is architecture.base_class and architecture.reader_class is None:
            own["forward"] = positioned_forward(model_class)
        SWAPPED_CLASSES[model_class] = _model_class(SwappedModel, model_class, own)
        # transformers finds these by a class's name: CLIP's text model has other names in its head's files.
        if renaming := get_checkpoint_conversion_mapping(model_class.__name__):
            register_checkpoint_conversion_mapping(SWAPPED_CLASSES[model_class].__name__, renaming, overwrite=True)
    return SWAPPED_CLASSES[model_class]


def _model_class(mixin: type, base: type, own: dict[str, Any]) -> type:
    made = _subclass(mixin, base, "with the position scheme of its config.", own)
    # transformers looks up what to record (hidden_states, attentions) by class name; an __init__ fills that in, which never
    # runs for a model that changes its class.
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(made), made._can_record_outputs)
    return made


def _subclass(mixin: type, base: type, words: str, own: dict[str, Any]) -> type:
    """Return a class with these attributes of its own, importable from here, so that models can be pickled."""
    own = {"__module__": __name__, "__doc__": f"{base.__name__} {words}", **own}
    made = globals()[f"Posswap{base.__name__}"] = type(f"Posswap{base.__name__}", (mixin, base), own)
    return made


for _architecture in tuple(ARCHITECTURES.values()):
    register_architecture(_architecture)
