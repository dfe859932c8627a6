"""Parity: whether an exported model computes what the swapped one does, measured on the same tokens.

Both read random tokens and, with a tokenizer, real text: 16 tokens, 128 tokens, and the longest input, up to `LONGEST`. If
there is a padding token, a second sequence is padded on the right.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_posswap.architectures import longest_input
from hf_posswap.data.text import cut_blocks, embedded_documents, token_lists
from hf_posswap.errors import PosswapError
from hf_posswap.functional.closed_form import wide

# The largest allowed difference, relative to the standard deviation of the outputs: the formulas are the same, but the order
# of sums, and so their rounding, is not.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 3e-1}

PARITY_FILE = "parity.json"

LONGEST = 2048  # tokens of the longest input that is compared


@dataclass(frozen=True)
class Certificate:
    """How near the exported model is to the swapped one: the largest absolute differences of outputs, and their scale."""

    source: str  # class and scheme
    position_scheme: dict  # as the swapped model's config has it
    target: str  # class
    dtype: str
    output: str  # what was compared: logits; start_logits, end_logits; last_hidden_state; ...
    random: dict[int, float]  # tokens a sequence -> largest difference
    text: dict[int, float]  # the same on real text; empty without a tokenizer
    deviation: float  # standard deviation of the swapped model's outputs
    left_out: tuple[str, ...]  # weights that the native class has no place for
    holds_for: tuple[str, ...]  # conditions on inputs; empty if any input will do
    longest: int | None = None  # input of the swapped model: with dynamic scaling, the native config has the trained length

    @property
    def largest(self) -> float:
        found = [*self.random.values(), *self.text.values()]
        return float(torch.tensor(found, dtype=torch.float64, device="cpu").max())  # NaN if one is

    def __str__(self) -> str:
        lines = [f"{self.source} -> {self.target}, {self.dtype}: largest difference of {self.output} {self.largest:.2g}"]
        for name, found in (("random tokens", self.random), ("text", self.text)):
            lines += [f"  {name}, {length} tokens: {value:.2g}" for length, value in found.items()]
        lines.append(f"  standard deviation of {self.output}: {self.deviation:.3g}")
        lines += [f"  left out, {self.target} has no place for it: {name}" for name in self.left_out]
        lines += [f"  holds for: {condition}" for condition in self.holds_for]
        return "\n".join(lines)


def certify(
    model: PreTrainedModel, exported: PreTrainedModel, tokenizer, left_out: tuple[str, ...], holds_for: tuple[str, ...]
) -> Certificate:
    """Compare outputs of a swapped model and of its export on the same tokens; PosswapError: beyond `TOLERANCE`."""
    causal = model.architecture.is_causal(model.config)
    longest = min(longest_input(model.config), LONGEST)
    cls = None if causal else getattr(tokenizer, "cls_token_id", None)
    # Some families give padding no position, and an encoder has [CLS] first and nowhere else.
    ordinary = torch.tensor([one for one in range(model.config.vocab_size) if one not in (cls, model.config.pad_token_id)])
    documents = [] if tokenizer is None else embedded_documents("validation", causal=causal)
    text = documents and token_lists([one[: 40 * longest] for one in documents], tokenizer)  # a beginning has as many tokens
    found, deviation = {"random": {}, "text": {}}, 0.0
    for length in sorted({min(16, longest), min(128, longest), longest}):
        generator = torch.Generator().manual_seed(length)
        tokens = ordinary[torch.randint(len(ordinary), (1, length), generator=generator)]
        if cls is not None:
            tokens[:, 0] = cls
        inputs = {"random": tokens}
        if text:
            inputs["text"] = cut_blocks(text, tokenizer, length)[:1]
        for kind, tokens in inputs.items():
            ours, theirs = (_outputs(one, tokens) for one in (model, exported))
            shared = [name for name in ours if name in theirs]  # RoFormer has no pooler
            found[kind][length] = float(torch.stack([(theirs[name] - ours[name]).abs().max().cpu() for name in shared]).max())
            spread = [ours[name].std() if ours[name].numel() > 1 else ours[name].abs().max() for name in shared]
            deviation = max(deviation, *map(float, spread))
    certificate = Certificate(
        source=f"{type(model).__name__}, {model.base_model.position_scheme}",
        position_scheme=model.config.position_scheme,
        target=type(exported).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        output=", ".join(shared),
        **found,
        deviation=deviation,
        left_out=left_out,
        holds_for=holds_for,
        longest=longest_input(model.config),
    )
    if not certificate.largest <= TOLERANCE[model.dtype] * max(deviation, 1e-6):  # NaN, too
        raise PosswapError(f"the exported model does not compute what the swapped one does:\n{certificate}")
    return certificate


def _outputs(model: PreTrainedModel, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the outputs, by name, for a sequence and, if there is a padding token, for a padded one; float64."""
    tokens, padding = tokens.to(model.device), model.config.pad_token_id
    if padding is not None and padding >= 0:
        cut = tokens.clone()
        cut[:, -max(1, tokens.shape[1] // 4) :] = padding
        tokens = torch.cat([tokens, cut])
    mask = torch.ones_like(tokens)
    mask[1:, -max(1, tokens.shape[1] // 4) :] = 0
    choices = "MultipleChoice" in type(model).__name__
    batch = {"input_ids": tokens, "attention_mask": mask}
    outputs = model(**{name: value[:, None] for name, value in batch.items()} if choices else batch, return_dict=True)
    compared = {}
    for name, value in outputs.items():  # skips a cache, which is no tensor
        if isinstance(value, torch.Tensor):
            per_token = value.dim() > 1 and value.shape[:2] == tokens.shape
            compared[name] = wide(value[mask.bool()] if per_token else value)
    return compared
