"""Real weights in other families' clothes: what the source says, they say, swapped and fitted, too."""

import pytest
import torch
from clothes import minilm, stdlib_gpt2

import hf_posswap as posswap

ENCODERS = ("camembert", "distilbert", "electra", "roberta", "xlm-roberta")


def make(family, layers):
    return stdlib_gpt2(family, layers) if family in ("gpt2", "opt") else minilm(family, layers)


@pytest.mark.parametrize("family", [*ENCODERS, "opt"])
@torch.no_grad()
def test_clothes(family):
    """Outputs are the source's, plain and swapped past the trained length; a span and a restore do what they do there."""
    model, source = make(family, 2), make("gpt2" if family == "opt" else "bert", 2)
    tokens = torch.randint(999, 1999, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = source(tokens)[0]
    assert (model(tokens)[0] - expected).abs().max() < 1e-5
    for scheme, options in (("sinusoidal", {}), ("rotary", {"warm_start": False, "span": 16}), ("relative:clip=8", {})):
        one, other = (posswap.swap(each, scheme, max_positions=1024, **options)(tokens)[0] for each in (model, source))
        assert (one - other).abs().max() < 1e-4 < (one - expected).abs().max()
        told = posswap.describe(model)
        assert (told.family, told.trained_positions, told.max_positions) == (family, told.trained_positions, 1024)
        assert told.trained_positions == posswap.describe(source).trained_positions
    assert (posswap.restore(model)(tokens)[0] - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("family", "scheme"), [("roberta", "rotary"), ("opt", "relative:clip=4")])
def test_fits_are_the_sources(family, scheme):
    """The same batches win the same back, to the third decimal."""
    tokens = torch.randint(999, 1999, (60, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for name in (family, "gpt2" if family == "opt" else "bert"):
        model = posswap.swap(make(name, 2), scheme)
        report = posswap.fit(model, tokens, reconstruct=1, progress=False)
        found.append((report.before.total, report.after.total))
    assert found[0] == pytest.approx(found[1], abs=5e-4) and found[0][1] < found[0][0]
