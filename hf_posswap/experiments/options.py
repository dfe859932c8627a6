"""The options of a recipe: a frozen dataclass that also defines its command line and its YAML files.

Every field is a command-line option, with the text of its annotation as help. `--config FILE.yaml` sets any of them, and the
command line wins. The class also says which question the recipe asks (QUESTION), and what its figures mean (FIGURES).
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
from hf_posswap.training.budget import check_numbers

STARTS = ("cold", "swap", "fit", "scratch")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every run has: a scheme, how a model gets it, and a seed. Runs that are compared differ only in these."""

    QUESTION: ClassVar[str] = ""  # what the recipe asks, in a line
    FIGURES: ClassVar[dict[str, str]] = {}  # beginning of a figure's name -> what it means
    FORBIDDEN_STARTS: ClassVar[dict[str, str]] = {}  # start -> why this recipe does not take it
    READS_TEXT: ClassVar[bool] = True  # with the checkpoint's tokenizer, which a saved model then gets
    LEAST: ClassVar[dict[str, float]] = {}  # option -> its least value, of each of them where there are several
    # Option of the command line -> further options of the YAML file that it overrides.
    REPLACES: ClassVar[dict[str, tuple[str, ...]]] = {}

    scheme: Annotated[str, "name or name:option=value,...; original leaves the model as it is."] = ORIGINAL
    schemes_from: Annotated[str | None, "Your own module or file.py that registers further schemes."] = None
    start: Annotated[str, "cold: no table; swap: warm start; fit: fitted to the original; scratch: random weights."] = "swap"
    seed: Annotated[int, "Seed of all random draws."] = 0

    def __post_init__(self):
        check_numbers(self)
        if self.scheme != ORIGINAL:
            parse_scheme(self.scheme)
        known = [start for start in STARTS if start not in self.FORBIDDEN_STARTS]
        if self.start not in known:
            why = self.FORBIDDEN_STARTS.get(self.start, "it is not known")
            raise PosswapError(f"start={self.start!r}: {why}; known are {', '.join(known)}")


@dataclass(frozen=True, kw_only=True)
class SwapOptions(RunOptions):
    """A checkpoint, its length after the swap, and the budget of a fit."""

    LEAST = {"fit_tokens": 1, "max_positions": 1, "span": 1, "first": 0, "fit_steps": 0}

    model: Annotated[str, "A model folder or Hub id; minilm and stdlib-gpt2 are built in."] = "minilm"
    max_positions: Annotated[int | None, "The longest input of the swapped model. Default: what the recipe needs."] = None
    span: Annotated[int | None, "Attend only to keys at a distance below this. Default: to all."] = None
    first: Annotated[int | None, "With --span: tokens at the beginning that all see, too. Default: 4; encoders 1."] = None
    fit_tokens: Annotated[int, "Tokens of training text for --start fit."] = 65_536
    fit_steps: Annotated[int, "Steps per layer for --start fit; 0: only the closed form."] = 100
    save_model: Annotated[bool, "Save the model and its tokenizer in the folder `model` of --output."] = False

    def __post_init__(self):
        super().__post_init__()
        if self.span is None and self.first not in (None, 1, 4):  # files of older runs have one of these all the same
            raise PosswapError(f"first={self.first} is about a span, of which there is none: give span, or leave first out")


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(SwapOptions, TrainingConfig):
    """One run of a recipe that trains: a model, a scheme, a budget."""

    report_to: Annotated[tuple[str, ...], "Trackers of accelerate: tensorboard, trackio, wandb; or none."] = ("tensorboard",)

    def __post_init__(self):
        TrainingConfig.__post_init__(self)
        SwapOptions.__post_init__(self)
        if "none" in self.report_to:  # the command line cannot give an empty tuple
            object.__setattr__(self, "report_to", ())


def read_config(config_class: type[RunOptions], file: Path | None, given: dict) -> RunOptions:
    """Return the configuration in a YAML file, overridden by options of the command line; unknown keys are errors."""
    hints = get_type_hints(config_class)
    hints = {field.name: hints[field.name] for field in fields(config_class)}
    values = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
            lines, values = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text) or {}
        except (yaml.YAMLError, ValueError) as error:  # ValueError: bytes that are no UTF-8
            raise PosswapError(f"{file} is no YAML ({' '.join(str(error).split())}): write `option: value` lines") from None
        if not isinstance(values, dict):
            raise PosswapError(f"{file} must hold `option: value` lines, not {type(values).__name__}")
        names = [key.value for key, _ in lines.value] if values else []
        if twice := [name for name in names if names.count(name) > 1]:
            raise PosswapError(f"{file}: {twice[0]} is there twice, and only the last would count: leave one out")
        if unknown := sorted(set(values) - set(hints), key=str):
            raise PosswapError(f"{file}: unknown option {unknown[0]!r}; known are {', '.join(sorted(hints))}")
        for name, value in values.items():
            values[name] = _as_declared(value, hints[name])
            try:
                type_validator(name, values[name], hints[name])
            except TypeError:
                kind = inspect.formatannotation(hints[name]).replace("tuple", "list")  # as YAML has it
                raise PosswapError(f"{file}: {name} must be {kind}, not {value!r}") from None
        for name in given:
            for replaced in config_class.REPLACES.get(name, ()):
                values.pop(replaced, None)
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if empty := [name for name, value in values.items() if value == ""]:  # often a shell's variable that is not set
        raise PosswapError(f"{empty[0]} is empty: give a value, or leave it out")
    if values.get("schemes_from"):  # before the name of one of its schemes is looked up
        import_schemes(values["schemes_from"])
    return config_class(**values)


def _as_declared(value, hint):
    """Return a YAML value with tuples for lists, and as a float where one is declared: YAML 1.1 reads 1e-4 as text."""
    if isinstance(value, list):
        return tuple(_as_declared(one, hint) for one in value)
    if float in (hint, *get_args(hint)) and isinstance(value, int | str) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass  # the caller reports that it is no number
    return value


def command_line(config_class: type[RunOptions], output: Path) -> inspect.Signature:
    """Return the signature that typer turns into options: --output, --resume, --config, and one for each field."""
    hints = get_type_hints(config_class)
    parameters = []

    def add(name: str, kind, default, declared: str, text: str, **options) -> None:
        hint = Annotated[kind, typer.Option(declared, help=text, **options)]
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    add("output", Path, output, "--output", "Folder for config.json, result.json and checkpoints.")
    add("resume", bool, False, "--resume", "Continue an interrupted run.")
    add("config", Path | None, None, "--config", "A YAML file of options; the command line wins.")
    for field in fields(config_class):
        kind, default = hints[field.name], field.default
        shown = ", ".join(map(str, default)) if isinstance(default, tuple) else default
        text = _help(config_class, field.name) + ("" if shown is None or shown == "" else f" [default: {shown}]")
        name = f"--{field.name.replace('_', '-')}"
        declared = f"{name}/--no-{name[2:]}" if kind is bool else name
        if get_origin(kind) is tuple:
            kind = list[get_args(kind)[0]]
        # None means not given: then the file's value or the dataclass's default holds.
        add(field.name, kind | None, None, declared, text.strip(), show_default=False)
    return inspect.Signature(parameters)


def _help(config_class: type, name: str) -> str:
    """Return the text of a field's annotation; a subclass that only changes the default inherits it."""
    for one in config_class.__mro__:
        hint = inspect.get_annotations(one, eval_str=True).get(name)
        if texts := getattr(hint, "__metadata__", ()):
            return " ".join(texts)
    return ""
