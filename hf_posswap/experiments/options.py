"""The options of a recipe: a frozen dataclass that is a command line and a YAML file too.

Every field is an option of the command line, with the text of its annotation as help. `--config FILE.yaml` sets any of them,
and the command line wins. What a recipe asks, and what its figures mean, stands on its class as well.
"""

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, get_args, get_origin, get_type_hints

import typer
import yaml
from huggingface_hub.dataclasses import type_validator

from hf_posswap.errors import PosswapError
from hf_posswap.experiments.comparison import ORIGINAL
from hf_posswap.schemes import parse_scheme
from hf_posswap.schemes.importing import import_schemes
from hf_posswap.training import TrainingConfig
from hf_posswap.training.budget import check_seed

STARTS = ("cold", "swap", "fit", "scratch")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every run has: a scheme, how a model gets it, and a seed. Runs that are compared differ in these alone."""

    QUESTION: ClassVar[str] = ""  # what the recipe asks, in a line
    FIGURES: ClassVar[dict[str, str]] = {}  # what a figure is, by the beginning of its name
    FORBIDDEN_STARTS: ClassVar[dict[str, str]] = {}  # and why
    # What an option of the command line takes the place of in a configuration file, beside itself.
    REPLACES: ClassVar[dict[str, tuple[str, ...]]] = {}

    scheme: Annotated[str, "name or name:option=value,...; original leaves the model as it is."] = ORIGINAL
    schemes_from: Annotated[str | None, "A module or file.py of yours that registers further schemes."] = None
    start: Annotated[
        str, "cold drops the table, swap starts warm, fit fits to the original before training, scratch draws all weights anew."
    ] = "swap"
    seed: Annotated[int, "Of all that is drawn."] = 0

    def __post_init__(self):
        check_seed(self.seed)
        if self.scheme != ORIGINAL:
            parse_scheme(self.scheme)
        known = [start for start in STARTS if start not in self.FORBIDDEN_STARTS]
        if self.start not in known:
            why = self.FORBIDDEN_STARTS.get(self.start, "it is not known")
            raise PosswapError(f"start={self.start!r}: {why}; known are {', '.join(known)}")

    def at_least_one(self, *names: str) -> None:
        """Raise where one of these options is less than 1; None is what is not given."""
        for name in names:
            if (value := getattr(self, name)) is not None and value < 1:
                raise PosswapError(f"{name}={value} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SwapOptions(RunOptions):
    """A checkpoint, and what the positions of the scheme are fitted with."""

    model: Annotated[str, "A model folder or Hub id; minilm and stdlib-gpt2 are built in."] = "minilm"
    max_positions: Annotated[int | None, "The longest input of the swapped model. Default: what the recipe needs."] = None
    span: Annotated[int | None, "How far attention looks in the swapped model. Default: everywhere."] = None
    first: Annotated[int, "With --span, how many tokens at the beginning all others see."] = 4
    fit_tokens: Annotated[int, "Tokens of training text that the start `fit` reads."] = 65_536
    fit_steps: Annotated[int, "Steps of that fit for each layer; 0: the closed form alone."] = 100
    save_model: Annotated[bool, "Keep the model and its tokenizer, in the folder `model` of --output."] = False

    def __post_init__(self):
        RunOptions.__post_init__(self)
        self.at_least_one("fit_tokens", "max_positions")
        if self.fit_steps < 0:
            raise PosswapError(f"fit_steps={self.fit_steps} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(SwapOptions, TrainingConfig):
    """One run of a recipe that trains: a model, a scheme, a budget."""

    report_to: Annotated[tuple[str, ...], "Trackers: tensorboard, trackio, wandb and others of accelerate; none for none."] = (
        "tensorboard",
    )

    def __post_init__(self):
        TrainingConfig.__post_init__(self)
        SwapOptions.__post_init__(self)
        if "none" in self.report_to:  # the command line has no other way to say so
            object.__setattr__(self, "report_to", ())


def read_config(config_class: type[RunOptions], file: Path | None, given: dict) -> RunOptions:
    """Return a configuration from a YAML file, with what was given on the command line over it; unknown keys are errors."""
    hints = get_type_hints(config_class)
    hints = {field.name: hints[field.name] for field in fields(config_class)}
    values = {}
    if file is not None:
        values = yaml.safe_load(file.read_text()) or {}
        if not isinstance(values, dict):
            raise PosswapError(f"{file} must hold `option: value` lines, not {type(values).__name__}")
        if unknown := sorted(set(values) - set(hints), key=str):
            raise PosswapError(f"{file}: unknown option {unknown[0]!r}; known are {', '.join(sorted(hints))}")
        for name, value in values.items():
            values[name] = _as_declared(value, hints[name])
            try:
                type_validator(name, values[name], hints[name])
            except TypeError:
                kind = getattr(hints[name], "__name__", None) if not get_args(hints[name]) else None
                raise PosswapError(f"{file}: {name} must be {kind or hints[name]}, not {value!r}") from None
        for name in given:
            for replaced in config_class.REPLACES.get(name, ()):
                values.pop(replaced, None)
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if values.get("schemes_from"):  # before the name of one of its schemes is looked up
        import_schemes(values["schemes_from"])
    return config_class(**values)


def _as_declared(value, hint):
    """Return a YAML value with tuples for lists, and numbers where they are wanted: YAML 1.1 reads 1e-4 as text."""
    if isinstance(value, list):
        return tuple(_as_declared(one, hint) for one in value)
    if float in (hint, *get_args(hint)) and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass  # which is then no number, and said to be none
    return value


def command_line(config_class: type[RunOptions], output: Path) -> inspect.Signature:
    """Return the signature that typer makes options of: one for each field, and those that are not part of what is compared."""
    hints = get_type_hints(config_class)
    options = {
        "output": (Path, output, typer.Option("--output", help="Folder for config.json, result.json and checkpoints.")),
        "resume": (bool, False, typer.Option("--resume", help="Go on with an interrupted run.")),
        "config": (Path | None, None, typer.Option("--config", help="A YAML file of options; the command line wins.")),
    }
    for field in fields(config_class):
        kind, default = hints[field.name], field.default
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        text = _help(config_class, field.name) + ("" if shown is None or shown == "" else f" [default: {shown}]")
        name = f"--{field.name.replace('_', '-')}"
        declared = f"{name}/--no-{name[2:]}" if kind is bool else name
        if get_origin(kind) is tuple:
            kind = list[get_args(kind)[0]]
        # None: not given, so that the file's value or the dataclass's default holds.
        options[field.name] = (kind | None, None, typer.Option(declared, help=text.strip(), show_default=False))
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [
            inspect.Parameter(name, only, default=default, annotation=Annotated[kind, option])
            for name, (kind, default, option) in options.items()
        ]
    )


def _help(config_class: type, name: str) -> str:
    """Return the text of a field's annotation; a class that only gives another default has that of its parent."""
    for one in config_class.__mro__:
        hint = inspect.get_annotations(one, eval_str=True).get(name)
        if texts := getattr(hint, "__metadata__", ()):
            return " ".join(texts)
    return ""
