"""Metrics of classification and regression, by name, as an `evaluate.Metric`: here, so that nothing is fetched.

In a run of several processes, gather the predictions first (accelerate's `gather_for_metrics`) and compute once: evaluate's own
distributed mode counts the samples that fill up the last batch twice. Importing `evaluate` takes seconds.

References: Matthews 1975 (phi coefficient of the confusion matrix); Warstadt et al. 2018, section 4 (CoLA); Cer et al. 2017,
section 4 (STS). scikit-learn and SciPy compute them.
"""

import datasets
import evaluate
import numpy
from scipy import stats
from sklearn import metrics

from hf_posswap.errors import DataError, PosswapError


def f1(references: list[int], predictions: list[int]) -> float:
    """Return the harmonic mean of precision and recall of label 1, 2 TP / (2 TP + FP + FN); 0 where it never occurs."""
    if strange := sorted({*predictions, *references} - {0, 1}):
        raise DataError(f"f1 knows the labels 0 and 1, not {strange[0]}: take f1_macro")
    return metrics.f1_score(references, predictions, labels=[1], average="macro", zero_division=0.0)


def f1_macro(references: list[int], predictions: list[int]) -> float:
    """Return the plain mean of F1 over all labels that occur in either list."""
    return metrics.f1_score(references, predictions, average="macro", zero_division=0.0)


def matthews(references: list[int], predictions: list[int]) -> float:
    """Return the Matthews correlation, -1 to 1, 0 for guesses; undefined, and 0, where one list holds a single label.

    For two labels (TP TN - FP FN) / sqrt((TP + FP)(TP + FN)(TN + FP)(TN + FN)); for more, Gorodkin's generalization.
    """
    single = len(set(references)) < 2 or len(set(predictions)) < 2
    return 0.0 if single else metrics.matthews_corrcoef(references, predictions)


def _correlated(of=numpy.asarray, **lists: list[float]) -> float:
    """Return the linear correlation, -1 to 1, of what `of` makes of the lists; undefined, and 0, where one does not vary."""
    pair = {name: numpy.asarray(values, float) for name, values in lists.items()}
    for name, values in pair.items():
        if not numpy.isfinite(values).all():
            place = int(numpy.flatnonzero(~numpy.isfinite(values))[0])
            raise DataError(f"{name} hold {values[place]} at place {place}: a correlation needs finite numbers")
    # SciPy warns of values that are nearly constant as well; of two samples the correlation is always 1 or -1.
    pair = [of(values) for values in pair.values()]
    flat = any(numpy.ptp(values) <= 1e-12 * abs(values).max() for values in pair)
    return 0.0 if flat else round(float(stats.pearsonr(*pair).statistic), 12)  # it can come out as 1.0000000000000002


def pearson(references: list[float], predictions: list[float]) -> float:
    """Return the linear correlation, cov(x, y) / (sd(x) sd(y))."""
    return _correlated(predictions=predictions, references=references)


def spearman(references: list[float], predictions: list[float]) -> float:
    """Return the correlation of ranks, equal values sharing their mean rank: it is unchanged by monotonic maps."""
    return _correlated(stats.rankdata, predictions=predictions, references=references)


OF_LABELS = {"accuracy": metrics.accuracy_score, "f1": f1, "f1_macro": f1_macro, "matthews": matthews}
OF_NUMBERS = {"spearman": spearman, "pearson": pearson}


class Metric(evaluate.Metric):
    """One of the metrics above. Samples are kept in memory, so that runs share no file, lock or folder.

    >>> Metric("f1").compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, 1])
    {'f1': 0.5}
    """

    def __init__(self, name: str):
        if name not in OF_LABELS | OF_NUMBERS:
            raise PosswapError(f"metric {name!r} is not known; known are {', '.join(OF_LABELS | OF_NUMBERS)}")
        super().__init__(config_name=name, keep_in_memory=True)

    def _build_data_dir(self) -> str:
        return ""  # evaluate makes a folder in its cache even if nothing is ever put there

    def _info(self) -> evaluate.MetricInfo:
        kind = datasets.Value("float64" if self.config_name in OF_NUMBERS else "int64")
        features = datasets.Features(predictions=kind, references=kind)
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description="", features=features)

    def _compute(self, predictions, references) -> dict[str, float]:
        return {self.config_name: float((OF_LABELS | OF_NUMBERS)[self.config_name](references, predictions))}


def metric_names(labels: int) -> tuple[str, ...]:
    """Return the names of the metrics that make sense for so many labels (0: numbers), the usual main one first.

    >>> metric_names(2), metric_names(0)
    (('accuracy', 'f1', 'f1_macro', 'matthews'), ('spearman', 'pearson'))
    """
    return tuple(OF_NUMBERS) if labels == 0 else tuple(name for name in OF_LABELS if labels == 2 or name != "f1")


def compute_metrics(names: tuple[str, ...], predictions: list, references: list) -> dict[str, float]:
    """Return several metrics by name, each computed on the same samples.

    >>> compute_metrics(("accuracy", "matthews"), [0, 1, 1, 2], [0, 1, 0, 2])
    {'accuracy': 0.75, 'matthews': 0.7}
    """
    pair = {"predictions": predictions, "references": references}
    return {name: value for one in names for name, value in Metric(one).compute(**pair).items()}
