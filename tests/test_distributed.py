"""Two processes against one, on gloo: losses, checkpoints, signals and evaluation under DDP and FSDP2, and wrong launches."""

import json
import os
import runpy
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from conftest import run_python
from safetensors.torch import load_file
from torch.distributed.elastic.utils.distributed import get_free_port
from torch.multiprocessing import start_processes
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

from hf_posswap import PosswapError
from hf_posswap.provenance import weight_hashes
from hf_posswap.training import TrainingConfig, train

ROOT = Path(__file__).parents[1]
JOB = Path(__file__).with_name("distributed_job.py")
# of Python 3.12 and newer, where workers of pytest have a thread that takes their work
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
CONFIGS = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))


def _seen(mode, folder):
    return [json.loads((folder / f"{mode}-{rank}.json").read_text()) for rank in range(2)]


def _fork(mode, folder):
    """Run a job on two processes, without the time that torchrun and they would take to import what is imported here."""
    folder.mkdir()
    with patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        job, port = runpy.run_path(str(JOB))["forked"], get_free_port()
        start_processes(job, args=(mode, folder, port), nprocs=2, start_method="fork")
    return _seen(mode, folder)


def _launch(mode, folder, **variables):
    """Run a job on two processes as users do, by torchrun."""
    folder.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "MASTER_"))}
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    run_python(*launch, JOB, mode, folder, env=inherited | {"PYTHONPATH": str(ROOT), **variables})
    return _seen(mode, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def alone(folder):
    """What this process saw, which is one alone."""
    (folder / "one").mkdir()
    return json.loads(json.dumps(runpy.run_path(str(JOB))["ddp"](folder / "one")))


@pytest.fixture(scope="module")
def together(folder):
    return _fork("ddp", folder / "two")


def test_two_processes_take_the_steps_of_one(alone, together):
    """The same losses, however uneven labels and padding are; the same weights after training with each scheme, in which DDP
    finds no unused parameter, and those of the first by `share_weights`; each of 203 examples counts once; documents of both
    processes are each other's negatives, which an embedder shows. A batch that processes cannot share is refused.
    """
    assert alone["processes"] == 1 and len(alone["examples"]) == 203 and len(set(alone["examples"])) > 1
    for rank in together:
        assert rank["processes"] == 2
        assert rank["even"] == pytest.approx(alone["even"], abs=1e-4)
        assert rank["ragged"] == pytest.approx(alone["ragged"], abs=1e-4) and rank["tokens"] == alone["tokens"]
        assert rank["examples"] == alone["examples"] and rank["shared"] == alone["shared"]
    assert together[0]["schemes"] == together[1]["schemes"] and len(set(together[0]["schemes"])) == 5
    assert together[0]["embedder"] == together[1]["embedder"] == pytest.approx(alone["embedder"], rel=1e-4, abs=1e-6)
    assert len(alone["uneven"]) == 1 and "do not divide into 2 processes" in together[0]["uneven"]


def test_two_processes_stop_together(folder, alone, together):
    """NaN on one process stops both and keeps the checkpoint before; a signal to one saves both, and they go on exactly."""
    for rank in (alone, *together):
        assert "became nan at step 4" in rank["nan"]
        assert "after step 3 of 5" in rank["stopped"]
        assert rank["resumed"] == rank["even"]
    assert together[0]["stopped"] == together[1]["stopped"]
    for run in ("one", "two"):
        assert [path.name for path in (folder / run / "nan" / "checkpoints").iterdir()] == ["step-00000002"]


def test_another_number_of_processes_is_refused(folder, together, make_model):
    """Random states and shares of batches are those of two processes: one does not go on with them."""
    config = TrainingConfig(max_steps=5, batch_size=8, learning_rate=1e-3)
    rows = [{"input_ids": torch.tensor([2, place]), "labels": torch.tensor([2, place])} for place in range(24)]
    with pytest.raises(PosswapError, match="processes 2 and 1"):
        train(make_model("gpt2"), rows, config, output=folder / "two" / "stopped", resume=True, progress=False)


def test_every_process_asks_for_keys(alone, together):
    """Five texts are asked once each, on two processes by as many calls of the model, which sharded ones need."""
    assert alone["heat_map"]["calls"] == [2, 2, 1]
    for rank in together:
        answers = rank["heat_map"]["panels"]["accuracy"][0][0]
        assert rank["heat_map"]["panels"] == alone["heat_map"]["panels"] and len(answers) == 5 and len(set(answers)) == 2
        assert rank["heat_map"]["calls"] == [2, 1]


def test_a_recipe_on_two_processes(folder, alone, together):
    """Two processes take the steps that one takes, count each of the 101 samples once, and keep the same model."""
    one, two = alone["recipe"], together[0]["recipe"]
    assert [run["cost"]["processes"] for run in (one, two)] == [1, 2]
    assert [run["recipe"]["said"] for run in together] == [1, 0]  # the main process says what it does
    for name in ("losses", "figures"):
        assert two[name] == pytest.approx(one[name], abs=1e-4)
    assert [point["step"] for point in two["curve"]] == [3, 6] and two["data"] == one["data"]
    assert two["curve"][0]["loss"] == pytest.approx(one["curve"][0]["loss"], abs=1e-4)
    assert two["figures"]["accuracy"] * 101 == pytest.approx(round(two["figures"]["accuracy"] * 101))
    kept = [folder / name / "recipe" / "model" for name in ("one", "two")]
    assert [run["weights"] for run in (one, two)] == [weight_hashes(path) for path in kept] and one["weights"]
    models = [AutoModelForSequenceClassification.from_pretrained(path) for path in kept]
    for (name, here), there in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(here, there, atol=1e-4), name
    assert models[0].config.position_scheme["name"] == "rotary" and (kept[0] / "tokenizer.json").is_file()


def test_sharded_processes_take_the_steps_of_one(folder, alone):
    """FSDP2: halves of the weights, the losses of one process, exact resuming from a sharded checkpoint, a model to measure."""
    ranks = _fork("fsdp", folder / "fsdp")
    assert all(rank["wrapped"] == ["BertLayer"] and rank["share"] == pytest.approx(0.5, abs=0.05) for rank in ranks)
    _same_training(ranks, alone, folder / "one", folder / "fsdp")


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_takes_the_steps_of_one(folder, alone, stage):
    """DeepSpeed's stages: the losses of one process, exact resuming, and a whole model that is measured and saved as any."""
    pytest.importorskip("deepspeed", reason="what this tests is there with: pip install deepspeed")
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"}
    variables["ACCELERATE_DEEPSPEED_ZERO_STAGE"] = str(stage)
    ranks = _launch("deepspeed", folder / f"stage{stage}", **variables)
    for rank in ranks:
        assert (rank["type"], rank["processes"], rank["stage"]) == ("DistributedType.DEEPSPEED", 2, stage)
    _same_training(ranks, alone, folder / "one", folder / f"stage{stage}")


def _same_training(ranks, alone, one, other):
    for rank in ranks:
        assert rank["resumed"] == pytest.approx(rank["ragged"], abs=1e-6)
        for name in ("even", "ragged", "even_after", "ragged_after", "finished"):
            assert rank[name] == pytest.approx(alone[name], abs=1e-4), name
        # Errors are relative to the states' mean square in the rows of each process.
        assert rank["distilled"] == pytest.approx(alone["distilled"], rel=2e-3)
    for name, auto_class in (("model", AutoModelForMaskedLM), ("even", AutoModelForCausalLM)):
        whole, gathered = (auto_class.from_pretrained(folder / name) for folder in (one, other))
        for (key, value), found in zip(whole.named_parameters(), gathered.parameters(), strict=True):
            if not key.endswith(("key.bias", "c_attn.bias")):  # softmax takes it out again: its gradient is rounding alone
                assert torch.allclose(value, found, atol=1e-4), key
        saved = [load_file(folder / name / "model.safetensors").keys() for folder in (one, other)]
        assert saved[0] == saved[1]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_configurations(path):
    """accelerate's own parser takes each file, knows every key, and finds the launch that the name promises."""
    kinds = {"cpu": "NO", "one_gpu": "NO", "multi_gpu": "MULTI_GPU", "multi_node": "MULTI_GPU", "fsdp2": "FSDP"}
    kinds |= {"deepspeed_zero2": "DEEPSPEED", "deepspeed_zero3": "DEEPSPEED"}
    assert {config.stem for config in CONFIGS} == set(kinds)
    config = load_config_from_file(str(path))
    assert config.distributed_type == DistributedType[kinds[path.stem]]
    assert config.use_cpu == (path.stem == "cpu")
    written = yaml.safe_load(path.read_text())
    assert set(written) <= set(vars(config))
    if "deepspeed" in path.stem:
        assert written["deepspeed_config"]["zero_stage"] == int(path.stem[-1])
    if path.stem == "fsdp2":
        assert written["fsdp_config"]["fsdp_version"] == 2
        assert "fsdp_transformer_layer_cls_to_wrap" not in written["fsdp_config"]
