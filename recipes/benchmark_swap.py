"""What the verbs themselves cost: time and memory of swap, fit, save, restore and load, on models of real sizes.

    python recipes/benchmark_swap.py --output runs/verbs
    python recipes/benchmark_swap.py --family gpt2 --scheme relative --output runs/verbs-gpt2

Models have random weights, in float32, and each is worked on in a process of its own, one verb after the other. Seconds are CPU
time. Memory is the highest resident memory of the process while the verb runs, above its level before there was a model, over
the bytes of the model's weights: 1 is the model alone. Linux only. With a GPU models are there, and both figures are its own:
wall time until it is done, and bytes in use in the caching allocator.
"""

import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import torch
from benchmark_attention import mebibytes, reset_peak
from torch.utils.benchmark import timer
from transformers import AutoModel, BertConfig, BertModel, GPT2Config, GPT2Model

import hf_posswap as posswap
from hf_posswap.errors import PosswapError
from hf_posswap.experiments.recipe import ORIGINAL, RunOptions, main

FAMILIES = {"bert": (BertModel, BertConfig), "gpt2": (GPT2Model, GPT2Config)}  # defaults are BERT-base and GPT-2 small


@dataclass(frozen=True, kw_only=True)
class Config(RunOptions):
    QUESTION = "What do swap, fit, save, restore and load cost in time and memory?"
    FIGURES = {
        "seconds": "CPU time of the verb, on a GPU wall time",
        "memory": "highest resident memory meanwhile, on a GPU its own, as a multiple of the model's",
    }
    FORBIDDEN_STARTS = dict.fromkeys(("cold", "fit", "scratch"), "weights are random here")
    LEAST = dict.fromkeys(("max_positions", "layers", "hidden", "texts", "length", "threads"), 1)

    family: Annotated[tuple[str, ...], "bert (base), gpt2 (small); repeatable."] = tuple(FAMILIES)
    scheme: str = "rotary"
    max_positions: Annotated[int, "The longest input of the swapped model."] = 2048
    layers: Annotated[int, "Layers of the model; bert and gpt2 have 12."] = 12
    hidden: Annotated[int, "Its hidden size; bert and gpt2 have 768."] = 768
    texts: Annotated[int, "Texts of random tokens to fit on."] = 20
    length: Annotated[int, "Tokens of each of these texts."] = 256
    steps: Annotated[int, "Steps per layer of the fit; posswap.fit takes 100 by default."] = 10
    threads: Annotated[int, "CPU threads."] = 1

    def __post_init__(self):
        super().__post_init__()
        if unknown := [family for family in self.family if family not in FAMILIES]:
            raise PosswapError(f"family={unknown[0]!r} is not known; known are {', '.join(FAMILIES)}")
        if self.scheme == ORIGINAL:
            raise PosswapError("scheme='original' would swap nothing: name a scheme")
        if self.hidden % 24:
            raise PosswapError(f"hidden={self.hidden} must be a multiple of 24: 12 heads of an even size")


def verbs(config: Config, family: str) -> dict[str, dict[str, float]]:
    """Return seconds and memory of each verb, in a process that does nothing else."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    kind, config_class = FAMILIES[family]
    device, clock = ("cuda", timer) if torch.cuda.is_available() else ("cpu", time.process_time)
    before, found = mebibytes(), {}
    sizes = {"num_hidden_layers": config.layers, "hidden_size": config.hidden, "intermediate_size": 4 * config.hidden}
    model = kind(config_class(**sizes)).to(device).eval()
    size = sum(parameter.nbytes for parameter in model.parameters()) / 2**20
    text = torch.randint(5, 5000, (config.texts, config.length))
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "swap": lambda: posswap.swap(model, config.scheme, max_positions=config.max_positions),
            "fit": lambda: posswap.fit(model, text, steps=config.steps, progress=False),
            "save": lambda: model.save_pretrained(folder),
            "restore": lambda: posswap.restore(model),
            "load": lambda: AutoModel.from_pretrained(folder).to(device),  # a second model beside the first
        }
        for verb, do in work.items():
            reset_peak()
            started = clock()
            do()
            peak = mebibytes(peak=True)
            found[verb] = {"seconds": round(clock() - started, 2), "memory": round((peak - before) / size, 2)}
    return {"model": {"mib": round(size)}, **found}


def run(config: Config, folder: Path, resume: bool) -> dict:
    details = {}
    for family in config.family:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            details[family] = process.submit(verbs, config, family).result()
    figures = {
        f"{family}_{verb}_{name}": value
        for family, found in details.items()
        for verb, measured in found.items()
        if verb != "model"
        for name, value in measured.items()
    }
    return {"figures": figures, "cost": {}, "details": details}


if __name__ == "__main__":
    main(Config, run)
