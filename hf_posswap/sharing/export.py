"""Native export: a swapped model as a stock class of transformers that computes the same function, and needs no plugin.

| positions | becomes |
|---|---|
| sinusoidal, learned, none: what is added to the embeddings | the family itself, with the vectors as its table |
| rotary, BERT, ELECTRA, DistilBERT, ALBERT | RoFormer, with the angles as its table |
| rotary, RoBERTa, XLM-RoBERTa, CamemBERT; BERT as a classifier of texts | JinaEmbeddingsV3 |
| rotary, ESM | ESM with `position_embedding_type` "rotary" |
| rotary, GPT-2, OPT, BioGPT | GPT-NeoX |
| relative, self-extend, alibi, buckets, mixed; any span | none: no class computes the same |

Weights are rewritten, exactly, to the conventions of the stock class (`native_encoders`, `native_decoders`). The mean vector
that a swap keeps of the old table (`Constant`) is added to an embedding that every token has: token types, or words, whose
output head is then untied. Position 0 has a vector of its own. An encoder reads [CLS] first and nowhere else, so there it is
added to the embedding of [CLS]. In a causal model any token may come first, and there is no place for it.

An export ends with a certificate (parity.py): both models read the same tokens, and the certificate has the largest difference
of their outputs. If that is not small, the export is an error.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posswap.architectures import longest_input
from hf_posswap.checkpoint import SWAPPED_CLASSES, SwappedModel
from hf_posswap.errors import PosswapError, UnsupportedModelError
from hf_posswap.evaluating import evaluating, exactly
from hf_posswap.pipelines import around, is_pipeline, tokenizer_of
from hf_posswap.provenance import check_new, weight_hashes, write_json
from hf_posswap.schemes.rotary import Rotary
from hf_posswap.sharing.native import DYNAMIC, Converted, with_table
from hf_posswap.sharing.native_decoders import GPT_NEOX, gpt_neox
from hf_posswap.sharing.native_encoders import ESM, JINA, ROFORMER, esm, jina, roformer
from hf_posswap.sharing.parity import PARITY_FILE, Certificate, certify
from hf_posswap.surgery import state_of
from hf_posswap.target import check_no_adapters, find_target

CONVERT: dict[type, Callable[..., Converted]] = {
    **dict.fromkeys(ROFORMER, roformer),
    **dict.fromkeys(JINA, jina),
    **dict.fromkeys(ESM, esm),
    **dict.fromkeys(GPT_NEOX, gpt_neox),
}


@dataclass(frozen=True)
class NativeExport:
    """A stock model of transformers and the certificate that it computes what the swapped one does."""

    model: PreTrainedModel
    certificate: Certificate
    tokenizer: PreTrainedTokenizerBase | None = None
    pipeline: nn.Module | None = None  # of sentence-transformers, with the stock model inside

    def __repr__(self) -> str:
        return str(self.certificate)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write weights, config, tokenizer and parity.json into a new folder, or the whole pipeline with parity.json.

        Raises:
            CheckpointError: The folder is not empty.
        """
        folder = Path(folder)
        check_new(folder)
        (self.model if self.pipeline is None else self.pipeline).save_pretrained(str(folder))
        if self.tokenizer is not None and self.pipeline is None:
            self.tokenizer.save_pretrained(folder)
        about = {"format": 1, "weights": weight_hashes(folder), "certificate": asdict(self.certificate)}
        write_json(folder / PARITY_FILE, about)


@torch.no_grad()
def export_native(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> NativeExport:
    """Return a swapped model as a stock class of transformers; the swapped model is not changed.

    Args:
        model: A swapped model, in any dtype, on one device, or a pipeline of sentence-transformers around one.
        tokenizer: The model's tokenizer, used for [CLS] and for real text in the certificate, and saved with the model: if it
            cut texts where the table ended, or nowhere, a copy that cuts them where the model ends. A pipeline has its own.

    Raises:
        UnsupportedModelError: No stock class computes the same function; the message says why.
        PosswapError: The outputs of the exported model differ from those of the swapped one.

    >>> import hf_posswap as posswap
    >>> from transformers import BertConfig, BertForMaskedLM
    >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    >>> model = posswap.swap(BertForMaskedLM(config), posswap.Rotary(mark_first=False), max_positions=1024)
    >>> native = posswap.export_native(model)
    >>> type(native.model).__name__, native.model.config.max_position_embeddings, native.certificate.largest < 1e-4
    ('RoFormerForMaskedLM', 1024, True)
    """
    pipeline, tokenizer = model if is_pipeline(model) else None, tokenizer or tokenizer_of(model)
    given, (model, _) = model, find_target(model, dispatched=True)
    check_no_adapters(given)
    if not isinstance(model, SwappedModel):
        raise UnsupportedModelError(f"this {type(model).__name__} has not been swapped: there is nothing to export")
    if tokenizer is not None and len(tokenizer) > model.config.vocab_size:
        raise PosswapError(f"the tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}: give its own")
    stock = next(plain for plain, swapped in SWAPPED_CLASSES.items() if swapped is type(model))
    scheme, attention = model.base_model.position_scheme, model.architecture.self_attentions(model.base_model)[0]
    _check_weights(model)
    share = "share the swapped model as it is"
    if span := state_of(model).span:
        raise UnsupportedModelError(f"no class of transformers has a span of {span.span}: {share}, or swap without span=")
    if not hasattr(attention, "positions"):
        convert = with_table
    elif not isinstance(scheme, Rotary):
        raise UnsupportedModelError(f"no class of transformers has {scheme.name} positions in its attention: {share}")
    elif (convert := CONVERT.get(stock)) is None:
        heads = [kind.__name__ for kind in CONVERT if issubclass(kind.config_class, model.architecture.config_class)]
        why = f"heads that have one are {', '.join(heads)}" if heads else share
        raise UnsupportedModelError(f"{stock.__name__} with rotary positions has no native counterpart: {why}")
    with exactly(model), evaluating(model):
        exported, left_out, holds_for = convert(model, stock, tokenizer)
        if isinstance(scheme, Rotary) and (scheme.scaling or {}).get("rope_type") == "dynamic":
            holds_for = (*holds_for, DYNAMIC.format(type(exported).__name__))
        exported.to(model.device).eval()
        if model.can_generate():
            exported.generation_config = copy.deepcopy(model.generation_config)
        certificate = certify(model, exported, tokenizer, left_out, holds_for)
    table, longest = state_of(model).geometry.trained_positions, longest_input(model.config)
    if tokenizer is not None and pipeline is None and not table != tokenizer.model_max_length <= longest:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.model_max_length = longest
    return NativeExport(exported, certificate, tokenizer, None if pipeline is None else around(pipeline, exported))


def _check_weights(model: SwappedModel) -> None:
    if len(dtypes := {str(parameter.dtype) for parameter in model.parameters()}) > 1:
        raise UnsupportedModelError(f"the model's weights are {' and '.join(sorted(dtypes))}: give it one dtype, model.to(...)")
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1 or torch.device("meta") in devices:
        raise UnsupportedModelError(f"the model is spread over {sorted(map(str, devices))}: load it on one device")
