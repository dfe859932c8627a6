"""The contract that every position scheme keeps, as checks of anybody's: what fails, by how much, and why as a rule.

    hf-posswap check rotary:theta=500
    hf-posswap check my_module:MyScheme
    hf-posswap check path/to/file.py:MyScheme

A check is a function that takes a `Subject`, a scheme in tiny random models, and computes the same thing in two ways. Nothing
is trained or downloaded, and the process stays as it was: its random state, and the schemes that are registered in it.
"""

import copy
import json
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    Cache,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.utils import logging as transformers_logging

from hf_posswap.errors import PosswapError, SequenceTooLongError
from hf_posswap.schemes import SCHEMES, NoPositions, Scheme, parse_scheme, register_scheme, scheme_from_dict
from hf_posswap.schemes.importing import load_scheme
from hf_posswap.surgery import geometry_of
from hf_posswap.swapping import restore, swap

TRAINED, LENGTH, FAR = 32, 20, 4000  # what the models hold before a swap, tokens of an input, a distant position
TOLERANCE, VISIBLE = 1e-4, 1e-2  # what rounding may change and what must change, relative to the largest output
BACKENDS = ("eager", "sdpa")
FAMILIES = {
    "bert": (BertForMaskedLM, AutoModelForMaskedLM),
    "bert-decoder": (BertLMHeadModel, AutoModelForCausalLM),
    "gpt2": (GPT2LMHeadModel, AutoModelForCausalLM),
}


@dataclass(frozen=True)
class CheckResult:
    """What one check found in one family."""

    check: str
    family: str
    passed: bool | None  # None: it does not apply
    detail: str = ""  # what differs, by how much and where; or why the check does not apply


@dataclass(frozen=True)
class Conformance:
    """What `check_scheme` found; `print` shows it as a table, with reasons beneath."""

    scheme: Scheme
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(result.passed is not False for result in self.results)

    def __str__(self) -> str:
        table = Table("check", *FAMILIES, "what it means", box=None, pad_edge=False)
        reasons, notes = [], {}
        for check, advice in CHECKS.items():
            row = [result for result in self.results if result.check == _name(check)]
            table.add_row(_name(check), *({True: "ok", False: "FAILS", None: "-"}[r.passed] for r in row), check.__doc__)
            failed = [f"{result.check}, {result.family}: {result.detail}" for result in row if result.passed is False]
            reasons += [*failed, f"    {advice}"] if failed else []
            for result in row:
                if result.passed is None:
                    notes.setdefault(result.detail, {})[result.check] = None  # names in order, each once
        notes = [f"- {', '.join(names)}: {detail}" for detail, names in notes.items()]
        console = Console(width=120, highlight=False, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(table)
        lines = [line.rstrip() for line in capture.get().splitlines()]
        lines += [textwrap.fill(text, 120, subsequent_indent="    ") for text in (*reasons, *notes)]
        return "\n".join([f"{self.scheme!r} {'passes' if self.passed else 'FAILS'}", *lines])


class _Failure(Exception):
    """The scheme does not do what the check asks for."""


class _NotApplicable(Exception):
    """The check has nothing to say about this scheme in this family."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What a check looks at: a scheme, the family and attention backend of the models that it is put into."""

    scheme: Scheme
    family: str
    backend: str
    untouched: torch.Tensor  # logits of a plain model, from before the scheme was put into any

    def swapped(self, max_positions: int | None = None, *, warm_start: bool = True) -> PreTrainedModel:
        """Make a swapped model, with room to spare where the scheme has it, and noise on the scheme's parameters.

        Many parameters start at zero, which would hide what they are used for.
        """
        if max_positions is None:
            max_positions = TRAINED if self.refuses(2 * TRAINED) else 2 * TRAINED
        model = swap(_plain(self.family, self.backend), self.scheme, max_positions=max_positions, warm_start=warm_start)
        attentions = model.architecture.self_attentions(model.base_model)
        modules = [_table(model), *(attention.positions for attention in attentions if hasattr(attention, "positions"))]
        _move([parameter for module in modules for parameter in module.parameters()], 0.3)
        return model

    @cached_property
    def model(self) -> PreTrainedModel:
        """A swapped model for all checks that only read it."""
        return self.swapped()

    def refuses(self, max_positions: int) -> str:
        """Say in the scheme's own words why it cannot hold so many positions; nothing if it can."""
        try:
            self.scheme.check(geometry_of(_config(self.family, self.backend), max_positions, TRAINED))
        except PosswapError as error:
            return str(error)
        return ""


def _config(family: str, backend: str) -> PreTrainedConfig:
    # At the usual range of 0.02, what positions do to the outputs would be less than the tolerance.
    common = {"vocab_size": 99, "initializer_range": 0.3, "pad_token_id": 0, "attn_implementation": backend}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": TRAINED, "bos_token_id": 1, "eos_token_id": 98}
        return GPT2Config(**common, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= {"max_position_embeddings": TRAINED, "is_decoder": family == "bert-decoder"}
    return BertConfig(**common, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def _plain(family: str, backend: str) -> PreTrainedModel:
    """Make the model that is swapped, always with the same weights."""
    torch.default_generator.manual_seed(0)  # the CPU's alone: torch.manual_seed would move those of GPUs, too
    model = FAMILIES[family][0](_config(family, backend)).eval()
    _move([parameter for parameter in model.parameters() if parameter.dim() == 1], 0.1)
    return model


@torch.no_grad()
def _move(parameters: list[torch.nn.Parameter], by: float) -> None:
    for parameter in parameters:
        parameter.add_(by * torch.randn(parameter.shape))


def _table(model: PreTrainedModel) -> torch.nn.Module:
    owner, name = model.architecture.table_owner(model.base_model)
    return getattr(owner, name)


def _tokens(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, 98, (rows, length), generator=torch.Generator().manual_seed(5))


def _from(first: int) -> torch.Tensor:
    """Return positions that start somewhere, (1, L). At 0 a scheme may mark the first token, see `Constant`."""
    return torch.arange(first, first + LENGTH)[None]


def _padded(before: int = 0, after: int = 0) -> dict[str, torch.Tensor]:
    """Return the mask and the positions of two rows, the second with padding."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :before] = mask[1, LENGTH - after :] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def _in_parts(model: PreTrainedModel, sizes: tuple[int, ...], cache: Cache, padded: dict | None = None) -> torch.Tensor:
    """Return the logits of tokens that a model reads part by part."""
    logits, inputs, end = [], {}, 0
    for part in _tokens().split(sizes, dim=1):
        start, end = end, end + part.shape[1]
        if padded is not None:
            inputs = {"attention_mask": padded["attention_mask"][:, :end], "position_ids": padded["position_ids"][:, start:end]}
        logits.append(model(part, past_key_values=cache, use_cache=True, **inputs).logits)
    return torch.cat(logits, dim=1)


def _gradients(model: PreTrainedModel) -> dict[str, torch.Tensor | None]:
    """Return the gradient of every parameter, by name, for a loss in which all logits count."""
    tokens = _tokens()
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(1)).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _close(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Fail unless two tensors are equal up to rounding; with a tolerance of 0, bit for bit."""
    if not actual.isfinite().all():
        raise _Failure(f"{what}: there are NaN or infinite numbers")
    difference, allowed = (actual - expected).abs(), tolerance * max(1.0, float(expected.abs().max()))
    if difference.max() > allowed:
        place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
        where = f"token {place[1]}" if len(place) == 3 else place  # logits are (B, L, words)
        raise _Failure(f"{what}: the largest difference is {difference.max():.2g}, tolerance {allowed:.2g}, at {where}")


@torch.no_grad()
def _differ(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail where hardly more than rounding is between two tensors."""
    difference, needed = float((actual - expected).abs().max()), VISIBLE * max(1.0, float(expected.abs().max()))
    if not difference >= needed:
        raise _Failure(f"{what}: the largest difference is {difference:.2g}, and {needed:.2g} or more is expected")


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from showing one for every model that is saved or loaded."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


@contextmanager
def _registered(scheme: Scheme) -> Iterator[None]:
    """Have a scheme known by its name inside; afterwards it is known if it was before."""
    known = scheme.name in SCHEMES
    register_scheme(type(scheme))
    try:
        yield
    finally:
        if not known:
            del SCHEMES[scheme.name]


# The checks. "and alone" is what is expected: tokens are counted from there. Docstrings are what the report says they mean.


def builds(subject: Subject) -> None:
    """It can be made, swapped in and run."""
    kind = type(subject.scheme)
    if missing := [field for field in ("name", "summary") if not isinstance(getattr(kind, field, None), str)]:
        raise _Failure(f"{kind.__name__} has no {' and no '.join(missing)}")
    if not kind.__dataclass_params__.frozen:
        raise _Failure(f"{kind.__name__} is not frozen")
    if not subject.model(_tokens()).logits.isfinite().all():
        raise _Failure("outputs are NaN or infinite")


def options(subject: Subject) -> None:
    """config.json and strings hold all that it is."""
    scheme = subject.scheme
    with _registered(scheme):
        for how, again in (
            ("config.json", scheme_from_dict(json.loads(json.dumps(scheme.to_dict())))),
            (f"the string {str(scheme)!r}", parse_scheme(str(scheme))),
        ):
            if again != scheme:
                raise _Failure(f"{scheme!r} comes back from {how} as {again!r}")


def restores(subject: Subject) -> None:
    """`restore` gives the original back, bit for bit."""
    model = _plain(subject.family, subject.backend)
    kind, weights = type(model), copy.deepcopy(model.state_dict())
    swap(model, subject.scheme)(_tokens())
    restore(model)
    if type(model) is not kind or list(model.state_dict()) != list(weights):
        raise _Failure(f"the restored {type(model).__name__} has other weights than the {kind.__name__} had")
    for name, value in model.state_dict().items():
        _close(value, weights[name], name, tolerance=0)
    _close(model(_tokens()).logits, subject.untouched, "outputs", tolerance=0)


def switched_on(subject: Subject) -> None:
    """It computes something else than no positions."""
    if isinstance(subject.scheme, NoPositions):
        raise _NotApplicable("it is no positions, the baseline")
    model, none = subject.swapped(warm_start=False), _plain(subject.family, subject.backend)
    swap(none, NoPositions(), warm_start=False)
    with torch.no_grad():  # a vector that all positions share does not count
        _table(none).mean.copy_(_table(model)(torch.tensor([[1]]))[0, 0])
    _differ(*(one(_tokens(), position_ids=_from(1)).logits for one in (model, none)), "with and without positions")


def order_matters(subject: Subject) -> None:
    """An encoder tells the same tokens in another order."""
    if subject.family != "bert":
        raise _NotApplicable("a decoder sees order through its causal mask")
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))
    shuffled, expected = (subject.model(tokens, position_ids=_from(1)).logits for tokens in (_tokens()[:, order], _tokens()))
    compare = _close if isinstance(subject.scheme, NoPositions) else _differ
    compare(shuffled, expected[:, order], "tokens in another order")


def position_ids(subject: Subject) -> None:
    """Positions that are given are the ones that count."""
    model, tokens, positions = subject.model, _tokens(), _from(0).repeat(2, 1)
    expected = model(tokens).logits
    given = model(tokens, position_ids=positions).logits
    if not positions.equal(_from(0).repeat(2, 1)):
        raise _Failure("the position_ids that the model was given are changed in place")
    _close(given, expected, "position_ids 0, 1, 2... for each row, and none")
    _close(model(tokens, position_ids=positions[:1]).logits, expected, "position_ids 0, 1, 2... for all rows, and none")
    if not isinstance(subject.scheme, NoPositions):
        outputs = (model(tokens, position_ids=places).logits for places in (_from(2) // 2, _from(1)))
        _differ(*outputs, "position_ids 1, 1, 2, 2... and 1, 2, 3...")
    if subject.family == "bert":
        listed = model(tokens.flip(1), position_ids=positions.flip(1)).logits
        _close(listed.flip(1), expected, "tokens listed from last to first, each with its position")


def padding(subject: Subject) -> None:
    """Tokens get what they get without padding around them."""
    model, tokens = subject.model, _tokens()
    for side, inputs in (("right", {"attention_mask": _padded(after=7)["attention_mask"]}), ("left", _padded(before=7))):
        real = inputs["attention_mask"][1].bool()
        outputs = model(tokens, **inputs).logits
        _close(outputs[1:, real], model(tokens[1:, real]).logits, f"13 tokens with 7 of padding on the {side}, and alone")
        _close(outputs[:1], model(tokens[:1]).logits, f"a row next to one with padding on the {side}, and alone")


def packing(subject: Subject) -> None:
    """Two documents in one row get what they get alone."""
    tokens, lengths = _tokens(), [12, 8]
    document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    allowed = document[:, None] == document[None]
    allowed = allowed if subject.family == "bert" else allowed.tril()
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    alone = torch.cat([subject.model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    packed = subject.model(tokens, attention_mask=mask, position_ids=positions).logits
    _close(packed, alone, "documents of 12 and 8 tokens in one row, and alone")


def batch_independence(subject: Subject) -> None:
    """A row alone gets what it gets in a batch."""
    tokens, positions = _tokens(), torch.cat([_from(9), _from(0)])
    together = subject.model(tokens, position_ids=positions.clone()).logits
    for row, output in enumerate(together.split(1)):
        alone = subject.model(tokens[row : row + 1], position_ids=positions[row : row + 1]).logits
        _close(output, alone, f"row {row} of a batch with positions from 9 and from 0, and alone")


def shift_invariance(subject: Subject) -> None:
    """A shift of all positions changes nothing, if so claimed."""
    near, far = (subject.model(_tokens(), position_ids=_from(first)).logits for first in (1, 12))
    if subject.scheme.shift_invariant:
        _close(far, near, "positions from 12 and from 1")
    elif (far - near).abs().max() < TOLERANCE * near.abs().max():
        raise _NotApplicable("it is not claimed, but holds: `shift_invariant: ClassVar[bool] = True` would say so")
    else:
        raise _NotApplicable("it is not claimed, and does not hold")


def cache(subject: Subject) -> None:
    """Decoding with a cache equals one forward without."""
    if subject.family == "bert":
        raise _NotApplicable("an encoder has no cache")
    model, config, padded = subject.model, subject.model.config, _padded(before=7)
    expected = model(_tokens(), use_cache=False).logits
    static = StaticCache(config=config, max_cache_len=LENGTH + 3)
    _close(_in_parts(model, (1,) * LENGTH, DynamicCache(config=config)), expected, "token by token")
    _close(_in_parts(model, (9, 1, 6, 4), DynamicCache(config=config)), expected, "in parts of 9, 1, 6 and 4")
    _close(_in_parts(model, (9, 1, 6, 4), static), expected, "in parts of 9, 1, 6 and 4, with a static cache")
    parts = _in_parts(model, (11, 5, 1, 3), DynamicCache(config=config), padded)
    _close(parts[1:, 7:], model(_tokens()[1:, 7:], use_cache=False).logits, "in parts, after padding on the left, and alone")


def backends_agree(subject: Subject) -> None:
    """Eager attention and sdpa give the same."""
    if _backends(subject.scheme) != BACKENDS:
        raise _NotApplicable(f"it runs with {' and '.join(subject.scheme.implementations)} alone")
    model, eager, mask = subject.model, replace(subject, backend="eager").model, _padded(after=7)["attention_mask"]
    _close(*(one(_tokens(), attention_mask=mask).logits[mask.bool()] for one in (model, eager)), "outputs")
    for (name, gradient), expected in zip(_gradients(model).items(), _gradients(eager).values(), strict=True):
        if gradient is not None and expected is not None:
            _close(gradient, expected, f"the gradient of {name}")


def gradients(subject: Subject) -> None:
    """Each parameter gets a gradient in each backward."""
    found = _gradients(subject.model)
    unused = [name for name, gradient in found.items() if gradient is None]
    broken = [name for name, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]
    idle = [name for name, gradient in found.items() if gradient is not None and not gradient.any()]
    reasons = {"none, as no forward uses it, and DDP waits for it": unused, "not finite": broken, "zero everywhere": idle}
    if said := [f"{', '.join(names)}: the gradient is {reason}" for reason, names in reasons.items() if names]:
        raise _Failure("; ".join(said))


def gradient_checkpointing(subject: Subject) -> None:
    """Gradients are the same with layers run twice."""
    model = subject.swapped().train()
    expected = _gradients(model)
    # transformers has renamed it, and warns under the old name
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        for name, gradient in _gradients(model).items():
            if (gradient is None) != (expected[name] is None):
                raise _Failure(f"{name} has a gradient in one case alone, use_reentrant={reentrant}")
            if gradient is not None:
                _close(gradient, expected[name], f"the gradient of {name}, use_reentrant={reentrant}")


def save_and_reload(subject: Subject) -> None:
    """A saved model loads with the same outputs, bit for bit."""
    with _registered(subject.scheme), tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        again = FAMILIES[subject.family][1].from_pretrained(folder, attn_implementation=subject.backend).eval()
    if again.base_model.position_scheme != subject.scheme:
        raise _Failure(f"it is loaded as {again.base_model.position_scheme!r}")
    _close(again(_tokens()).logits, subject.model(_tokens()).logits, "outputs of the loaded model", tolerance=0)


def deepcopy(subject: Subject) -> None:
    """A copy computes the same, and shares nothing."""
    model = subject.swapped()
    expected = model(_tokens()).logits
    twin = copy.deepcopy(model)
    _close(twin(_tokens()).logits, expected, "outputs of the copy", tolerance=0)
    _move(list(twin.parameters()), 0.3)
    _differ(twin(_tokens()).logits, expected, "the copy, changed, and the model")
    restore(twin)
    _close(model(_tokens()).logits, expected, "the model after its copy was changed and restored", tolerance=0)


def longer_than_trained(subject: Subject) -> None:
    """Twice the length runs, and what is too long is refused."""
    refusal = subject.refuses(2 * TRAINED)
    reach = TRAINED if refusal else 2 * TRAINED
    tokens = _tokens(length=reach + 1)
    if not subject.model(tokens[:, :reach]).logits.isfinite().all():
        raise _Failure(f"there are NaN or infinite numbers on {reach} tokens")
    with suppress(SequenceTooLongError):
        subject.model(tokens)
        raise _Failure(f"{reach + 1} tokens run in a model that is set up for {reach}")
    if refusal:
        raise _NotApplicable(refusal)


def phase_precision(subject: Subject) -> None:
    """bfloat16 errs as little at position 4000 as at 1."""
    if refusal := subject.refuses(2 * FAR):
        raise _NotApplicable(refusal)
    coarse, fine, tokens = subject.swapped(2 * FAR).bfloat16(), subject.swapped(2 * FAR), _tokens(rows=8)
    with torch.no_grad():  # the same weights for both, so that arithmetic alone differs; buffers stay as they are
        for target, source in zip(fine.parameters(), coarse.parameters(), strict=True):
            target.copy_(source)
        outputs = [[model(tokens, position_ids=_from(first)).logits for model in (coarse, fine)] for first in (1, FAR)]
    near, far = (float((rough.float() - exact).square().mean().sqrt()) for rough, exact in outputs)
    if not far <= 3 * near:
        raise _Failure(f"bfloat16 is off by {far:.2g} at position {FAR}, and by {near:.2g} at position 1")


# In the order that they run in; with each, what is behind a failure as a rule, and what to do.
CHECKS: dict[Callable[[Subject], None], str] = {
    builds: "A scheme is a frozen keyword-only dataclass with `name` and `summary`; its modules fit the sizes in Geometry, "
    "here 2 heads of 16 dimensions and 32 trained positions.",
    options: "Options are numbers, strings, booleans, None, and lists or dicts of them: turn others into these in "
    "__post_init__. The class has a @dataclass decorator and a name of its own.",
    restores: "A swap changes one model. Look for patches of torch or transformers, global hooks, tensors written in place.",
    switched_on: "Is embedding_module or attention_module spelled right, and does it return the module? What is called in it "
    "is forward, prepare, rotate and attend. LayerNorm takes out a number that is added to all dimensions alike.",
    order_matters: "What is computed for a token has to depend on where it is, or where others are.",
    position_ids: "Compute from the position_ids that forward and prepare are handed, not from places in the tensor; and "
    "write to a new tensor, as theirs belongs to the caller.",
    padding: "`attend` has to apply the mask that it is given. No position may be divided by the length, which counts padding, "
    "or be a place in the tensor, which counts it, too.",
    packing: "Positions start again within a row: take them from position_ids. `attend` gets masks of 4 dimensions, too.",
    batch_independence: "position_ids are (1, L) or (B, L): rows have their own, and nothing may be summed up over the batch.",
    shift_invariance: "Only differences of positions may count: look for absolute ones, or leave shift_invariant at False.",
    cache: "With a cache position_ids are those of the new tokens: what a token gets may depend on no later one, nor on how "
    "many come at once. Keys are kept as `rotate` returned them; needs_key_positions gives `prepare` their positions.",
    backends_agree: "`attend` computes the same whether or not it is asked for probabilities.",
    gradients: "Make a parameter only where every forward uses it, in every layer; `detach` and rounding stop gradients.",
    gradient_checkpointing: "A layer may run twice: count no calls, use nothing up, and share by what `prepare` returns.",
    save_and_reload: "Options, parameters and persistent buffers are loaded. Other tensors that __init__ or fit_table make are "
    "lost, as transformers loads into empty ones: compute them in forward.",
    deepcopy: "Tensors belong to the module: not to Python modules or classes, and none is the result of a computation.",
    longer_than_trained: "Build for geometry.max_positions, not trained_positions; or refuse in `check`, with a PosswapError.",
    phase_precision: "Compute angles in float32 or better and round once, at the end. Buffers are cast along with the model: "
    "keep frequencies as numbers, and make the tensor in forward.",
}


def check_scheme(scheme: Scheme | type[Scheme] | str) -> Conformance:
    """Run every check on a scheme: in a BERT encoder, a BERT decoder and a GPT-2, with eager attention and with sdpa.

    Args:
        scheme: An instance, a class whose options have defaults, or a string such as "rotary:theta=500". It need not be
            registered.

    A check that raises has failed, and what it raised is the reason. All of it takes some ten seconds.

    Raises:
        PosswapError: This is no scheme: no subclass of Scheme, no dataclass, a class without defaults, an unknown string.

    >>> found = check_scheme("none")
    >>> found.passed, [result.family for result in found.results if result.check == "cache" and result.passed]
    (True, ['bert-decoder', 'gpt2'])
    """
    scheme = _instance(scheme)
    jobs = [(family, check) for family in FAMILIES for check in CHECKS]
    results, broken = [], set()
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.inference_mode(False),
        torch.enable_grad(),
        _no_progress_bars(),
    ):
        models = [(family, backend) for family in FAMILIES for backend in _backends(scheme)]
        subjects = [Subject(scheme, *names, untouched=_plain(*names)(_tokens()).logits.detach()) for names in models]
        for family, check in tqdm(jobs, desc="check", unit="check", disable=None):
            if family in broken:
                results.append(CheckResult(_name(check), family, None, "not run, as it does not build"))
                continue
            results.append(_run(check, [subject for subject in subjects if subject.family == family]))
            if check is builds and not results[-1].passed:
                broken.add(family)
    return Conformance(scheme, tuple(results))


def _instance(scheme: Scheme | type[Scheme] | str) -> Scheme:
    if isinstance(scheme, str):
        return parse_scheme(scheme)
    kind = scheme if isinstance(scheme, type) else type(scheme)
    if not issubclass(kind, Scheme) or kind is Scheme:
        raise PosswapError(f"{scheme!r} is no scheme: pass a subclass of posswap.Scheme, or an instance of one")
    if not is_dataclass(kind):
        raise PosswapError(f"{kind.__name__} is no dataclass: decorate it with @dataclass(frozen=True, kw_only=True)")
    try:
        return scheme() if isinstance(scheme, type) else scheme
    except (Exception, SystemExit) as error:
        said = f"{kind.__name__}() raises {type(error).__name__}: {error}"
        raise PosswapError(f"{said}; give each option a default that fits, or check an instance") from error


def _run(check: Callable[[Subject], None], subjects: list[Subject]) -> CheckResult:
    """Run a check with each backend; where it fails with one, it has failed."""
    passed, detail = True, ""
    for subject in subjects:
        try:
            check(subject)
        except _NotApplicable as reason:
            passed, detail = None, str(reason)
        except (Exception, SystemExit) as error:  # whatever a scheme raises is a finding
            said = str(error) if isinstance(error, (_Failure, PosswapError)) else f"{type(error).__name__}: {error}"
            passed, detail = False, textwrap.shorten(f"with {subject.backend}, {said}", 500)
            break
    return CheckResult(_name(check), subject.family, passed, detail)


def _backends(scheme: Scheme) -> tuple[str, ...]:
    """Return those that it runs with; all where that is neither, so that the swap says so."""
    return tuple(backend for backend in BACKENDS if backend in (scheme.implementations or BACKENDS)) or BACKENDS


def _name(check: Callable[[Subject], None]) -> str:
    return check.__name__.replace("_", " ")


_SOURCE_HELP = "module:Name, path/to/file.py:Name (a class or an instance), or a string such as rotary:theta=500."


def check(scheme: Annotated[str, typer.Argument(help=_SOURCE_HELP)]):
    """Check a position scheme, your own or one of these, against the contract; exits with 1 when something fails."""
    found = check_scheme(load_scheme(scheme))
    typer.echo(found)
    if not found.passed:
        raise typer.Exit(1)
