"""Metrics of classification and regression, as children of `evaluate.Metric`: here, so that nothing is fetched.

In a run of several processes, gather the predictions first (accelerate's `gather_for_metrics`) and compute once: evaluate's own
distributed mode counts the samples that fill up the last batch twice. Importing `evaluate` takes seconds.

References: Matthews 1975 (phi coefficient of the confusion matrix); Warstadt et al. 2018, section 4 (CoLA); Cer et al. 2017,
section 4 (STS). scikit-learn and SciPy compute them.
"""

from typing import Literal

import datasets
import evaluate
import numpy
from scipy import stats
from sklearn import metrics

from hf_posswap.errors import DataError, PosswapError


class _Metric(evaluate.Metric):
    """Base of all: samples are kept in memory, so that runs share no file, lock or folder."""

    kind = "int64"

    def __init__(self, **options):
        if options.get("num_process", 1) != 1:
            raise PosswapError("gather predictions with accelerate's gather_for_metrics and compute the metric in one process")
        super().__init__(**{**options, "keep_in_memory": True})

    def _build_data_dir(self) -> str:
        return ""  # evaluate makes a folder in its cache even if nothing is ever put there

    def _info(self) -> evaluate.MetricInfo:
        features = datasets.Features(dict.fromkeys(("predictions", "references"), datasets.Value(self.kind)))
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)


class Accuracy(_Metric):
    """Share of labels that are right: 0 to 1.

    >>> Accuracy().compute(predictions=[0, 1, 1, 2], references=[0, 1, 0, 2])
    {'accuracy': 0.75}
    """

    def _compute(self, predictions, references) -> dict[str, float]:
        return {"accuracy": float(metrics.accuracy_score(references, predictions))}


class F1(_Metric):
    """Harmonic mean of precision and recall, 2 TP / (2 TP + FP + FN): 0 to 1.

    `average="binary"` is the F1 of label 1, "macro" the plain mean over all labels that occur in either list. If label 1 occurs
    in neither, its F1 is 0.

    >>> F1().compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 1])
    {'f1': 0.5}
    >>> F1().compute(predictions=[0, 1, 2, 2], references=[0, 1, 2, 1], average="macro")
    {'f1_macro': 0.777...}
    """

    def _compute(self, predictions, references, average: Literal["binary", "macro"] = "binary") -> dict[str, float]:
        if average not in ("binary", "macro"):
            raise PosswapError(f"average={average!r} is not known; known are binary, macro")
        binary = average == "binary"
        if binary and (strange := sorted({*predictions, *references} - {0, 1})):
            raise DataError(f"binary F1 knows the labels 0 and 1, not {strange[0]}: take average='macro'")
        labels = [1] if binary else None
        value = metrics.f1_score(references, predictions, labels=labels, average="macro", zero_division=0.0)
        return {"f1" if binary else "f1_macro": float(value)}


class Matthews(_Metric):
    """Matthews correlation of given and predicted labels: -1 to 1, and 0 for guesses.

    For two labels (TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)); for more, Gorodkin's generalization. Where
    one list holds a single label it is undefined and 0 is returned.

    >>> Matthews().compute(predictions=[1, 1, 1, 0], references=[1, 1, 0, 0])
    {'matthews': 0.577...}
    """

    def _compute(self, predictions, references) -> dict[str, float]:
        if len(set(references)) < 2 or len(set(predictions)) < 2:
            return {"matthews": 0.0}
        return {"matthews": float(metrics.matthews_corrcoef(references, predictions))}


class Pearson(_Metric):
    """Linear correlation, cov(x, y) / (sd(x) sd(y)): -1 to 1.

    Where one list does not vary it is undefined and 0 is returned. Numbers that are not finite are an error.

    >>> Pearson().compute(predictions=[0.0, 1.0, 3.0], references=[1.0, 2.0, 4.0])
    {'pearson': 1.0}
    """

    kind = "float64"
    correlation = staticmethod(stats.pearsonr)

    def _compute(self, predictions, references) -> dict[str, float]:
        pair = {"predictions": numpy.asarray(predictions, float), "references": numpy.asarray(references, float)}
        for name, values in pair.items():
            if not numpy.isfinite(values).all():
                place = int(numpy.flatnonzero(~numpy.isfinite(values))[0])
                raise DataError(f"{name} hold {values[place]} at place {place}: a correlation needs finite numbers")
        # SciPy warns of values that are nearly constant as well; of two samples the correlation is always 1 or -1.
        flat = any(numpy.ptp(values) <= 1e-12 * max(1.0, abs(values).max()) for values in pair.values())
        value = 0.0 if flat else float(self.correlation(*pair.values()).statistic)
        return {type(self).__name__.lower(): round(value, 12)}  # it can come out as 1.0000000000000002


class Spearman(Pearson):
    """Correlation of ranks, equal values sharing their mean rank: -1 to 1, unchanged by monotonic maps.

    >>> Spearman().compute(predictions=[0.1, 0.2, 9.0, 0.0], references=[2.0, 3.0, 4.0, 1.0])
    {'spearman': 1.0}
    """

    correlation = staticmethod(stats.spearmanr)


METRICS = {
    "accuracy": (Accuracy, {}),
    "f1": (F1, {}),
    "f1_macro": (F1, {"average": "macro"}),
    "matthews": (Matthews, {}),
    "pearson": (Pearson, {}),
    "spearman": (Spearman, {}),
}


def metric_names(labels: int) -> tuple[str, ...]:
    """Return the names of the metrics that make sense for so many labels (0: numbers), the usual main one first.

    >>> metric_names(2), metric_names(0)
    (('accuracy', 'f1', 'f1_macro', 'matthews'), ('spearman', 'pearson'))
    """
    if labels == 0:
        return "spearman", "pearson"
    return ("accuracy", "f1", "f1_macro", "matthews") if labels == 2 else ("accuracy", "f1_macro", "matthews")


def compute_metrics(names: tuple[str, ...], predictions: list, references: list) -> dict[str, float]:
    """Return several metrics by name, each computed on the same samples.

    >>> compute_metrics(("accuracy", "matthews"), [0, 1, 1, 0], [0, 1, 1, 0])
    {'accuracy': 1.0, 'matthews': 1.0}
    """
    figures = {}
    for name in names:
        if name not in METRICS:
            raise PosswapError(f"metric {name!r} is not known; known are {', '.join(METRICS)}")
        metric, options = METRICS[name]
        figures |= metric().compute(predictions=predictions, references=references, **options)
    return figures
