"""Format 1 of this project goes on loading, and transformers 4's relative positions are no silent absolute model.

Each folder of golden/format-1 holds the logits that its model had; they were written at commit 186f5fa, with transformers
5.23.0, by golden/make_format_1.py of commit f776502; those of transformers 4.57.6 by make_relative_key.py of 18fc526.
"""

import json
import logging as std_logging
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from conftest import refused, rewrite
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers.utils import logging

import hf_posswap as posswap
from hf_posswap.checkpoint import STUB
from hf_posswap.experiments.comparison import load_runs, markdown
from hf_posswap.sharing.load_reports import LoadReports
from hf_posswap.sharing.record import read_results

GOLDEN = Path(__file__).parent / "golden"
FORMAT_1, RESULTS = GOLDEN / "format-1", GOLDEN / "format-1-results"
AUTO = {"bert": transformers.AutoModelForMaskedLM, "gpt2": transformers.AutoModelForCausalLM}
FOLDERS = sorted(path.name for path in FORMAT_1.iterdir() if path.name.partition("-")[2] not in ("base", "delta"))
EXACT = {"rtol": 1e-5, "atol": 1e-5}


def load(name: str, **options):
    return AUTO[name.partition("-")[0]].from_pretrained(FORMAT_1 / name, **options).eval()


@pytest.mark.parametrize("name", FOLDERS)
def test_checkpoint(name):
    """The Auto classes load it, and it computes what it computed; the code in it has the classes that its config names."""
    assert len(FOLDERS) == 12
    expected, model = load_file(FORMAT_1 / name / "expected.safetensors"), load(name)
    told = posswap.describe(model)
    assert told.new.name == name.partition("-")[2] and told.trained_positions == 24 and not told.can_restore
    torch.testing.assert_close(model(expected["tokens"]).logits, expected["logits"], **EXACT)
    named = json.loads((FORMAT_1 / name / "config.json").read_text())["auto_map"]
    # Folders of one family were saved with the same code, and it is kept in one; test_fresh_processes loads by such code.
    there = runpy.run_path(FORMAT_1 / f"{name.partition('-')[0]}-rotary" / STUB)
    assert there[named["AutoModel"].removeprefix(f"{Path(STUB).stem}.")] is type(model.base_model)
    assert {f"{Path(STUB).stem}.{one}" for one in there} >= set(named.values())


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_delta(family):
    """It loads onto the base it was made from, which then computes what the swapped model computed."""
    expected, model = load_file(FORMAT_1 / f"{family}-delta" / "expected.safetensors"), load(f"{family}-base")
    posswap.load_delta(model, FORMAT_1 / f"{family}-delta")
    assert posswap.describe(model).new == posswap.Relative(clip=4)
    torch.testing.assert_close(model(expected["tokens"]).logits, expected["logits"], **EXACT)


def test_results():
    """A comparison's runs and a card's record are read: by the table that compares, and by leaderboards."""
    runs = load_runs([RESULTS / "comparison.json"])
    assert [run["config"]["scheme"] for run in runs] == ["original", "relative"]
    assert f"| relative, fit | {runs[1]['figures']['accuracy']:.3f} |" in markdown(runs, figures=["accuracy"])
    record = read_results(RESULTS)
    assert record["model"]["position_scheme"]["name"] == "rotary" and record["fit"]["after"]["total"] < 0.08
    assert "| rotary" in posswap.leaderboard([RESULTS])


@pytest.fixture(params=["relative_key", "relative_key_query"])
def checkpoint(request, tmp_path):
    """A folder as transformers 4.57.6 wrote it, of both types that it had, and what that version computed."""
    with safe_open(GOLDEN / f"{request.param}.safetensors", "pt") as file:
        assert file.metadata()["transformers"] == "4.57.6"
        golden = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    weights = {name.removeprefix("weights."): value for name, value in golden.items() if name.startswith("weights.")}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}
    config = transformers.BertConfig(**sizes, max_position_embeddings=16, pad_token_id=0).to_dict()
    config |= {"position_embedding_type": request.param, "architectures": ["BertForMaskedLM"], "transformers_version": "4.57.6"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, golden


def test_outputs_of_transformers_4(checkpoint, backend):
    """Outputs are those of transformers 4, for encoder and decoder, with padding, also after saving and loading."""
    folder, golden = checkpoint
    real = golden["mask"].bool()
    for auto_class, name in ((transformers.AutoModelForMaskedLM, "encoder"), (transformers.AutoModelForCausalLM, "decoder")):
        if name == "decoder":
            rewrite(folder / "config.json", lambda config: config.update(is_decoder=True))
        model = posswap.load_relative_key(folder, auto_class)
        model.set_attn_implementation(backend)
        model.save_pretrained(folder / name)
        for one in (model, auto_class.from_pretrained(folder / name)):
            logits = one(golden["tokens"], attention_mask=golden["mask"]).logits
            assert_close(logits[real], golden[f"{name}_logits"][real], rtol=1e-5, atol=1e-5)


def test_what_is_named(checkpoint):
    """No base for an adapter to name, which would load as an absolute model; a head that the checkpoint lacks, as new."""
    folder, _ = checkpoint
    model = posswap.load_relative_key(str(folder), transformers.AutoModelForMaskedLM, max_positions=40)
    assert model.config.max_position_embeddings == 40
    assert model.name_or_path == model.config.name_or_path == "" and "base_model" not in model.config.position_scheme
    with pytest.warns(
        UserWarning, match=r"lacks: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias, classifier.w"
    ):
        posswap.load_relative_key(folder, transformers.AutoModelForSequenceClassification)


@pytest.fixture
def reports():
    """transformers reports as it does by default, whatever another test has asked for."""
    before = logging.get_verbosity()
    logging.set_verbosity_warning()
    yield
    logging.set_verbosity(before)


@pytest.mark.usefixtures("reports")
@pytest.mark.parametrize("stock", ["AutoModel", "AutoModelForMaskedLM", "BertModel"])
def test_a_stock_load_is_noticed(checkpoint, stock):
    """A load by transformers 5, which makes an absolute model of it, warns; such a model cannot be swapped."""
    folder, _ = checkpoint
    place = re.escape(str(folder))
    says = rf"{place} has relative positions .*hf_posswap\.load_relative_key\('{place}', ...\)"
    with pytest.warns(UserWarning, match=says):
        model = getattr(transformers, stock).from_pretrained(folder)
    for verb in (posswap.describe, lambda model: posswap.swap(model, "rotary")):
        refused("load_relative_key", verb, model, error=posswap.UnsupportedModelError)


@pytest.mark.usefixtures("reports")
def test_other_reports_do_not_warn(make_model, tmp_path, caplog):
    """What is left out or missing of any other checkpoint is transformers' to tell."""
    model = make_model("bert")
    weights = {name: tensor.contiguous() for name, tensor in model.base_model.state_dict().items()}
    save_file(weights | {"encoder.layer.0.attention.self.other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert "UNEXPECTED" in caplog.text and "MISSING" in caplog.text and not seen
    record = std_logging.LogRecord("transformers", std_logging.WARNING, __file__, 1, "one %s", ("two", "values"), None)
    LoadReports().handle(record)  # transformers has such calls: Python's own handlers tell, and go on


def test_what_is_refused(checkpoint, make_model, tmp_path):
    """Absolute checkpoints, missing tables, classes without BERT and unknown options are refused."""
    folder, _ = checkpoint
    kind = json.loads((folder / "config.json").read_text())["position_embedding_type"]
    make_model("bert").save_pretrained(tmp_path / "plain")
    refused("'absolute' positions", posswap.load_relative_key, tmp_path / "plain", error=posswap.UnsupportedModelError)
    transformers.RobertaConfig(position_embedding_type="relative_key").save_pretrained(tmp_path / "roberta")
    says = "roberta with 'relative_key' .* only bert's"
    refused(says, posswap.load_relative_key, tmp_path / "roberta", error=posswap.UnsupportedModelError)
    for other in (transformers.AutoModelForObjectDetection, transformers.BertModel):
        refused(f"{other.__name__} is no Auto class with a BERT", posswap.load_relative_key, folder, other)
    refused("unknown option 'revison'", posswap.load_relative_key, folder, revison="main")
    refused("max_positions=8", posswap.load_relative_key, folder, max_positions=8)
    table = "bert.encoder.layer.1.attention.self.distance_embedding.weight"
    rewrite(folder / "model.safetensors", lambda weights: weights.pop(table))
    says = f"says {kind}, and what that needs is missing.*layer.1"
    refused(says, posswap.load_relative_key, folder, error=posswap.CheckpointError)
