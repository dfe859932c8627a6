"""Causal models with rotary positions as GPT-NeoX: GPT-2, BioGPT, and OPT where its layers are pre-norm.

GPT-NeoX rotates pairs (m, m + R/2) of the first R dimensions. Its one projection has query, key and value of each head in turn.
"""

import torch
from transformers import GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, OPTForCausalLM

from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.sharing import native
from hf_posswap.sharing.native import Converted

_HEADS = ("Model", "ForSequenceClassification", "ForQuestionAnswering")
GPT_NEOX = {
    **native.pairs_of_heads("GPT2", "GPTNeoX", (*_HEADS, "ForTokenClassification")),
    **native.pairs_of_heads("OPT", "GPTNeoX", _HEADS),
    **native.pairs_of_heads(
        "BioGpt", "GPTNeoX", ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    ),
    GPT2LMHeadModel: GPTNeoXForCausalLM,
    OPTForCausalLM: GPTNeoXForCausalLM,
}

# Names in each family: prefix, word embedding, last norm, layers; then GPT-NeoX's name -> ours, for norms and linear maps.
_PLACES = {
    "gpt2": ("transformer.", "wte", "ln_f", "h"),
    "opt": ("model.", "embed_tokens", "final_layer_norm", "layers"),
    "biogpt": ("biogpt.", "embed_tokens", "layer_norm", "layers"),
}
_NORMS = dict.fromkeys(
    ("opt", "biogpt"), {"input_layernorm": "self_attn_layer_norm", "post_attention_layernorm": "final_layer_norm"}
) | {"gpt2": {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}}
_LINEAR = dict.fromkeys(
    ("opt", "biogpt"), {"attention.dense": "self_attn.out_proj", "mlp.dense_h_to_4h": "fc1", "mlp.dense_4h_to_h": "fc2"}
) | {"gpt2": {"attention.dense": "attn.c_proj", "mlp.dense_h_to_4h": "mlp.c_fc", "mlp.dense_4h_to_h": "mlp.c_proj"}}
# Fields of its config: intermediate_size, hidden_act, attention_dropout, hidden_dropout
_FIELDS = {
    "gpt2": ("n_inner", "activation_function", "attn_pdrop", "resid_pdrop"),
    "opt": ("ffn_dim", "activation_function", "attention_dropout", "dropout"),
    "biogpt": ("intermediate_size", "hidden_act", "attention_probs_dropout_prob", "hidden_dropout_prob"),
}


def gpt_neox(model: SwappedModel, stock: type, _) -> Converted:
    """Export a GPT-2, OPT or BioGPT to GPT-NeoX with attention and MLP in sequence (`use_parallel_residual=False`)."""
    config, family = model.config, model.architecture.model_type
    attentions = model.architecture.self_attentions(model.base_model)
    positions = attentions[0].positions
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError("GPT-NeoX has no cross-attention")
    if family == "opt" and (not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size):
        raise UnsupportedModelError("this OPT is post-norm or projects its words (as the 350m does), which GPT-NeoX does not")
    mean, _, marked = native.constant(model)
    if marked:
        raise UnsupportedModelError(native.NO_PLACE.format("GPT-NeoX"))
    order = native.halves_first(positions).to(model.device)
    prefix, words, last, layers = _PLACES[family]
    own, whole = model.state_dict(), model.base_model is not model
    base = (prefix if whole else "") + ("decoder." if family == "opt" else "")
    there = "gpt_neox." if whole else ""
    word_scale = getattr(model.get_input_embeddings(), "embed_scale", 1.0)  # BioGPT's
    weights = {f"{there}embed_in.weight": (own[f"{base}{words}.weight"].double() * word_scale + mean).to(model.dtype)}
    _norm(weights, f"{there}final_layer_norm", own, f"{base}{last}", config.hidden_size)
    for layer, attention in enumerate(attentions):
        ours, theirs = f"{base}{layers}.{layer}.", f"{there}layers.{layer}."
        for target, source in _NORMS[family].items():
            _norm(weights, f"{theirs}{target}", own, f"{ours}{source}", config.hidden_size)
        for target, source in _LINEAR[family].items():
            weight = own[f"{ours}{source}.weight"]
            weight = weight.T.contiguous() if family == "gpt2" else weight  # Conv1D stores its weight transposed
            weights[f"{theirs}{target}.weight"] = weight
            bias = own.get(f"{ours}{source}.bias")
            weights[f"{theirs}{target}.bias"] = weight.new_zeros(len(weight)) if bias is None else bias
        scale = model.architecture.scaling(attention) * positions.geometry.head_dim**0.5
        for part, three in _query_key_value(family, own, ours).items():
            query, key, value = (one.unflatten(0, (config.num_attention_heads, -1)) for one in three)  # (H, D, ...)
            rows = torch.stack([query[:, order] * scale, key[:, order], value], dim=1)  # (H, 3, D, ...)
            weights[f"{theirs}attention.query_key_value.{part}"] = rows.flatten(0, 2)
    head = {name: value for name, value in own.items() if not name.startswith(base)} if whole else {}
    head = {name.replace("output_projection", "lm_head"): value for name, value in head.items()}
    size, act, attention_dropout, dropout = (getattr(config, name) for name in _FIELDS[family])
    neox = GPTNeoXConfig(
        **native.common(config),
        **native.rope_fields(positions),
        intermediate_size=size or 4 * config.hidden_size,
        hidden_act=act,
        attention_dropout=attention_dropout,
        hidden_dropout=dropout,
        layer_norm_eps=getattr(config, "layer_norm_epsilon", 1e-5),
        use_parallel_residual=False,
        tie_word_embeddings=False,
    )
    holds_for = () if family == "gpt2" else (native.COUNTED.format("GPT-NeoX"),)  # a GPT-2 counts padding, too
    return native.build(GPT_NEOX[stock], neox, weights | head, model), (), holds_for


def _norm(weights: dict, target: str, own: dict, source: str, size: int) -> None:
    """Copy a layer norm; one without weights becomes weight 1 and bias 0."""
    like = next(iter(own.values()))
    weights[f"{target}.weight"] = own.get(f"{source}.weight", like.new_ones(size))
    weights[f"{target}.bias"] = own.get(f"{source}.bias", like.new_zeros(size))


def _query_key_value(family: str, own: dict, layer: str) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return weights, (E, E) each, and biases, (E,) each, of query, key and value."""
    if family == "gpt2":
        return {part: own[f"{layer}attn.c_attn.{part}"].t().chunk(3) for part in ("weight", "bias")}
    weight = tuple(own[f"{layer}self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj"))
    bias = [own.get(f"{layer}self_attn.{name}.bias") for name in ("q_proj", "k_proj", "v_proj")]
    return {"weight": weight, "bias": tuple(w.new_zeros(len(w)) if b is None else b for w, b in zip(weight, bias, strict=True))}
