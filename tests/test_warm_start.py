"""On the real embedded checkpoints the default start never loses to a cold one, and positions show in word order."""

import sys

import pytest
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hf_posswap as posswap
from hf_posswap import measure
from hf_posswap.data.text import stdlib_documents, stdlib_prose, token_blocks

SCHEMES = ("sinusoidal", "relative", "rotary", "rotary:fraction=0.5", "none")


@pytest.fixture(scope="module")
def minilm():
    folder = posswap.embedded_model("minilm")
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def gpt2():
    folder = posswap.embedded_model("stdlib-gpt2")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def prose():
    """The standard library's prose, the part that is read sooner."""
    return stdlib_prose("validation")


def test_encoder(minilm, prose):
    """A warm start is nearer the original than a cold one, by a margin of cosine, for every scheme."""
    model, tokenizer = minilm
    blocks = token_blocks(["\n".join(prose)], tokenizer, 128)[:6]
    original = measure.pooled_states(model, blocks)
    for scheme in SCHEMES:
        cold = measure.pooled_cosine(posswap.swap(model, scheme, warm_start=False), blocks, original)
        warm = measure.pooled_cosine(posswap.swap(model, scheme), blocks, original)
        assert warm > cold + 0.05, scheme
    posswap.restore(model)


def test_causal_model(gpt2, monkeypatch):
    """A warm start has a lower perplexity than a cold one for every scheme; the encoders' balanced basis would harm rotary."""
    model, tokenizer = gpt2
    blocks = token_blocks(list(stdlib_documents("validation").values()), tokenizer, 256)[::240]
    for scheme in SCHEMES:
        cold = measure.perplexity(posswap.swap(model, scheme, warm_start=False), blocks)
        warm = measure.perplexity(posswap.swap(model, scheme), blocks)
        assert warm < cold, scheme
    warm = measure.perplexity(posswap.swap(model, "rotary"), blocks)
    # The module, not the function of the same name.
    monkeypatch.setattr(sys.modules["hf_posswap.warm_start"], "balances", lambda architecture, config: True)
    assert measure.perplexity(posswap.swap(model, "rotary"), blocks) > warm
    posswap.restore(model)


def test_word_order(minilm, gpt2, prose):
    """The originals tell swapped neighbours from intact ones; a BERT without positions is at chance, exactly."""
    train, test = measure.word_order_examples(prose[:800], 260), measure.word_order_examples(prose[800:], 120)
    assert measure.word_order_preference(*gpt2, test[0]) > 0.8
    model, tokenizer = minilm
    assert measure.word_order_probe(model, tokenizer, train, test) > 0.53
    posswap.swap(model, "none", warm_start=False)
    few = [tuple(part[:60] for part in one) for one in (train, test)]
    assert abs(measure.word_order_probe(model, tokenizer, *few) - 0.5) < 0.02
    posswap.restore(model)
