"""The items that a figure is the mean of (blocks of text, queries, rows of a table), and how much hangs on which were drawn.

The spread over seeds says how much a figure depends on the training run; the interval over items, on the evaluation set.
"""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch

from hf_posswap.extras import extra


def averaged(figures: dict[str, float | list | torch.Tensor]) -> dict[str, dict]:
    """Return the `figures` and `items` of a result. A figure may be given as its values on all items, (N,): it is their mean.

    Values are kept with five digits.

    >>> averaged({"accuracy": [True, False], "majority": 0.5})
    {'figures': {'accuracy': 0.5, 'majority': 0.5}, 'items': {'accuracy': [1.0, 0.0]}}
    """
    items = {name: list(map(float, values)) for name, values in figures.items() if isinstance(values, list | torch.Tensor)}
    return {
        "figures": figures | {name: fmean(values) for name, values in items.items()},
        "items": {name: [float(f"{value:.5g}") for value in values] for name, values in items.items()},
    }


def items_of(runs: list[dict], name: str) -> np.ndarray | None:
    """Return a figure of a row on each item, (N,), the mean over seeds; None if a run kept no items, or another number.

    If each seed draws its own items, the means are of different ones, but as independent as single ones.
    """
    found = [run.get("items", {}).get(name, ()) for run in runs]
    return np.mean(found, axis=0) if len(found[0]) > 1 and len(set(map(len, found))) == 1 else None


def half_width(values: Sequence[float]) -> float:
    """Return the half width of Student's 95 % interval of the mean of values (N,)."""
    with extra():
        from scipy import stats
    return float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))


def student_p(values: Sequence[float]) -> float:
    """Return the p-value of Student's t-test of values (N,) that differ: is their mean unlike zero?"""
    with extra():
        from scipy import stats
    return float(stats.ttest_1samp(values, 0).pvalue)


def parted(values: np.ndarray) -> np.ndarray:
    """Return values in the order of the text, (N,); from 64 on the means of 16 parts of it.

    Blocks next to each other are alike, so an interval that takes all for independent is too narrow: "batch means", Law and
    Kelton, Simulation Modeling and Analysis, 9.5.
    """
    return values if len(values) < 64 else np.array([part.mean() for part in np.array_split(values, 16)])


def paired_p(differences: np.ndarray) -> float:
    """Return the p-value of paired differences (N,): McNemar's exact test if they are of one size, else t-test of `parted`.

    >>> paired_p(np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0]))  # six wins and no loss: 2 / 2**6
    0.03125
    """
    with extra():
        from scipy import stats
    if not len(unequal := differences[differences != 0]):
        return 1.0
    if np.ptp(abs(unequal)) < 1e-9:
        return float(stats.binomtest(int((unequal > 0).sum()), len(unequal)).pvalue)
    return student_p(parted(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that may be compared with one level, however many there are (Holm 1979).

    >>> holm([0.04, 0.01, 0.03])
    [0.06, 0.03, 0.06]
    """
    order = np.argsort(p_values)
    adjusted = np.maximum.accumulate(np.asarray(p_values)[order] * np.arange(len(order), 0, -1)).clip(max=1)
    return adjusted[np.argsort(order)].tolist()
