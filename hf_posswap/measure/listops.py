"""ListOps: nested expressions of list operators, and the digit that each evaluates to, seeded.

Nangia & Bowman 2018, "ListOps: A Diagnostic Dataset for Latent Tree Learning" (https://arxiv.org/abs/1804.06028), in the long
version of Tay et al. 2021, "Long Range Arena" (https://arxiv.org/abs/2011.04006), section 2.2.1. The grammar:

    expression -> digit | operator expression expression ... ]      2 to max_args arguments
    operator   -> [MIN | [MAX | [MED | [SM                          minimum, maximum, median (rounded down), sum modulo 10
    digit      -> 0 | 1 | ... | 9

    [MAX 2 9 [MIN 4 7 ] 0 ]  =  9

Probabilities are those of the published generator (google-research/long-range-arena, lra_benchmarks/data/listops.py): a node is
an operator with probability 1/4 and never at `max_depth`; operators, digits and numbers of arguments are uniform; expressions
of `min_length` tokens or fewer, or of `max_length` or more, are dropped, and none occurs twice. Length counts every symbol
above. The published files also have parentheses around each node of a binary tree; they are no part of the length there, and
are not written here.
"""

import random
from collections.abc import Sequence
from statistics import median

import torch
from torch.utils.data import Dataset

from hf_posswap.errors import DataError

OPERATORS = {"[MIN": min, "[MAX": max, "[MED": lambda values: int(median(values)), "[SM": lambda values: sum(values) % 10}
SPECIAL = ("[PAD]", "[CLS]", "[SEP]")
SYMBOLS = (*OPERATORS, "]", *map(str, range(10)))
TOKEN_IDS = {symbol: number for number, symbol in enumerate((*SPECIAL, *SYMBOLS))}
OPERATOR_CHANCE = 0.25
_TRIES = 200_000  # of drawing one expression; the published settings need about 11


def listops_expressions(
    count: int, *, min_length: int = 500, max_length: int = 2000, max_depth: int = 10, max_args: int = 10, seed: int = 0
) -> list[str]:
    """Return `count` different expressions of more than `min_length` and fewer than `max_length` symbols.

    >>> for text in listops_expressions(2, min_length=5, max_length=12, max_depth=3, max_args=4):
    ...     print(text, "=", evaluate(text), "of depth", depth(text))
    [MIN 8 9 4 [MIN 5 7 8 1 ] ] = 1 of depth 3
    [MED 3 3 [MAX 7 1 1 5 ] 7 ] = 5 of depth 3
    """
    if max_depth < 2 or max_args < 2:
        raise DataError(f"max_depth={max_depth} and max_args={max_args} must be at least 2")
    if not 0 <= min_length < max_length - 1:
        raise DataError(f"no length lies between min_length={min_length} and max_length={max_length}")
    chance, found, missed = random.Random(seed), {}, 0
    while len(found) < count:
        symbols = _draw(chance, max_depth, max_args, max_length)
        text = " ".join(symbols)
        if min_length < len(symbols) < max_length and text not in found:
            found[text], missed = None, 0
        elif (missed := missed + 1) == _TRIES:
            raise DataError(f"lengths {min_length} to {max_length} are too rare at max_depth={max_depth}, max_args={max_args}")
    return list(found)


def _draw(chance: random.Random, max_depth: int, max_args: int, max_length: int) -> list[str]:
    """Return the symbols of one expression; drawing stops as soon as there are too many."""
    symbols, open_arguments = [], [1]  # the arguments that each open node still waits for, outermost first
    while open_arguments and len(symbols) < max_length:
        if open_arguments[-1] == 0:
            open_arguments.pop()
            symbols += ["]"] if open_arguments else []
            continue
        open_arguments[-1] -= 1
        if len(open_arguments) < max_depth and chance.random() < OPERATOR_CHANCE:
            symbols.append(chance.choice(tuple(OPERATORS)))
            open_arguments.append(chance.randint(2, max_args))
        else:
            symbols.append(str(chance.randrange(10)))
    return symbols


def evaluate(expression: str) -> int:
    """Return the value of an expression, 0 to 9; DataError if the grammar does not allow it.

    >>> evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]"), evaluate("[MED 1 2 5 8 ]"), evaluate("[SM 7 8 ]")
    (9, 3, 5)
    """
    stack = [(None, [])]
    for symbol in expression.split():
        if symbol in OPERATORS:
            stack.append((symbol, []))
        elif symbol == "]" and len(stack) > 1 and len(stack[-1][1]) > 1:
            operator, values = stack.pop()
            stack[-1][1].append(OPERATORS[operator](values))
        elif symbol in TOKEN_IDS and symbol.isdigit():
            stack[-1][1].append(int(symbol))
        else:
            raise DataError(f"{symbol!r} stands where the grammar of ListOps has none, in {expression!r}")
    if len(stack) != 1 or len(stack[0][1]) != 1:
        raise DataError(f"{expression!r} is not one ListOps expression")
    return stack[0][1][0]


def depth(expression: str) -> int:
    """Return how deep digits are nested, as `max_depth` counts: a lone digit has 1.

    >>> depth("7"), depth("[MAX 2 9 [MIN 4 7 ] 0 ]")
    (1, 3)
    """
    deepest = level = 1
    for symbol in expression.split():
        level += (symbol in OPERATORS) - (symbol == "]")
        deepest = max(deepest, level)
    return deepest


def encode(expression: str) -> torch.Tensor:
    """Return an expression as token ids between [CLS] and [SEP]: `TOKEN_IDS` is the whole vocabulary."""
    return torch.tensor([TOKEN_IDS[symbol] for symbol in ("[CLS]", *expression.split(), "[SEP]")])


class ListOpsExamples(Dataset):
    """Expressions as training examples: token ids, and the value as one of ten labels, both computed on access."""

    def __init__(self, expressions: Sequence[str]):
        self.expressions = expressions  # as text: 96,000 of a thousand symbols would be 0.8 GB of tensors

    def __len__(self) -> int:
        return len(self.expressions)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = self.expressions[index]
        return {"input_ids": encode(text), "labels": torch.tensor(evaluate(text))}
