"""`hf-posswap card`, `push` and `leaderboard`: publish a model and compare published ones."""

from pathlib import Path
from typing import Annotated

import typer
from huggingface_hub import ModelCard

from hf_posswap.sharing.card import write_card
from hf_posswap.sharing.hub import share
from hf_posswap.sharing.leaderboard import leaderboard

Folder = Annotated[Path, typer.Argument(help="A folder that swap or export wrote, or a delta.")]
Results = Annotated[list[Path] | None, typer.Option(help="Folder of compare or a recipe with runs of this scheme; repeatable.")]
BaseModel = Annotated[str | None, typer.Option(help="What was swapped, if not said: owner/name[@revision], or local:name.")]
License = Annotated[str | None, typer.Option(help="Licence of the weights, such as apache-2.0; usually the base model's.")]
EvalResult = Annotated[list[str] | None, typer.Option(help="DATASET:TASK:FIGURE for the Hub's leaderboards; repeatable.")]


def card_command(
    folder: Folder,
    results: Results = None,
    base_model: BaseModel = None,
    license: License = None,
    eval_result: EvalResult = None,
):
    """Write a model's card, its results as JSON and pictures into its folder; your own text in the card stays."""
    path = write_card(folder, results=results, base_model=base_model, license=license, eval_results=eval_result or ())
    typer.echo(f"wrote {path}")
    if ModelCard.load(path).data.license is None:
        typer.echo("the card names no licence: give one with --license, or others may not use the model")


def push_command(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(help="owner/name on the Hub; created if it does not exist.")],
    results: Results = None,
    base_model: BaseModel = None,
    license: License = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another model there, and text in its card.")] = False,
    eval_result: EvalResult = None,
):
    """Write the card as `card` does, and push the folder to the Hub; files that are there already are not sent again."""
    card = {"results": results, "base_model": base_model, "license": license, "eval_results": eval_result or ()}
    typer.echo(share(folder, repo_id, private=private, create_pr=create_pr, overwrite=overwrite, **card))


def leaderboard_command(
    places: Annotated[list[str], typer.Argument(help="Folders of shared models, or owner/name[@revision] on the Hub.")],
    vary: Annotated[list[str] | None, typer.Option(help="An option that may differ, and names rows; repeatable.")] = None,
    figure: Annotated[list[str] | None, typer.Option(help="A column to show; repeatable. Default: all.")] = None,
):
    """Show the results of several shared models in one table for each recipe; unequal budgets are an error."""
    typer.echo(leaderboard(places, vary=vary or (), figures=figure or ()))
