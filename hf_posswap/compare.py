"""The main job: take a checkpoint through position schemes, and measure what each swap costs and what tuning wins back.

For every scheme, from the same checkpoint, with the same text and the same number of steps: the damage of a cold and of a
warm swap, of one that was fitted to the original, a short tuning of that, and a word-order probe. An encoder is judged by
its mean-pooled states against the original's and tuned by distillation from it; a causal model by held-out perplexity
at one, two and four times its trained length and by KL to the original, and tuned on its own loss.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

import torch
from tqdm import tqdm
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.assets import EMBEDDED_MODELS, model_source
from hf_posswap.calibration import text_batches
from hf_posswap.distillation import distillation_loss
from hf_posswap.errors import PosswapError
from hf_posswap.fitting import fit
from hf_posswap.measure.damage import kl_divergence, perplexity, pooled_cosine, pooled_states
from hf_posswap.measure.word_order import word_order_examples, word_order_preference, word_order_probe
from hf_posswap.recipe import ORIGINAL, load_family, load_tokenizer
from hf_posswap.results import prepare_output, provenance, write_json
from hf_posswap.schemes import parse_scheme
from hf_posswap.swap import swap
from hf_posswap.text import Split, embedded_documents, read_documents, stdlib_prose, token_blocks
from hf_posswap.training import TrainingConfig, train

DEFAULT_SCHEMES = ("sinusoidal", "relative", "rotary", "none")
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """One comparison: what, on which text, and the budget that every scheme gets."""

    models: tuple[str, ...] = EMBEDDED_MODELS  # folders, Hub ids, or the names of the embedded ones
    schemes: tuple[str, ...] = DEFAULT_SCHEMES
    data: str | None = None  # text, table or Hub dataset; None: the standard library's text
    text_column: str = "text"
    seeds: tuple[int, ...] = (0,)
    max_steps: int = 16
    batch_size: int = 8
    learning_rate: float = 2e-4
    fit_tokens: int = 16_384
    reconstruct: int = 10  # steps of the fit for each layer
    evaluation_tokens: int = 8192  # of held-out text, for each figure
    word_order_sentences: int = 480  # half of them intact; half as many again are held out

    def __post_init__(self):
        for field in ("max_steps", "batch_size", "fit_tokens", "reconstruct", "evaluation_tokens", "word_order_sentences"):
            if not isinstance(getattr(self, field), int) or getattr(self, field) < 1:
                raise PosswapError(f"{field}={getattr(self, field)!r} must be an integer of at least 1")
        if not self.models or not self.schemes or not self.seeds:
            raise PosswapError("a comparison needs at least one model, one scheme and one seed")
        for scheme in self.schemes:
            if scheme != ORIGINAL:
                parse_scheme(scheme)


def compare(config: CompareConfig, output: Path, *, resume: bool = False, progress: bool = True) -> dict:
    """Run a comparison and return its results; rows that a resumed run finds finished are not run again.

    Writes into `output`: results.json, results.md, one PNG for each figure, and models/ with one swapped model a family.
    """
    if config.data is not None:  # a missing file is found before anything is loaded or written
        read_documents(config.data, text_column=config.text_column)
    rows_folder = prepare_output(asdict(config), output, resume)
    results = {"format": FORMAT, **provenance(), "config": asdict(config), "models": []}
    jobs = [(name, scheme) for name in config.models for scheme in (ORIGINAL, *config.schemes)]
    bar = tqdm(total=len(jobs), desc="compare", unit="swap", disable=None if progress else True)
    for name in config.models:
        bench = _Bench(name, config, progress)
        rows = []
        for scheme in (ORIGINAL, *config.schemes):
            bar.set_description(f"{name}: {scheme}")
            row_file = rows_folder / f"{len(results['models'])}-{_slug(scheme)}.json"
            if not row_file.exists():
                folder = f"{len(results['models'])}-{_slug(name)}-{_slug(scheme)}"
                keep = output / "models" / folder if scheme == _kept(config) else None
                write_json(row_file, bench.row(scheme, keep))
            rows.append(json.loads(row_file.read_text()))
            bar.update()
        results["models"].append({**bench.facts(), "rows": rows})
    bar.close()
    write_json(output / "results.json", results)
    return results


class _Bench:
    """One model with the text it is measured and tuned on."""

    def __init__(self, name: str, config: CompareConfig, progress: bool):
        self.name, self.config, self.progress = name, config, progress
        self.original, self.tokenizer, self.causal = load_checkpoint(name)
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        self.original.to(device)
        self.trained_positions = self.original.config.max_position_embeddings
        self.lengths = [n * self.trained_positions for n in (1, 2, 4)] if self.causal else []
        self.max_positions = max(self.lengths, default=self.trained_positions)
        held_out, training = self._documents("validation"), self._documents("train")
        self.train_length = self.trained_positions if self.causal else min(128, self.trained_positions)
        self.train_blocks = token_blocks(training, self.tokenizer, self.train_length)
        self.training = training
        if self.causal:
            # The same tokens at every length, cut into shorter or longer blocks: length alone makes the difference.
            longest = self._evaluation_blocks(held_out, self.max_positions)
            self.eval_blocks = {n: longest.view(-1, n) for n in self.lengths}
        else:
            eval_lengths = sorted({min(128, self.trained_positions), self.trained_positions})
            self.eval_blocks = {n: self._evaluation_blocks(held_out, n) for n in eval_lengths}
        if not self.causal:
            self.original_states = {n: pooled_states(self.original, b) for n, b in self.eval_blocks.items()}
        self.words_train, self.words_test = self._word_order()

    def _documents(self, split: Split) -> list[str]:
        return documents(self.config.data, split, causal=self.causal, text_column=self.config.text_column)

    def _evaluation_blocks(self, documents: list[str], length: int) -> torch.Tensor:
        blocks = token_blocks(documents, self.tokenizer, length)
        # Evenly spread over the text, the same tokens for every scheme.
        count = min(len(blocks), max(1, self.config.evaluation_tokens // length))
        return blocks[torch.linspace(0, len(blocks) - 1, count).long()]

    def _word_order(self):
        sentences = self.config.word_order_sentences
        if self.config.data is None:
            prose = {split: stdlib_prose(split) for split in ("train", "validation")}
        else:
            prose = {split: "\n".join(self._documents(split)).split("\n") for split in ("train", "validation")}
        return word_order_examples(prose["train"], sentences), word_order_examples(prose["validation"], sentences // 2)

    def facts(self) -> dict:
        return {
            "model": self.name,
            "model_type": self.original.config.model_type,
            "causal": self.causal,
            "parameters": self.original.num_parameters(),
            "trained_positions": self.trained_positions,
            "evaluation_tokens": {str(n): b.numel() for n, b in self.eval_blocks.items()},
            "tuning_tokens": self.config.max_steps * self.config.batch_size * self.train_length,
        }

    def row(self, scheme: str, keep: Path | None) -> dict:
        """Measure one scheme: cold, warm, and with each seed fitted and then tuned."""
        row = {"scheme": scheme}
        if scheme != ORIGINAL:
            row["cold"] = self._measure(self._swapped(scheme, warm_start=False))
        model = self._swapped(scheme)
        row["swapped"] = self._measure(model, word_order=True)
        fitted, tuned = [], []
        for seed in self.config.seeds:
            model = self._swapped(scheme)
            if scheme != ORIGINAL:
                report = fit(
                    model, self._fit_batches(seed), reconstruct=self.config.reconstruct, seed=seed, progress=self.progress
                )
                figures = self._measure(model, word_order=True)
                fitted.append({"seed": seed, "tokens": report.tokens, "seconds": report.seconds, **figures})
            model, run = self._tune(model, seed, scheme)
            figures = self._measure(model, word_order=True)
            tuned.append({"seed": seed, "tokens": run.tokens, "seconds": run.seconds, **figures})
            if keep is not None and seed == self.config.seeds[0]:
                model.save_pretrained(keep)
                self.tokenizer.model_max_length = self.max_positions
                self.tokenizer.save_pretrained(keep)
        if fitted:
            row["fitted"] = fitted
        row["tuned"] = tuned
        return row

    def _fit_batches(self, seed: int) -> list[torch.Tensor]:
        return text_batches(
            self.training,
            self.tokenizer,
            self.trained_positions,
            tokens=self.config.fit_tokens,
            causal=self.causal,
            seed=seed,
        )

    def _swapped(self, scheme: str, *, warm_start: bool = True) -> PreTrainedModel:
        model = copy.deepcopy(self.original)
        if scheme != ORIGINAL:
            return swap(model, scheme, max_positions=self.max_positions, warm_start=warm_start)
        if self.max_positions > self.trained_positions:
            return swap(model, "learned:extend=tile", max_positions=self.max_positions)
        return model

    def _measure(self, model: PreTrainedModel, *, word_order: bool = False) -> dict:
        if self.causal:
            shortest = self.lengths[0]
            figures = {f"perplexity_{n}": perplexity(model, blocks) for n, blocks in self.eval_blocks.items()}
            figures["kl"] = kl_divergence(model, self.original, self.eval_blocks[shortest])
        else:
            states = self.original_states
            figures = {f"cosine_{n}": pooled_cosine(model, b, states[n]) for n, b in self.eval_blocks.items()}
        if word_order:
            if self.causal:
                figures["word_order"] = word_order_preference(model, self.tokenizer, self.words_test[0])
            else:
                figures["word_order"] = word_order_probe(model, self.tokenizer, self.words_train, self.words_test)
        return figures

    def _tune(self, model: PreTrainedModel, seed: int, scheme: str):
        config = TrainingConfig(
            max_steps=self.config.max_steps,
            batch_size=self.config.batch_size,
            learning_rate=self.config.learning_rate,
            table_learning_rate_factor=100.0,  # so few steps that tables would stay next to zero
            dropout=False,
            seed=seed,
        )
        compute_loss = None if self.causal else distillation_loss(self.original)
        rows = [{"input_ids": row, "labels": row} if self.causal else {"input_ids": row} for row in self.train_blocks]
        description = f"{self.name}: tuning {scheme}, seed {seed}"
        return train(model, rows, config, compute_loss=compute_loss, progress=self.progress, description=description)


def load_checkpoint(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, bool]:
    """Load an unswapped model by its name on the command line: (model, tokenizer, whether it is causal)."""
    _, causal = load_family(name)
    model = (AutoModelForCausalLM if causal else AutoModel).from_pretrained(model_source(name)).eval()
    return model, load_tokenizer(name), causal


def documents(data: str | None, split: Split, *, causal: bool, text_column: str = "text") -> list[str]:
    """Return the text of one split: the user's, or the embedded one."""
    if data is not None:
        return read_documents(data, split=split, text_column=text_column)
    return embedded_documents(split, causal=causal)


def figures_of(row: dict) -> Iterator[tuple[str, str, float, float | None]]:
    """Yield (stage, figure, value, spread) of a row: spread is the standard deviation over seeds, None for one seed."""
    for stage in ("cold", "swapped"):
        for name, value in row.get(stage, {}).items():
            yield stage, name, value, None
    for stage in ("fitted", "tuned"):
        for name in row.get(stage, [{}])[0]:
            values = [run[name] for run in row[stage]]
            yield stage, name, mean(values), stdev(values) if len(values) > 1 else None


def _kept(config: CompareConfig) -> str:
    return next((s for s in config.schemes if s.startswith("rotary")), config.schemes[0])


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in text.rstrip("/").rpartition("/")[2] or text)
