"""`hf-posswap plot`: draw a scheme, a model or a result file with one of the functions in `plots`."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib import rc_context
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from hf_posswap import plots
from hf_posswap.data.text import embedded_documents, spread, token_blocks
from hf_posswap.describing import describe
from hf_posswap.errors import DataError, PosswapError
from hf_posswap.experiments import page
from hf_posswap.experiments.comparison import check_budgets, figure_names, label_of, load_runs, row_label, rows_of
from hf_posswap.experiments.opening import open_model, open_tokenizer
from hf_posswap.measure.attention_distance import attention_by_distance
from hf_posswap.measure.positions import frequencies, one_head, position_table, scheme_of, translation
from hf_posswap.provenance import read_json
from hf_posswap.schemes import SCHEMES, Scheme, parse_scheme
from hf_posswap.swapping import swap
from hf_posswap.target import find_target

_Drawable = Scheme | PreTrainedModel
_WORDS = {Scheme: "a scheme", PreTrainedModel: "a model", dict: "a result file or folder"}


def _is_scheme(source: str) -> bool:
    return source.partition(":")[0] in SCHEMES


def open_source(source: str) -> _Drawable | dict:
    """Return the scheme, results or model that a word on the command line names; they are tried in this order.

    Results are {"runs": [...], "vary": [...], "source": source} of `hf-posswap compare` or recipes.

    >>> open_source("relative:clip=8").clip
    8

    PosswapError: it is none of these.
    """
    path = Path(source)
    if _is_scheme(source):
        return parse_scheme(source)
    file = next((one for one in (path, path / "comparison.json") if one.is_file()), None)
    if file or (path.is_dir() and any(path.rglob("result.json"))):
        runs, vary = load_runs([file or path]), (read_json(file).get("vary") if file else None) or []
        check_budgets(runs, vary)
        return {"runs": runs, "vary": vary, "source": source}
    try:
        return find_target(open_model(source))[0]
    except PosswapError as error:
        others = f"no scheme ({', '.join(SCHEMES)}), no result file or folder"
        raise PosswapError(f"{source} is {others}, and no model that loads: {error}") from None


# What draws a kind of picture takes what its source is, or {source: what it is}; the keyword-only arguments are its options.


def _table(one: _Drawable, look: dict, *, positions: int | None = None, size: int = 64) -> Figure:
    if isinstance(one, Scheme):
        return plots.plot_table(position_table(one, positions or 16, size), **look)
    attentions = find_target(one)[1].self_attentions(one.base_model)
    layers = [attention.positions for attention in attentions if hasattr(attention, "positions")]
    # Relative positions have vectors in each layer, by distance.
    if len({layer.kind for layer in layers}) == 1 and hasattr(layers[0], "key_vectors"):
        if positions:
            raise PosswapError(f"--positions is for tables, and {look['title']} has vectors by distance: leave it out")
        norms = torch.stack([torch.atleast_2d(layer.key_vectors().detach().norm(dim=-1)) for layer in layers])
        if not norms.any():
            raise PosswapError(f"the relative vectors of {look['title']} are all zeros: fit or train the model first")
        label = "norm of the vectors of keys"
        return plots.plot_attention_by_distance({"keys": norms}, label=label, log=False, **look)
    return plots.plot_table(position_table(one, positions), **look)


def _similarity(one: _Drawable, look: dict, *, positions: int | None = None, size: int = 128) -> Figure:
    return plots.plot_similarity(position_table(one, positions, size), **look)


def _dot_products(found: dict[str, _Drawable], look: dict, *, positions: int | None = None, size: int = 128) -> Figure:
    tables = {}
    for source, one in found.items():
        tables[source] = position_table(one, positions or (256 if isinstance(one, Scheme) else None), size)
    return plots.plot_dot_products(tables, **look)


def _wavelengths(found: dict[str, _Drawable], look: dict, *, positions: int | None = None, size: int = 64) -> Figure:
    lines, trained = {}, positions  # for schemes without a model there is no trained length, and no line for it
    for source, one in found.items():
        scheme, geometry = (one, one_head(size, positions or 512)) if isinstance(one, Scheme) else scheme_of(one)
        lines[source] = 2 * math.pi / frequencies(scheme, geometry)
        trained = trained or (None if isinstance(one, Scheme) else geometry.trained_positions)
    return plots.plot_wavelengths(lines, trained=trained, **look)


def _translation(scheme: Scheme, look: dict, *, size: int = 16, shift: Sequence[int] = (1, 4, 16)) -> Figure:
    panels = {}
    for k in shift:
        matrix, missed = translation(scheme, k, size)
        panels[f"k = {k}" + (f", misses by {missed:.0%}" if missed > 0.005 else "")] = matrix
    return plots.plot_translation(panels, **look)


def _attention(found: dict[str, _Drawable], look: dict, *, positions: int | None = None) -> Figure:
    profiles, model = {}, None
    for source, one in found.items():
        if isinstance(one, PreTrainedModel):
            model, batches = one, _batches(source, one, positions)
        elif model is None:
            raise PosswapError(f"plot attention takes a model, and then schemes for it: plot attention minilm {source}")
        else:
            swap(model, one)
        profiles[source] = attention_by_distance(model, batches, reach=min(64, batches[0]["input_ids"].shape[1] - 1))
    return plots.plot_attention_by_distance(profiles, label="mean attention of a query", **look)


def _batches(source: str, model: PreTrainedModel, length: int | None) -> list[dict[str, torch.Tensor]]:
    """Return about 4,096 tokens of the embedded text, in rows of `length`, by default 128 or the model's longest input."""
    tokenizer, longest = open_tokenizer(source), describe(model).max_positions
    if tokenizer is None:
        raise DataError(f"{source} has no tokenizer to read text with: save one next to the model")
    if (length or 0) > longest:
        raise PosswapError(f"{length} positions were asked for, and the model holds {longest}: lower --positions")
    documents = embedded_documents("validation", causal=find_target(model)[1].is_causal(model.config))
    rows = spread(token_blocks(documents, tokenizer, length or min(128, longest)), 4096)
    return [{"input_ids": some} for some in rows.split(8)]


def _choose(found: dict, names: list[str], figure: str | None, wanted: str) -> str:
    """Return the figure that was asked for, or the first; raise PosswapError if there is none, or it is unknown."""
    if not names:
        raise PosswapError(f"{wanted}; there are none in {found['source']}")
    if figure is not None and figure not in names:
        raise PosswapError(f"{found['source']} has no figure {figure!r} to draw; there are {', '.join(names)}")
    return figure or names[0]


def _loss(found: dict, look: dict, *, figure: str | None = None) -> Figure:
    runs = found["runs"]
    families = page.families(figure_names(runs), least=1)
    families.sort(key=lambda name: {"loss": 0, "perplexity": 1}.get(name, 2))
    family = _choose(found, families, figure, "plot loss takes runs with a figure at several lengths")
    return page.plot(runs, family, found["vary"], trained=runs[0].get("details", {}).get("trained_length"), **look)


def _heat_map(found: dict, look: dict, *, figure: str | None = None) -> Figure:
    runs = [run for run in found["runs"] if {"depths", "lengths"} <= run.get("details", {}).keys()]
    details = [run["details"] for run in runs]
    if any((one["depths"], one["lengths"]) != (details[0]["depths"], details[0]["lengths"]) for one in details):
        raise PosswapError(f"{found['source']} has runs of different depths or lengths: draw those of one kind")
    names = [name for name in ("accuracy", "candidates") if details and name in details[0]]
    wanted = "plot heat-map takes shares by depth and length, as recipes/passkey.py writes them"
    name = _choose(found, names, figure, wanted)
    rows = rows_of(runs, found["vary"])
    maps = {label_of(row): [torch.tensor(run["details"][name]).double() for run in some] for row, some in rows.items()}
    return plots.plot_heat_maps(
        {row: torch.stack(seeds).mean(0).tolist() for row, seeds in maps.items()},
        rows=details[0]["depths"],
        columns=details[0]["lengths"],
        row_label="depth of the key",
        column_label="length (tokens)",
        title=f"{look['title']}: {name}" + (", means over seeds" if len(runs) > len(rows) else ""),
        dark=look["dark"],
    )


def _recovery(found: dict, look: dict, *, figure: str | None = None) -> Figure:
    runs = [run for run in found["runs"] if "damage" in (run.get("details", {}).get("curve") or [{}])[0]]
    names = [name for name in ("damage", "perplexity") if runs and name in runs[0]["details"]["curve"][0]]
    if runs and runs[0]["config"].get("text_weight"):  # the model also learned from the text, so low damage is not the aim
        names.reverse()
    name = _choose(found, names, figure, "plot recovery takes curves over tokens, as recipes/heal.py writes them")
    lines = {}
    for run in runs:
        line = lines.setdefault(row_label(run, found["vary"]), {})
        for point in run["details"]["curve"]:
            line.setdefault(point["tokens"], []).append(point[name])
    original, label = runs[0]["details"]["original"].get(name), f"{name} on held-out text"
    return plots.plot_recovery(lines, original=original, steps="tokens of distillation", label=label, **look)


# Kind of picture -> (function, what it takes, whether several).
KINDS = {
    "table": (_table, (Scheme, PreTrainedModel), False),
    "similarity": (_similarity, (Scheme, PreTrainedModel), False),
    "dot-products": (_dot_products, (Scheme, PreTrainedModel), True),
    "wavelengths": (_wavelengths, (Scheme, PreTrainedModel), True),
    "translation": (_translation, (Scheme,), False),
    "attention": (_attention, (Scheme, PreTrainedModel), True),
    "loss": (_loss, (dict,), False),
    "recovery": (_recovery, (dict,), False),
    "heat-map": (_heat_map, (dict,), False),
}


def draw(kind: str, sources: Sequence[str], *, dark: bool = False, **options) -> Figure:
    """Return a picture of one of `KINDS`; DataError for result files of another make."""
    function, kinds, several = KINDS[kind]
    if len(sources) > 1 and not several:
        raise PosswapError(f"plot {kind} draws one source at a time; given were {', '.join(sources)}")
    if twice := [source for source in sources if sources.count(source) > 1]:
        raise PosswapError(f"{twice[0]} is given twice: give each source once")
    found = {source: open_source(source) for source in sources}
    for source, one in found.items():
        if not isinstance(one, kinds):
            given = next(word for made, word in _WORDS.items() if isinstance(one, made))
            raise PosswapError(f"plot {kind} takes {' or '.join(_WORDS[one] for one in kinds)}; {source} is {given}")
    if "size" in options and not any(isinstance(one, Scheme) for one in found.values()):
        raise PosswapError(f"--size is for schemes, and {' and '.join(sources)} has its own: leave it out")
    if several:
        return function(found, {"dark": dark}, **options)
    ((source, one),) = found.items()
    path = Path(source).resolve()
    title = source if _is_scheme(source) else (path.parent if path.is_file() else path).name
    try:
        return function(one, {"title": title, "dark": dark}, **options)
    except (KeyError, TypeError, AttributeError) as error:
        if not isinstance(one, dict):
            raise
        said = f"{type(error).__name__}: {error}"
        raise DataError(f"{source} is not what compare or a recipe writes ({said}): give their files") from error


_SOURCE_HELP = "Schemes (name:option=value), models (folder, Hub id, minilm, stdlib-gpt2), or a result file or folder."


def plot(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    source: Annotated[list[str], typer.Argument(help=_SOURCE_HELP)],
    output: Annotated[Path, typer.Option(help="The picture, a .png or .svg file.")],
    dark: Annotated[bool, typer.Option("--dark", help="For a dark page.")] = False,
    positions: Annotated[int | None, typer.Option(min=2, max=100_000, help="Positions to draw, or tokens of a text.")] = None,
    size: Annotated[int | None, typer.Option(min=1, max=100_000, help="Dimensions that a scheme is drawn with.")] = None,
    shift: Annotated[list[int] | None, typer.Option(min=1, help="k of translation; repeatable. Default: 1 4 16.")] = None,
    figure: Annotated[str | None, typer.Option(help="Which figure of a result file, where there are several.")] = None,
):
    """Draw positions, or results of finished runs.

    Schemes are drawn by their formula, at sizes of your choice; models with their own weights.

    \b
        hf-posswap plot table sinusoidal --output table.png
        hf-posswap plot dot-products minilm sinusoidal --output dots.svg
        hf-posswap plot attention minilm rotary --dark --output heads.png
        hf-posswap plot recovery runs/heal --output recovery.png
    """
    if kind not in KINDS:
        raise PosswapError(f"there is no picture {kind!r}; there are {', '.join(KINDS)}")
    if output.suffix not in (".png", ".svg"):
        raise PosswapError(f"{output} must end in .png or .svg")
    given = {"positions": positions, "size": size, "shift": shift, "figure": figure}
    given = {name: value for name, value in given.items() if value}
    takes = KINDS[kind][0].__kwdefaults__
    if idle := [name for name in given if name not in takes]:
        options = ", ".join(f"--{option}" for option in takes)
        raise PosswapError(f"plot {kind} does not look at --{idle[0]}; it takes {options}")
    drawn = draw(kind, source, dark=dark, **given)
    output.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "hf_posswap"}):  # the same picture gives the same bytes
        drawn.savefig(output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None)
    typer.echo(f"wrote {output}")
