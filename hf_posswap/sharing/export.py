"""Native export: a swapped model as a stock class of transformers that computes the same function, with no plugin after that.

| positions | BERT | GPT-2 |
|---|---|---|
| sinusoidal, learned, none: what is added to the embeddings | BERT with the vectors as its table | GPT-2, the same |
| rotary | RoFormer, with the angles as its table | GPT-NeoX |
| relative | none: no class has Shaw's vectors | none |

What differs between ours and theirs is rewritten in weights, exactly:

- RoFormer turns pairs (2m, 2m + 1) of all D dimensions by what its table of sines and cosines says. The table is a weight that
  is saved and loaded, so any theta, any fraction (angle 0) and every scaling that does not look at the length fits in.
- GPT-NeoX turns pairs (m, m + R/2) of the first R dimensions, its query, key and value are one projection, head by head.
- The vector that a swap keeps of the old table (`Constant`) goes into an embedding that every token has: BERT's token types,
  GPT-NeoX's tokens, whose head is then untied. Position 0 has a vector of its own. In an encoder, which reads [CLS] first and
  nowhere else, it goes into the embedding of [CLS]; elsewhere any token may come first, and there is no such place.

An export ends with a certificate (parity.py): both models read the same tokens, and the largest difference of their outputs is
part of the result. One that is not small is an error.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import (
    BertForMultipleChoice,
    BertForSequenceClassification,
    BertModel,
    GPT2Model,
    GPTNeoXConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    RoFormerConfig,
    RoFormerPreTrainedModel,
)

from hf_posswap.checkpoint import SWAPPED_CLASSES, SwappedModel
from hf_posswap.errors import CheckpointError, PosswapError, UnsupportedModelError
from hf_posswap.pipelines import around, is_pipeline, tokenizer_of
from hf_posswap.provenance import weight_hashes, write_json
from hf_posswap.schemes.rotary import Rotary, RotaryPositions
from hf_posswap.sharing.parity import PARITY_FILE, Certificate, certify
from hf_posswap.surgery import state_of
from hf_posswap.target import find_target


def _pairs_of_heads(family: str, native: str, heads: Sequence[str]) -> dict[type, type]:
    """Return a family's classes with those of the native one, which calls the causal head by another name."""
    pairs = {f"{family}{head}": f"{native}{head}" for head in heads} | {f"{family}LMHeadModel": f"{native}ForCausalLM"}
    return {getattr(transformers, one): getattr(transformers, other) for one, other in pairs.items()}


_HEADS = ("Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
ROFORMER = _pairs_of_heads("Bert", "RoFormer", (*_HEADS, "ForMaskedLM", "ForMultipleChoice"))
GPT_NEOX = _pairs_of_heads("GPT2", "GPTNeoX", _HEADS)

# What configs call by the same name.
_COMMON = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "bos_token_id", "eos_token_id", "pad_token_id",
    "initializer_range", "use_cache", "id2label", "label2id", "problem_type",
)  # fmt: skip

Converted = tuple[PreTrainedModel, tuple[str, ...], tuple[str, ...]]  # with a certificate's `left_out` and `holds_for`


@dataclass(frozen=True)
class NativeExport:
    """A stock model of transformers and the certificate that it computes what the swapped one does."""

    model: PreTrainedModel
    certificate: Certificate
    tokenizer: PreTrainedTokenizerBase | None = None
    pipeline: nn.Module | None = None  # of sentence-transformers, with the stock model inside

    def __repr__(self) -> str:
        return str(self.certificate)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, config, tokenizer and parity.json into a new folder; of a pipeline all that it has.

        Raises:
            CheckpointError: The folder has something in it.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder} exists already: choose another folder")
        (self.model if self.pipeline is None else self.pipeline).save_pretrained(str(folder))
        if self.tokenizer is not None and self.pipeline is None:
            self.tokenizer.save_pretrained(folder)
        about = {"format": 1, "weights": weight_hashes(folder), "certificate": asdict(self.certificate)}
        write_json(folder / PARITY_FILE, about)


@torch.no_grad()
def export_native(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> NativeExport:
    """Return a swapped model as a stock class of transformers; the swapped one stays as it is.

    Args:
        model: A swapped model, in any dtype, on one device, or a pipeline of sentence-transformers around one.
        tokenizer: The one it reads with, for [CLS] and for the certificate's real text. Saved with the model. A pipeline
            has its own.

    Raises:
        UnsupportedModelError: No native class computes the same function; the message says why.
        PosswapError: The exported model does not compute what the swapped one does.

    >>> import hf_posswap as posswap
    >>> from transformers import BertConfig, BertForMaskedLM
    >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    >>> model = posswap.swap(BertForMaskedLM(config), posswap.Rotary(mark_first=False), max_positions=1024)
    >>> native = posswap.export_native(model)
    >>> type(native.model).__name__, native.model.config.max_position_embeddings, native.certificate.largest < 1e-4
    ('RoFormerForMaskedLM', 1024, True)
    """
    pipeline, tokenizer = model if is_pipeline(model) else None, tokenizer or tokenizer_of(model)
    model, _ = find_target(model, dispatched=True)
    if not isinstance(model, SwappedModel):
        raise UnsupportedModelError(f"this {type(model).__name__} has not been swapped: there is nothing to export")
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise PosswapError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}: they do not belong together"
        )
    stock = next(plain for plain, swapped in SWAPPED_CLASSES.items() if swapped is type(model))
    scheme, attention = model.base_model.position_scheme, model.architecture.self_attentions(model.base_model)[0]
    _check_weights(model)
    if span := state_of(model).span:
        raise UnsupportedModelError(
            f"no class of transformers attends to distances below {span.span} and the first {span.first} tokens: share the "
            "swapped model as it is, or swap without span="
        )
    if not hasattr(attention, "positions"):
        convert = _with_table
    elif isinstance(scheme, Rotary) and stock in ROFORMER:
        convert = _roformer
    elif isinstance(scheme, Rotary) and stock in GPT_NEOX:
        convert = _gpt_neox
    elif isinstance(scheme, Rotary):
        raise UnsupportedModelError(
            f"{stock.__name__} with rotary positions has no native counterpart: heads that have one are "
            f"{', '.join(kind.__name__ for kind in (*ROFORMER, *GPT_NEOX))}"
        )
    else:
        raise UnsupportedModelError(
            f"no class of transformers has {scheme.name} positions in its attention: share the swapped model as it is, which "
            "loads wherever hf_posswap is installed"
        )
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        exported, left_out, holds_for = convert(model, stock, tokenizer)
        exported.to(model.device).eval()
        if model.can_generate():
            exported.generation_config = copy.deepcopy(model.generation_config)
        certificate = certify(model, exported, tokenizer, left_out=left_out, holds_for=holds_for)
    finally:
        for module, training in modes.items():
            module.training = training
    return NativeExport(exported, certificate, tokenizer, None if pipeline is None else around(pipeline, exported))


def _check_weights(model: SwappedModel) -> None:
    names = [name for name, _ in model.named_parameters()]
    if any(".base_layer." in name or "lora_" in name for name in names):
        raise UnsupportedModelError("there are adapters around the model's layers: merge them first (merge_and_unload)")
    if getattr(model, "is_quantized", False) or any(not p.is_floating_point() for p in model.parameters()):
        raise UnsupportedModelError("a quantized model cannot be exported: export first, then quantize")
    if len(dtypes := {str(parameter.dtype) for parameter in model.parameters()}) > 1:
        raise UnsupportedModelError(f"the model's weights are {' and '.join(sorted(dtypes))}: give it one dtype, model.to(...)")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedModelError(f"the model is spread over {sorted(map(str, devices))}: load it on one device")


def _build(kind: type, config: PreTrainedConfig, weights: dict[str, torch.Tensor], model: SwappedModel) -> PreTrainedModel:
    # RoFormer has attention of its own; the others attend as the swapped model does, which makes them equal to the last bit.
    attention = {} if issubclass(kind, RoFormerPreTrainedModel) else {"attn_implementation": model.config._attn_implementation}
    exported = kind._from_config(config, dtype=model.dtype, **attention)
    exported.load_state_dict(weights)  # strict: nothing is missing, and nothing is left over
    return exported


def _with_table(model: SwappedModel, stock: type, _) -> Converted:
    """The family itself, with what the scheme adds at each position as its learned table."""
    owner, name = model.architecture.table_owner(model.base_model)
    embedding = getattr(owner, name)
    own = ("position_scheme", "architectures", "auto_map")
    fields = {key: value for key, value in model.config.to_dict().items() if key not in own}
    config = model.architecture.config_class(**{**fields, "model_type": model.architecture.model_type})
    weights, prefix = _without(model, embedding)
    positions = torch.arange(config.max_position_embeddings, device=model.device)
    weights[f"{prefix}.weight"] = embedding(positions[None])[0]
    return _build(stock, config, weights, model), (), ()


def _without(model: SwappedModel, embedding: nn.Module) -> tuple[dict[str, torch.Tensor], str]:
    """Return the weights without those of the embedding-side module, and that module's name."""
    prefix = next(name for name, module in model.named_modules() if module is embedding)
    return {name: value for name, value in model.state_dict().items() if not name.startswith(f"{prefix}.")}, prefix


def _constant(model: SwappedModel) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Return (mean, first minus mean), float64, and whether the latter is something."""
    owner, name = model.architecture.table_owner(model.base_model)
    constant = getattr(owner, name)
    mean = constant.mean.double()
    difference = torch.zeros_like(mean) if constant.first is None else constant.first.double() - mean
    return mean, difference, bool(difference.any())


def _pairs_first(positions: RotaryPositions) -> torch.Tensor:
    """Order a head's dimensions as (x, y) pairs, fastest first, then those that do not turn; (D,) int64."""
    still = torch.arange(positions.rotary_dim, positions.geometry.head_dim)
    return torch.cat([positions.planes().flatten(), still])


def _roformer(model: SwappedModel, stock: type, tokenizer) -> Converted:
    config, positions = model.config, model.architecture.self_attentions(model.base_model)[0].positions
    kind = (positions.scheme.scaling or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(f"RoFormer has one table of angles, and {kind} scaling chooses angles by length")
    if positions.geometry.head_dim % 2:
        raise UnsupportedModelError(f"RoFormer turns all dimensions in pairs, and head_dim is {positions.geometry.head_dim}")
    if stock is BertForSequenceClassification and config.hidden_act != "tanh":
        raise UnsupportedModelError(
            f"RoFormer's classification head applies {config.hidden_act} where BERT's pooler applies tanh: no weights make "
            "them equal; share the swapped model as it is, or export its encoder (AutoModel) and keep the head yourself"
        )
    mean, difference, marked = _constant(model)
    cls = getattr(tokenizer, "cls_token_id", None)
    if marked and config.is_decoder:
        raise UnsupportedModelError(_NO_PLACE.format("RoFormer as a decoder"))
    if marked and cls is None:
        raise UnsupportedModelError(
            "the first token has a vector of its own, which belongs to [CLS] in RoFormer: pass the tokenizer (which must have "
            "a cls_token), or swap with posswap.Rotary(mark_first=False)"
        )
    tied = config.tie_word_embeddings and model.get_output_embeddings() is not None
    weights, prefix = _without(model, model.base_model.embeddings.position_embeddings)
    embeddings = prefix.removesuffix("position_embeddings")
    types, words = (f"{embeddings}{name}.weight" for name in ("token_type_embeddings", "word_embeddings"))
    weights[types] = (weights[types].double() + mean).to(model.dtype)
    if marked:
        weights[words] = weights[words].clone()  # the head's own are another tensor now, and stay as they were
        weights[words][cls] = (weights[words][cls].double() + difference).to(model.dtype)
    order = _pairs_first(positions)
    for name in [name for name in weights if ".attention.self.query." in name or ".attention.self.key." in name]:
        heads = weights[name].unflatten(0, (config.num_attention_heads, -1))
        weights[name] = heads[:, order.to(heads.device)].flatten(0, 1)
    pooler = {name: weights.pop(name) for name in list(weights) if ".pooler." in f".{name}"}
    head = {BertForMultipleChoice: "sequence_summary.summary", BertForSequenceClassification: "classifier.dense"}.get(stock)
    if head is not None:
        if stock is BertForSequenceClassification:
            weights = {name.replace("classifier.", "classifier.out_proj."): value for name, value in weights.items()}
        weights |= {f"{head}.{name.rpartition('.')[2]}": value for name, value in pooler.items()}
        pooler = {}
    weights = {name.replace("bert.", "roformer.", 1) if name.startswith("bert.") else name: v for name, v in weights.items()}
    base = "" if stock is BertModel else "roformer."
    weights[f"{base}encoder.embed_positions.weight"] = _angle_table(positions, config.max_position_embeddings, model)
    summary = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "tanh"}
    exported = _build(
        ROFORMER[stock],
        RoFormerConfig(
            **{name: getattr(config, name) for name in _COMMON},
            **(summary if stock is BertForMultipleChoice else {}),
            intermediate_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            hidden_dropout_prob=config.hidden_dropout_prob,
            attention_probs_dropout_prob=config.attention_probs_dropout_prob,
            max_position_embeddings=config.max_position_embeddings,
            type_vocab_size=config.type_vocab_size,
            layer_norm_eps=config.layer_norm_eps,
            is_decoder=config.is_decoder,
            add_cross_attention=config.add_cross_attention,
            tie_word_embeddings=tied and not marked,
        ),
        weights,
        model,
    )
    holds_for = ("positions that count from the first token on: RoFormer takes no position_ids",)
    if marked:
        holds_for += ("inputs that begin with [CLS] and have it nowhere else: it carries what marked the first token",)
    return exported, tuple(pooler), holds_for


def _angle_table(positions: RotaryPositions, length: int, model: SwappedModel) -> torch.Tensor:
    """Return RoFormer's table (L, D): sines, then cosines; dimensions that do not turn have angle 0."""
    cos, sin = positions.angles(torch.arange(length, device=model.device)[None], length)
    still = (positions.geometry.head_dim - positions.rotary_dim) // 2
    cos, sin = (nn.functional.pad(part[0, 0], (0, still), value=value) for part, value in ((cos, 1.0), (sin, 0.0)))
    return torch.cat([sin, cos], dim=-1).to(model.dtype)


_NO_PLACE = (
    "the first token has a vector of its own, and {} has no place for it, where any token may come first: swap with "
    "posswap.Rotary(mark_first=False), fit, and export that"
)


def _gpt_neox(model: SwappedModel, stock: type, _) -> Converted:
    config, positions = model.config, model.architecture.self_attentions(model.base_model)[0].positions
    scheme, geometry = positions.scheme, positions.geometry
    if config.add_cross_attention:
        raise UnsupportedModelError("GPT-NeoX has no cross-attention")
    mean, _, marked = _constant(model)
    if marked:
        raise UnsupportedModelError(_NO_PLACE.format("GPT-NeoX"))
    # Pairs (x, y) become (all x, all y).
    turning, still = _pairs_first(positions).split([positions.rotary_dim, geometry.head_dim - positions.rotary_dim])
    order = torch.cat([turning[0::2], turning[1::2], still]).to(model.device)
    own = model.state_dict()
    base = "" if stock is GPT2Model else "transformer."
    there = "" if stock is GPT2Model else "gpt_neox."
    words = own[f"{base}wte.weight"]
    weights = {f"{there}embed_in.weight": (words.double() + mean).to(model.dtype)}
    for part in ("weight", "bias"):
        weights[f"{there}final_layer_norm.{part}"] = own[f"{base}ln_f.{part}"]
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"{base}h.{layer}.", f"{there}layers.{layer}."
        for source, target in (("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm")):
            for part in ("weight", "bias"):
                weights[f"{theirs}{target}.{part}"] = own[f"{ours}{source}.{part}"]
        linear = {"attn.c_proj": "attention.dense", "mlp.c_fc": "mlp.dense_h_to_4h", "mlp.c_proj": "mlp.dense_4h_to_h"}
        for source, target in linear.items():  # Conv1D stores its weight transposed
            weights[f"{theirs}{target}.weight"] = own[f"{ours}{source}.weight"].T.contiguous()
            weights[f"{theirs}{target}.bias"] = own[f"{ours}{source}.bias"]
        scale = 1.0 if config.scale_attn_weights else geometry.head_dim**0.5
        scale /= layer + 1 if config.scale_attn_by_inverse_layer_idx else 1
        for part, fused in (("weight", own[f"{ours}attn.c_attn.weight"].T), ("bias", own[f"{ours}attn.c_attn.bias"])):
            query, key, value = (third.unflatten(0, (geometry.num_heads, -1)) for third in fused.chunk(3))  # (H, D, ...)
            rows = torch.stack([query[:, order] * scale, key[:, order], value], dim=1)  # (H, 3, D, ...)
            weights[f"{theirs}attention.query_key_value.{part}"] = rows.flatten(0, 2)
    head = {name: value for name, value in own.items() if not name.startswith(base)} if base else {}
    # int() of the share must be R again.
    share = positions.rotary_dim / geometry.head_dim
    if int(geometry.head_dim * share) != positions.rotary_dim:
        share = (positions.rotary_dim + 0.5) / geometry.head_dim
    scaling = dict(scheme.scaling or {"rope_type": "default"})
    dynamic = scaling["rope_type"] == "dynamic"
    if scaling["rope_type"] not in ("default", "linear", "dynamic"):
        scaling.setdefault("original_max_position_embeddings", geometry.trained_positions)
    exported = _build(
        GPT_NEOX[stock],
        GPTNeoXConfig(
            **{name: getattr(config, name) for name in _COMMON},
            intermediate_size=config.n_inner or 4 * config.hidden_size,
            hidden_act=config.activation_function,
            attention_dropout=config.attn_pdrop,
            hidden_dropout=config.resid_pdrop,
            # Where `dynamic` begins to grow is what GPT-NeoX calls its maximum.
            max_position_embeddings=geometry.trained_positions if dynamic else config.max_position_embeddings,
            layer_norm_eps=config.layer_norm_epsilon,
            use_parallel_residual=False,
            rope_parameters={**scaling, "rope_theta": float(scheme.theta), "partial_rotary_factor": share},
            tie_word_embeddings=False,
        ),
        weights | head,
        model,
    )
    return exported, (), ()
