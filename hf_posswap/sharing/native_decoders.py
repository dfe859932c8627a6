"""Causal models with rotary positions as GPT-NeoX: GPT-2, BioGPT, and OPT where its layers are pre-norm.

GPT-NeoX rotates pairs (m, m + R/2) of the first R dimensions. Its one projection has query, key and value of each head in turn.
"""

import torch
from torch import nn
from transformers import GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.pytorch_utils import Conv1D

from hf_posswap.architectures import Architecture
from hf_posswap.checkpoint import SwappedModel
from hf_posswap.errors import UnsupportedModelError
from hf_posswap.functional.closed_form import wide
from hf_posswap.sharing import native
from hf_posswap.sharing.native import Converted

GPT_NEOX = native.pairs_of_heads(("GPT2", "OPT", "BioGpt"), "GPTNeoX", ("Model", "ForSequenceClassification"))
GPT_NEOX |= native.pairs_of_heads(("GPT2", "OPT"), "GPTNeoX", ("ForQuestionAnswering",))
GPT_NEOX |= native.pairs_of_heads(("GPT2", "BioGpt"), "GPTNeoX", ("ForTokenClassification",))
GPT_NEOX |= native.pairs_of_heads(("OPT", "BioGpt"), "GPTNeoX", ("ForCausalLM",))
GPT_NEOX |= {GPT2LMHeadModel: GPTNeoXForCausalLM}

# Chinese GPT-2s have BERT's tokenizer, which gives them.
TYPES = "inputs without token_type_ids: GPT-2 adds the words of these ids to its own, and GPT-NeoX does not read them"
_LAST_NORM = {"gpt2": "ln_f", "opt": "final_layer_norm", "biogpt": "layer_norm"}
_IN_A_LAYER = {  # what a layer of GPT-NeoX has -> its name in GPT-2, and in OPT and BioGPT
    "input_layernorm": ("ln_1", "self_attn_layer_norm"),
    "post_attention_layernorm": ("ln_2", "final_layer_norm"),
    "attention.dense": ("attn.c_proj", "self_attn.out_proj"),
    "mlp.dense_h_to_4h": ("mlp.c_fc", "fc1"),
    "mlp.dense_4h_to_h": ("mlp.c_proj", "fc2"),
}
# Fields of its config: intermediate_size, hidden_act, attention_dropout, hidden_dropout
_FIELDS = {
    "gpt2": ("n_inner", "activation_function", "attn_pdrop", "resid_pdrop"),
    "opt": ("ffn_dim", "activation_function", "attention_dropout", "dropout"),
    "biogpt": ("intermediate_size", "hidden_act", "attention_probs_dropout_prob", "hidden_dropout_prob"),
}


def gpt_neox(model: SwappedModel, stock: type, _) -> Converted:
    """Export a GPT-2, OPT or BioGPT to GPT-NeoX with attention and MLP in sequence (`use_parallel_residual=False`)."""
    config, base, architecture = model.config, model.base_model, model.architecture
    family, attentions = architecture.model_type, architecture.self_attentions(base)
    positions = attentions[0].positions
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError("GPT-NeoX has no cross-attention")
    norms = family != "opt" or (config.do_layer_norm_before and not config._remove_final_layer_norm)
    if not norms or (family == "opt" and config.word_embed_proj_dim != config.hidden_size):
        raise UnsupportedModelError("this OPT is post-norm or projects its words (350m), or has no last norm, unlike GPT-NeoX")
    mean, _, marked = native.constant(model)
    if marked:
        raise UnsupportedModelError(native.NO_PLACE.format("GPT-NeoX"))
    modules = {"final_layer_norm": getattr(architecture.reader(base), _LAST_NORM[family])}
    for number, layer in enumerate(architecture.layers(base)):
        for theirs, (gpt2, others) in _IN_A_LAYER.items():
            modules[f"layers.{number}.{theirs}"] = layer.get_submodule(gpt2 if family == "gpt2" else others)
    weights = {}
    for name, module in modules.items():
        for part, value in module.named_parameters():
            # Conv1D stores its weight transposed.
            weights[f"{name}.{part}"] = value.T if part == "weight" and isinstance(module, Conv1D) else value
    words = model.get_input_embeddings()
    word_scale = getattr(words, "embed_scale", 1.0)  # BioGPT's
    weights["embed_in.weight"] = (wide(words.weight) * word_scale + mean).to(model.dtype)
    order = native.halves_first(positions).to(model.device)
    for number, attention in enumerate(attentions):
        scale = architecture.scaling(attention) * positions.geometry.head_dim**0.5
        for part, three in _query_key_value(architecture, attention).items():
            query, key, value = three.unflatten(0, (3, config.num_attention_heads, -1))  # (H, D, ...) each
            rows = torch.stack([query[:, order] * scale, key[:, order], value], dim=1)  # (H, 3, D, ...)
            weights[f"layers.{number}.attention.query_key_value.{part}"] = rows.flatten(0, 2)
    if base is not model:
        weights = {f"gpt_neox.{name}": value for name, value in weights.items()}
        head = {name: value for name, value in model.state_dict().items() if not name.startswith(f"{model.base_model_prefix}.")}
        weights |= {name.replace("output_projection", "lm_head"): value for name, value in head.items()}
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
    condition = TYPES if family == "gpt2" else native.COUNTED.format("GPT-NeoX")  # a GPT-2 counts padding, too
    return native.build(GPT_NEOX[stock], neox, weights, model), (), (condition,)


def _query_key_value(architecture: Architecture, attention: nn.Module) -> dict[str, torch.Tensor]:
    """Return weight (3E, E) and, if there is one, bias (3E,) of the projections to query, key and value."""
    if architecture.model_type == "gpt2":
        return {"weight": attention.c_attn.weight.T, "bias": attention.c_attn.bias}
    layers = [dict(getattr(attention, name).named_parameters()) for name in architecture.projections]
    return {part: torch.cat([layer[part] for layer in layers]) for part in layers[0]}
