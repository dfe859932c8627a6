"""What positions a model has, swapped or not."""

import textwrap
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_posswap.functional.banded import Span
from hf_posswap.schemes import Learned, Scheme
from hf_posswap.surgery import position_modules, state_of, undo_of
from hf_posswap.target import find_target


@dataclass(frozen=True, kw_only=True)
class Description:
    """The result of `describe`; `print` shows it as a table."""

    family: str
    model_class: str
    trained_positions: int
    max_positions: int
    layers: int
    old: Scheme = Learned()  # what the checkpoint was trained with, as far as this process knows
    new: Scheme = Learned()  # what the model has now
    parameters_added: int = 0
    parameters_dropped: int = 0
    layers_patched: int = 0
    swapped: bool = False
    can_restore: bool = False
    span: Span | None = None  # how far attention looks; None: everywhere
    layers_with_span: int = 0
    distances: str = ""  # what the scheme makes of them at these lengths

    def __str__(self) -> str:
        rows = {
            "model": f"{self.model_class} ({self.family})",
            "positions": f"{self.old} -> {self.new}" if self.swapped else f"{self.new}, not swapped",
            "parameters": f"+{self.parameters_added:,} -{self.parameters_dropped:,}",
            "max positions": f"{self.max_positions:,} (trained with {self.trained_positions:,})",
        }
        if self.distances:
            rows["distances"] = self.distances
        if self.span is not None:
            where = f", in {self.layers_with_span} of {self.layers} layers" * (self.layers_with_span < self.layers)
            first = f"the first {self.span.first} token{'s' * (self.span.first != 1)}"
            rows["attention"] = f"to distances below {self.span.span:,} and {first}{where}"
        rows["attention layers patched"] = f"{self.layers_patched} of {self.layers}"
        original = "kept: posswap.restore(model)" if self.can_restore else "not kept in this process"
        rows["original"] = original if self.swapped else "this is it"
        options = {"width": 100, "subsequent_indent": " " * 26, "break_on_hyphens": False}
        return "\n".join(textwrap.fill(f"{label:<26}{value}", **options) for label, value in rows.items())


def describe(model: PreTrainedModel) -> Description:
    """Return the positions, sizes (parameters, tokens) and layers of a model, swapped or not.

    >>> from transformers import GPT2Config, GPT2Model
    >>> print(describe(GPT2Model(GPT2Config(n_embd=32, n_layer=1, n_head=2, n_positions=64))))
    model                     GPT2Model (gpt2)
    positions                 learned, not swapped
    parameters                +0 -0
    max positions             64 (trained with 64)
    attention layers patched  0 of 1
    original                  this is it
    """
    target, architecture = find_target(model, dispatched=True)
    layers = architecture.attention_of_layers(target.base_model)
    about = {"family": architecture.model_type, "model_class": type(target).__name__, "layers": len(layers)}
    state, undo = state_of(target), undo_of(target)
    if state is None:
        longest = architecture.longest_input(target.config)
        return Description(**about, trained_positions=longest, max_positions=longest)
    dropped = (state.geometry.trained_positions + architecture.first_row(target.config)) * state.geometry.hidden_size
    if undo is not None:  # what the swap replaced: the table, or the scheme of a loaded model
        before = [undo.snapshot.table, *(module for *_, module in undo.snapshot.attentions if module is not None)]
        dropped = sum(p.numel() for module in before for p in module.parameters())
    patched = [attention.positions for attention in layers if hasattr(attention, "positions")]
    return Description(
        **about,
        trained_positions=state.geometry.trained_positions,
        max_positions=state.geometry.max_positions,
        old=undo.snapshot.state.scheme if undo is not None and undo.snapshot.state is not None else Learned(),
        new=state.scheme,
        parameters_added=sum(p.numel() for one in position_modules(target, architecture) for p in one.parameters()),
        parameters_dropped=dropped,
        layers_patched=len(patched),
        swapped=True,
        can_restore=undo is not None,
        span=state.span,
        layers_with_span=sum(state.kinds[one.kind].span is not None for one in patched),
        distances=state.scheme.distances(state.geometry),
    )
