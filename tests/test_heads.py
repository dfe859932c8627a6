"""Every head of every family, swapped: it runs, trains, saves and loads; cross-attention is left alone."""

import re

import pytest
import torch
from conftest import refused, rewrite
from torch.testing import assert_close
from transformers import AutoModel, BertLMHeadModel, BertModel, EncoderDecoderModel, EsmModel, GPT2LMHeadModel, GPT2Model

import hf_posswap as posswap
from hf_posswap.checkpoint import SWAPPED_CLASSES
from hf_posswap.experiments.models import load_original

LABELS = {  # by how the class is called at its end
    "AlbertForPreTraining": {"labels": (2, 12), "sentence_order_label": (2,)},
    "ForPreTraining": {"labels": (2, 12), "next_sentence_label": (2,)},
    ("LMHeadModel", "ForMaskedLM", "ForCausalLM", "ForTokenClassification"): {"labels": (2, 12)},
    ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction"): {"labels": (2,)},
    "ForQuestionAnswering": {"start_positions": (2,), "end_positions": (2,)},
    "DoubleHeadsModel": {"labels": (2, 3, 12), "mc_labels": (2,)},
    ("Model", "WithProjection"): {},
}


def make(make_model, head: type):
    """A tiny plain model of this class; it reads 32 tokens, and no token is the padding one."""
    family = head.config_class.model_type
    decodes = head.__name__.endswith("CausalLM") and family not in ("opt", "biogpt")
    return make_model(f"{family}-decoder" if decodes else family, head=head)


def inputs_for(head: type) -> dict:
    """Inputs with padding and labels, in the shape that this head wants."""
    generator = torch.Generator().manual_seed(2)
    choices = "MultipleChoice" in head.__name__ or "DoubleHeads" in head.__name__
    tokens = torch.randint(2, 98, (2, 3, 12) if choices else (2, 12), generator=generator)
    mask = torch.ones_like(tokens)
    if head.__name__.startswith("CLIP"):  # its pooling looks for the end of the text
        tokens[:, 8] = 98
    if not head.__name__.startswith("OPT"):  # its padding has a row of the table, which a swapped model has not
        mask[1, ..., 9:] = 0
    labels = next(shapes for suffix, shapes in LABELS.items() if head.__name__.endswith(suffix))
    drawn = {name: torch.randint(2, shape, generator=generator) for name, shape in labels.items()}
    return {"input_ids": tokens, "attention_mask": mask, **drawn}


def tensors_of(output) -> dict[str, torch.Tensor]:
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize(
    ("head", "scheme"),
    # Each head with one scheme in attention or in the table's place, in turn.
    [(head, ("rotary", "learned", "relative:clip=4", "sinusoidal")[turn % 4]) for turn, head in enumerate(SWAPPED_CLASSES)],
)
def test_head(make_model, make_swapped, head, scheme, tmp_path):
    """The plain head's outputs under Learned(), others under other schemes; saved, loaded and restored exactly."""
    model, inputs = make(make_model, head), inputs_for(head)
    expected, config = tensors_of(model(**inputs)), model.config.to_dict()
    posswap.swap(model, scheme)
    actual = tensors_of(model(**inputs))
    assert actual.keys() == expected.keys() and len(actual) > 0
    assert ("loss" in actual) == (len(inputs) > 2)
    same = [torch.equal(actual[name], expected[name]) for name in expected]
    assert all(same) if scheme == "learned" else not any(same)
    if "loss" in actual:
        (actual["loss"] + actual.get("mc_loss", 0)).backward()
        without = [name for name, p in model.named_parameters() if p.grad is None]
        assert [name for name in without if not re.search("pooler|contact_head", name)] == []
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    again = tensors_of(loaded.eval()(**inputs))
    for name in actual:  # not bit for bit: some CPUs round otherwise where the same weights lie elsewhere in memory
        assert_close(again[name], actual[name], rtol=1e-5, atol=1e-6)
    posswap.restore(model)
    assert type(model) is head and model.config.to_dict() == config  # without what saving has written into it
    restored = tensors_of(model(**inputs))
    assert all(torch.equal(restored[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:the fit was undone")
def test_clips_text_model_is_found_in_its_projection(make_model, tmp_path):
    """An Auto class and a fit's report find the headless model in a folder of the head's, which calls it `text_model`."""
    for head in [head for head in SWAPPED_CLASSES if head.__name__ == "CLIPTextModelWithProjection"]:
        model, inputs = make(make_model, head), inputs_for(head)
        posswap.swap(model, "rotary", max_positions=64)
        report = posswap.fit(model, torch.randint(2, 98, (12, 16)), steps=1, progress=False)
        model.save_pretrained(tmp_path)
        report.save(tmp_path)  # which compares the weights
        loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
        assert_close(loaded(**inputs)[0], model.text_model(**inputs)[0])
        posswap.restore(model).save_pretrained(tmp_path / "original")
        refused("cannot be loaded as a causal LM", load_original, str(tmp_path / "original"))


def test_choices_with_a_span(make_model):
    """Choices in rows, as GPT2DoubleHeadsModel takes them, read as each row alone does; their mask has 3 dimensions, too."""
    head = next(head for head in SWAPPED_CLASSES if "DoubleHeads" in head.__name__)
    model, inputs = make(make_model, head), inputs_for(head)
    posswap.swap(model, "rotary", span=4, first=1)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    rows = model.transformer(tokens.flatten(0, 1), attention_mask=mask.flatten(0, 1))[0]
    actual = model(tokens, attention_mask=mask).logits
    assert_close(actual[mask.bool()], model.lm_head(rows).view_as(actual)[mask.bool()])


@pytest.mark.parametrize(
    ("head", "scheme", "backend"),
    [
        (head, scheme, ("eager", "sdpa")[(row + column) % 2])
        for row, head in enumerate((BertLMHeadModel, GPT2LMHeadModel, BertModel, GPT2Model))
        for column, scheme in enumerate(("rotary:fraction=0.5", "relative:clip=4", "sinusoidal", "none")[row // 2 :: 2])
    ],
)
def test_cross_attention(make_swapped, head, scheme, backend, tokens, tmp_path):
    """Decoders with cross-attention: only self-attention is positioned, a cache equals none, and reloading is exact."""
    family = "gpt2" if head in (GPT2LMHeadModel, GPT2Model) else "bert-decoder"
    model = make_swapped(family, scheme, backend, head=head, add_cross_attention=True, max_positions=64)
    encoded = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    cross = {"encoder_hidden_states": encoded, "encoder_attention_mask": mask}
    with torch.no_grad():
        expected = model(tokens, **cross, use_cache=False)[0]
        assert (model(tokens, use_cache=False)[0] - expected).abs().max() > 0.1
        crossed = [module for name, module in model.named_modules() if name.endswith(("crossattention", "crossattention.self"))]
        assert len(crossed) >= 2 and not any(hasattr(module, "positions") for module in crossed)
        output = model(tokens[:, :15], **cross, use_cache=True)
        parts = [output[0]]
        for step in range(15, 20):
            output = model(tokens[:, step : step + 1], **cross, past_key_values=output.past_key_values, use_cache=True)
            parts.append(output[0])
        assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path, attn_implementation=backend).eval()
        assert torch.equal(loaded(tokens, **cross, use_cache=False)[0], expected)


@pytest.mark.parametrize(
    ("encoder", "head", "decoder"), [("bert", BertModel, "bert-decoder"), ("esm", EsmModel, "roberta-decoder")]
)
def test_inside_an_encoder_decoder(make_swapped, tokens, encoder, head, decoder, tmp_path):
    """Swapped models work and are saved inside an EncoderDecoderModel; a part of one that is swapped would not be."""
    encoder = make_swapped(encoder, "rotary", head=head)
    swapped = make_swapped(decoder, "relative:clip=4", add_cross_attention=True)
    decoder = type(swapped)(swapped.config)  # built from a config, and not by a swap
    decoder.load_state_dict(swapped.state_dict())
    before = [{name: value.clone() for name, value in part.state_dict().items()} for part in (encoder, decoder)]
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    assert_close([encoder.state_dict(), decoder.state_dict()], before, rtol=0, atol=0)  # it initialises what is not marked
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 6, "do_sample": False, "decoder_start_token_id": 1, "pad_token_id": 0}
    generated = model.generate(tokens, **options)
    assert torch.equal(generated, model.generate(tokens, use_cache=False, **options))
    assert generated.shape == (2, 7)
    for whole in (model, model.encoder):
        refused("then compose them", posswap.swap, whole, "none", error=posswap.UnsupportedModelError)
    refused("then compose them", posswap.restore, model.decoder, error=posswap.UnsupportedModelError)
    model.save_pretrained(tmp_path)
    again = EncoderDecoderModel.from_pretrained(tmp_path).eval()
    assert_close(*(one(tokens, decoder_input_ids=generated).logits for one in (again, model)))
    rewrite(tmp_path / "config.json", lambda config: config["encoder"]["position_scheme"].update(theta=500))
    says = "^Posswap.*: .*not the one that these weights were saved with"
    refused(says, EncoderDecoderModel.from_pretrained, tmp_path, error=posswap.CheckpointError)
