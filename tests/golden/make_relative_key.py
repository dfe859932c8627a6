"""Make relative_key.safetensors and relative_key_query.safetensors: what transformers 4.57 computes with these
values of position_embedding_type.

transformers 5 has no relative positions for BERT any more, so its last answers are kept here. Run in an environment of
its own, once:

    python3 -m venv old && old/bin/pip install torch==2.13.0 transformers==4.57.6
    old/bin/python tests/golden/make_relative_key.py

One set of weights is used twice, in an encoder (BertForMaskedLM) and in a decoder (BertLMHeadModel, causal). The
decoder runs without a cache: with one, 4.57 takes every query to stand at the last position.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel


def main(kind: str):
    """Write one file beside this script."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    options = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 16,
        "initializer_range": 0.3,
        "position_embedding_type": kind,
        "attn_implementation": "eager",
    }
    encoder = BertForMaskedLM(BertConfig(**options)).eval()
    decoder = BertLMHeadModel(BertConfig(**options, is_decoder=True)).eval()
    decoder.load_state_dict(encoder.state_dict())
    tokens = torch.randint(1, 64, (2, 16))
    mask = torch.ones_like(tokens)
    mask[1, 11:] = 0
    with torch.no_grad():
        tensors = {
            "tokens": tokens,
            "mask": mask,
            "encoder_logits": encoder(tokens, attention_mask=mask).logits,
            "decoder_logits": decoder(tokens, attention_mask=mask, use_cache=False).logits,
        }
    weights = {name: value for name, value in encoder.state_dict().items() if "cls.predictions.decoder" not in name}
    tensors |= {f"weights.{name}": value.contiguous() for name, value in weights.items()}
    metadata = {"transformers": transformers.__version__, "torch": torch.__version__, "script": Path(__file__).name}
    save_file(tensors, Path(__file__).with_name(f"{kind}.safetensors"), metadata)


if __name__ == "__main__":
    for name in ("relative_key", "relative_key_query"):
        main(name)
