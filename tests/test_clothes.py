"""Real weights in other families' clothes: MiniLM as RoBERTa's and BERT's kin, the embedded GPT-2 as OPT and BioGPT.

The weights are renamed and the function stays the same, so a swap and a fit have to give what they give the model itself.
"""

import copy
import functools
import re
from pydoc_data.topics import topics

import pytest
import torch
import transformers
from transformers import AutoModel, AutoTokenizer

import hf_posswap as posswap

BERTS = ("Roberta", "Electra")  # with BERT's names; XLM-RoBERTa and CamemBERT are RoBERTas
NAMES = {  # of BERT's and GPT-2's weights in other families, the first pattern that is found
    "DistilBert": {
        r"encoder\.(layer\.\d+)\.attention\.self\.(.)\w+": r"transformer.\1.attention.\2_lin",
        r"encoder\.(layer\.\d+)\.attention\.output\.dense": r"transformer.\1.attention.out_lin",
        r"encoder\.(layer\.\d+)\.attention\.output\.LayerNorm": r"transformer.\1.sa_layer_norm",
        r"encoder\.(layer\.\d+)\.intermediate\.dense": r"transformer.\1.ffn.lin1",
        r"encoder\.(layer\.\d+)\.output\.dense": r"transformer.\1.ffn.lin2",
        r"encoder\.(layer\.\d+)\.output\.LayerNorm": r"transformer.\1.output_layer_norm",
    },
    "Albert": {
        r"encoder\.layer\.(\d+)\.attention\.(self|output)\.": r"encoder.albert_layer_groups.\1.albert_layers.0.attention.",
        r"encoder\.layer\.(\d+)\.intermediate\.dense": r"encoder.albert_layer_groups.\1.albert_layers.0.ffn",
        r"encoder\.layer\.(\d+)\.output\.dense": r"encoder.albert_layer_groups.\1.albert_layers.0.ffn_output",
        r"encoder\.layer\.(\d+)\.output\.LayerNorm": r"encoder.albert_layer_groups.\1.albert_layers.0.full_layer_layer_norm",
    },
    "OPT": {
        r"h\.(\d+)\.attn\.c_proj": r"decoder.layers.\1.self_attn.out_proj",
        r"h\.(\d+)\.attn\.(.)\.": r"decoder.layers.\1.self_attn.\2_proj.",
        r"h\.(\d+)\.ln_1": r"decoder.layers.\1.self_attn_layer_norm",
        r"h\.(\d+)\.ln_2": r"decoder.layers.\1.final_layer_norm",
        r"h\.(\d+)\.mlp\.c_fc": r"decoder.layers.\1.fc1",
        r"h\.(\d+)\.mlp\.c_proj": r"decoder.layers.\1.fc2",
        "ln_f": "decoder.final_layer_norm", "wte": "decoder.embed_tokens", "wpe": "decoder.embed_positions",
    },
}  # fmt: skip
NAMES["BioGpt"] = {old: new.removeprefix("decoder.") for old, new in NAMES["OPT"].items()} | {"ln_f": "layer_norm"}


def dressed(model, kind: str):
    """Return the model as one of another family."""
    config, weights, size = model.config, dict(model.state_dict()), model.config.hidden_size
    options = {"vocab_size": config.vocab_size, "hidden_size": size, "pad_token_id": 0, "type_vocab_size": 2}
    options |= {"num_hidden_layers": config.num_hidden_layers, "num_attention_heads": config.num_attention_heads}
    options |= {"embedding_size": size, "word_embed_proj_dim": size, "num_hidden_groups": config.num_hidden_layers}
    options |= {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "max_position_embeddings": config.max_position_embeddings}
    options |= dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim"), 4 * size)
    unused = 1 if kind == "Roberta" else 2 if kind in ("OPT", "BioGpt") else 0  # rows that the table begins with
    (table,) = (name for name in weights if "wpe" in name or "position_embeddings" in name)
    weights[table] = torch.nn.functional.pad(weights[table], (0, 0, unused, 0))
    if config.model_type == "gpt2":  # one weight for q, k and v; all are transposed
        options |= {
            "hidden_act": "gelu_new",
            "activation_function": "gelu_new",
            "scale_embedding": False,
            "layer_norm_eps": 1e-5,
        }
        weights = {name: one.T if ".c_" in name and one.dim() > 1 else one for name, one in weights.items()}
        for name in [name for name in weights if "c_attn" in name]:
            letters = zip("qkv", weights.pop(name).chunk(3), strict=True)
            weights |= {name.replace("c_attn", letter): part for letter, part in letters}
    elif unused:  # of 513 rows, one is padding's
        options["max_position_embeddings"] += 1
    if kind == "DistilBert":  # it has no types of tokens
        words, types = (f"embeddings.{name}_embeddings.weight" for name in ("word", "token_type"))
        weights[words] = weights[words] + weights[types][0]
    if kind == "Albert":
        weights["encoder.embedding_hidden_mapping_in.weight"] = torch.eye(size)
        weights["encoder.embedding_hidden_mapping_in.bias"] = torch.zeros(size)
    for name in list(weights):
        new = next((re.sub(old, new, name) for old, new in NAMES.get(kind, {}).items() if re.match(old, name)), name)
        weights[new] = weights.pop(name)
    config_class = getattr(transformers, f"{kind}Config")
    known = config_class().to_dict() | config_class.attribute_map
    other = getattr(transformers, f"{kind}Model")(config_class(**{name: options[name] for name in options if name in known}))
    missing = other.load_state_dict(weights, strict=False).missing_keys
    assert all("pooler" in name for name in missing), missing
    return other.eval()


def fit(model, batches):
    return posswap.fit(posswap.swap(model, "rotary"), batches, reconstruct=1, progress=False)


@pytest.fixture(scope="module")
def source():
    """The function that returns the first two layers of a real model, batches, and the report of their fit."""

    @functools.cache
    def load(name: str):
        if not posswap.assets.is_installed(name):
            pytest.skip(f"{name} is not installed")
        place = posswap.embedded_model(name)
        model, tokenizer = AutoModel.from_pretrained(place, num_hidden_layers=2).eval(), AutoTokenizer.from_pretrained(place)
        texts = [text for _, text in sorted(topics.items())[:12]]
        batches = posswap.text_batches(texts, tokenizer, 64, tokens=2560, causal=name == "stdlib-gpt2")
        return model, batches, fit(copy.deepcopy(model), batches)

    return load


@pytest.mark.parametrize("kind", [*BERTS, *NAMES])
def test_clothes(source, kind):
    """The same states to the bit, the same figures of a fit, and an export with them.

    The self-attention of DistilBERT and ALBERT has the output projection, which is fitted with it, and they come nearer.
    """
    model, batches, report = source("stdlib-gpt2" if kind in ("OPT", "BioGpt") else "minilm")
    other = dressed(model, kind)
    with torch.no_grad():
        states = [one(batches[0]).last_hidden_state for one in (model, other)]
    torch.testing.assert_close(*states, rtol=0, atol=1e-6)
    found = fit(other, batches)
    if kind in (*BERTS, "DistilBert"):
        tokenizer = AutoTokenizer.from_pretrained(posswap.embedded_model("minilm"))
        assert posswap.export_native(other, tokenizer).certificate.largest < 1e-4
    assert found.before.total == pytest.approx(report.before.total, abs=1e-5)
    if kind in ("DistilBert", "Albert"):
        assert found.after.total < report.after.total
    else:
        assert found.after.total == pytest.approx(report.after.total, abs=1e-5)
        assert [layer.after for layer in found.layers] == pytest.approx([layer.after for layer in report.layers], abs=1e-5)
