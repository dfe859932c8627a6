"""What all recipes share: a command line, a swapped model, one result file.

A recipe asks one question. It defines its options (a frozen dataclass, a subclass of `RecipeConfig`), and a function that
answers the question for one scheme and one seed:

    @dataclass(frozen=True, kw_only=True)
    class Config(RecipeConfig):
        QUESTION = "Does it find a hidden key?"
        FIGURES = {"accuracy": "share of keys that are found"}

        depth: Annotated[int, "Where the key is hidden."] = 3

    def run(config: Config, folder: Path, resume: bool) -> dict: ...

    if __name__ == "__main__":
        main(Config, run)

The output folder gets config.json, with all options (--config reads it), inputs.json, with the hashes of the files that they
name, and result.json, with the figures. `hf-posswap compare` runs a recipe for several schemes and seeds.
"""

import inspect
import math
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, get_origin, get_type_hints

from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_posswap.architectures import longest_input
from hf_posswap.assets import model_source
from hf_posswap.errors import CheckpointError, Interrupted, PosswapError
from hf_posswap.experiments.comparison import FORMAT, ORIGINAL
from hf_posswap.experiments.items import averaged
from hf_posswap.experiments.models import cost, give_positions, load_family, load_model, load_original, load_tokenizer
from hf_posswap.experiments.options import RecipeConfig, RunOptions, SwapOptions, command_line, read_config
from hf_posswap.pipelines import is_pipeline
from hf_posswap.provenance import input_hashes, lock, prepare_output, provenance, weight_hashes, without_home, write_json
from hf_posswap.swapping import usual_first
from hf_posswap.terminal import run_program
from hf_posswap.training.budget import TrainingConfig
from hf_posswap.training.launching import check_launch, check_processes, save_trained
from hf_posswap.training.run_log import announce

__all__ = [  # what a recipe needs
    "ORIGINAL", "RecipeConfig", "RunOptions", "SwapOptions", "announce", "averaged", "cost", "give_positions", "load_family",
    "load_model", "load_original", "load_tokenizer", "main",
]  # fmt: skip
# Options whose value may also be the name of a file, by chance: wandb writes into a folder `wandb`. A Literal is none of these.
NO_FILE = (
    "scheme", "start", "metric", "phase", "report_to", "_column", "_config", "_split", "lr_scheduler_type",
    "train_sampling_strategy", "torch_compile", "mixed_precision",
)  # fmt: skip


def main(config_class: type[RunOptions], run: Callable[[RunOptions, Path, bool], dict]) -> None:
    """Run a recipe from the command line.

    `run(config, folder, resume)` works in `folder`. It returns {"figures": {name: number}, "cost": {...}, "model": model} and
    further entries for result.json, such as "items" (`items.averaged`); "model" is optional. It is called on all processes, and
    the main one writes the result. If a figure or weight is NaN or infinite, PosswapError is raised and no result is written.
    """
    module, held = inspect.getmodule(run), ExitStack()
    program = Path(module.__file__).stem

    def command(**given):
        # The first PartialState of a process fixes its device, and does not look at this variable by itself.
        check_processes(PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")))
        output, resume, file = (given.pop(name) for name in ("output", "resume", "config"))
        config = read_config(config_class, file, {name: value for name, value in given.items() if value is not None})
        if isinstance(config, SwapOptions) and config.span is not None and config.first is None and config.scheme != ORIGINAL:
            config = replace(config, first=usual_first(load_family(config.model)[1]))  # that which `swap` takes
        launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        trains = getattr(config, "tune_steps", getattr(config, "train", True))
        if getattr(config, "mixed_precision", "") is None and trains and launched != "no":
            config = replace(config, mixed_precision=launched)  # results tell it, and --resume keeps it
        if isinstance(config, TrainingConfig) and trains:
            check_launch(config, config.gradient_accumulation_steps)  # not only after a fit
        if PartialState().is_main_process:
            if output.is_file():
                raise CheckpointError(f"{output} is a file: give a folder")
            held.enter_context(lock(output))
            options = asdict(config) | ({"model": model_source(config.model)} if hasattr(config, "model") else {})
            words = {name for name, hint in get_type_hints(config_class).items() if get_origin(hint) is Literal}
            named = {name: v for name, v in options.items() if name not in words and not name.endswith(NO_FILE)}
            inputs = input_hashes(named, output)
            prepare_output(asdict(config), inputs, output, resume)
        PartialState().wait_for_everyone()
        try:
            answer = run(config, output, resume)
        except KeyboardInterrupt:
            where = f"goes on from the last checkpoint in {output}, or begins again if there is none"
            raise Interrupted(f"stopped without a result: the same command with --resume {where}") from None
        model = answer.pop("model", None)
        wrong = [f"{name} {value}" for name, value in answer["figures"].items() if not math.isfinite(value)]
        for name, value in () if model is None else model.named_parameters():
            shard = value.to_local() if isinstance(value, DTensor) else value  # this process's
            wrong += [f"{name} that is not finite"] * (not shard.detach().isfinite().all())
        if wrong:
            raise PosswapError(f"the run ended in {wrong[0]}, and has no result: lower --learning-rate, or check the data")
        if PartialState().is_main_process:  # before the model, which may not fit on the disk
            width = max(map(len, answer["figures"]), default=0)
            for name, value in answer["figures"].items():
                print(f"{name:<{width}}  {value:.4g}")
        keep = isinstance(config, SwapOptions) and config.save_model
        if keep:
            if model is None:
                raise PosswapError(f"{program} makes no model to keep: leave out --save-model")
            _save_model(model, config, output / "model")
        if PartialState().is_main_process:
            spec = sys.modules["__main__"].__spec__  # set if a module was started with -m
            run_by = f"python -m {spec.name}" if spec else f"python {without_home(Path(sys.argv[0]).as_posix())}"
            asked = {"question": config.QUESTION, "meaning": config.FIGURES} if config.QUESTION else {}
            kept = {"weights": weight_hashes(output / "model", modules=True)} if keep else {}
            about = {"format": FORMAT, "recipe": program, **asked, **provenance(run_by), "config": asdict(config)}
            if PartialState().device.type == "cpu":  # also where there is a GPU that was not to be used
                about["hardware"]["accelerator"] = None
            write_json(output / "result.json", {**about, "inputs": inputs, **answer, **kept})
            print(f"wrote {output / 'result.json'}")

    # \b makes the help keep the line breaks of a paragraph.
    about = (module.__doc__ or "").replace("\n\n    ", "\n\n\b\n    ")
    figures = "\n".join(f"    {name}: {meaning}" for name, meaning in config_class.FIGURES.items())
    command.__doc__ = f"{about}\n\nFigures, by how their names begin:\n\n\b\n{figures}" if figures else about
    command.__signature__ = command_line(config_class, Path("runs") / program.replace("_", "-"))
    with held:
        run_program(program, command)


def _save_model(model: PreTrainedModel, config: SwapOptions, folder: Path) -> None:
    if is_pipeline(model):  # it saves its own tokenizer
        if PartialState().is_main_process:
            model.save_pretrained(str(folder))
        return
    save_trained(model, folder)
    if PartialState().is_main_process and config.READS_TEXT:
        tokenizer = load_tokenizer(config.model)
        tokenizer.model_max_length = longest_input(model.config)
        tokenizer.save_pretrained(folder)
