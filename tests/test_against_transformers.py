"""Swapped models against transformers' own models of the same scheme, with the same weights under their names there.

Rotary: RoFormer (interleaved) for BERT, GPT-NeoX (half, partial, scaled) for GPT-2. Relative: the `relative_key` of
transformers 4.57, from golden/relative_key.safetensors (golden/make_relative_key.py made it).
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    RoFormerConfig,
    RoFormerForCausalLM,
    RoFormerForMaskedLM,
)

import hf_posswap as posswap

GOLDEN = Path(__file__).parent / "golden" / "relative_key.safetensors"
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def to_roformer(model) -> RoFormerForMaskedLM | RoFormerForCausalLM:
    """The RoFormer that a BERT with cold interleaved rotary positions is."""
    config = model.config
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "is_decoder")
    options = {name: getattr(config, name) for name in same} | {
        "embedding_size": config.hidden_size,
        "rotary_value": False,
    }
    options |= {"max_position_embeddings": config.max_position_embeddings, "attn_implementation": "eager"}
    kind = RoFormerForCausalLM if config.is_decoder else RoFormerForMaskedLM
    twin = kind(RoFormerConfig(**options)).eval()
    weights = {name.replace("bert.", "roformer."): value for name, value in model.state_dict().items()}
    weights = {name: value for name, value in weights.items() if "position_embeddings" not in name}
    missing, unexpected = twin.load_state_dict(weights, strict=False)
    assert unexpected == [] and all("embed_positions" in name for name in missing)
    return twin


def to_gpt_neox(model, rope_parameters: dict, max_positions: int) -> GPTNeoXForCausalLM:
    """The GPT-NeoX that a GPT-2 with cold half-layout rotary positions is."""
    config = model.config
    heads, size = config.n_head, config.n_embd
    neox = GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=config.vocab_size,
            hidden_size=size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=heads,
            intermediate_size=4 * size,
            hidden_act=config.activation_function,
            max_position_embeddings=max_positions,
            use_parallel_residual=False,
            layer_norm_eps=config.layer_norm_epsilon,
            rope_parameters=rope_parameters,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            attn_implementation="eager",
        )
    ).eval()

    def fuse(tensor: torch.Tensor) -> torch.Tensor:
        """(3 H D, ...) with all queries first to (H 3 D, ...) with one head first."""
        return tensor.unflatten(0, (3, heads, size // heads)).transpose(0, 1).flatten(0, 2)

    weights = {"gpt_neox.embed_in.weight": model.transformer.wte.weight, "lm_head.weight": model.lm_head.weight}
    renamed = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_proj": "attention.dense"}
    renamed |= {
        "mlp.c_fc": "mlp.dense_h_to_4h",
        "mlp.c_proj": "mlp.dense_4h_to_h",
        "attn.c_attn": "attention.query_key_value",
    }
    for layer, block in enumerate(model.transformer.h):
        for ours, theirs in renamed.items():
            module = block.get_submodule(ours)
            weight, bias = module.weight, module.bias
            if not ours.startswith("ln"):
                weight = weight.T  # Conv1D stores (in, out)
            if ours == "attn.c_attn":
                weight, bias = fuse(weight), fuse(bias)
            weights |= {
                f"gpt_neox.layers.{layer}.{theirs}.weight": weight,
                f"gpt_neox.layers.{layer}.{theirs}.bias": bias,
            }
    for name in ("weight", "bias"):
        weights[f"gpt_neox.final_layer_norm.{name}"] = getattr(model.transformer.ln_f, name)
    if "embed_out.weight" in neox.state_dict():
        weights["embed_out.weight"] = weights.pop("lm_head.weight")
    neox.load_state_dict(weights)
    return neox


@pytest.mark.parametrize("family", ["bert", "bert-decoder"])
def test_bert_with_rotary_is_roformer(make_model, family, backend, tokens):
    """Same weights, same logits, for encoder and decoder, with and without padding, past the old maximum too."""
    model = make_model(family, backend)
    posswap.swap(model, posswap.Rotary(), max_positions=64, warm_start=False)
    twin = to_roformer(model)
    for given, real in ((tokens, 20), (tokens, 13), (tokens.repeat(1, 3), 60)):
        mask = torch.ones_like(given)
        mask[1, real:] = 0
        allowed = mask[:, None, None, :].bool().expand(-1, 1, mask.shape[1], -1)
        if family == "bert-decoder":  # RoFormer made no causal mask of its own in transformers 5.17
            allowed = allowed.tril()
        theirs = twin(given, attention_mask=torch.where(allowed, 0.0, torch.finfo(torch.float32).min)).logits
        ours = model(given, attention_mask=mask).logits
        assert_close(ours[mask.bool()], theirs[mask.bool()], **EXACT)


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_gpt2_with_rotary_is_gpt_neox(make_model, fraction, backend, tokens):
    """Same weights, same logits and the same cached generation past the old maximum."""
    model = make_model("gpt2", backend)
    posswap.swap(model, posswap.Rotary(layout="half", fraction=fraction, theta=5_000), max_positions=64, warm_start=False)
    rope = {"rope_type": "default", "rope_theta": 5_000.0, "partial_rotary_factor": fraction}
    neox = to_gpt_neox(model, rope, 64)
    assert_close(model(tokens).logits, neox(tokens).logits, **EXACT)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(tokens, **options), neox.generate(tokens, **options))


SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 16},
    "longrope": {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 4.0], "factor": 2.0},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("repeats", [1, 3])
def test_scaled_rotary_is_gpt_neox(make_model, kind, repeats, tokens):
    """Every published scaling gives the logits of a GPT-NeoX that is configured with it, within and past 32 tokens."""
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    model = make_model("gpt2")
    scheme = posswap.Rotary(layout="half", fraction=0.5, scaling=scaling)
    posswap.swap(model, scheme, max_positions=64, warm_start=False)
    rope = {**scaling, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 32}
    if kind in ("linear", "dynamic"):
        del rope["original_max_position_embeddings"]
    neox = to_gpt_neox(model, rope, 32 if kind == "dynamic" else 64)  # `dynamic` grows from max_position_embeddings
    tokens = tokens.repeat(1, repeats)
    # transformers computes the angles in float32
    assert_close(model(tokens).logits, neox(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_relative_is_relative_key(kind, backend):
    """Key terms without clipping, shared by the heads: the table of transformers 4.57 read from right to left."""
    with safe_open(GOLDEN, "pt") as file:
        assert file.metadata()["transformers"] == "4.57.6"
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
    }
    config = BertConfig(**options, max_position_embeddings=16, is_decoder=kind == "decoder", attn_implementation=backend)
    model = (BertLMHeadModel if kind == "decoder" else BertForMaskedLM)(config).eval()
    tables = [weights.pop(f"bert.encoder.layer.{layer}.attention.self.distance_embedding.weight") for layer in range(2)]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert unexpected == [] and all(name.startswith("cls.predictions.decoder") for name in missing)
    posswap.swap(model, posswap.Relative(clip=15, values=False, share_heads=True), warm_start=False)
    logits = model(golden["tokens"], attention_mask=golden["mask"]).logits
    real = golden["mask"].bool()
    assert (logits - golden[f"{kind}_logits"])[real].abs().max() > 0.1  # the tables are still zero
    with torch.no_grad():
        for attention, table in zip(model.architecture.self_attentions(model.base_model), tables, strict=True):
            assert attention.positions.key_table.shape == table.shape == (31, 16)
            attention.positions.key_table.copy_(table.flip(0))  # theirs is indexed by query - key
    logits = model(golden["tokens"], attention_mask=golden["mask"]).logits
    assert_close(logits[real], golden[f"{kind}_logits"][real], **EXACT)
