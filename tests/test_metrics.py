"""Metrics against SciPy, by hand, at the edges and side by side; and the logits that they are of."""

import numpy
import pytest
import torch
from conftest import refused
from scipy import stats
from transformers import BertForSequenceClassification

from hf_posswap.measure.metrics import OF_LABELS, OF_NUMBERS, Metric, compute_metrics, metric_names
from hf_posswap.training.evaluation import predict


def test_numbers_against_scipy():
    """Correlations are SciPy's; ranks do not see a monotone change, the linear one does."""
    generator = numpy.random.default_rng(0)
    references = generator.normal(size=101).round(1)  # with ties
    predictions = references + generator.normal(size=101)
    figures = compute_metrics(metric_names(0), predictions, references)
    assert figures["pearson"] == pytest.approx(stats.pearsonr(predictions, references).statistic)
    assert figures["spearman"] == pytest.approx(stats.spearmanr(predictions, references).statistic)
    bent = compute_metrics(metric_names(0), numpy.exp(predictions), references)
    assert bent["spearman"] == figures["spearman"] and abs(bent["pearson"] - figures["pearson"]) > 0.01
    tiny = compute_metrics(metric_names(0), predictions * 1e-14, references)
    assert tiny == pytest.approx(figures)


@pytest.mark.parametrize(
    ("predictions", "references", "wanted"),
    [
        ([1, 1, 1], [1, 1, 1], {"accuracy": 1, "f1": 1, "f1_macro": 1, "matthews": 0}),
        ([0, 0, 0], [0, 0, 0], {"accuracy": 1, "f1": 0, "f1_macro": 1, "matthews": 0}),
        ([1, 1, 1, 1], [0, 1, 1, 1], {"accuracy": 0.75, "f1": 6 / 7, "f1_macro": 3 / 7, "matthews": 0}),
        ([0, 1], [1, 0], {"accuracy": 0, "f1": 0, "f1_macro": 0, "matthews": -1}),
    ],
)
def test_one_label_only(predictions, references, wanted):
    """Constant predictions and one label only have figures, without a warning."""
    assert compute_metrics(metric_names(2), predictions, references) == pytest.approx(wanted)


@pytest.mark.parametrize("constant", [0.0, 0.1, -3.7])
def test_numbers_that_do_not_vary(constant):
    """A correlation with a constant is 0, on either side and for one sample, without a warning."""
    for metric in OF_NUMBERS:
        for pair in (([constant] * 5, [1.0, 2, 3, 4, 5]), ([1.0, 2, 3, 4, 5], [constant] * 5), ([1.0], [constant])):
            assert Metric(metric).compute(predictions=pair[0], references=pair[1]) == {metric: 0.0}


def test_errors():
    """Numbers that are not finite, labels beyond two for binary F1, and unknown names are refused."""
    for metric in OF_NUMBERS:
        for bad in (float("nan"), float("inf")):
            samples = {"predictions": [1.0, bad, 2.0], "references": [1.0, 2.0, 3.0]}
            refused(f"predictions hold {bad} at place 1", Metric(metric).compute, **samples)
    refused("not 2: take f1_macro", Metric("f1").compute, predictions=[0, 2], references=[0, 1])
    refused("known are accuracy", compute_metrics, ("acuracy",), [0], [0])
    refused("Mismatch", Metric("accuracy").compute, predictions=[0, 1], references=[0], error=ValueError)
    assert {*OF_LABELS, *OF_NUMBERS} == {name for labels in (0, 2, 3) for name in metric_names(labels)}


def test_no_files(tmp_path, monkeypatch):
    """Metrics write no files, neither into the cache nor into the working directory, so runs cannot collide in them."""
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path)
    monkeypatch.chdir(tmp_path)
    (metric := Metric("accuracy")).add_batch(predictions=[0, 1], references=[0, 1])
    assert not [path for path in tmp_path.rglob("*") if path.is_file() or "default" in path.name]
    assert metric.compute() == {"accuracy": 1.0}


def test_logits_of_all_rows(make_model):
    """Logits are those of each row by itself, in the order of rows; the model's mode comes back, no gradient is kept."""
    model = make_model("bert", head=BertForSequenceClassification, num_labels=2).train()
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 20, (21,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(2, 98, (length,), generator=generator)} for length in lengths]
    found = predict(model, rows, 0, 4)
    refused("empty", predict, model, [], 0, 4)
    with pytest.raises(IndexError):
        predict(model, [{"input_ids": torch.tensor([1, 2_000_000])}], 0, 4)
    assert model.training and not found.requires_grad
    model.eval()
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row["input_ids"][None]).logits for row in rows])
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
