"""Claims about position schemes: what is found is what was worked out by hand, and a broken scheme changes the verdict."""

from pathlib import Path

import pytest
import torch
from test_notebooks import assert_same_text
from typer.testing import CliRunner

import hf_posswap.commands.claims as claims
from hf_posswap.cli import app
from hf_posswap.commands.claims import CLAIMS, Claim, check_claims, markdown
from hf_posswap.schemes.sinusoidal import sinusoids

# Whether each finding holds, in order; and text that must stand in one of them.
EXPECTED = {
    "unique": ([True, True, True, False, False], "31 codes", "7 codes", "1.95 apart"),
    "bounded": ([True, True, False, False], "norm 8.0", "norm 19.6"),
    "same_distance_same_relation": ([True, False], "0.11 of 10 positions and 0.01 of 100"),
    "generalises_to_longer": ([True, False, True, False], "1.3 times the original's, which reads these alone, in the first"),
    "deterministic": ([True, True, False],),
    "translation": ([True],),
    "sine_alone": ([True, True],),
    "dot_product_decreases": ([False, True], "rises at 47 of 127 steps, first from 11 to 12"),
    "dot_product_vanishes": ([False, False, False], "up to 0.26"),
    "symmetric": ([True, False, False, True, False], "both -9 slopes", "bucket 9 at distance -9, 41 at 9"),
    "layout_does_not_matter": ([True, False], "difference 1.34, frequencies up to 15% apart"),
    "wavelengths": ([False, True], "54,410 of 62,832"),
    "binary_is_wasteful": ([True, True],),
    "few_dimensions": ([False, False, False], "89% of the pairs", "97% of the pairs"),
    "learned_and_fixed_alike": ([True, False],),
    "early_positions_favoured": ([True],),
    "relative_is_slower": ([True, True],),
    "rotary_keeps_distances": ([True, False],),
    "absolute_on_little_data": ([False, True],),
    "order_matters": ([True, False],),
    "clipping_is_small": ([True], "16,512 numbers", "130,944"),
    "printed_frequency": ([False], "with the inverse, 0.8"),
    "precision": ([True, True, False, False], "0.63 rad", "0.0052 rad"),
}


@pytest.fixture(scope="module")
def computed() -> dict[str, Claim]:
    """All claims, computed once."""
    return {claim.name: claim for claim in check_claims()}


@pytest.mark.parametrize("name", EXPECTED)
def test_claims(computed, name):
    """Each claim holds where it was found to hold by other means, fails where it fails, and says by how much."""
    holds, *texts = EXPECTED[name]
    found = computed[name]
    assert [finding.holds for finding in found.findings] == holds, found
    for text in texts:
        assert any(text in finding.found for finding in found.findings), (text, found)
    assert found.statement and not found.statement.endswith(".")


def test_the_page_has_what_is_computed(computed):
    """The table in notebooks/README.md is this one, with all claims; numbers that come from models may differ a little."""
    assert list(computed) == [claim.__name__ for claim in CLAIMS] == list(EXPECTED)
    page = (Path(__file__).parents[1] / "notebooks" / "README.md").read_text()
    block = page.partition("<!-- claims -->\n")[2].partition("\n<!-- /claims -->")[0]
    assert_same_text(markdown(list(computed.values())), block)


def broken(positions: torch.Tensor, size: int, **options) -> torch.Tensor:
    """Sinusoids whose cosines are sines, and which grow."""
    signal = sinusoids(positions, size, **options)
    return torch.cat([signal[..., 0::2], signal[..., 0::2]], -1) * (1 + 0.01 * positions[..., None])


@pytest.mark.parametrize(
    "claim",
    ["bounded", "same_distance_same_relation", "translation", "symmetric", "layout_does_not_matter", "binary_is_wasteful"],
)
def test_a_broken_scheme_changes_verdicts(computed, monkeypatch, claim):
    """Where sinusoids are not what they should be, what held of them does not hold."""
    right = computed[claim]
    monkeypatch.setattr(claims, "sinusoids", broken)
    (wrong,) = check_claims((getattr(claims, claim),))
    assert [f.holds for f in right.findings] != [f.holds for f in wrong.findings]


def test_the_command_and_its_tables(monkeypatch):
    """One row for each finding, the claim's words once; the Markdown table has the same content."""
    monkeypatch.setattr(claims, "check_claims", lambda: check_claims((claims.wavelengths, claims.translation)))
    shown = CliRunner().invoke(app, ["claims"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0 and shown.output.count("Wavelengths run from") == 1 and "54,410 of 62,832" in shown.output
    table = CliRunner().invoke(app, ["claims", "--markdown"]).output.strip().splitlines()
    assert len(table) == 2 + 3 and table[2].startswith("| 1 | Wavelengths run from 2 pi to 10,000 times 2 pi | as printed")
    assert table[3].startswith("| | | tensor2tensor") and table[4].startswith("| 2 | A shift is a linear map")
    assert " fails " in table[2] and " holds " in table[3]
