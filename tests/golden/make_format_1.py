"""Write the folders in format-1/: what the project saved before its redesign, and must go on loading.

    python tests/golden/make_format_1.py     # at commit 186f5fa, with transformers 5.23.0

Each folder holds a tiny swapped model as it was saved (or a delta, and the base it belongs to) and `expected.safetensors`: its
outputs for the token ids in the same file.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import hf_posswap as posswap

HERE = Path(__file__).parent / "format-1"
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
SIZES = {
    "bert": (BertForMaskedLM, BertConfig, BERT | {"vocab_size": 40, "max_position_embeddings": 24}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, GPT2 | {"vocab_size": 40, "n_positions": 24}),
}
SCHEMES = {
    "learned": "learned:extend=tile",
    "sinusoidal": "sinusoidal",
    "relative": "relative:clip=4",
    "rotary": "rotary:theta=100,fraction=0.5",
    "none": "none",
    "ladder": "ladder:rung=dials,combine=concatenate",
}


def tiny(family: str):
    torch.manual_seed(0)
    model_class, config_class, sizes = SIZES[family]
    return model_class(config_class(initializer_range=0.3, **sizes)).eval()


def keep(model, folder: Path, seed: int) -> None:
    tokens = torch.randint(1, 40, (2, 20), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
    save_file({"tokens": tokens, "logits": logits.contiguous()}, folder / "expected.safetensors")


def main() -> None:
    for family in SIZES:
        for seed, (name, scheme) in enumerate(SCHEMES.items()):
            model = posswap.swap(tiny(family), scheme, max_positions=24 if name == "ladder" else 48)
            for parameter_name, parameter in model.named_parameters():  # tables that start at zero are drawn
                if ".positions." in parameter_name:
                    torch.nn.init.normal_(parameter, std=0.3)
            folder = HERE / f"{family}-{name}"
            model.save_pretrained(folder)
            keep(model, folder, seed)
        base = tiny(family)
        base.save_pretrained(HERE / f"{family}-base")
        posswap.swap(base, "relative:clip=4")
        for parameter_name, parameter in base.named_parameters():
            if ".positions." in parameter_name:
                torch.nn.init.normal_(parameter, std=0.3)
        posswap.save_delta(base, HERE / f"{family}-delta")
        keep(base, HERE / f"{family}-delta", 99)


if __name__ == "__main__":
    sys.exit(main())
