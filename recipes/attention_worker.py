"""One case of benchmark_attention.py, in a process of its own: a subject against its reference, or its peak memory.

    python recipes/attention_worker.py '{"measure": "time", ...}'   # the benchmark does this; the fields are those of Case

Prints one JSON object, the result or the error. It runs under any interpreter that has torch and transformers: hf_posswap is
imported only by subjects that need it, so that subjects of another transformers can be measured where it is not installed.

Shapes: B batch, H heads, L length, D head_dim, R = 2 * clip + 1.
"""

import ctypes
import gc
import json
import os
import platform
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

_RELATIVE = ("relative", "relative-keys", "relative-fused", "relative-window", "relative-triton", "relative-by-index")
# What can be measured, by family. The first of each is its reference: its own case is the A/A control.
SUBJECTS = {
    "bidirectional": ("sdpa", "eager", *_RELATIVE),
    "causal": ("sdpa", "eager", *_RELATIVE),
    "bert": ("sdpa", "eager", *_RELATIVE, "rotary", "none", "sinusoidal", "roformer"),
    "gpt2": ("sdpa", "eager", *_RELATIVE, "rotary", "none", "sinusoidal", "gpt-neox"),
    "old-bert": ("sdpa", "eager", "relative_key", "relative_key_query"),
}
LEVELS = {"op": ("bidirectional", "causal"), "model": ("bert", "gpt2", "old-bert")}
PHASES = ("forward", "train", "decode")
DECODERS = ("causal", "gpt2")  # families that have a decode phase
MAX_PAIRS, MAX_WARM_UP = 200, 20
TABLE_STD = 0.02  # of relative tables: a swap starts them at zero, and zeros would be an easier sum than real ones


# glibc hands big blocks back to the kernel, which zeroes them anew for every call. "keep" makes it hold on to them, as CUDA's
# caching allocator does. The first flatters whatever allocates little; both are what users meet.
ALLOCATORS = {
    "default": {},
    "keep": {
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(2**28),
        "MALLOC_MMAP_THRESHOLD_": str(2**40),
        "MALLOC_MMAP_MAX_": "0",  # older versions of glibc ignore a threshold that is so high
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One process: what is measured, and how."""

    measure: str  # "time" or "memory"
    level: str
    phase: str
    family: str
    subject: str
    batch: int
    length: int  # for decode: tokens that are cached when the first one is timed
    clip: int | None  # None for subjects that have none
    dtype: str
    device: str
    threads: int
    allocator: str
    dropout: float
    layers: int
    hidden: int
    heads: int
    vocab: int
    calls: int  # pairs of calls, at least
    seconds: float  # go on with short calls until so much time has been spent
    seed: int

    @property
    def reference(self) -> str:
        return SUBJECTS[self.family][0]

    @property
    def training(self) -> bool:
        return self.phase == "train"


def op_step(case: Case, subject: str) -> Callable[[], object]:
    """Return one call of attention alone, (B, H, L, D), with a key table and, but for `relative-keys`, a value table.

    Queries, keys and values lie in memory as transformers' projections leave them, (B, L, H, D).
    """
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    head_dim, queries = case.hidden // case.heads, 1 if case.phase == "decode" else case.length
    dropout, causal = case.dropout if case.training else 0.0, case.family == "causal"

    def random(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (std * torch.randn(shape, generator=generator)).to(device, dtype)

    query = random(case.batch, queries, case.heads, head_dim).transpose(1, 2)
    key, value = (random(case.batch, case.length, case.heads, head_dim).transpose(1, 2) for _ in range(2))
    inputs = [query, key, value]
    scale = head_dim**-0.5
    hidden_keys = None  # True above the diagonal
    if causal and queries > 1:
        hidden_keys = torch.ones(queries, case.length, dtype=torch.bool, device=device).triu(1)
    if subject == "sdpa":

        def attend(query, key, value):
            is_causal = causal and queries > 1
            return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=is_causal)

    elif subject == "eager":

        def attend(query, key, value):
            scores = query @ key.mT * scale
            if hidden_keys is not None:
                scores = scores.masked_fill(hidden_keys, torch.finfo(dtype).min)
            return functional.dropout(scores.softmax(-1), dropout) @ value

    else:
        attention, by_index = _our_attention()
        inputs += [
            random(case.heads, 2 * case.clip + 1, head_dim, std=TABLE_STD) for _ in range(1 + (subject != "relative-keys"))
        ]
        if subject == "relative-by-index":
            places = torch.arange(case.length, device=device)
            distances = (places - places[-queries:, None]).clamp(-case.clip, case.clip)[None] + case.clip
            mask = None if hidden_keys is None else ~hidden_keys

            def attend(query, key, value, key_table, value_table):
                return by_index(query, key, value, key_table, value_table, distances, mask, scale, dropout)[0]

        else:
            implementation = subject.removeprefix("relative-") if subject not in ("relative", "relative-keys") else "auto"

            def attend(*tensors):
                return attention(
                    *tensors, clip=case.clip, causal=causal, dropout=dropout, scale=scale, implementation=implementation
                )

    if not case.training:
        return lambda: attend(*inputs)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    upstream = random(case.batch, queries, case.heads, head_dim).transpose(1, 2)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, upstream)


def _our_attention() -> tuple[Callable, Callable]:
    # Attention alone needs nothing of transformers, which takes longer to import than most cases take to run.
    folder = next((Path(path) / "hf_posswap" for path in sys.path if (Path(path) / "hf_posswap").is_dir()), None)
    if folder is not None and "hf_posswap" not in sys.modules:
        package = types.ModuleType("hf_posswap")
        package.__path__ = [str(folder)]
        sys.modules["hf_posswap"] = package
    from hf_posswap.functional.relative_attention import relative_attention
    from hf_posswap.schemes.relative import attend_by_index

    return relative_attention, attend_by_index


def build_model(case: Case, subject: str) -> torch.nn.Module:
    """Return a randomly initialised model of the case's sizes, with room for the longest input of the case."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(case.seed)
    positions = max(512, case.length + MAX_PAIRS + MAX_WARM_UP)
    backend = "eager" if subject in ("eager", "relative-by-index", "relative_key", "relative_key_query") else "sdpa"
    dropouts = {"hidden_dropout_prob": case.dropout, "attention_probs_dropout_prob": case.dropout}
    encoder = {
        "vocab_size": case.vocab,
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "intermediate_size": 4 * case.hidden,
        "max_position_embeddings": positions,
    }
    if case.family == "old-bert":
        if int(transformers.__version__.split(".")[0]) > 4:
            raise RuntimeError(f"transformers {transformers.__version__} has no position_embedding_type: 4.57.6 has")
        kind = subject if subject.startswith("relative_key") else "absolute"
        config = transformers.BertConfig(**encoder, **dropouts, position_embedding_type=kind, attn_implementation=backend)
        model = transformers.BertModel(config, add_pooling_layer=False)
    elif subject == "roformer":  # it has eager attention only
        model = transformers.RoFormerModel(transformers.RoFormerConfig(**encoder, **dropouts))
    elif case.family == "bert":
        config = transformers.BertConfig(**encoder, **dropouts, attn_implementation=backend)
        model = transformers.BertModel(config, add_pooling_layer=False)
    elif subject == "gpt-neox":  # as near to GPT-2 as its config gets: sequential residuals, all of a head's dimensions turn
        config = transformers.GPTNeoXConfig(
            **encoder,
            hidden_dropout=case.dropout,
            attention_dropout=case.dropout,
            hidden_act="gelu_new",
            use_parallel_residual=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
            attn_implementation=backend,
        )
        model = transformers.GPTNeoXModel(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=case.vocab,
            n_embd=case.hidden,
            n_layer=case.layers,
            n_head=case.heads,
            n_positions=positions,
            resid_pdrop=case.dropout,
            embd_pdrop=case.dropout,
            attn_pdrop=case.dropout,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation=backend,
        )
        model = transformers.GPT2Model(config)
    if subject in (*_RELATIVE, "rotary", "none", "sinusoidal"):
        _swap(model, case, subject)
    return model.to(case.device, getattr(torch, case.dtype)).train(case.training)


def _swap(model: torch.nn.Module, case: Case, subject: str) -> None:
    import hf_posswap as posswap

    if subject not in _RELATIVE:
        posswap.swap(model, subject, warm_start=False)
        return
    posswap.swap(model, posswap.Relative(clip=case.clip, values=subject != "relative-keys"), warm_start=False)
    for name, parameter in model.named_parameters():
        if name.endswith(("key_table", "value_table")):
            torch.nn.init.normal_(parameter, std=TABLE_STD)
    if subject in ("relative-fused", "relative-window", "relative-triton"):
        posswap.set_relative_implementation(model, subject.removeprefix("relative-"))


def model_step(case: Case, subject: str) -> Callable[[], object]:
    """Return one call of a model: a forward, a training step without its optimizer, or one token after those cached."""
    model = build_model(case, subject)
    generator = torch.Generator().manual_seed(case.seed)
    tokens = torch.randint(0, case.vocab, (case.batch, case.length), generator=generator).to(case.device)
    options = {} if case.family in ("bert", "old-bert") else {"use_cache": False}
    if case.phase == "decode":
        state = {"cache": model(tokens, use_cache=True).past_key_values}
        token = tokens[:, :1]

        def step():
            state["cache"] = model(token, past_key_values=state["cache"], use_cache=True).past_key_values

    elif case.training:

        def step():
            model(tokens, **options).last_hidden_state.float().square().mean().backward()
            model.zero_grad(set_to_none=True)

    else:

        def step():
            model(tokens, **options)

    return step


def paired_times(case: Case, steps: tuple[Callable, Callable]) -> dict:
    """Time reference and subject alternately, call by call, in milliseconds."""
    times = {"reference_cpu": [], "reference_wall": [], "cpu": [], "wall": []}
    synchronize = torch.cuda.synchronize if case.device == "cuda" else lambda: None

    def timed(step: Callable, prefix: str) -> None:
        synchronize()
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        synchronize()
        times[prefix + "cpu"].append(round(1e3 * (time.process_time() - cpu), 5))
        times[prefix + "wall"].append(round(1e3 * (time.perf_counter() - wall), 5))

    started, rounds = time.perf_counter(), 0
    while rounds < (3 if case.device == "cuda" else 1) or time.perf_counter() - started < case.seconds / 10:
        for step in steps:  # warm-up: kernels are compiled or chosen, threads started
            step()
        rounds += 1
        if rounds == MAX_WARM_UP:
            break
    started = time.perf_counter()
    while len(times["cpu"]) < case.calls or time.perf_counter() - started < case.seconds:
        timed(steps[0], "reference_")
        timed(steps[1], "")
        if len(times["cpu"]) == MAX_PAIRS:
            break
    return times


def peak_memory(case: Case, step: Callable) -> float | None:
    """Return by how many MiB memory grows over its level before, at the highest point of two calls; None if unknown.

    On CUDA it is the caching allocator's count of bytes in use, on Linux the resident memory of the process.
    """
    if case.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    elif not Path("/proc/self/clear_refs").exists():
        return None
    else:
        gc.collect()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc: what building the model has left free goes back,
        if trim is not None:  # otherwise the calls would fill it unseen
            trim(0)
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the high-water mark
    for _ in range(2):
        step()
    if case.device == "cuda":
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)
    return round(_resident("VmHWM") - before, 2)


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) / 1024


def environment() -> dict:
    """Return what this interpreter is, and which attention kernels it may choose from."""
    transformers = sys.modules.get("transformers")
    backends = torch.backends.cuda
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": getattr(transformers, "__version__", None),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "sdpa_kernels": {
            "flash": backends.flash_sdp_enabled(),
            "mem_efficient": backends.mem_efficient_sdp_enabled(),
            "math": backends.math_sdp_enabled(),
            "cudnn": backends.cudnn_sdp_enabled(),
        },
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def run(case: Case) -> dict:
    """Measure one case and return its result: times in ms, or the peak in MiB."""
    torch.set_num_threads(case.threads)
    torch.manual_seed(case.seed)
    make = op_step if case.level == "op" else model_step
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    with nullcontext() if case.training else torch.no_grad():
        if case.measure == "memory":
            # Code that is loaded and threads that are started by a first call are not what a longer input costs.
            make(replace(case, batch=1, length=min(case.length, 32), layers=1), case.subject)()
            result = {"peak_mib": peak_memory(case, make(case, case.subject))}
        else:
            result = {"times_ms": paired_times(case, (make(case, case.reference), make(case, case.subject)))}
    return {**result, "load": load, "environment": environment()}


if __name__ == "__main__":
    try:
        answer = run(Case(**json.loads(sys.argv[1])))
    except Exception as error:  # whatever it is, the benchmark records it and goes on with the next case
        answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
