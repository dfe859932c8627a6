"""No positions at all: the honest baseline.

Without positions an encoder is permutation equivariant (it sees a bag of words); a causal decoder still sees order
through its mask. Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers"
(https://arxiv.org/abs/2305.19466).
"""

from dataclasses import dataclass
from typing import ClassVar

from hf_posswap.schemes.base import Scheme


@dataclass(frozen=True, kw_only=True)
class NoPositions(Scheme):
    """No positions. A warm start keeps the table's mean vector and its row 0, a cold one keeps nothing.

    >>> NoPositions().to_dict()
    {'name': 'none'}
    """

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "no positions: the baseline"
    shift_invariant: ClassVar[bool] = True
