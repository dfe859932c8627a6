"""Make an embedder that reads long documents in one go: swap, fit on long text, tune on pairs without labels.

    python recipes/long_embedder.py --scheme rotary --train-file books/ --validation-file plays.txt --save-model
    python recipes/long_embedder.py --read chunks --chunk 128 --train-file books/ --validation-file plays.txt   # baseline
    python recipes/long_embedder.py --scheme rotary --tokens 4096 --cached 4 --train-file my-documents.csv
    accelerate launch recipes/long_embedder.py --scheme rotary --train-file books/

A pair is a document and a passage of it; the other documents of the batch are the negatives. A penalty, weighted by --brake,
keeps the vectors of passages, which are short texts, near those of the original, so that it stays good at short texts. The
scheme `original` is the baseline: the unswapped model, tuned in the same way, which reads documents as --read says. Choose
rates, chunks and brakes by `select`, measured on the last tenth of the training documents, which is not trained on, as is
`kept`. `by_chunk`, for chunks only, takes an index of all of them, which has many times the vectors.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from accelerate import PartialState
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional

from hf_posswap.errors import DataError, PosswapError
from hf_posswap.experiments.embedders import EmbedderOptions, load_embedder, longest_text, sts, swap_embedder
from hf_posswap.experiments.recipe import ORIGINAL, announce, averaged, cost, main
from hf_posswap.experiments.text_tasks import documents
from hf_posswap.extras import extra
from hf_posswap.measure.retrieval import Way, cut_documents, draw_passages, piece_vectors, read_as, recall
from hf_posswap.pipelines import unwrap
from hf_posswap.provenance import new_folder, read_json

with extra():
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.util import cos_sim, mine_hard_negatives

EACH = 6  # passages drawn from each document in the evaluation, two from each third
TEMPERATURE = 0.05


@dataclass(frozen=True, kw_only=True)
class Config(EmbedderOptions):
    QUESTION = "Does it find a long document by a passage of it, wherever that stands?"
    FIGURES = {
        "recall": "share of passages whose document is the nearest of all",
        "early": "the same, of passages from the first third of the document",
        "middle": "of passages from its second third",
        "late": "of passages from its last third",
        "by_chunk": "recall if each chunk has a vector, and the nearest chunk tells the document",
        "select": "recall on text that tells which rates to take",
        "kept": "cosine of short texts' vectors with the original's",
        "sts": "Spearman's rho on pairs of sentences",
    }
    LEAST = {"tokens": 3, "passage": 1, "documents": 2}
    LEAST |= dict.fromkeys(("max_steps", "hard", "cached", "checkpoint_every", "brake"), 0) | {"learning_rate": 1e-12}

    start: str = "fit"
    span: Annotated[int | None, "Attend only to keys at a distance below this; as many as --tokens: to all."] = 128
    tokens: Annotated[int, "Tokens of a document, and the longest input of the swapped model."] = 1024
    passage: Annotated[int, "Tokens of a passage."] = 48
    read: Way = "chunks"
    chunk: int = 128
    max_steps: Annotated[int, "Tuning steps on pairs; 0: measure without tuning."] = 60
    batch_size: Annotated[int, "Pairs per step, over all processes."] = 12
    learning_rate: Annotated[float, "Peak rate, after warm-up over a tenth of the steps; then a cosine to 0."] = 5e-5
    brake: Annotated[float, "Weight of 1 - cosine of the passages' vectors with the original's."] = 1.0
    hard: Annotated[int, "Further negatives of each pair: documents nearest to its passage by the model itself."] = 0
    cached: Annotated[int, "Pairs in memory at once, for large batches (GradCache); 0: all."] = 0
    bf16: Annotated[bool, "Tune with autocast to bfloat16."] = False
    checkpoint_every: Annotated[int, "Steps between checkpoints, for --resume; 0: none."] = 0
    documents: Annotated[int, "The largest number of documents to search."] = 120

    def __post_init__(self):
        super().__post_init__()
        if os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16":  # which the trainer takes by itself
            object.__setattr__(self, "bf16", True)
        if self.batch_size < 2:
            raise PosswapError(f"batch_size={self.batch_size}: other pairs of the batch are the negatives, so give 2 or more")


def run(config: Config, folder: Path, resume: bool) -> dict:
    if config.max_steps and config.batch_size % PartialState().num_processes:
        raise PosswapError(f"batch_size={config.batch_size} does not divide into {PartialState().num_processes} processes")
    set_seed(config.seed)
    original = load_embedder(config.model)
    tokenizer, body = original.tokenizer, config.tokens - 2
    cut = [cut_documents(documents(config, split, causal=False), tokenizer, body) for split in ("train", "validation")]
    test, held = cut[1], set(cut[1])
    others = [text for text in cut[0] if text not in held]
    if not others:
        raise DataError("every document to train on is one to measure on, too: give --validation-file other text")
    aside, fewer = max(2, len(others) // 10), max(2, config.documents // 3)  # one document is always found
    training, select = others[:-aside], others[-aside:]
    if min(len(test), len(select)) < 2:
        raise DataError("the text to measure on, or to train on, is one document, which is always found: give more text")
    count, wanted = min(len(training), config.max_steps * config.batch_size), config.batch_size * (1 + config.hard)
    if config.max_steps and count < wanted:
        raise DataError(f"{count} different documents do not fill a batch, which takes {wanted}: give more text, or more steps")
    asked = {
        name: (texts, draw_passages(texts, tokenizer, config.passage, EACH, seed=0))
        for name, texts in (("recall", spread(test, config.documents)), ("select", spread(select, fewer)))
    }
    begun = folder / "start"
    known = resume and begun.is_dir()
    embedder = load_embedder(str(begun) if known else config.model)
    if config.scheme != ORIGINAL and not known:
        swap_embedder(embedder, config, training, tokens=config.tokens)
        if PartialState().is_main_process:
            with new_folder(begun) as whole:  # --resume takes what is there
                embedder.save_pretrained(str(whole))
    elif config.scheme == ORIGINAL:
        read_as(embedder, config.read, config.chunk, longest_text(config, config.tokens))
    spent = {}
    if config.max_steps:
        spent = tune(embedder, original, pairs(config, training, tokenizer), config, folder, resume)
    announce("measuring")
    figures, speed = measure(embedder, original, config, asked)
    spent = cost(unwrap(embedder)) | spent | {"documents_per_second": speed}
    details = dict(zip(("documents", "queries"), map(len, asked["recall"]), strict=True))
    return {**averaged(figures), "cost": spent, "model": embedder, "details": details}


def pairs(config: Config, training: list[str], tokenizer) -> list:
    """Draw (passage, document) pairs; every document is used once before any is used again."""
    wanted, drawn = config.max_steps * config.batch_size, []
    generator = torch.Generator().manual_seed(config.seed)
    while len(drawn) < wanted:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        few = [training[i] for i in torch.randperm(len(training), generator=generator)[: wanted - len(drawn)].tolist()]
        drawn += [(one.text, few[one.document]) for one in draw_passages(few, tokenizer, config.passage, 1, seed)]
    return drawn


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the cosines (A, B) of vectors (A, E) and (B, E) in float32: in bfloat16 they have steps of up to 0.004."""
    with torch.autocast(a.device.type, enabled=False):
        return cos_sim(a.float(), b.float())


class PairsWithBrake(nn.Module):
    """MultipleNegativesRankingLoss, plus 1 - cosine of passages with their original vectors (B, E), the labels."""

    def __init__(self, model: SentenceTransformer, brake: float, cached: int):
        super().__init__()
        self.model, self.brake, self.cached = model, brake, cached
        several = PartialState().num_processes > 1
        options = {"scale": 1 / TEMPERATURE, "similarity_fct": cosines, "gather_across_devices": several}
        kind = losses.CachedMultipleNegativesRankingLoss if cached else losses.MultipleNegativesRankingLoss
        self.pairs = kind(model, **options, **({"mini_batch_size": cached} if cached else {}))

    def forward(self, features, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of passages, their documents, and hard negatives; these are read apart, and so not padded alike."""
        if self.cached:
            loss, short = self.pairs(features, None), self.model(features[0])["sentence_embedding"]
        else:
            short, *long = (self.model(part)["sentence_embedding"] for part in features)
            loss = self.pairs.compute_loss_from_embeddings([short, *long], None)
        return loss + self.brake * (1 - functional.cosine_similarity(short, labels[:, : short.shape[-1]], dim=-1)).mean()


def tune(embedder, original, drawn: list, config: Config, folder: Path, resume: bool) -> dict:
    """Tune an embedder on pairs, in place, with sentence-transformers' trainer; return how many tokens they have.

    And how many it reads a second, unless all steps were done before a resumption.
    """
    dataset = Dataset.from_dict(dict(zip(("anchor", "positive"), zip(*drawn, strict=True), strict=True)))
    if config.hard:
        announce("looking for hard negatives")
        options = {"num_negatives": config.hard, "output_format": "n-tuple", "batch_size": 8, "verbose": False}
        dataset = mine_hard_negatives(dataset, embedder, **options)
    prompt = embedder.prompts.get(embedder.default_prompt_name)
    texts = [text for name in dataset.column_names for text in dataset[name]]
    read = (embedder.preprocess(texts[i : i + 64], prompt=prompt) for i in range(0, len(texts), 64))
    tokens = sum(int(features["attention_mask"].sum()) for features in read)
    announce("tuning")
    with original.truncate_embeddings(None):  # whole, as the trainer's own vectors are but of chunks
        dataset = dataset.add_column("label", original.encode(list(dataset["anchor"])).tolist())
    if getattr(unwrap(embedder), "pooler", None) is not None:  # it gets no gradient, and DDP waits for every gradient
        unwrap(embedder).pooler.requires_grad_(False)
    cpu, output = PartialState().device.type == "cpu", folder / "trainer"
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(output),
        max_steps=config.max_steps,
        per_device_train_batch_size=config.batch_size,
        accelerator_config={"split_batches": True},  # the sampler makes the whole batch, over all processes
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.max_steps // 10,
        batch_sampler="no_duplicates",  # a document twice in a batch would be its own false negative
        seed=config.seed,
        bf16=config.bf16,
        prompts=prompt,  # as `encode` reads texts, those of the brake too
        use_cpu=cpu,
        ddp_backend="gloo" if cpu and PartialState().num_processes > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # a forward calls the model twice, and broadcasting would change buffers still in use
        save_strategy="steps" if config.checkpoint_every else "no",
        save_steps=config.checkpoint_every or 500,
        save_total_limit=1,
        logging_steps=max(1, config.max_steps // 10),
        report_to="none",
        dataloader_pin_memory=not cpu,
    )
    arguments._n_gpu = min(1, arguments.n_gpu)  # a process has one GPU, as in other recipes: transformers would take them all
    loss = PairsWithBrake(embedder, config.brake, config.cached)
    trainer = SentenceTransformerTrainer(model=embedder, args=arguments, train_dataset=dataset, loss=loss)
    whole = [state.parent for state in output.glob("checkpoint-*/trainer_state.json")] if resume else []  # written last
    newest = max(whole, key=lambda place: int(place.name.removeprefix("checkpoint-")), default=None)
    if newest:
        read_json(newest / "trainer_state.json", "remove this checkpoint: tuning goes on from what was before it")
    begun = int(newest.name.removeprefix("checkpoint-")) if newest else 0
    seconds = trainer.train(resume_from_checkpoint=newest and str(newest)).metrics["train_runtime"]
    if (done := trainer.state.global_step) < config.max_steps:  # the sampler leaves out batches that it cannot fill
        what = f"{done} steps of {config.max_steps}: too few documents differ, of pairs and hard negatives, to fill batches"
        raise DataError(f"{what}: give more text, more steps, or a smaller batch")
    embedder.eval()
    pace = {"tokens_per_second": tokens * (1 - begun / config.max_steps) / seconds} if begun < config.max_steps else {}
    return {"tokens": tokens} | pace


def spread(items: list, count: int) -> list:
    count = min(count, len(items))
    return [items[number * len(items) // count] for number in range(count)]


@torch.no_grad()
def measure(embedder, original, config: Config, asked: dict[str, tuple[list, list]]) -> tuple[dict, float]:
    """Return the figures of a run, means as their values for each document, and how many documents it reads a second."""
    figures, seconds = {}, {}
    for name, (texts, passages) in asked.items():
        started = time.perf_counter()
        long = embedder.encode(texts, batch_size=8, convert_to_tensor=True).cpu()  # which waits for a GPU
        seconds[name] = time.perf_counter() - started
        short = embedder.encode([one.text for one in passages], convert_to_tensor=True).cpu()
        hits = recall(long, short, [one.document for one in passages]).float().view(len(texts), EACH)
        figures[name] = hits.mean(1)
        if name == "recall":
            figures |= dict(zip(("early", "middle", "late"), hits.view(len(texts), 3, -1).mean(2).unbind(1), strict=True))
            if config.scheme == ORIGINAL and config.read == "chunks" and 2 * config.chunk <= config.tokens:  # two or more
                hits = recall(piece_vectors(embedder.encode, texts), short, [one.document for one in passages])
                figures["by_chunk"] = hits.float().view(len(texts), EACH).mean(1)
    before = original.encode([one.text for one in passages], convert_to_tensor=True).cpu()
    figures["kept"] = functional.cosine_similarity(short, before, dim=-1).view(-1, EACH).mean(1)
    if config.sts:
        figures |= {"sts": sts(embedder, config.sts), "sts_original": sts(original, config.sts)}
    return figures, len(asked["recall"][0]) / seconds["recall"]


if __name__ == "__main__":
    main(Config, run)
