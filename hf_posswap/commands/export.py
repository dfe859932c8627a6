"""`hf-posswap export`: from a swapped checkpoint to a stock one."""

from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.experiments.opening import Trust, loading, open_tokenizer, open_whole
from hf_posswap.provenance import new_folder
from hf_posswap.sharing.export import export_native
from hf_posswap.terminal import say


def export_command(
    model: Annotated[str, typer.Argument(help="The folder or Hub id of a swapped model.")],
    output: Annotated[Path, typer.Option(help="A new folder for the model, its tokenizer and parity.json.")],
    trust_remote_code: Trust = False,
):
    """Save a swapped model as a stock class of transformers that computes the same, and show the largest difference.

    With rotary positions, BERT, ALBERT, DistilBERT and ELECTRA become RoFormer; RoBERTa, XLM-RoBERTa, CamemBERT and BERT as a
    classifier of texts JinaEmbeddingsV3; ESM an ESM; GPT-2, OPT and BioGPT GPT-NeoX. Positions that are added to the embeddings
    become a learned table. A pipeline of sentence-transformers stays one. The result loads without hf_posswap.
    """
    with new_folder(output) as folder:
        loaded = open_whole(model, trust_remote_code=trust_remote_code)
        tokenizer = open_tokenizer(model, trust_remote_code=trust_remote_code)
        say("exporting, and comparing both models on the same tokens")
        native = export_native(loaded, tokenizer)
        native.save_pretrained(folder)
    typer.echo(native.certificate)
    line = loading(native.model if native.pipeline is None else native.pipeline, output)
    typer.echo(f"saved to {output}: {line}, without hf_posswap")
