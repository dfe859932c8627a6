"""What the checks work with: a scheme in a tiny random model, inputs, and what counts as equal.

Weights have a standard deviation of 0.3. With transformers' 0.02, positions would change the outputs of so small a model by
less than any sensible tolerance, and no check could fail.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, Cache, PreTrainedConfig, PreTrainedModel

from hf_posswap.architectures import ARCHITECTURES, Architecture, find_family
from hf_posswap.attention import CACHE
from hf_posswap.errors import PosswapError
from hf_posswap.schemes import SCHEMES, Scheme, register_scheme
from hf_posswap.surgery import geometry_of, position_modules
from hf_posswap.swapping import swap

TRAINED, LENGTH = 32, 20  # positions of the models before a swap; tokens of an input
TOLERANCE, VISIBLE = 1e-4, 1e-2  # largest change by rounding, smallest change that counts; relative to an output above 1
BACKENDS = ("eager", "sdpa")
FAMILIES = ("bert", "bert-decoder", "gpt2")  # families in a report; the checks work with all others, too
# Config fields of tiny models that differ from BERT's.
_SIZES = {
    "albert": {"embedding_size": 24},
    "distilbert": {"hidden_dim": 64, "dropout": 0.0, "attention_dropout": 0.0},
    "clip_text_model": {"initializer_factor": 10.0},  # weights of CLIP start at parts of this
    "electra": {"embedding_size": 24},
    # like the 350m checkpoint: projections in and out, post-norm
    "opt": {"ffn_dim": 64, "dropout": 0.0, "init_std": 0.3, "word_embed_proj_dim": 24, "do_layer_norm_before": False},
}


class Failure(Exception):
    """The scheme does not do what the check asks for."""


class NotApplicable(Exception):
    """The check has nothing to say about this scheme in this family."""


@dataclass(eq=False)
class Subject:
    """A scheme, and the family and attention backend of the models to check it in."""

    scheme: Scheme
    family: str
    backend: str

    def __post_init__(self):
        self.untouched = tiny_model(self.family, self.backend)(text())[0].detach()  # before the scheme is swapped in

    @property
    def causal(self) -> bool:
        return architecture_of(self.family).is_causal(tiny_config(self.family))

    @property
    def caches(self) -> bool:
        return self.causal and hasattr(tiny_config(self.family), "use_cache")  # not so CLIP's text model

    def swapped(self, max_positions: int | None = None, **options) -> PreTrainedModel:
        """Make a swapped model, with twice its trained length if the scheme allows it, and noise on the scheme's parameters.

        Options are those of `swap`. Many parameters start at zero, and errors in their use would not show.
        """
        if max_positions is None:
            max_positions = TRAINED if self.refuses(2 * TRAINED) else 2 * TRAINED
        model = swap(tiny_model(self.family, self.backend), self.scheme, max_positions=max_positions, **options)
        move(position_parameters(model), 0.3)
        return model

    def twin(self, model: PreTrainedModel, **options) -> PreTrainedModel:
        """Make `swapped(**options)` with the other backend and this model's weights: in a new swap rounding decides signs."""
        other = replace(self, backend="eager" if self.backend == "sdpa" else "sdpa").swapped(**options)
        other.load_state_dict(model.state_dict())
        return other

    @cached_property
    def model(self) -> PreTrainedModel:
        """A swapped model for all checks that only read it."""
        return self.swapped()

    def refuses(self, max_positions: int) -> str:
        """Return the scheme's own message why it cannot hold so many positions; "" if it can."""
        try:
            self.scheme.check(geometry_of(tiny_config(self.family, self.backend), max_positions, TRAINED))
        except PosswapError as error:
            return str(error)
        return ""


def backends_of(scheme: Scheme) -> tuple[str, ...]:
    """Return which of our backends a scheme runs with; all if it is none of them, so that the swap raises."""
    return tuple(backend for backend in BACKENDS if backend in (scheme.implementations or BACKENDS)) or BACKENDS


def architecture_of(family: str) -> Architecture:
    """Return the architecture of a family; "-decoder" at the end of its name is ignored."""
    found = find_family(family.removesuffix("-decoder"))
    if found is None:
        raise PosswapError(f"there is no family {family!r}; there are {', '.join(ARCHITECTURES)}")
    return found


def auto_class(family: str) -> type:
    """Return the Auto class that loads a family's language model, or, where there is none, its headless one."""
    auto = AutoModelForCausalLM if architecture_of(family).is_causal(tiny_config(family)) else AutoModelForMaskedLM
    return auto if architecture_of(family).config_class in auto._model_mapping else AutoModel


def tiny_config(family: str, backend: str = "eager", **changes) -> PreTrainedConfig:
    """Return the config of a model with 2 layers of 2 heads of 16 dimensions, without dropout."""
    architecture = architecture_of(family)
    common = {"vocab_size": 99, "initializer_range": 0.3, "pad_token_id": 0, "attn_implementation": backend}
    common |= {"bos_token_id": 1, "eos_token_id": 98}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": TRAINED}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        sizes |= {"max_position_embeddings": TRAINED, "is_decoder": family.endswith("-decoder")}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = architecture.config_class(**common | sizes | dropouts | _SIZES.get(family, {}) | changes)
    if architecture.first_id(config) and "max_position_embeddings" not in changes:
        architecture.set_longest_input(config, TRAINED)
    return config


def tiny_model(family: str, backend: str = "eager", *, head: type | None = None, seed: int = 0, **changes) -> PreTrainedModel:
    """Make the model to swap; a seed always gives the same weights.

    Its `position_ids` count from 0 even if those of its family do not.
    """
    torch.default_generator.manual_seed(seed)  # of the CPU only: torch.manual_seed would also seed GPUs
    config = tiny_config(family, backend, **changes)
    model = (head or auto_class(family)._model_mapping[type(config)])(config).eval()
    move([parameter for parameter in model.parameters() if parameter.dim() == 1], 0.1)  # biases and norms, as if trained
    if first_id := architecture_of(family).first_id(config):
        model.register_forward_pre_hook(partial(_count_from, first_id), with_kwargs=True)
    return model


def _count_from(first_id: int, model, arguments: tuple, named: dict) -> tuple[tuple, dict]:
    given = named.get("position_ids")
    return arguments, named if given is None else named | {"position_ids": given + first_id}


@torch.no_grad()
def move(parameters: list[torch.nn.Parameter], by: float) -> None:
    """Add noise with standard deviation `by` to each parameter."""
    for parameter in parameters:
        parameter.add_(by * torch.randn(parameter.shape))


def position_parameters(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """Return all parameters of a swapped model's positions."""
    return [parameter for module in position_modules(model, model.architecture) for parameter in module.parameters()]


def text(rows: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Return random token ids (rows, length), none of them special."""
    return torch.randint(2, 98, (rows, length), generator=torch.Generator().manual_seed(5))


def count_from(first: int) -> torch.Tensor:
    """Return positions first, first + 1, ..., (1, L). At 0 a scheme may mark the first token, see `Constant`."""
    return torch.arange(first, first + LENGTH)[None]


def padded(before: int = 0, after: int = 0) -> dict[str, torch.Tensor]:
    """Return mask and positions, both (2, L), of two rows, the second with padding."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, :before] = mask[1, LENGTH - after :] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def in_parts(model: PreTrainedModel, sizes: tuple[int, ...], cache: Cache, padded: dict | None = None) -> torch.Tensor:
    """Return the logits (2, L, V) of a text that a model reads in parts, with a cache."""
    logits, inputs, end = [], {}, 0
    for part in text().split(sizes, dim=1):
        start, end = end, end + part.shape[1]
        if padded is not None:
            inputs = {"attention_mask": padded["attention_mask"][:, :end], "position_ids": padded["position_ids"][:, start:end]}
        logits.append(model(part, use_cache=True, **{CACHE: cache}, **inputs)[0])
    return torch.cat(logits, dim=1)


def gradients_of(model: PreTrainedModel) -> dict[str, torch.Tensor | None]:
    """Return the gradient of every parameter, by name, for a loss that depends on all logits."""
    tokens = text()
    model.zero_grad()
    logits = model(tokens, use_cache=False)[0]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(1) % logits.shape[-1]).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def same(actual: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Fail unless two tensors are equal up to rounding; with a tolerance of 0, bit for bit."""
    if not actual.isfinite().all():
        raise Failure(f"{what}: there are NaN or infinite numbers")
    difference, allowed = (actual - expected).abs(), tolerance * max(1.0, float(expected.abs().max()))
    if difference.max() > allowed:
        place = [int(i) for i in torch.unravel_index(difference.argmax(), difference.shape)]
        where = f"token {place[1]}" if len(place) == 3 else place  # logits are (B, L, words)
        raise Failure(f"{what}: the largest difference is {difference.max():.2g}, tolerance {allowed:.2g}, at {where}")


def same_gradients(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None], what: str) -> None:
    """Fail unless two results of `gradients_of` are equal up to rounding, and the same parameters have none."""
    for name, gradient in found.items():
        if (gradient is None) != (expected[name] is None):
            raise Failure(f"{name} has a gradient in one case only, {what}")
        if gradient is not None:
            same(gradient, expected[name], f"the gradient of {name}, {what}")


@torch.no_grad()
def different(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fail unless two tensors differ by clearly more than rounding, relative to the largest value."""
    difference, needed = float((actual - expected).abs().max()), VISIBLE * max(1.0, float(expected.abs().max()))
    if not difference >= needed:
        raise Failure(f"{what}: the largest difference is {difference:.2g}, and {needed:.2g} or more is expected")


@contextmanager
def registered(scheme: Scheme) -> Iterator[None]:
    """Inside, the scheme is registered; afterwards only if it was before."""
    known = SCHEMES.get(scheme.name)
    register_scheme(type(scheme))
    try:
        yield
    finally:
        if known is None:
            del SCHEMES[scheme.name]
        else:
            SCHEMES[scheme.name] = known
