"""What test_distributed.py starts on two processes: `distributed_job.py MODE FOLDER`. Every process writes what it saw."""

import contextlib
import gc
import importlib
import io
import json
import os
import random
import runpy
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from test_training import even_rows, ragged_rows
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel, BertTokenizer

import hf_posswap as posswap
from hf_posswap.contract.subject import tiny_model
from hf_posswap.experiments.recipe import main
from hf_posswap.fitting.distillation import distillation_loss
from hf_posswap.measure.losses import token_losses
from hf_posswap.training import TrainingConfig, train
from hf_posswap.training.batching import pad
from hf_posswap.training.evaluation import predict
from hf_posswap.training.launching import save_trained, share_weights

STEADY = TrainingConfig(max_steps=5, batch_size=8, learning_rate=1e-3)
PARTS = replace(STEADY, gradient_accumulation_steps=2, checkpoint_every=3)


def bert(head=BertForMaskedLM, **changes):
    return posswap.swap(tiny_model("bert", head=head, **changes), "relative:clip=4")


def gpt2():
    return posswap.swap(tiny_model("gpt2", n_layer=1), "relative:clip=4")


def mean_loss_after(model, folder: Path) -> float:
    """Measure a model that was trained, each process by itself; save it."""
    tokens = torch.stack([row["input_ids"] for row in even_rows()])
    labels = tokens.masked_fill(torch.arange(16) % 3 > 0, -100)
    loss = token_losses(model, tokens, labels).nanmean().item()
    save_trained(model, folder)
    return loss


def finished(folder: Path) -> list[float]:
    """Resume a run that has no step left, as if it was stopped while it measured; measure it by parts and as a whole."""
    config = TrainingConfig(max_steps=2, batch_size=8, checkpoint_every=2)
    options = {"output": folder / "run", "progress": False}
    train(gpt2(), even_rows(), config, **options)
    model, _ = train(gpt2(), even_rows(), config, resume=True, **options)
    tokens = torch.stack([row["input_ids"] for row in even_rows()])
    return [mean_loss_after(model, folder / "model"), model(input_ids=tokens, labels=tokens).loss.item()]


def distilled() -> list[float]:
    """Train an encoder without a head to have its original's hidden states."""
    model, loss = bert(BertModel), distillation_loss(tiny_model("bert", head=BertModel))
    model.pooler.requires_grad_(False)  # it gets no gradient, and DDP waits for every gradient
    rows = [{"input_ids": row["input_ids"]} for row in even_rows()]
    config = replace(STEADY, seed=2**32 - 1)  # the greatest, to which processes add their numbers
    return train(model, rows, config, compute_loss=loss, progress=False)[1].losses


def losses(folder: Path, **options) -> dict:
    """Train on even rows, and on ragged ones in parts, which is resumed where it has checkpoints; and a run at its end."""
    model, run = train(gpt2(), even_rows(), STEADY, progress=False)
    seen = {"processes": run.processes, "even": run.losses, "even_after": mean_loss_after(model, folder / "even")}
    options = {"collate": pad, "progress": False, **options}
    model, run = train(bert(), ragged_rows(), PARTS, **options)
    seen |= {"ragged": run.losses, "tokens": run.tokens, "ragged_after": mean_loss_after(model, folder / "model")}
    if "output" in options:
        assert (options["output"] / "checkpoints" / "step-00000003").exists()  # the optimizer's state shows in step 5
        seen["resumed"] = train(bert(), ragged_rows(), PARTS, resume=True, **options)[1].losses
    return seen | {"finished": finished(folder / "finished"), "distilled": distilled()}


def heat_map(folder: Path) -> dict:
    """What recipes/passkey.py asks of the texts of one cell, and how often it calls the model on this process."""
    passkey = runpy.run_path(str(Path(__file__).parents[1] / "recipes" / "passkey.py"))
    texts = SimpleNamespace(draw=lambda length, depth, chance: chance.random())
    config = passkey["PasskeyConfig"](lengths=(64,), depths=(0.0,), examples=5, tokens_a_batch=128)
    calls = []

    def ask(model, drawn):
        calls.append(len(drawn))
        return ([text < 0.5 for text in drawn],)

    return {"panels": passkey["heat_maps"](None, texts, config, ask=ask), "calls": calls}


def texts(data: Path) -> None:
    """Write a tiny BERT, sentences whose label is their first animal, and long documents."""
    words, chance = "cat dog the a sat ran on under mat log and then it was happy sad".split(), random.Random(0)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)}).save_pretrained(data)
    tiny_model("bert", head=BertModel).save_pretrained(data)
    for split, count in (("train", 400), ("validation", 101)):
        rows = [[*chance.sample(words[:2], 2), *chance.choices(words[2:], k=chance.randint(1, 12))] for _ in range(count)]
        (data / f"{split}.csv").write_text("sentence,label\n" + "".join(f"{' '.join(row)},{row[0]}\n" for row in rows))
        (data / f"{split}.txt").write_text(" ".join(chance.choices(words, k=5 * count)))


def embedder(data: Path, folder: Path) -> list[float]:
    """Tune an embedder for long documents; return what each of its parameters sums up to, squared."""
    module = importlib.import_module("long_embedder")
    module.EACH = 3
    files = {"model": str(data), "train_file": str(data / "train.txt"), "validation_file": str(data / "validation.txt")}
    fitted = {"scheme": "rotary", "tokens": 128, "passage": 8, "window": 16, "span": 8, "fit_tokens": 1500, "fit_steps": 5}
    # Fewer documents than pairs: none may be twice in a batch of all processes.
    config = module.Config(**files, **fitted, max_steps=6, batch_size=4, documents=4, learning_rate=1e-2)
    return [p.detach().square().sum().item() for p in module.run(config, folder, False)["model"].parameters()]


def recipe(data: Path, folder: Path) -> dict:
    """Run a recipe as its command line does; return its result, and how often this process said that it measures."""
    options = "--no-dropout --eval-steps 3 --learning-rate 1e-3 --scheme rotary --start fit --save-model --max-steps 6"
    options += " --batch-size 8 --eval-batch-size 8 --fit-steps 2 --fit-tokens 256"
    files = ["--train-file", data / "train.csv", "--validation-file", data / "validation.csv"]
    module = importlib.import_module("downstream_classification")
    sys.argv = ["recipe", "--model", str(data), *map(str, files), *options.split(), "--output", str(folder)]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main(module.Config, module.run)
        except SystemExit as stop:
            assert not stop.code, said.getvalue()
    return json.loads((folder / "result.json").read_text()) | {"said": said.getvalue().splitlines().count("measuring")}


def tried(config: TrainingConfig, **options) -> list[float] | str:
    """Train a GPT-2 on even rows; return its losses, or what the error says."""
    try:
        return train(gpt2(), even_rows(), config, progress=False, **options)[1].losses
    except posswap.PosswapError as error:
        return str(error)


def ddp(folder: Path) -> dict:
    seen = losses(folder) | {"heat_map": heat_map(folder)}

    def breaks(model, batch):
        breaks.calls += 1
        factor = float("nan") if breaks.calls == 4 and PartialState().is_last_process else 1.0
        return model(**batch).loss * factor

    breaks.calls = 0
    config = TrainingConfig(max_steps=6, batch_size=8, checkpoint_every=2)
    seen["nan"] = tried(config, compute_loss=breaks, output=folder / "nan")

    def stop(model, run):  # only one process gets the signal
        if len(run.losses) == 2 and PartialState().is_last_process:
            os.kill(os.getpid(), signal.SIGTERM)

    seen["stopped"] = tried(STEADY, output=folder / "stopped", after_step=stop)
    seen["resumed"] = tried(STEADY, output=folder / "stopped", resume=True)
    seen["uneven"] = tried(TrainingConfig(max_steps=1, batch_size=3))

    seen["schemes"] = []  # DistributedDataParallel raises in a second step where a parameter got no gradient in the first
    for scheme in ("learned", "sinusoidal", "rotary:fraction=0.5", "none", "relative:vectors=sinusoidal"):
        model = posswap.swap(posswap.restore(gpt2()), scheme)
        model, _ = train(model, even_rows(), TrainingConfig(max_steps=2, batch_size=8, learning_rate=1e-2), progress=False)
        seen["schemes"].append(sum(p.detach().double().sum().item() for p in model.parameters()))

    torch.manual_seed(PartialState().process_index)
    shared = torch.nn.Linear(3, 2)
    share_weights(shared)
    seen["shared"] = shared.weight.tolist()
    classifier = bert(BertForSequenceClassification, num_labels=3).train()
    rows = ragged_rows(203, classes=True)
    seen["examples"] = predict(classifier, rows, 0, 8).argmax(-1).tolist()
    assert classifier.training
    sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
    data = folder / "data"
    if PartialState().is_main_process:
        texts(data)
    PartialState().wait_for_everyone()
    seen["embedder"] = embedder(data, folder / "embedder")
    seen["recipe"] = recipe(data, folder / "recipe")  # which disconnects the processes at its end
    return seen


def fsdp(folder: Path) -> dict:
    """The real FSDP2 path of accelerate, which it would otherwise not take on CPUs: this override is for tests alone."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
    )
    Accelerator(cpu=True, fsdp_plugin=plugin)
    for state in (PartialState, AcceleratorState):  # the second copies from the first whenever it is made
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    seen = {}

    def halves(model, run):
        seen["wrapped"] = plugin.transformer_cls_names_to_wrap
        seen["share"] = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())

    return losses(folder, output=folder / "fsdp", after_step=halves) | seen


def deepspeed(folder: Path) -> dict:
    """DeepSpeed as it is, its stage from the environment; accelerate would connect the processes on GPUs only."""
    PartialState(cpu=False, backend="gloo")
    seen = losses(folder, output=folder / "run")
    state = AcceleratorState()
    return seen | {"type": str(state.distributed_type), "stage": state.deepspeed_plugin.zero_stage}


def write(mode: str, folder: Path) -> None:
    found = {"ddp": ddp, "fsdp": fsdp, "deepspeed": deepspeed}[mode](folder)
    (folder / f"{mode}-{PartialState().process_index}.json").write_text(json.dumps(found))


def forked(rank: int, mode: str, folder: Path, port: int) -> None:
    """Be one of two processes, as torchrun would make them, in a fork of a process that has used accelerate by itself."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in found.items()})
    warnings.resetwarnings()  # those of a test are errors
    AcceleratorState._reset_state(reset_partial_state=True)
    write(mode, folder)


if __name__ == "__main__":
    gc.freeze()  # see conftest.py
    torch.set_num_threads(1)
    write(sys.argv[1], Path(sys.argv[2]))
