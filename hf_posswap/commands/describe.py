"""`hf-posswap describe`: which positions a checkpoint has."""

from typing import Annotated

import typer

from hf_posswap.commands.opening import TRUST_HELP, open_model
from hf_posswap.describing import describe


def describe_command(
    model: Annotated[str, typer.Argument(help="A model folder or Hub id, swapped or not.")],
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST_HELP)] = False,
):
    """Show which positions a checkpoint has, swapped or not."""
    typer.echo(describe(open_model(model, trust_remote_code=trust_remote_code)))
