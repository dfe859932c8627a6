"""Train the embedded GPT-2: a small causal model with learned positions, on the text of the standard library.

    python recipes/train_stdlib_gpt2.py --output runs/stdlib-gpt2            # about an hour on one core
    accelerate launch recipes/train_stdlib_gpt2.py --output runs/stdlib-gpt2 # on GPUs, the same steps
    python recipes/train_stdlib_gpt2.py --output runs/stdlib-gpt2 --resume   # continues after an interruption

`make demo` needs a real pretrained GPT-2, also without access to the Hub. Documents are the modules of the standard library
and the `help()` topics; a tenth of them, chosen by a hash of their name, is held out. The output folder gets
model.safetensors (float16 on disk, float32 in memory), tokenizer.json and training.json.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from accelerate import PartialState
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_posswap.data.text import stdlib_documents, token_blocks
from hf_posswap.measure.damage import perplexity
from hf_posswap.provenance import provenance, write_json
from hf_posswap.terminal import run_program
from hf_posswap.training import TrainingConfig, train

CONTEXT = 256
END_OF_TEXT = "<|endoftext|>"


def build_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, as GPT-2 has, learned from the training documents only."""
    tokenizer = ByteLevelBPETokenizer()
    options = {"vocab_size": 2048, "min_frequency": 0, "special_tokens": [END_OF_TEXT], "show_progress": False}
    tokenizer.train_from_iterator(documents, **options)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, model_max_length=CONTEXT, **ends)


def shifted_blocks(documents: list[str], tokenizer: PreTrainedTokenizerFast, passes: int) -> torch.Tensor:
    """Return blocks (N, 256); each pass cuts the text at other places, so that tokens are seen at different positions."""
    stream = token_blocks(documents, tokenizer, length=1).flatten()
    offsets = [CONTEXT * i // passes for i in range(passes)]
    return torch.cat([stream[o : o + (len(stream) - o) // CONTEXT * CONTEXT].view(-1, CONTEXT) for o in offsets])


def main(
    output: Annotated[Path, typer.Option(help="Folder for the model; checkpoints go into it while training.")],
    max_steps: Annotated[int, typer.Option(help="Optimizer steps of batch-size blocks of 256 tokens.")] = 2600,
    batch_size: Annotated[int, typer.Option(help="Blocks a step, over all processes.")] = 20,
    learning_rate: float = 1.5e-3,
    seed: int = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in the folder.")] = False,
):
    """Train the embedded GPT-2 on the standard library and report its held-out perplexity."""
    train_documents = list(stdlib_documents("train").values())
    tokenizer = build_tokenizer(train_documents)
    blocks = shifted_blocks(train_documents, tokenizer, passes=8)
    held_out = token_blocks(list(stdlib_documents("validation").values()), tokenizer, CONTEXT)
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(tokenizer), "n_positions": CONTEXT, "n_embd": 256, "n_layer": 4, "n_head": 4, "attn_pdrop": 0.0}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends))
    budget = {"max_steps": max_steps, "batch_size": batch_size, "learning_rate": learning_rate, "seed": seed}
    config = TrainingConfig(**budget, warmup_ratio=0.03, weight_decay=0.1, checkpoint_every=250)
    dataset = [{"input_ids": row, "labels": row} for row in blocks]
    model, run = train(model, dataset, config, output=output, resume=resume, description="stdlib-gpt2")
    if not PartialState().is_main_process:
        return
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    # float16 on disk halves the download; config.json keeps dtype float32, so the model loads as float32.
    weights = {name: tensor.half() for name, tensor in load_file(output / "model.safetensors").items()}
    save_file(weights, output / "model.safetensors", metadata={"format": "pt"})
    stored = GPT2LMHeadModel.from_pretrained(output).eval()
    report = {
        **provenance(f"python {sys.argv[0]}"),
        "parameters": stored.num_parameters(),
        "held_out_perplexity": perplexity(stored, held_out),
        "held_out_tokens": held_out.numel(),
        "train_tokens_distinct": blocks.numel() // 8,
        "train_tokens_seen": run.tokens,
        "seconds": run.seconds,
        "processes": run.processes,
        "final_train_loss": sum(run.losses[-50:]) / len(run.losses[-50:]),
        "config": asdict(config),
    }
    write_json(output / "training.json", report)
    data = ModelCardData(language="en", license="apache-2.0", library_name="transformers", pipeline_tag="text-generation")
    card = ModelCard.from_template(data, str(Path(__file__).with_suffix(".md.jinja")), context=CONTEXT, **report)
    card.save(output / "README.md")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    run_program("train_stdlib_gpt2", main)
