"""Encoders with rotary positions as stock classes: BERT and its kin as RoFormer, RoBERTa's as JinaEmbeddingsV3, ESM as itself.

BERT, ELECTRA, DistilBERT and ALBERT have the same layers under other names; a layer that ALBERT shares is written for each use.
A classifier of texts goes where the activation in its head is found: BERT's (tanh) to JinaEmbeddingsV3, ELECTRA's to RoFormer;
for DistilBERT's (relu) and ALBERT's there is no class.

- RoFormer rotates pairs (2m, 2m + 1) of all D dimensions, by a table of sines and cosines. The table is a saved weight, so any
  theta, any fraction (with angle 0) and every scaling that does not depend on the input's length can be written into it.
- JinaEmbeddingsV3 rotates all pairs (m, m + D/2), at frequencies given by `rope_parameters`.
- ESM with `position_embedding_type` "rotary" rotates the same pairs, at frequencies in a saved buffer.
"""

import torch
import transformers
from torch import nn

from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.sharing import native
from hf_posswap.sharing.native import Converted

_HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
_TOKENS = ("Model", "ForMaskedLM", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
ROFORMER = native.pairs_of_heads(("Bert", "Electra", "DistilBert", "Albert"), "RoFormer", _TOKENS)
ROFORMER |= native.pairs_of_heads(("Electra",), "RoFormer", ("ForCausalLM", "ForSequenceClassification"))
ROFORMER |= {transformers.BertLMHeadModel: transformers.RoFormerForCausalLM}
JINA = native.pairs_of_heads(("Roberta", "XLMRoberta", "Camembert"), "JinaEmbeddingsV3", (*_HEADS, "ForQuestionAnswering"))
JINA |= native.pairs_of_heads(("Bert",), "JinaEmbeddingsV3", ("ForSequenceClassification",))
# Fields of a config that BERT and its kin share.
_SAME = ("intermediate_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size")
_SAME += ("layer_norm_eps",)
ESM = native.pairs_of_heads(("Esm",), "Esm", _HEADS)


def roformer(model: SwappedModel, stock: type, tokenizer) -> Converted:
    """Export a BERT, ELECTRA, DistilBERT or ALBERT to RoFormer."""
    config, positions = model.config, model.architecture.self_attentions(model.base_model)[0].positions
    kind = (positions.scheme.scaling or {}).get("rope_type")
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(f"RoFormer has one table of angles, and {kind} scaling chooses angles by length")
    if positions.geometry.head_dim % 2:
        raise UnsupportedModelError(f"RoFormer rotates pairs of dimensions, and head_dim {positions.geometry.head_dim} is odd")
    family, target = model.architecture.model_type, ROFORMER[stock]
    if stock.__name__ in _ELECTRA_GELU and config.hidden_act != "gelu":
        raise UnsupportedModelError(f"RoFormer's head applies {config.hidden_act}, ELECTRA's gelu: share the model itself")
    if family == "albert" and config.embedding_size == config.hidden_size:
        what = "RoFormer projects words of another size alone, and this ALBERT all"
        raise UnsupportedModelError(f"{what}: share the model itself")
    weights, holds_for, tied = native.without_constant(model, tokenizer, "RoFormer", onto="token_type")
    left_out = tuple(name for name in weights if "pooler." in name)
    weights = _as_bert(model, weights)
    native.reorder(weights, native.pairs_first(positions), config.num_attention_heads)
    pooler = {name: weights.pop(name) for name in list(weights) if "pooler." in name}
    if chooses := target is transformers.RoFormerForMultipleChoice:
        weights |= {f"sequence_summary.summary.{name.rpartition('.')[2]}": value for name, value in pooler.items()}
        left_out = ()
    base = "" if stock is model.architecture.base_class else "roformer."
    length, still = config.max_position_embeddings, (positions.geometry.head_dim - positions.rotary_dim) // 2
    angles = positions.angles(torch.arange(length, device=model.device)[None], length)
    # RoFormer's table, (L, D): sines, then cosines; unrotated dimensions have angle 0.
    cos, sin = (nn.functional.pad(part[0, 0], (0, still), value=value) for part, value in zip(angles, (1.0, 0.0), strict=True))
    weights[f"{base}encoder.embed_positions.weight"] = torch.cat([sin, cos], dim=-1).to(model.dtype)
    fields = native.common(config, *_SAME, "max_position_embeddings", "is_decoder", "add_cross_attention", "embedding_size")
    if family == "distilbert":
        fields |= {theirs: getattr(config, ours) for theirs, ours in _DISTILBERT_FIELDS.items()}
    if family == "albert":
        fields["num_hidden_layers"] *= config.inner_group_num
    if chooses:
        fields |= {"summary_type": "first", "summary_use_proj": True, "summary_activation": _CHOOSES.get(family, "tanh")}
    exported = native.build(target, transformers.RoFormerConfig(**fields, tie_word_embeddings=tied), weights, model)
    counted = "positions that count from the first token on: RoFormer takes no position_ids"
    return exported, left_out, (counted, *holds_for)


_ELECTRA_GELU = ("ElectraForMaskedLM", "ElectraForCausalLM", "ElectraForSequenceClassification")
_CHOOSES = {"electra": "gelu", "distilbert": "relu"}  # the activation before the choice
_DISTILBERT_FIELDS = {
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
_BERT_NAMES = {  # of each family's weights, in this order, since some are parts of others
    "bert": {},
    "electra": {"generator_predictions.": "cls.predictions.transform.", "generator_lm_head.": "cls.predictions.decoder."},
    "distilbert": {
        "transformer.layer.": "encoder.layer.",
        "attention.q_lin": "attention.self.query",
        "attention.k_lin": "attention.self.key",
        "attention.v_lin": "attention.self.value",
        "attention.out_lin": "attention.output.dense",
        "sa_layer_norm": "attention.output.LayerNorm",
        "ffn.lin1": "intermediate.dense",
        "ffn.lin2": "output.dense",
        "output_layer_norm": "output.LayerNorm",
        "pre_classifier.": "pooler.dense.",
        "vocab_transform": "cls.predictions.transform.dense",
        "vocab_layer_norm": "cls.predictions.transform.LayerNorm",
        "vocab_projector": "cls.predictions.decoder",
    },
    "albert": {
        "encoder.embedding_hidden_mapping_in": "embeddings_project",
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.dense": "attention.output.dense",
        "attention.LayerNorm": "attention.output.LayerNorm",
        "ffn_output": "output.dense",
        "ffn.": "intermediate.dense.",
        "full_layer_layer_norm": "output.LayerNorm",
        "pooler.": "pooler.dense.",
        "predictions.dense": "predictions.transform.dense",
        "predictions.LayerNorm": "predictions.transform.LayerNorm",
        "predictions.": "cls.predictions.",
    },
}


def _as_bert(model: SwappedModel, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights under RoFormer's names, which are BERT's."""
    config, family = model.config, model.architecture.model_type
    named = _renamed(weights, {f"{model.base_model_prefix}.": "roformer.", **_BERT_NAMES[family]})
    if "cls.predictions.decoder.bias" in named:
        named["cls.predictions.bias"] = named["cls.predictions.decoder.bias"]
    for layer in range(config.num_hidden_layers if family == "albert" else 0):
        group, inner = int(layer / (config.num_hidden_layers / config.num_hidden_groups)), config.inner_group_num
        for part in range(inner):
            shared, own = f"albert_layer_groups.{group}.albert_layers.{part}.", f"layer.{layer * inner + part}."
            named |= {name.replace(shared, own): value for name, value in named.items() if shared in name}
    return {name: value for name, value in named.items() if "albert_layer_groups." not in name}


def _renamed(weights: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """Return the weights with these parts of their names replaced, one after the other."""
    named = {}
    for name, value in weights.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        named[name] = value
    return named


def jina(model: SwappedModel, stock: type, tokenizer) -> Converted:
    """Export a RoBERTa, XLM-RoBERTa, CamemBERT or BERT to JinaEmbeddingsV3: the same post-norm layers with other names."""
    config, positions = model.config, model.architecture.self_attentions(model.base_model)[0].positions
    if config.is_decoder:
        raise UnsupportedModelError("JinaEmbeddingsV3 is no decoder")
    if positions.rotary_dim != positions.geometry.head_dim:
        few = f"{positions.rotary_dim} of {positions.geometry.head_dim}"
        raise UnsupportedModelError(f"JinaEmbeddingsV3 rotates all dimensions of a head, not {few}: swap with fraction=1")
    own, holds_for, tied = native.without_constant(model, tokenizer, "JinaEmbeddingsV3", onto="token_type")
    native.reorder(own, native.halves_first(positions), config.num_attention_heads)
    weights = _renamed(own, (_JINA_CLASSIFIER if model.architecture.model_type == "bert" else {}) | _JINA_NAMES)
    fields = native.common(config, *_SAME, "classifier_dropout") | native.rope_fields(positions)
    config = transformers.JinaEmbeddingsV3Config(**fields, tie_word_embeddings=tied)
    exported = native.build(JINA[stock], config, weights, model)
    return exported, (), (native.COUNTED.format("JinaEmbeddingsV3"), *holds_for)


# A BERT's pooler and classifier are RoBERTa's head.
_JINA_CLASSIFIER = {"classifier.": "classifier.out_proj.", "bert.pooler.": "classifier.", "bert.": "roberta."}
_JINA_NAMES = {  # in this order, since the last two are also parts of names above
    "encoder.layer.": "layers.",
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "post_mlp_layernorm",
}


def esm(model: SwappedModel, stock: type, tokenizer) -> Converted:
    """Export an ESM to ESM with rotary positions; unrotated pairs have frequency 0."""
    config, positions = model.config, model.architecture.self_attentions(model.base_model)[0].positions
    kind, head_dim = (positions.scheme.scaling or {}).get("rope_type"), positions.geometry.head_dim
    frequencies, factor = positions.frequencies(torch.device("cpu"), positions.geometry.max_positions)
    if kind in ("dynamic", "longrope") or factor != 1 or head_dim % 2:
        raise UnsupportedModelError(f"ESM has one frequency for each pair, and no factor: {kind} scaling does not fit")
    mean, difference, _ = native.constant(model)
    if (mean.any() or difference.any()) and (config.token_dropout or config.emb_layer_norm_before):
        why = "what a swap keeps of the table has no place in ESM, which rescales its words"
        raise UnsupportedModelError(f"{why}: swap with warm_start=False, and fit")
    weights, holds_for, tied = native.without_constant(model, tokenizer, "ESM", onto="word")
    pairs = native.pairs_first(positions)
    native.reorder(weights, torch.cat([pairs[0::2], pairs[1::2]]), config.num_attention_heads)
    base = "" if stock is model.architecture.base_class else "esm."
    frequencies = nn.functional.pad(frequencies, (0, head_dim // 2 - len(frequencies)))
    weights[f"{base}rotary_embeddings.inv_freq"] = frequencies.float()
    turns = {"position_embedding_type": "rotary", "rope_theta": float(positions.scheme.theta)}
    own = native.family_config(model, **turns, tie_word_embeddings=tied)
    return native.build(ESM[stock], own, weights, model), (), (native.COUNTED.format("rotary ESM"), *holds_for)
