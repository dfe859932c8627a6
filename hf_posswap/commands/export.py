"""`hf-posswap export`: from a swapped checkpoint to a stock one."""

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.commands.new_folder import new_folder
from hf_posswap.commands.opening import TRUST_HELP, open_model, open_tokenizer
from hf_posswap.sharing.export import export_native
from hf_posswap.terminal import say


def export_command(
    model: Annotated[str, typer.Argument(help="The folder or Hub id of a swapped model.")],
    output: Annotated[Path, typer.Option(help="A new folder for the model, its tokenizer and parity.json.")],
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help=TRUST_HELP)] = False,
):
    """Write a swapped model as a stock class of transformers that computes the same, and say how near it comes.

    BERT with rotary positions becomes RoFormer, GPT-2 GPT-NeoX; what is added to the embeddings becomes a plain table.
    """
    with new_folder(output) as folder:
        loaded = open_model(model, trust_remote_code=trust_remote_code)
        tokenizer = open_tokenizer(model, trust_remote_code=trust_remote_code)
        say("exporting, and comparing both models on the same tokens")
        native = export_native(loaded, tokenizer)
        native.save_pretrained(folder)
    typer.echo(native.certificate)
    typer.echo(f"saved to {output}: {type(native.model).__name__}.from_pretrained({str(output)!r}), without hf_posswap")
