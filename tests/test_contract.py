"""The checks of `hf-posswap check`, over all schemes, families and backends, and what only known families can be asked."""

import re
from dataclasses import fields
from itertools import combinations, product

import pytest
import torch
from conftest import CASES, refused, spread
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap.contract.checks import CHECKS
from hf_posswap.contract.subject import BACKENDS, FAMILIES, Failure, NotApplicable, Subject, padded
from hf_posswap.schemes import options_in, parse_scheme, scheme_from_dict

LENGTH = 20
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CELLS = [(check, *row) for start, check in enumerate(CHECKS) for row in spread(start)]


def reasons(subject: Subject) -> dict[str, str | bool]:
    """What checks that cannot apply say, by their names; False for others."""
    scheme = subject.scheme
    return {
        "table_kept": scheme != posswap.Learned() and "only `learned`",
        "scale_and_dropout": scheme.name not in ("relative", "self-extend", "mixed") and "own attention",
        "switched_on": scheme.name == "none" and "baseline",
        "order_matters": subject.causal and "a decoder sees order",
        "shift_invariance": not scheme.shift_invariant and "not claimed, and does not hold",
        "cache": not subject.caches and "an encoder has no cache",
        "longer_than_trained": scheme == posswap.Learned() and "32 rows",
        "phase_precision": scheme == posswap.Learned() and "32 rows",
        "packing": subject.family == "esm" and "masks of 2 dimensions",
        "gradient_checkpointing": subject.family == "albert" and "none for this family",
    }


@pytest.mark.parametrize(
    ("check", "case", "family", "backend"), CELLS, ids=[f"{check.__name__}-{'-'.join(row)}" for check, *row in CELLS]
)
def test_check(check, case, family, backend):
    """Every check holds for every scheme, and is left out only where it cannot apply."""
    subject = Subject(CASES[case].scheme, family, backend)
    if reason := reasons(subject).get(check.__name__):
        refused(reason, check, subject, error=NotApplicable)
    else:
        check(subject)


# Bit by bit the same code, so few pairs: one scheme that turns, one that attends, one that adds, one in the table's place.
FEW = "albert biogpt clip_text_model distilbert electra electra-decoder ernie esm opt xlm-roberta-xl".split()
KIN = [
    (case, family, BACKENDS[(row + column) % 2])
    for row, family in enumerate(FEW)
    for column, case in enumerate(
        ("rotary", "relative", ("learned-tile", "sinusoidal")[row % 2], ("alibi", "buckets", "alibi-fixed")[row % 3])
    )
]


@pytest.mark.parametrize(("case", "family", "backend"), KIN, ids=["-".join(row) for row in KIN])
def test_kin(case, family, backend):
    subject, left_out = Subject(CASES[case].scheme, family, backend), set()
    for check in CHECKS:
        try:
            check(subject)
        except NotApplicable:
            left_out.add(check.__name__)
        except Failure as failure:
            assert family == "esm" and check.__name__ == "gradients", failure
            assert re.fullmatch(r"(\S*contact_head\S* )+the gradient is none[^;]*", str(failure)), failure
    assert left_out == {name for name, reason in reasons(subject).items() if reason}


def test_every_pair_is_met():
    """Each feature, scheme, family and backend meets each of the others, and each scheme every family with every backend."""
    values = (CHECKS, CASES, FAMILIES, BACKENDS)
    assert len(CHECKS) == 21 and len(CELLS) == 21 * len(CASES)
    for one, other in combinations(range(4), 2):
        assert {(cell[one], cell[other]) for cell in CELLS} == set(product(values[one], values[other]))
    assert {cell[1:] for cell in CELLS} == set(product(*values[1:]))
    families = ("bert-decoder", "gpt2")
    assert {row for start in range(4) for row in spread(start, families)} == set(product(CASES, families, BACKENDS))


@pytest.mark.only(families=("gpt2",))
def test_packed_sequences_without_a_mask(model, case):
    """Without mask and cache, positions tell documents apart, as in transformers; how far they go counts, not how many."""
    sizes = [case.max_positions or 32, 12]
    tokens = torch.randint(2, 98, (2, sum(sizes)), generator=torch.Generator().manual_seed(5))
    position_ids = torch.cat([torch.arange(size) for size in sizes]).repeat(2, 1)
    alone = torch.cat([model(part).logits for part in tokens.split(sizes, dim=1)], dim=1)
    assert_close(model(tokens, position_ids=position_ids, use_cache=False).logits, alone, **CLOSE)


def test_inputs_embeds_and_tuples(model, tokens):
    """Embeddings instead of token ids, with and without position_ids, and outputs as a tuple, are the same logits."""
    embeds = model.get_input_embeddings()(tokens)
    for inputs in ({}, {"position_ids": torch.arange(LENGTH).expand(2, -1) // 2}):
        expected = model(tokens, **inputs).logits
        assert torch.equal(model(inputs_embeds=embeds, **inputs).logits, expected)
        assert torch.equal(model(tokens, return_dict=False, **inputs)[0], expected)


def test_hidden_states_and_attentions(make_model, family, case, tokens):
    """As many as a plain model records, swapped and restored after it has; rows of attention sum to 1 and see no padding."""
    asked = {"attention_mask": padded(after=7)["attention_mask"], "output_attentions": True, "output_hidden_states": True}
    model = make_model(family)
    before = model(tokens, **asked)
    posswap.swap(model, case.scheme, max_positions=case.max_positions)
    swapped = model(tokens, **asked)
    assert len(swapped.attentions) == 2
    assert len(swapped.hidden_states) == 3 and all(h.shape == (2, LENGTH, 32) for h in swapped.hidden_states)
    for probabilities in swapped.attentions:
        assert probabilities.shape == (2, 2, LENGTH, LENGTH)
        assert_close(probabilities.sum(-1), torch.ones(2, 2, LENGTH))
        assert probabilities[1, :, :, 13:].abs().max() == 0
        assert family == "bert" or probabilities.triu(1).abs().max() == 0
    same = case.scheme in (posswap.Learned(), posswap.Learned(extend="tile"))  # these tokens fit the trained length
    assert torch.equal(swapped.attentions[1], before.attentions[1]) == same
    after = posswap.restore(model)(tokens, **asked)
    assert len(after.attentions) == 2 and torch.equal(after.attentions[1], before.attentions[1])


def test_dropout_is_active_in_training_only(make_swapped, family, backend, case, tokens):
    """The swapped attention drops as the family's own does: while training, at the family's rate."""
    rates = {"attn_pdrop": 0.5} if family == "gpt2" else {"attention_probs_dropout_prob": 0.5}
    model = make_swapped(family, case.scheme, backend, max_positions=case.max_positions, **rates)
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    assert (model(tokens).logits - model(tokens).logits).abs().max() > 0.1


@pytest.mark.only(backends=("eager",))
def test_too_long_input(model, family, case):
    """An input beyond the last position says its length, the maximum and the remedy; one that just fits runs."""
    limit = case.max_positions or 32
    model(torch.full((1, limit), 5))
    too_long = f"reaches {limit + 1} positions.*set up for {limit}.*posswap.swap.*max_positions={limit + 1}.*truncate"
    tokens = torch.full((1, limit + 1), 5)
    for inputs in (
        {"input_ids": tokens},
        {"inputs_embeds": model.get_input_embeddings()(tokens)},
        {"input_ids": tokens[:, :4], "position_ids": torch.tensor([[0, 1, 2, limit]])},
    ):
        refused(too_long, model, error=posswap.SequenceTooLongError, **inputs)
    refused("must not be negative, the smallest is -1", model, tokens[:, :4], position_ids=torch.tensor([[0, 1, 2, -1]]))


def test_no_input_and_two_inputs(make_swapped, family):
    """No tokens, or tokens and embeddings at once, get the family's own error."""
    model = make_swapped(family, "rotary")
    for inputs in ({}, {"input_ids": torch.ones(1, 3).long(), "inputs_embeds": torch.ones(1, 3, 32)}):
        refused("input_ids", model, error=ValueError, **inputs)


TURNS = {  # a scheme, and the options of which each is turned by itself
    "alibi:": "slopes=fixed",
    "buckets:": "buckets=4",
    "buckets:buckets=4,": "reach=16",
    "learned:extend=tile,": "extend=interpolate",
    "sinusoidal:": "base=100 layout=tensor2tensor project=false",
    "sinusoidal:project=false,": "layout=halves",  # a fitted projection undoes an order of the dimensions
    "relative:": "clip=5 values=false share_heads=true key_query=true vectors=sinusoidal",
    "rotary:": "theta=100 fraction=0.5 layout=half scaling={rope_type=linear,factor=2} mark_first=false",
    "self-extend:": "theta=100 fraction=0.5 temper=1 mark_first=false group=4",
    "self-extend:group=4,": "near=6",
    "mixed:": "layers=[rotary,none]",
    "ladder:": "rung=dials combine=concatenate",
}


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_every_option_matters(make_model, family):
    """Every field of every scheme, turned once, changes the logits of a sequence beyond the old maximum."""
    tokens = torch.randint(2, 98, (1, 50), generator=torch.Generator().manual_seed(5))
    turned = set()
    for start, option in ((start, option) for start, options in TURNS.items() for option in options.split()):
        before, name = options_in(start), option.partition("=")[0]
        pair = [parse_scheme(start), scheme_from_dict(before | options_in(f"{before['name']}:{option}"))]
        turned.add((pair[0].name, name))
        outputs = []
        for scheme in pair:
            # a balanced basis chooses its dimensions by the layout, which then does not show
            warm = scheme.name != "rotary" or name == "mark_first"
            model = posswap.swap(make_model(family), scheme, max_positions=64, warm_start=warm)
            torch.manual_seed(7)
            for attention in model.architecture.self_attentions(model.base_model):
                for parameter in getattr(attention, "positions", torch.nn.Module()).parameters():
                    torch.nn.init.normal_(parameter, std=0.3)
            outputs.append(model(tokens).logits)
        assert (outputs[0] - outputs[1]).abs().max() > 0.05, (start, option)
    assert turned == {(name, field.name) for name, scheme in posswap.SCHEMES.items() for field in fields(scheme)}
