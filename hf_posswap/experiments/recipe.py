"""What all recipes share: one configuration that is a command line and a YAML file too, a swapped model, one result file.

A recipe is a question. It says which options it has (a frozen dataclass, a child of `RecipeConfig`), and how one run answers it
for one scheme and one seed (a function of that configuration):

    @dataclass(frozen=True, kw_only=True)
    class Config(RecipeConfig):
        depth: Annotated[int, "Where the key is hidden."] = 3

    def run(config: Config, folder: Path, resume: bool) -> dict: ...

    if __name__ == "__main__":
        main(Config, run)

Every field is then an option, `--config FILE.yaml` sets any of them (the command line wins), and config.json and result.json in
the output folder say what was run and what came out. Comparing schemes and seeds is the job of recipes/compare.py.
"""

import inspect
import resource
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
import typer
import yaml
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env, set_seed
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_posswap.architectures import ARCHITECTURES
from hf_posswap.assets import model_source
from hf_posswap.errors import CheckpointError, PosswapError, UnsupportedModelError
from hf_posswap.experiments.comparison import ORIGINAL
from hf_posswap.fitting.fit import fit
from hf_posswap.provenance import lock, prepare_output, provenance, weight_hashes, without_home, write_json
from hf_posswap.schemes import parse_scheme
from hf_posswap.schemes.importing import import_schemes
from hf_posswap.surgery import geometry_of
from hf_posswap.swapping import swap
from hf_posswap.terminal import run_program
from hf_posswap.training import TrainingConfig, TrainingRun
from hf_posswap.training.launching import save_trained, share_weights

STARTS = ("cold", "swap", "fit", "scratch")
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class RecipeConfig(TrainingConfig):
    """One run of a recipe: a model, a scheme, a budget. Runs that are compared differ in scheme, start and seed alone."""

    model: Annotated[str, "A model folder or Hub id; minilm and stdlib-gpt2 are built in."] = "minilm"
    scheme: Annotated[str, "name or name:option=value,...; original leaves the model as it is."] = ORIGINAL
    schemes_from: Annotated[str | None, "A module or file.py of yours that registers further schemes."] = None
    start: Annotated[
        Literal[STARTS],
        "cold drops the table, swap starts warm, fit fits to the original before training, scratch draws all weights anew.",
    ] = "swap"
    report_to: Annotated[tuple[str, ...], "Trackers: tensorboard, trackio, wandb and others of accelerate; none for none."] = (
        "tensorboard",
    )
    max_positions: Annotated[int | None, "The longest input of the swapped model. Default: what the recipe needs."] = None
    fit_tokens: Annotated[int, "Tokens of training text that the start `fit` reads."] = 65_536
    fit_steps: Annotated[int, "Steps of that fit for each layer."] = 100
    save_model: Annotated[bool, "Keep the trained model and its tokenizer, in the folder `model` of --output."] = False

    # What an option of the command line takes the place of in a configuration file, beside itself.
    REPLACES: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self):
        super().__post_init__()
        if "none" in self.report_to:  # the command line has no other way to say so
            object.__setattr__(self, "report_to", ())
        if self.scheme != ORIGINAL:
            parse_scheme(self.scheme)
        if self.start not in STARTS:
            raise PosswapError(f"start={self.start!r} is not known; known are {', '.join(STARTS)}")
        for name in ("fit_tokens", "fit_steps"):
            if getattr(self, name) < 1:
                raise PosswapError(f"{name}={getattr(self, name)} must be at least 1")


def load_family(name: str, **options) -> tuple[PreTrainedConfig, bool]:
    """Return the configuration of an unswapped checkpoint, by its name on the command line, and whether it is causal."""
    config = AutoConfig.from_pretrained(model_source(name), **options)
    if config.model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{name} is a {config.model_type!r} model; give an unswapped checkpoint of: {', '.join(sorted(ARCHITECTURES))}"
        )
    return config, ARCHITECTURES[config.model_type].is_causal(config)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint; one without a padding token pads with its end of text."""
    source = model_source(name)
    family, tokenizer = AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    if not 10 < len(tokenizer) <= family.vocab_size:  # for a folder without one, transformers makes one up
        raise PosswapError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens and the model {family.vocab_size}: they do not belong together"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_original(name: str) -> PreTrainedModel:
    """Load an unswapped checkpoint as the cost of a swap is measured on it: a causal model with its head, an encoder bare."""
    _, causal = load_family(name)
    return (AutoModelForCausalLM if causal else AutoModel).from_pretrained(model_source(name)).eval()


def load_model(
    config: RecipeConfig, auto_class: type, *, max_positions: int | None = None, fit_batches: Callable[[], list] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None, prepare: Callable[[PreTrainedModel, set[str]], None] | None = None,
    progress: bool = True, **options,
) -> PreTrainedModel:  # fmt: skip
    """Load the checkpoint into a class of transformers' Auto family, and give it the positions that the run asks for.

    Seeded, so that a head the checkpoint lacks starts the same for every scheme. `max_positions` is what the recipe needs
    where the user said nothing; `fit_batches()` gives the text for the start `fit` (`text_batches`). The main process alone
    fits; the other ones get its weights. `prepare(model, missing)` is called on the original before it is
    swapped, with the names of weights that the checkpoint lacks: to train a new head that all schemes start from.
    """
    set_seed(config.seed)
    source, (family, _) = model_source(config.model), load_family(config.model, **options)
    if tokenizer is not None and family.pad_token_id is None:
        family.pad_token_id = tokenizer.pad_token_id
    trained = family.max_position_embeddings
    # A recipe that needs fewer than the checkpoint has is content with those.
    longest = config.max_positions or max(max_positions or 0, trained)
    if config.scheme != ORIGINAL:  # before anything is loaded or trained
        parse_scheme(config.scheme).check(geometry_of(family, longest, trained))
    elif longest > trained:
        raise PosswapError(
            f"the original reads {trained} tokens, not {longest}: ask for learned:extend=tile or learned:extend=interpolate, "
            "or for fewer"
        )
    if config.start == "scratch":
        model = auto_class.from_config(family)
    else:
        model, loading = auto_class.from_pretrained(source, config=family, output_loading_info=True)
        if prepare is not None:
            prepare(model, set(loading["missing_keys"]))
    if config.scheme != ORIGINAL:
        swap(model, config.scheme, max_positions=longest, warm_start=config.start in ("swap", "fit"))
        if config.start == "fit":
            if fit_batches is None:
                raise PosswapError("this recipe has no text to fit on: take another --start")
            model.to(PartialState().device)
            if PartialState().is_main_process:
                fit(model, fit_batches(), reconstruct=config.fit_steps, seed=config.seed, progress=progress)
            share_weights(model)
    return model.to(PartialState().device).eval()


def cost(model: PreTrainedModel, run: TrainingRun | None = None) -> dict:
    """Return what a run cost: parameters, tokens, tokens a second, and the peak of memory on this process's device."""
    device = PartialState().device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    spent = {"parameters": model.num_parameters(), "peak_memory_bytes": peak, "processes": PartialState().num_processes}
    if run is not None:
        spent |= {"tokens": run.tokens, "seconds": run.seconds, "tokens_per_second": run.tokens_per_second}
    return spent


def main(config_class: type[RecipeConfig], run: Callable[[RecipeConfig, Path, bool], dict]) -> None:
    """Run a recipe from the command line.

    `run(config, folder, resume)` works in `folder` and returns {"figures": {name: number}, "cost": {...}, "model": model} and
    what else the result file shall hold; it is called on all processes, and the main one writes.
    """
    held, module = [], inspect.getmodule(run)
    program = Path(module.__file__).stem

    def command(**given):
        # The first state of a process decides for all, and on its own heeds everything that was launched but this.
        PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
        output, resume, file = (given.pop(name) for name in ("output", "resume", "config"))
        config = read_config(config_class, file, {name: value for name, value in given.items() if value is not None})
        if PartialState().is_main_process:
            if output.is_file():
                raise CheckpointError(f"{output} is a file: give a folder")
            held.append(lock(output))
            prepare_output(asdict(config), output, resume)
        PartialState().wait_for_everyone()
        answer = run(config, output, resume)
        model = answer.pop("model", None)
        if config.save_model:
            if model is None:
                raise PosswapError(f"save_model: {program} makes no model to keep")
            _save_model(model, config.model, output / "model")
        if PartialState().is_main_process:
            spec = sys.modules["__main__"].__spec__  # of a module that was started with -m
            run_by = f"python -m {spec.name}" if spec else f"python {without_home(sys.argv[0])}"
            about = {"format": FORMAT, "recipe": program, **provenance(run_by)}
            kept = {"weights": weight_hashes(output / "model")} if config.save_model else {}
            write_json(output / "result.json", {**about, "config": asdict(config), **answer, **kept})
            _show(answer["figures"], output / "result.json")

    # \b: leave the lines of the paragraph as they are.
    command.__doc__ = (module.__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")
    command.__signature__ = inspect.Signature(_parameters(config_class, Path("runs") / program.replace("_", "-")))
    try:
        run_program(program, command)
    finally:
        for one in held:
            one.release()


def _save_model(model: PreTrainedModel, source: str, folder: Path) -> None:
    tokenizer = load_tokenizer(source)
    tokenizer.model_max_length = model.config.max_position_embeddings
    save_trained(model, folder)
    if PartialState().is_main_process:
        tokenizer.save_pretrained(folder)


def read_config(config_class: type[RecipeConfig], file: Path | None, given: dict) -> RecipeConfig:
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
            if isinstance(value, str) and _number_type(hints[name]) and _is_number(value):
                value = float(value)  # YAML 1.1 reads 1e-4 as text
            if not _fits(value, hints[name]):
                raise PosswapError(f"{file}: {name} must be {_name(hints[name])}, not {value!r}")
            values[name] = tuple(value) if isinstance(value, list) else value
        for name in given:
            for replaced in config_class.REPLACES.get(name, ()):
                values.pop(replaced, None)
    values |= {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if values.get("schemes_from"):  # before the name of one of its schemes is looked up
        import_schemes(values["schemes_from"])
    return config_class(**values)


def _parameters(config_class: type[RecipeConfig], output: Path) -> list[inspect.Parameter]:
    """Return one command-line option for each field, and those that are not part of what is compared."""
    hints = get_type_hints(config_class, include_extras=True)
    options = {
        "output": (Path, output, "Folder for config.json, result.json and checkpoints."),
        "resume": (bool, False, "Go on with an interrupted run."),
        "config": (Path | None, None, "A YAML file of options; the command line wins."),
    }
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, typer.Option(f"--{name}", help=text)],
        )
        for name, (kind, default, text) in options.items()
    ]
    for field in fields(config_class):
        kind, *texts = get_args(hints[field.name]) if get_origin(hints[field.name]) is Annotated else (hints[field.name],)
        if get_origin(kind) is tuple:
            kind = list[get_args(kind)[0]]
        shown = ", ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        text = " ".join(texts) + ("" if shown is None or shown == "" else f" [default: {shown}]")
        name = f"--{field.name.replace('_', '-')}"
        # None: not given, so that the file's value or the dataclass's default holds.
        declared = typer.Option(f"{name}/--no-{name[2:]}" if kind is bool else name, help=text.strip(), show_default=False)
        parameters.append(
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declared]
            )
        )
    return parameters


def _number_type(kind) -> bool:
    return float in (kind, *get_args(kind))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _fits(value, kind) -> bool:
    """Whether a value from a YAML file is of a field's type: the handful of types that options have."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(one, get_args(kind)[0]) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, type(None) if kind is type(None) else kind)


def _name(kind) -> str:
    return " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else getattr(kind, "__name__", str(kind))


def _show(figures: dict[str, float], file: Path) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}")
    console = Console()
    console.print(table)
    console.print(f"wrote {file}", highlight=False, soft_wrap=True)
