"""Real weights for families without a download: the embedded models' functions in other families' clothes.

A BERT is a RoBERTa whose table starts behind the row of padding, an ELECTRA whose words are as wide as its layers, a
DistilBERT whose words know the first token type. A GPT-2 is an OPT whose table has two rows in front.
"""

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel

import hf_posswap as posswap

_DISTILBERT = {
    "transformer.layer": "encoder.layer",
    "attention.q_lin": "attention.self.query",
    "attention.k_lin": "attention.self.key",
    "attention.v_lin": "attention.self.value",
    "attention.out_lin": "attention.output.dense",
    "sa_layer_norm": "attention.output.LayerNorm",
    "ffn.lin1": "intermediate.dense",
    "ffn.lin2": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}


def minilm(family: str = "bert", layers: int = 6) -> PreTrainedModel:
    """Return MiniLM's headless model, or its first layers, as one of `family`."""
    source = AutoModel.from_pretrained(posswap.embedded_model("minilm"), num_hidden_layers=layers).eval()
    if family == "bert":
        return source
    config, theirs = source.config, source.state_dict()
    sizes = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    sizes |= {"intermediate_size": config.intermediate_size, "hidden_dim": config.intermediate_size, "layer_norm_eps": 1e-12}
    sizes |= {"embedding_size": config.hidden_size, "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 101}
    sizes |= {"eos_token_id": 102}
    made = AutoConfig.for_model(family, **sizes)
    architecture = posswap.ARCHITECTURES[family]
    architecture.set_longest_input(made, config.max_position_embeddings)
    model = AutoModel.from_config(made).eval()
    weights = {}
    for name in model.state_dict():
        other = name
        for old, new in _DISTILBERT.items() if family == "distilbert" else ():
            other = other.replace(old, new)
        weights[name] = theirs[other]
    table = weights["embeddings.position_embeddings.weight"]
    padding = torch.zeros(architecture.first_row(made), table.shape[1])
    weights["embeddings.position_embeddings.weight"] = torch.cat([padding, table])
    if family == "distilbert":
        types = theirs["embeddings.token_type_embeddings.weight"]
        weights["embeddings.word_embeddings.weight"] = weights["embeddings.word_embeddings.weight"] + types[0]
    model.load_state_dict(weights)
    return model


def stdlib_gpt2(family: str = "gpt2", layers: int = 4) -> PreTrainedModel:
    """Return the embedded GPT-2 with its head, or its first layers, as a GPT-2 or an OPT."""
    folder = posswap.embedded_model("stdlib-gpt2")
    source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, n_layer=layers).eval()
    if family == "gpt2":
        return source
    config, theirs, size = source.config, source.state_dict(), source.config.n_embd
    made = OPTConfig(
        vocab_size=config.vocab_size,
        hidden_size=size,
        word_embed_proj_dim=size,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        ffn_dim=config.n_inner or 4 * size,
        max_position_embeddings=config.n_positions,
        activation_function=config.activation_function,
        pad_token_id=None,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    model = OPTForCausalLM(made).eval()
    weights = {"embed_tokens.weight": theirs["transformer.wte.weight"]}
    weights["embed_positions.weight"] = torch.cat([torch.zeros(2, size), theirs["transformer.wpe.weight"]])
    for kind in ("weight", "bias"):
        weights[f"final_layer_norm.{kind}"] = theirs[f"transformer.ln_f.{kind}"]
        for layer in range(config.n_layer):
            ours, other = f"layers.{layer}.", f"transformer.h.{layer}."
            fused = theirs[f"{other}attn.c_attn.{kind}"].t()  # Conv1D stores its weight transposed
            for name, part in zip(("q_proj", "k_proj", "v_proj"), fused.chunk(3), strict=True):
                weights[f"{ours}self_attn.{name}.{kind}"] = part
            for old, new in (("attn.c_proj", "self_attn.out_proj"), ("mlp.c_fc", "fc1"), ("mlp.c_proj", "fc2")):
                weights[f"{ours}{new}.{kind}"] = theirs[f"{other}{old}.{kind}"].t()
            for old, new in (("ln_1", "self_attn_layer_norm"), ("ln_2", "final_layer_norm")):
                weights[f"{ours}{new}.{kind}"] = theirs[f"{other}{old}.{kind}"]
    model.model.decoder.load_state_dict(weights)
    return model
