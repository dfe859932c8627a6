"""`hf-posswap swap`: swap the positions of a checkpoint, fit them, and save the result."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from transformers import PreTrainedModel

from hf_posswap.architectures import family_of, longest_input
from hf_posswap.data.calibration import text_batches, written_text
from hf_posswap.data.text import read_documents, stdlib_prose
from hf_posswap.describing import describe
from hf_posswap.errors import DataError, PosswapError
from hf_posswap.experiments.opening import Trust, loading, open_tokenizer, open_whole
from hf_posswap.fitting.choosing import choose
from hf_posswap.fitting.fit import fit as fit_swapped
from hf_posswap.pipelines import is_pipeline, reads, unwrap
from hf_posswap.provenance import new_folder, provenance
from hf_posswap.schemes import SCHEMES, parse_scheme
from hf_posswap.swapping import swap
from hf_posswap.terminal import say

_SCHEME_HELP = "name:option=value,option=value; names: " + ", ".join(f"{n} ({s.summary})" for n, s in SCHEMES.items())


def swap_command(
    model: Annotated[str, typer.Argument(help="A model folder or Hub id; minilm and stdlib-gpt2 are built in.")],
    scheme: Annotated[str, typer.Option(help=_SCHEME_HELP)],
    output: Annotated[Path, typer.Option(help="A new folder for the swapped model and its tokenizer.")],
    max_positions: Annotated[int | None, typer.Option(help="The longest input; the checkpoint's own by default.")] = None,
    span: Annotated[int | None, typer.Option(help="Attend only to keys at a distance below this. Default: to all.")] = None,
    first: Annotated[int | None, typer.Option(help="With --span: first tokens that all see. Default: 4; encoders 1.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the old table without a warm start.")] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            help="Fit the swapped model to its original, layer by layer, on this text: a file, folder or Hub data set, or "
            "'auto': the standard library's text for an encoder, text that it generates itself for a causal model."
        ),
    ] = None,
    fit_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to fit on and measure with. Default: 65536.")] = None,
    fit_steps: Annotated[  # --reconstruct: its older name, in commands on cards
        int | None,
        typer.Option("--fit-steps", "--reconstruct", min=0, help="Steps per layer; 0: only the closed form. Default: 100."),
    ] = None,
    window: Annotated[int | None, typer.Option(help="Tokens the original reads at once in fits. Default: its longest.")] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of a table with the text. Default: text.")] = None,
    trust_remote_code: Trust = False,
):
    """Swap a checkpoint's positions, fit the new ones if asked to, and save the result.

    It takes BERT, GPT-2 and their kin with learned positions, with any head of transformers, in full precision, and pipelines
    of sentence-transformers around them. It does not take quantized models, nor other families: the error names those it takes.
    """
    given = {"--fit-tokens": fit_tokens, "--fit-steps": fit_steps, "--window": window, "--text-column": text_column}
    if fit is None and (idle := [name for name, value in given.items() if value is not None]):
        raise PosswapError(f"{idle[0]} is about a fit: pass --fit FILE or --fit auto, too")
    if fit == "auto" and text_column is not None:
        raise PosswapError("--text-column is about a table, and --fit auto reads none: pass --fit FILE, or leave it out")
    chosen = parse_scheme(scheme)
    options = {"max_positions": max_positions, "warm_start": not cold, "span": span, "first": first}
    with new_folder(output) as folder:
        whole = open_whole(model, trust_remote_code=trust_remote_code)
        loaded, piped = unwrap(whole), is_pipeline(whole)
        tokenizer = open_tokenizer(model, trust_remote_code=trust_remote_code)
        report = None
        if fit is not None:
            longest = max_positions or reads(whole, longest_input(loaded.config))  # as a pipeline does
            lengths = {"longest": longest, "window": window}
            batches, words = _calibration(fit, text_column or "text", loaded, tokenizer, fit_tokens or 65_536, **lengths)
            if chosen.open_options():
                say(f"choosing {', '.join(chosen.open_options())} of {chosen.name} by short fits")
                chosen = choose(loaded, chosen, batches, **options, window=window)
        say(f"swapping to {chosen}")
        swap(whole, chosen, **options)
        if fit is not None:
            steps = 100 if fit_steps is None else fit_steps
            layers = loaded.config.num_hidden_layers
            say(f"fitting {layers} layers, {steps} steps each, on {words}: minutes on a CPU for a small model")
            report = fit_swapped(loaded, batches, steps=steps, window=window)
            report = replace(report, text=words)
        say(f"saving to {output}")
        whole.save_pretrained(str(folder))
        if report is not None:
            report.save(folder, command=provenance()["command"])
        if tokenizer is not None and not piped:
            tokenizer.model_max_length = longest_input(loaded.config)
            tokenizer.save_pretrained(folder)
    if report is not None:
        typer.echo(report)  # not before all is saved: printing fails where nobody reads
    typer.echo(replace(describe(loaded), can_restore=False))  # only this process could restore it
    if tokenizer is None:
        typer.echo(f"no tokenizer saved: {model} has none for this model")
    typer.echo(f"saved to {output}: import hf_posswap, then {loading(whole, output)}")


def _calibration(
    source: str, column: str, model: PreTrainedModel, tokenizer, tokens: int, longest: int, window: int | None
) -> tuple[list, str]:
    """Return token batches of the text to fit on, and the name of that text for the report."""
    causal = family_of(model.config).is_causal(model.config)
    if source == "auto" and causal and model.get_output_embeddings() is not None:
        say(f"letting the model write {tokens:,} tokens to fit on")
        return [written_text(model, tokens=tokens)], "written by the model"
    if tokenizer is None:
        raise DataError("the checkpoint has no tokenizer to read text with: fit in Python, where you pass token ids")
    if source == "auto":
        documents, words = ["\n".join(stdlib_prose("train"))], "prose from the Python standard library"
    else:
        documents, words = read_documents(source, text_column=column), Path(source).name
    window = window or longest_input(model.config)  # the original reads longer text through it
    return text_batches(documents, tokenizer, longest, tokens=tokens, causal=causal, window=window), words
