"""Claims about position schemes: what is found is what the page says, and a broken scheme changes the verdict."""

from pathlib import Path

import pytest
import torch
from test_notebooks import assert_same_text
from typer.testing import CliRunner

import hf_posswap.commands.claims as claims
from hf_posswap.cli import app
from hf_posswap.commands.claims import Claim, check_claims, markdown
from hf_posswap.schemes.sinusoidal import sinusoids


@pytest.fixture(scope="module")
def computed() -> dict[str, Claim]:
    """All claims, computed once."""
    return {claim.name: claim for claim in check_claims()}


def test_the_page_has_what_is_computed(computed):
    """The table in notebooks/README.md is this one, with all claims; numbers that come from models may differ a little."""
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


def test_multiplications_are_those_of_the_formulas(computed):
    """A BERT-base layer: 12 E^2 a token, and 2 E for each key; Shaw's vectors: 2 E for each of 129 distances."""
    for length, finding in zip((128, 1024), computed["relative_is_slower"].findings, strict=True):
        plain = 12 * 768 + 2 * length
        assert finding.found.startswith(f"{(plain + 2 * 129) / plain:.2f} times")


def test_the_command_and_its_tables(monkeypatch):
    """One row for each finding, the claim's words once; the Markdown table has the same content."""
    monkeypatch.setattr(claims, "check_claims", lambda: check_claims((claims.wavelengths, claims.translation)))
    shown = CliRunner().invoke(app, ["claims"], env={"COLUMNS": "160"})
    assert shown.exit_code == 0 and shown.output.count("Wavelengths run from") == 1 and "54,410 of 62,832" in shown.output
    table = CliRunner().invoke(app, ["claims", "--markdown"]).output.strip().splitlines()
    assert len(table) == 2 + 3 and table[2].startswith("| 1 | Wavelengths run from 2 pi to 10,000 times 2 pi | as printed")
    assert table[3].startswith("| | | tensor2tensor") and table[4].startswith("| 2 | A shift is a linear map")
    assert " fails " in table[2] and " holds " in table[3]
