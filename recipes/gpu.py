"""All that waits for a GPU, in one command of at most ten minutes; the same command again does what was left, or has failed.

    python recipes/gpu.py                                       # or: make gpu
    python recipes/gpu.py --only kernel --only triton-gpt2
    python recipes/gpu.py --miniature --output runs/try         # the same steps, tiny, on a CPU

Each step is a command of its own: tests of the Triton kernel; the training loop in bfloat16; what a swap costs; a GPT-2 small,
trained on the standard library, that is fitted, reads on, generates and looks for keys; a BERT-base that does so with random
weights, so that only its times count; the files of recipes/accelerate that this machine can launch; attention in bfloat16.

--output has a folder named after the hardware, with the result and the log of each step, and steps.json with all figures.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from hf_posswap.errors import PosswapError
from hf_posswap.experiments.models import load_tokenizer
from hf_posswap.provenance import provenance, write_json
from hf_posswap.terminal import run_program

ROOT = Path(__file__).parents[1]


def steps(place: Path, miniature: bool) -> dict[str, tuple[int, list[str]]]:
    """Return name -> (seconds after which it is ended, what follows `python`) in order; their folders are in `place`."""
    found, here = {}, shlex.quote(str(place))

    def add(name: str, limit: int, command: str, full: str = "", tiny: str = "", output: str = "--output") -> None:
        found[name] = limit, shlex.split(f"{command} {tiny if miniature else full} {output} {here}/{name}")

    random, trained, bert = f"{here}/models/gpt2-small", f"{here}/gpt2-small/model", f"{here}/models/bert-base"
    text = "--train-file recipes/results/README.md"  # where it does not matter which: it is soon read
    check = "-m pytest -n 0 -W default -p no:cacheprovider -o python_functions=check_* tests/test_relative_triton.py"
    add("kernel", 200, check, "", "-k head_dim", f"--junitxml {here}/kernel.xml --basetemp")
    full, tiny = "--batch-size 8 --length 1024 --pairs 3", "--batch-size 2 --length 16 --steps 2 --pairs 1"
    add("loop", 90, f"recipes/benchmark_loop.py --mixed-precision bf16 --model {random}", full, tiny)
    add("verbs", 120, "recipes/benchmark_swap.py", "", "--layers 1 --hidden 48 --length 32 --steps 1")
    full, tiny = "--max-steps 500 --learning-rate 6e-4", f"{text} --max-steps 2 --batch-size 2 --evaluation-tokens 256"
    add("gpt2-small", 150, f"recipes/language_modeling.py --mixed-precision bf16 --model {random} --save-model", full, tiny)
    full = "--factor 8 --fit-tokens 32768 --fit-steps 50"
    tiny = f"{text} --factor 2 --fit-factor 2 --fit-tokens 4096 --fit-steps 1 --evaluation-tokens 256"
    read_on = f"recipes/read_on.py --model {trained} --scheme"
    add("read-on-original", 150, f"{read_on} original", full, tiny)
    add("read-on-relative", 150, f"{read_on} relative --start fit", full, tiny)
    full, tiny = f"{full} --span 768 --generate 2000", f"{tiny} --span 96 --generate 140"
    add("read-on-span", 150, f"{read_on} rotary --start fit", full, tiny)
    full, tiny = "--max-steps 100 --examples 5", "--max-steps 2 --batch-size 2 --examples 2 --depths 0.5"
    keys = "recipes/passkey.py --scheme rotary --mixed-precision bf16 --train-lengths 100 --lengths 100 --lengths 2048 --model"
    add("keys-gpt2", 150, f"{keys} {trained}", f"{full} --train-lengths 1024 --lengths 8192", tiny)
    add("keys-bert", 150, f"{keys} {bert}", f"{full} --train-lengths 512", tiny)
    full = "--window 512 --fit-length 2048 --fit-tokens 32768 --fit-steps 50 --lengths 512 --lengths 4096"
    tiny = "--window 64 --fit-length 128 --fit-tokens 4096 --fit-steps 1 --lengths 256"
    add("read-on-bert", 150, f"recipes/retrieval.py --scheme rotary --start fit --model {bert}", full, tiny)
    for file in sorted((ROOT / "recipes/accelerate").glob("*.yaml")):
        count = 1 if miniature or file.stem in ("cpu", "one_gpu") else max(1, torch.cuda.device_count())
        launch = f"-m accelerate.commands.launch --config_file recipes/accelerate/{file.name} --num_processes {count}"
        heal = f"recipes/heal.py {text} --max-steps 5 --batch-size {8 * count} --evaluation-tokens 512"
        add(f"launch-{file.stem}", 60, f"{launch} {heal}")
    relative = "relative:clip=64"
    schemes = {name: f"{relative} --implementation {name}" for name in ("triton", "window")}
    full = "--dtype bfloat16 --layers 12 --shape 1x8192"
    tiny = "--layers 1 --hidden 32 --heads 2 --calls 1 --seconds 0 --shape 1x16"
    for name, scheme in {**schemes, "rotary": "rotary", "original": "original"}.items():
        attention = f"recipes/benchmark_attention.py --scheme {scheme}"
        add(f"{name}-bert", 90, f"{attention} --phase forward --phase train", full, tiny)
        add(f"{name}-gpt2", 90, f"{attention} --phase train --phase decode --family gpt2", full, tiny)
    return found


def build_models(folder: Path, miniature: bool) -> None:
    """Save a GPT-2 small and a BERT-base with random weights and tokenizers of the embedded models, unless they are there."""
    torch.manual_seed(0)
    tiny = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 128}
    embedded = {"gpt2-small": (GPT2LMHeadModel, GPT2Config, "stdlib-gpt2"), "bert-base": (BertModel, BertConfig, "minilm")}
    for name, (kind, config_class, words) in embedded.items():
        if not (folder / name / "tokenizer.json").exists():  # the last to be written
            tokenizer = load_tokenizer(words)
            ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
            config = config_class(**ends, **(tiny if miniature else {}))  # other sizes are the defaults
            tokenizer.model_max_length = config.max_position_embeddings
            kind(config).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


def gpu(
    output: Annotated[Path, typer.Option(help="The folder for results.")] = Path("runs/gpu"),
    seconds: Annotated[int, typer.Option(help="For all steps. One whose limit is more than what is left of it waits.")] = 600,
    only: Annotated[list[str] | None, typer.Option(help="The name of a step, repeatable. Default: all.")] = None,
    miniature: Annotated[bool, typer.Option("--miniature", help="Tiny steps on a CPU: does all of it run?")] = False,
):
    """Take all steps that have no result yet; exit with 1 if any fails."""
    started = time.perf_counter()
    if not (miniature or torch.cuda.is_available()):
        raise PosswapError("torch sees no CUDA device here: run this where it does, or try it on a CPU with --miniature")
    hardware = "cpu" if miniature else f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}".removeprefix("1 ")
    place = Path(os.path.relpath(output.resolve() / re.sub("[^a-z0-9]+", "-", hardware.lower()), ROOT))
    every, table, rows = steps(place, miniature), place / "steps.json", {}
    if unknown := [name for name in only or () if name not in every]:
        raise PosswapError(f"there is no step {unknown[0]!r}; there are {', '.join(every)}")
    os.chdir(ROOT)
    build_models(place / "models", miniature)
    done = json.loads(table.read_text("utf-8")) if table.exists() else {}
    for name in only or every:
        (limit, command), left = every[name], int(seconds - (time.perf_counter() - started))
        if done.get(name, {}).get("command") == command:
            rows[name] = "ok, before"
        elif name == "launch-multi_node":
            rows[name] = "left out: it needs several machines"
        elif "deepspeed" in name and not find_spec("deepspeed"):
            rows[name] = "left out: deepspeed is not installed"
        elif limit > left:
            rows[name] = f"left for the next call: it may take {limit} s, {left} s are left"
        else:
            print(f"{name}: at most {limit} s", flush=True)
            shutil.rmtree(place / name, ignore_errors=True)  # of a call that was stopped, or has failed
            before, log = time.perf_counter(), place / f"{name}.log"
            why = run(command, limit, log, on_cpu=miniature)
            rows[name] = f"failed: {why}; {log} ends: {log.read_text('utf-8').splitlines()[-1:]}" if why else "ok"
            if not why:
                result, spent = place / name / "result.json", round(time.perf_counter() - before, 1)
                figures = json.loads(result.read_text("utf-8"))["figures"] if result.exists() else {}
                done[name] = provenance() | {"command": command, "seconds": spent, "figures": figures}
                write_json(table, done)
    for name, said in rows.items():
        print(f"{name:<24} {done.get(name, {}).get('seconds', ''):>6}  {said}")
    print(f"results are in {place.resolve()}")
    raise typer.Exit(any(said.startswith("failed") for said in rows.values()))


def run(command: list[str], limit: int, log: Path, *, on_cpu: bool) -> str | None:
    """Run a command with its output in a file; return why it failed. After the limit all its processes are ended."""
    environment = {"GOMP_SPINCOUNT": "500", **os.environ}  # see README.md: A busy machine
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if on_cpu else {}
    with log.open("w", encoding="utf-8") as file:
        options = {"stdout": file, "stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
        process = subprocess.Popen([sys.executable, *command], **options)
    try:
        status = process.wait(limit)
        return f"exit {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"not done after {limit} s"
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()  # Windows has no groups
            process.wait()


if __name__ == "__main__":
    run_program("gpu", gpu)
