"""On the real embedded checkpoints the default start is not worse than a cold one: `balances` and the parts beside it."""

import sys

from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_posswap as posswap
from hf_posswap import measure
from hf_posswap.data.text import stdlib_documents, stdlib_prose, token_blocks


def embedded(name: str, auto: type) -> tuple:
    folder = posswap.embedded_model(name)
    return auto.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def test_encoder():
    """A warm start is nearer the original than a cold one, by a margin of cosine, for every scheme."""
    model, tokenizer = embedded("minilm", AutoModel)
    blocks = token_blocks(["\n".join(stdlib_prose("validation"))], tokenizer, 128)[:6]  # the part that is read sooner
    original = measure.pooled_states(model, blocks)
    for scheme in ("sinusoidal", "relative", "rotary", "rotary:fraction=0.5", "none"):
        cold = measure.pooled_cosine(posswap.swap(model, scheme, warm_start=False), blocks, original)
        warm = measure.pooled_cosine(posswap.swap(model, scheme), blocks, original)
        assert warm > cold + 0.05, scheme


def test_causal_model(monkeypatch):
    """The encoders' balanced basis would harm rotary; notebooks/01_swap_a_model.ipynb has warm and cold starts."""
    model, tokenizer = embedded("stdlib-gpt2", AutoModelForCausalLM)
    blocks = token_blocks(list(stdlib_documents("validation").values()), tokenizer, 256)[::60]
    warm = measure.perplexity(posswap.swap(model, "rotary"), blocks)
    assert warm < measure.perplexity(posswap.swap(model, "rotary", warm_start=False), blocks)
    # The module, not the function of the same name.
    monkeypatch.setattr(sys.modules["hf_posswap.warm_start"], "balances", lambda architecture, config: True)
    assert measure.perplexity(posswap.swap(model, "rotary"), blocks) > warm
