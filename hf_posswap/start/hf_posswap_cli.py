"""The command line: which commands there are, and that each is imported when it is asked for.

Installed, it stands beside the package, not in it: importing hf_posswap imports transformers, and `hf-posswap --help` and the
completion of a shell should not wait for that.
"""

import os
from importlib import import_module, metadata
from typing import Annotated

import typer
from typer.core import TyperGroup

COMMANDS = {  # name -> where it is, and what it does
    "demo": ("hf_posswap.commands.demo:demo", "See in two minutes what a swap costs and a fit wins back."),
    "swap": ("hf_posswap.commands.swap:swap_command", "Swap a checkpoint's positions, fit them if asked, save it."),
    "describe": ("hf_posswap.commands.describe:describe_command", "Say what positions a checkpoint has."),
    "export": ("hf_posswap.commands.export:export_command", "Write a swapped model as a stock class of transformers."),
    "plot": ("hf_posswap.commands.plot:plot", "Draw a scheme, a checkpoint or finished runs."),
    "compare": ("hf_posswap.commands.compare:compare", "Compare position schemes in one recipe under one budget."),
    "claims": ("hf_posswap.commands.claims:claims", "Check what is said of position schemes: what holds?"),
    "check": ("hf_posswap.contract.report:check", "Check a scheme, your own or one of these."),
    "card": ("hf_posswap.commands.share:card_command", "Write a model's card and its results into its folder."),
    "push": ("hf_posswap.commands.share:push_command", "Write the card, and push the folder to the Hub."),
    "leaderboard": ("hf_posswap.commands.share:leaderboard_command", "Put what shared models say of themselves in one table."),
}


class Commands(TyperGroup):
    """The group whose commands are only names and a line each, until one is resolved."""

    def resolve_command(self, ctx, args):
        name, command, rest = super().resolve_command(ctx, args)
        if command is None:
            return name, command, rest
        command = load(name)
        from hf_posswap.terminal import checked

        return name, command, checked(rest)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog="Try: hf-posswap demo; then hf-posswap swap bert-base-uncased --scheme rotary --fit auto --output my-bert",
)


def load(name: str):
    """Import a command, and return it as the parser wants it."""
    module, _, function = COMMANDS[name][0].partition(":")
    from hf_posswap.terminal import begin

    begin()
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name)(getattr(import_module(module), function))
    return typer.main.get_command(alone)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hf_posswap {metadata.version('hf_posswap')}")
        raise typer.Exit


@app.callback()
def _about(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    schemes_from: Annotated[str | None, typer.Option(help="Your own module or file.py that registers further schemes.")] = None,
):
    """Swap the position scheme of pretrained encoders and decoders, and measure what it costs.

    Schemes are learned, sinusoidal, relative, rotary, self-extend, alibi, buckets, none, mixed and ladder. Models are folders
    and Hub ids of bert, roberta, xlm-roberta, xlm-roberta-xl, camembert, albert, distilbert, electra, ernie, esm, gpt2, opt,
    biogpt and clip_text_model models, with any head, and pipelines of sentence-transformers; minilm and stdlib-gpt2 are built
    in. `hf-posswap COMMAND --help` has the options.
    """
    if schemes_from is not None:
        from hf_posswap.errors import PosswapError
        from hf_posswap.schemes.importing import import_schemes
        from hf_posswap.terminal import checked

        if context.invoked_subcommand == "compare":
            raise PosswapError("write --schemes-from after compare, which hands it on to the recipe")
        import_schemes(checked([f"--schemes-from={schemes_from}"])[0].partition("=")[2])


for _name, (_, _summary) in COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)


def main() -> None:
    """Run the command line; exit with 2 after an error of the user's or the machine's."""
    # A thread that spins at a barrier for one that has lost its core can make a busy machine many times as slow. torch reads
    # this when it is imported, and so do the processes that `compare` starts. See recipes/README.md.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "500")
    os.environ["MPLBACKEND"] = "agg"  # pictures go to files; another backend, or none of this name, may not be there
    try:
        app()
    except Exception as error:
        from hf_posswap.terminal import end

        end("hf-posswap", error)


if __name__ == "__main__":
    main()
