"""How near to its original does a swapped model come by `fit` alone, and how much does the text it is fitted on matter?

    python recipes/fit_quality.py --model stdlib-gpt2 --seed 0 --seed 1 --seed 2 --output runs/fit-gpt2
    python recipes/fit_quality.py --model minilm --data valid.txt --evaluation test.txt --pairs stsb-dev.csv --output runs/fit

Writes results.json and results.md. A row is one scheme, fitted with every seed: it draws the text and the order of steps.
Texts: `given` is --data (the embedded text without it), `embedded` the standard library's, `shuffled` the given text with its
tokens in random order, `random` tokens drawn uniformly, `written` by a causal model itself.
"""

import csv
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from scipy.stats import spearmanr
from tqdm import tqdm
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_posswap as posswap
from hf_posswap.architectures import ARCHITECTURES
from hf_posswap.assets import model_source
from hf_posswap.data.calibration import random_tokens, text_batches, written_text
from hf_posswap.data.text import embedded_documents, read_documents, token_blocks
from hf_posswap.errors import DataError, PosswapError
from hf_posswap.experiments.fit_table import fit_table
from hf_posswap.measure import kl_divergence, perplexity, pooled_cosine, pooled_states
from hf_posswap.provenance import provenance, write_json
from hf_posswap.terminal import run_program

TEXTS = ("given", "embedded", "shuffled", "random", "written")


class Bench:
    """One checkpoint with the text that swapped copies of it are fitted on and measured on."""

    def __init__(self, name: str, data: str | None, evaluation: str | None, pairs: Path | None, tokens: int, evaluated: int):
        source = model_source(name)
        config = AutoConfig.from_pretrained(source)
        self.causal = ARCHITECTURES[config.model_type].is_causal(config)
        self.load = lambda: (AutoModelForCausalLM if self.causal else AutoModel).from_pretrained(source).eval()
        self.original, self.tokenizer = self.load(), AutoTokenizer.from_pretrained(source)
        self.longest, self.tokens = config.max_position_embeddings, tokens
        self.training = self._documents(data, "train")
        held_out = self._documents(evaluation or data, "train" if evaluation else "validation")
        self.lengths = [self.longest] if self.causal else sorted({self.longest // 4, self.longest})
        self.blocks = {}
        for length in self.lengths:
            blocks = token_blocks(held_out, self.tokenizer, length)
            count = min(len(blocks), max(1, evaluated // length))
            self.blocks[length] = blocks[torch.linspace(0, len(blocks) - 1, count).long()]
        self.pairs = None if pairs is None else _read_pairs(pairs)
        if self.causal:
            self.perplexity = perplexity(self.original, self.blocks[self.longest])
        else:
            self.states = {n: pooled_states(self.original, blocks) for n, blocks in self.blocks.items()}

    def _documents(self, data: str | None, split: str) -> list[str]:
        if data is not None:
            return read_documents(data, split=split)
        return embedded_documents(split, causal=self.causal)

    def batches(self, text: str, seed: int) -> list[torch.Tensor]:
        """Return token ids of the kind of text that was asked for."""
        if text == "written":
            return [written_text(self.original, tokens=self.tokens, seed=seed)]
        if text == "random":
            return random_tokens(self.original, tokens=self.tokens, seed=seed)
        documents = self._documents(None, "train") if text == "embedded" else self.training
        batches = text_batches(documents, self.tokenizer, self.longest, tokens=self.tokens, causal=self.causal, seed=seed)
        if text != "shuffled":
            return batches
        generator = torch.Generator().manual_seed(seed)
        edge = 0 if self.causal else 1  # [CLS] and [SEP] stay where they are
        for blocks in batches:
            inner = blocks[:, edge : blocks.shape[1] - edge]
            inner.copy_(inner.flatten()[torch.randperm(inner.numel(), generator=generator)].view_as(inner))
        return batches

    def measure(self, model) -> dict[str, float]:
        """Return the figures of one model."""
        if self.causal:
            blocks = self.blocks[self.longest]
            found = perplexity(model, blocks)
            return {
                "perplexity": found,
                "ratio": found / self.perplexity,
                "kl": kl_divergence(model, self.original, blocks[::4]),
            }
        figures = {f"cosine_{n}": pooled_cosine(model, blocks, self.states[n]) for n, blocks in self.blocks.items()}
        if self.pairs is not None:
            figures["spearman"] = self._spearman(model)
        return figures

    @torch.no_grad()
    def _spearman(self, model) -> float:
        left, right, scores = self.pairs
        vectors = []
        for texts in (left, right):
            parts = []
            for first in range(0, len(texts), 64):
                batch = self.tokenizer(texts[first : first + 64], padding=True, truncation=True, return_tensors="pt")
                mask = batch["attention_mask"][..., None]
                states = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
                parts.append(torch.nn.functional.normalize(states, dim=-1))
            vectors.append(torch.cat(parts))
        return float(spearmanr((vectors[0] * vectors[1]).sum(-1).numpy(), scores).statistic)


def main(
    output: Annotated[Path, typer.Option(help="Folder for results.json and results.md.")],
    model: Annotated[str, typer.Option(help="A model folder or Hub id; minilm and stdlib-gpt2 are built in.")] = "minilm",
    scheme: Annotated[list[str] | None, typer.Option(help="Repeatable. Default: sinusoidal, relative, rotary.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help=f"What to fit on, repeatable: {', '.join(TEXTS)}. Default: given.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Text to fit on: file, folder or Hub dataset; default: embedded.")] = None,
    evaluation: Annotated[str | None, typer.Option(help="Text to measure on; default: the held-out part of --data.")] = None,
    pairs: Annotated[Path | None, typer.Option(help="A csv of sentence1, sentence2 and label, for Spearman's rho.")] = None,
    reconstruct: Annotated[list[int] | None, typer.Option(help="Steps for each layer, repeatable. Default: 100.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to fit on.")] = 65_536,
    evaluation_tokens: Annotated[int, typer.Option(help="Tokens to measure on, at each length.")] = 32_768,
    seed: Annotated[list[int] | None, typer.Option(help="Repeatable. Default: 0, 1, 2.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows of an interrupted run.")] = False,
):
    """Fit every scheme with every seed, and write what that reached."""
    scheme, text = scheme or ["sinusoidal", "relative", "rotary"], text or ["given"]
    reconstruct, seed = reconstruct or [100], seed or [0, 1, 2]
    unknown = sorted(set(text) - set(TEXTS))
    if unknown:
        raise DataError(f"--text {unknown[0]!r} is not one of {', '.join(TEXTS)}")
    config = {
        "model": model, "scheme": scheme, "text": text, "data": data and Path(data).name, "reconstruct": reconstruct,
        "evaluation": evaluation and Path(evaluation).name, "pairs": pairs and pairs.name, "tokens": tokens,
        "evaluation_tokens": evaluation_tokens, "seeds": seed,
    }  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    file = output / "results.json"
    if file.exists() and not resume:
        raise PosswapError(f"{file} exists: choose another --output, or pass --resume")
    bench = Bench(model, data, evaluation, pairs, tokens, evaluation_tokens)
    done = json.loads(file.read_text()) if file.exists() else {"config": config}
    if done["config"] != config:
        raise PosswapError(f"{file} was made with other options: resume with the same, or choose another --output")
    rows = done.get("rows", [])
    about = provenance("python recipes/fit_quality.py")
    original = bench.measure(bench.original)
    jobs = [(s, t, n) for s in scheme for t in text for n in reconstruct]
    for name, kind, steps in tqdm(jobs, desc="fit quality"):
        if any((row["scheme"], row["text"], row["reconstruct"]) == (name, kind, steps) for row in rows):
            continue
        row = {"scheme": name, "text": kind, "reconstruct": steps}
        row["cold"] = bench.measure(posswap.swap(bench.load(), name, warm_start=False))
        row["swapped"] = bench.measure(posswap.swap(bench.load(), name))
        row["fitted"] = []
        for one in seed:
            swapped = posswap.swap(bench.load(), name)
            report = posswap.fit(swapped, bench.batches(kind, one), reconstruct=steps, seed=one)
            figures = {"seed": one, "seconds": report.seconds, "tokens": report.tokens, **bench.measure(swapped)}
            row["fitted"].append(figures | {"layers": [asdict(layer) for layer in report.layers]})
        rows.append(row)
        write_json(file, {"format": 1, **about, "config": config, "original": original, "rows": rows})
    results = json.loads(file.read_text())
    (output / "results.md").write_text(fit_table(results) + "\n")
    print(fit_table(results))


def _read_pairs(path: Path) -> tuple[list[str], list[str], list[float]]:
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    missing = sorted({"sentence1", "sentence2", "label"} - set(rows[0] if rows else ()))
    if missing:
        raise DataError(f"{path} has no column {missing[0]!r}: it needs sentence1, sentence2 and label")
    return [row["sentence1"] for row in rows], [row["sentence2"] for row in rows], [float(row["label"]) for row in rows]


if __name__ == "__main__":
    run_program("fit_quality", main)
