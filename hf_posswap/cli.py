"""The command line: one command for each thing that people do with a model."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posswap.architectures import ARCHITECTURES
from hf_posswap.assets import model_source
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.commands.claims import claims
from hf_posswap.commands.compare import compare
from hf_posswap.commands.plot import plot
from hf_posswap.contract.report import check
from hf_posswap.data.calibration import text_batches, written_text
from hf_posswap.data.text import read_documents, stdlib_prose
from hf_posswap.describing import describe
from hf_posswap.errors import CheckpointError, DataError, PosswapError
from hf_posswap.fitting.choosing import choose
from hf_posswap.fitting.fit import fit as fit_swapped
from hf_posswap.provenance import provenance
from hf_posswap.schemes import SCHEMES, parse_scheme
from hf_posswap.sharing.card import write_card
from hf_posswap.sharing.export import export_native
from hf_posswap.sharing.hub import share
from hf_posswap.sharing.leaderboard import leaderboard
from hf_posswap.swapping import swap
from hf_posswap.terminal import run_program

app = typer.Typer(
    help="Swap the position scheme of pretrained BERT and GPT-2 models, and measure what it costs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_SCHEME_HELP = "name:option=value,option=value; names: " + ", ".join(f"{n} ({s.summary})" for n, s in SCHEMES.items())


@app.command("swap")
def swap_command(
    model: Annotated[str, typer.Argument(help="A model folder or Hub id; minilm and stdlib-gpt2 are built in.")],
    scheme: Annotated[str, typer.Option(help=_SCHEME_HELP)],
    output: Annotated[Path, typer.Option(help="A new folder for the swapped model and its tokenizer.")],
    max_positions: Annotated[int | None, typer.Option(help="The longest input; the checkpoint's own by default.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the old table without a warm start.")] = False,
    fit: Annotated[
        str | None,
        typer.Option(
            help="Fit the swapped model to its original, layer by layer, on this text: a file, folder or Hub dataset; "
            "'auto': text at hand, the standard library's for an encoder, the model's own writing for a causal model."
        ),
    ] = None,
    fit_tokens: Annotated[
        int | None, typer.Option(help="Tokens to fit on and to measure the fit with. Default: 65536.")
    ] = None,
    reconstruct: Annotated[
        int | None, typer.Option(help="Steps for each layer; 0: the closed form alone. Default: 100.")
    ] = None,
    text_column: Annotated[str | None, typer.Option(help="The column of a table with the text. Default: text.")] = None,
):
    """Swap a checkpoint's positions, fit the new ones if asked to, and save the result."""
    for name, value in (("--fit-tokens", fit_tokens), ("--reconstruct", reconstruct), ("--text-column", text_column)):
        if fit is None and value is not None:
            raise PosswapError(f"{name} is about a fit: pass --fit FILE or --fit auto, too")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists already: choose another --output")
    source = model_source(model)
    loaded = _load(source)
    tokenizer = AutoTokenizer.from_pretrained(source)
    chosen = parse_scheme(scheme)
    batches, words = None, None
    if fit is not None:
        batches, words = _calibration(fit, text_column or "text", loaded, tokenizer, fit_tokens or 65_536)
    if batches is not None and chosen.open_options():
        chosen = choose(loaded, chosen, batches, max_positions=max_positions)
    swap(loaded, chosen, max_positions=max_positions, warm_start=not cold)
    report = None
    if batches is not None:
        report = fit_swapped(loaded, batches, reconstruct=100 if reconstruct is None else reconstruct)
        report = replace(report, text=words)
        typer.echo(report)
    output.mkdir(parents=True, exist_ok=True)
    loaded.save_pretrained(output)
    if report is not None:
        report.save(output, command=provenance()["command"])
    typer.echo(describe(loaded))
    # For a folder without a tokenizer transformers makes one up, with hardly a word in it.
    if len(tokenizer) > 10:
        tokenizer.model_max_length = loaded.config.max_position_embeddings
        tokenizer.save_pretrained(output)
    else:
        typer.echo(f"no tokenizer saved: {source} has none for this model")
    typer.echo(f"saved to {output}: import hf_posswap, then AutoModel...from_pretrained({str(output)!r})")


@app.command("describe")
def describe_command(model: Annotated[str, typer.Argument(help="A model folder or Hub id, swapped or not.")]):
    """Say what positions a checkpoint has."""
    typer.echo(describe(_load(model_source(model))))


@app.command("export")
def export_command(
    model: Annotated[str, typer.Argument(help="The folder or Hub id of a swapped model.")],
    output: Annotated[Path, typer.Option(help="A new folder for the model, its tokenizer and parity.json.")],
):
    """Write a swapped model as a stock class of transformers that computes the same, and say how near it comes.

    BERT with rotary positions becomes RoFormer, GPT-2 GPT-NeoX; what is added to the embeddings becomes a plain table.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists already: choose another --output")
    loaded, tokenizer = _load(model), AutoTokenizer.from_pretrained(model)
    native = export_native(loaded, tokenizer if len(tokenizer) > 10 else None)  # for a folder without one, one is made up
    native.save_pretrained(output)
    typer.echo(native.certificate)
    typer.echo(f"saved to {output}: {type(native.model).__name__}.from_pretrained({str(output)!r}), without hf_posswap")


app.command("compare")(compare)
app.command("claims")(claims)
app.command("check")(check)
app.command("plot")(plot)


def _calibration(source: str, text_column: str, model: PreTrainedModel, tokenizer, tokens: int) -> tuple[list, str]:
    """Return token batches of the text that a fit was asked to use, and which text that is."""
    causal = ARCHITECTURES[model.config.model_type.removeprefix("posswap-")].is_causal(model.config)
    if source == "auto" and causal and model.get_output_embeddings() is not None:
        return [written_text(model, tokens=tokens)], "written by the model"
    if len(tokenizer) <= 10:
        raise DataError("the checkpoint has no tokenizer to read text with: fit in Python, where you pass token ids")
    if source == "auto":
        documents, words = ["\n".join(stdlib_prose("train"))], "prose from the Python standard library"
    else:
        documents, words = read_documents(source, text_column=text_column), Path(source).name
    batches = text_batches(documents, tokenizer, model.config.max_position_embeddings, tokens=tokens, causal=causal)
    return batches, words


_RESULTS_HELP = "A folder that compare or a recipe wrote, with runs of this model's scheme; repeatable."
_BASE_HELP = (
    "What it was swapped from, if the folder does not say: owner/name, owner/name@revision, or local:name if on no Hub."
)
_LICENSE_HELP = "Licence of the weights, such as apache-2.0: as a rule the base model's."
_EVAL_HELP = "DATASET:TASK:FIGURE for .eval_results/, the Hub's own leaderboards of registered benchmarks; repeatable."


@app.command("card")
def card_command(
    folder: Annotated[Path, typer.Argument(help="A folder that swap or export wrote, or a delta.")],
    results: Annotated[list[Path] | None, typer.Option(help=_RESULTS_HELP)] = None,
    base_model: Annotated[str | None, typer.Option(help=_BASE_HELP)] = None,
    license: Annotated[str | None, typer.Option(help=_LICENSE_HELP)] = None,
    eval_result: Annotated[list[str] | None, typer.Option(help=_EVAL_HELP)] = None,
):
    """Write a model's card, its results as JSON and pictures into its folder; text of your own in the card stays."""
    path = write_card(folder, results=results, base_model=base_model, license=license, eval_results=eval_result or ())
    typer.echo(f"wrote {path}")
    if ModelCard.load(path).data.license is None:
        typer.echo("the card names no licence: say with --license under which one others may use the model")


@app.command("push")
def push_command(
    folder: Annotated[Path, typer.Argument(help="A folder that swap or export wrote, or a delta.")],
    repo_id: Annotated[str, typer.Argument(help="owner/name on the Hub; it is made where it does not exist.")],
    results: Annotated[list[Path] | None, typer.Option(help=_RESULTS_HELP)] = None,
    base_model: Annotated[str | None, typer.Option(help=_BASE_HELP)] = None,
    license: Annotated[str | None, typer.Option(help=_LICENSE_HELP)] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a new repository.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also over a foreign model there, or text in its card.")
    ] = False,
    eval_result: Annotated[list[str] | None, typer.Option(help=_EVAL_HELP)] = None,
):
    """Write the card as `card` does, and push the folder to the Hub; what is there already is not sent again."""
    typer.echo(
        share(
            folder,
            repo_id,
            results=results,
            base_model=base_model,
            license=license,
            private=private,
            create_pr=create_pr,
            overwrite=overwrite,
            eval_results=eval_result or (),
        )
    )


@app.command("leaderboard")
def leaderboard_command(
    places: Annotated[list[str], typer.Argument(help="Folders of shared models, or owner/name[@revision] on the Hub.")],
    vary: Annotated[
        list[str] | None, typer.Option(help="An option that may differ, and stands in the row; repeatable.")
    ] = None,
    figure: Annotated[list[str] | None, typer.Option(help="A column to show; repeatable. Default: all.")] = None,
):
    """Put what shared models say of themselves into one table for each recipe; unequal budgets are refused."""
    typer.echo(leaderboard(places, vary=vary or (), figures=figure or ()))


def _load(source: str) -> PreTrainedModel:
    """Load a checkpoint with the head it was saved with, so that nothing is lost on the way."""
    config = AutoConfig.from_pretrained(source)
    by_name = {kind.__name__: kind for pair in SWAPPED_CLASSES.items() for kind in pair}
    named = (config.architectures or [None])[0]
    if named in by_name:
        return by_name[named].from_pretrained(source)
    auto_class = AutoModelForCausalLM if config.model_type.endswith("gpt2") else AutoModel
    model, info = auto_class.from_pretrained(source, output_loading_info=True)
    if info["unexpected_keys"]:
        lost = ", ".join(sorted(info["unexpected_keys"])[:3])
        raise CheckpointError(
            f"{source} was saved as {named}, which is none of the known classes, and weights would be lost ({lost} ...): swap "
            "it in Python, where you choose the class"
        )
    return model


def main() -> None:
    """Run the command line."""
    run_program("hf-posswap", app)


if __name__ == "__main__":
    main()
