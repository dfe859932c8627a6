"""What does an embedder find in long documents? Pass keys and needles as in LongEmbed, data sets in BEIR's format, STS.

    python recipes/retrieval.py --scheme rotary --start fit --span 128                 # MiniLM, 256 to 4,096 tokens
    python recipes/retrieval.py --scheme original --read truncated                     # baseline: documents are cut
    python recipes/retrieval.py --scheme original --read chunks --chunk 128            # baseline: mean over chunks
    python recipes/retrieval.py --model runs/long-embedder/model --scheme original --read whole --beir nfcorpus --lengths 1024

Figures come from sentence-transformers' evaluators, so they can be compared with other embedders' figures. --read whole is for
models that read enough tokens, such as those of recipes/long_embedder.py.

50 questions are asked of each kind and length. `by_chunk`, for chunks only, takes an index of all of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from hf_posswap.errors import PosswapError
from hf_posswap.experiments.embedders import EmbedderOptions, load_embedder, longest_text, sts, swap_embedder
from hf_posswap.experiments.recipe import ORIGINAL, announce, averaged, cost, main
from hf_posswap.experiments.text_tasks import documents
from hf_posswap.extras import extra
from hf_posswap.measure.retrieval import piece_vectors, read_as, recall
from hf_posswap.measure.retrieval_sets import RetrievalSet, needles, passkeys, read_beir
from hf_posswap.pipelines import unwrap

with extra():
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.util import cos_sim


@dataclass(frozen=True, kw_only=True)
class Config(EmbedderOptions):
    QUESTION = "What does it find in long documents?"
    FIGURES = {
        "passkey": "share of questions whose document of N tokens is the first of 100, made of one sentence in filler",
        "needle": "the same, with a fact in prose",
        "by_chunk": "the same if each chunk has a vector, and the nearest chunk tells the document",
        "beir": "nDCG@10",
        "sts": "Spearman's rho on pairs of sentences",
    }
    LEAST = {"fit_length": 1, "lengths": 64}

    lengths: Annotated[tuple[int, ...], "Tokens of pass key and needle documents; repeatable."] = (256, 512, 1024, 2048, 4096)
    fit_length: Annotated[int, "Tokens of the longest texts of --start fit."] = 1024
    beir: Annotated[tuple[str, ...], "Folders with corpus.jsonl, queries.jsonl and qrels/test.tsv; repeatable."] = ()

    def __post_init__(self):
        super().__post_init__()
        names = [Path(place).name for place in self.beir]
        if len(set(names)) < len(names):
            raise PosswapError(f"two data sets of --beir are named {max(names, key=names.count)!r}: rename the folder of one")


def run(config: Config, folder: Path, resume: bool) -> dict:
    embedder = load_embedder(config.model)
    beir = {Path(place).name: read_beir(place) for place in config.beir}
    longest, reads = max([*config.lengths, embedder.max_seq_length]), config.chunk or embedder.max_seq_length
    if config.scheme != ORIGINAL:
        texts = documents(config, "train", causal=False) if config.start == "fit" else ()
        length = min(config.fit_length, longest)
        swap_embedder(embedder, config, texts, tokens=length, longest=longest)
    else:
        read_as(embedder, config.read, reads, longest_text(config, longest))
    text = documents(config, "validation", causal=False)
    figures = {}
    for length in config.lengths:
        announce(f"looking in documents of {length} tokens")
        sets = {"passkey": passkeys(embedder.tokenizer, length), "needle": needles(embedder.tokenizer, length, text)}
        for name, one in sets.items():
            figures[f"{name}_{length}"] = found(embedder, one).first
            if config.scheme == ORIGINAL and config.read == "chunks":
                figures[f"{name}_by_chunk_{length}"] = nearest_chunk(embedder, one)
    for name, one in beir.items():
        announce(f"looking in {name}")
        figures[f"beir_{name}"] = found(embedder, one).ndcg
    if config.sts:
        figures["sts"] = sts(embedder, config.sts)
    return {**averaged(figures), "cost": cost(unwrap(embedder)), "model": embedder}


class Evaluator(InformationRetrievalEvaluator):
    """sentence-transformers' evaluator, which also keeps which queries find an answer in the first place."""

    first: list[bool]
    ndcg: float

    def compute_metrics(self, queries_result_list: list) -> dict:
        tops = [min(hits, key=lambda hit: (-hit["score"], hit["corpus_id"]))["corpus_id"] for hits in queries_result_list]
        self.first = [top in self.relevant_docs[query] for query, top in zip(self.queries_ids, tops, strict=True)]
        found = super().compute_metrics(queries_result_list)
        self.ndcg = float(found["ndcg@k"][10])
        return found


def found(embedder, one: RetrievalSet) -> Evaluator:
    """Return the evaluator of one set after it has looked, by the cosine of vectors."""
    evaluator = Evaluator(*one, batch_size=8, write_csv=False, score_functions={"cosine": cos_sim})
    evaluator(embedder)
    return evaluator


def nearest_chunk(embedder, one: RetrievalSet) -> list[bool]:
    """Return for each query whether the nearest of all chunks is one of its document."""
    documents, queries = list(one.corpus), embedder.encode_query(list(one.queries.values()), convert_to_tensor=True).cpu()
    answers = [documents.index(*one.relevant[query]) for query in one.queries]
    return recall(piece_vectors(embedder.encode_document, list(one.corpus.values())), queries, answers).tolist()


if __name__ == "__main__":
    main(Config, run)
