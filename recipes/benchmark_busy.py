"""How much longer does a fit take beside a process that keeps a core busy?

    python recipes/benchmark_busy.py                          # with GOMP_SPINCOUNT=500, as `hf-posswap` sets it
    GOMP_SPINCOUNT=1000000000 python recipes/benchmark_busy.py    # as torch's threads wait without

Wall time, alone and beside it in turn, on as many threads as there are cores: measure where nothing else runs.
"""

import os
import subprocess
import sys
from statistics import median
from typing import Annotated

import typer

from hf_posswap.terminal import run_program

FIT = """
import time, torch, hf_posswap as posswap
from transformers import BertConfig, BertModel
torch.manual_seed(0)
model = BertModel(BertConfig(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512)).eval()
posswap.swap(model, "relative:clip=16")
started = time.perf_counter()
posswap.fit(model, torch.randint(5, 5000, (40, 256)), progress=False)
print(time.perf_counter() - started)
"""


def seconds() -> float:
    """Return the wall time of a small fit in a process of its own."""
    environment = {"GOMP_SPINCOUNT": "500", **os.environ}
    done = subprocess.run([sys.executable, "-c", FIT], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def main(pairs: Annotated[int, typer.Option(min=1, help="Fits alone, and as many beside it.")] = 3) -> None:
    """Print the median of fits alone and beside a busy process, and what the one is of the other."""
    alone, beside = [], []
    for _ in range(pairs):
        alone.append(seconds())
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
            try:
                beside.append(seconds())
            finally:
                neighbour.kill()
    print(f"alone {median(alone):.1f} s, beside it {median(beside):.1f} s: {median(beside) / median(alone):.1f} times as long")


if __name__ == "__main__":
    run_program("benchmark_busy", main)
