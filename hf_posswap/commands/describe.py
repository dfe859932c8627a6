"""`hf-posswap describe`: which positions a checkpoint has."""

from typing import Annotated

import typer

from hf_posswap.describing import describe
from hf_posswap.experiments.opening import Trust, open_model


def describe_command(
    model: Annotated[str, typer.Argument(help="A model folder or Hub id, swapped or not.")],
    trust_remote_code: Trust = False,
):
    """Show which positions a checkpoint has, swapped or not."""
    typer.echo(describe(open_model(model, trust_remote_code=trust_remote_code)))
