"""What families and schemes may leave to the seams: positions that are counted another way, and biases on scores."""

import os
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from conftest import refused, run_python
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, DynamicCache, RobertaConfig, RobertaForCausalLM

import hf_posswap as posswap
from hf_posswap import architectures, attention
from hf_posswap.attention import CACHE, PositionedAttention, add_bias, read_positions, to_digits, write_positions
from hf_posswap.checkpoint import STUB
from hf_posswap.contract.subject import gradients_of, padded
from hf_posswap.data.calibration import check_batches, few_tokens
from hf_posswap.functional import distance_attention
from hf_posswap.functional.distance_attention import attend_by_distance
from hf_posswap.measure.losses import sliding_window_losses
from hf_posswap.sharing import export

PAD = 3  # the padding token, so that position 0 is row 4 of the table


@pytest.mark.parametrize("scheme", ["rotary", "relative:clip=4", "learned"])
@torch.no_grad()
def test_a_cache_counts_on(scheme):
    """A RoBERTa decoder computes token by token, and by `generate`, what it does at once; its own table is the original."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
    config = RobertaConfig(**sizes, max_position_embeddings=20, pad_token_id=PAD, initializer_range=0.3, is_decoder=True)
    original = RobertaForCausalLM(config).eval()
    tokens = torch.randint(4, 99, (2, 12), generator=torch.Generator().manual_seed(3))
    expected = original(tokens).logits
    model = posswap.swap(original, scheme)
    whole, cache = model(tokens, use_cache=False).logits, DynamicCache(config=model.config)
    steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(12)]
    # Headless models take the cache by its old name and by that of 5.24, and lose neither to a None.
    for given in ({CACHE: cache}, {"past_key_values": None} | {CACHE: cache}, {CACHE: None} | {"past_key_values": cache}):
        cache.crop(-1)
        last = model.base_model(tokens[:, 11:12], **given).last_hidden_state
        assert_close(last, model.base_model(tokens).last_hidden_state[:, 11:12], rtol=1e-4, atol=1e-4)
    assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)
    tokens[1, :5], options = PAD, {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(tokens, attention_mask=tokens.ne(PAD).long(), max_new_tokens=4, eos_token_id=None, **options)
    for row, start in zip(out.sequences, (0, 5), strict=True):
        alone = model(row[None, start:-1], use_cache=False).logits[0, -4:]
        assert_close(torch.stack(out.logits, dim=1)[start // 5], alone, rtol=1e-4, atol=1e-4)
    if scheme == "learned":
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("family", sorted(architectures.ARCHITECTURES))
def test_ids_are_the_familys_own(make_model, family):
    """With its own table a swapped model reads and learns, in every form, what the plain one does; others see no padding."""
    model = make_model(family)
    tokens = torch.randint(4, 99, (2, 12), generator=torch.Generator().manual_seed(3))
    tokens[0, 9:] = tokens[1, :4] = 0
    mask = (tokens != 0).long()
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    embeds = model.get_input_embeddings()(tokens)
    forms = [
        {"input_ids": tokens, "attention_mask": mask},
        {"input_ids": tokens[1:], "attention_mask": mask[1:].bool()},
        {"input_ids": tokens.clamp(min=4)},
        {"input_ids": tokens, "attention_mask": mask, "position_ids": counted},
        {"inputs_embeds": embeds, "attention_mask": mask},
        {"inputs_embeds": embeds[:1], "position_ids": counted[1:] + 7},
    ]
    forms = forms[:4] if family == "clip_text_model" else forms  # which takes no embeddings
    plain, gradients = [model(**form)[0] for form in forms], gradients_of(model)
    posswap.swap(model, "learned")
    for name, found in gradients_of(model).items():  # rows that are no positions are gone
        assert found is gradients[name] is None or torch.equal(found, gradients[name][-len(found) :]), name
    for form, expected in zip(forms, plain, strict=True):
        real = form.get("attention_mask", torch.ones(expected.shape[:2])).bool()
        assert torch.equal(model(**form)[0][real], expected[real]), form.keys()
    posswap.swap(model, "learned", span=32)  # as far as it reads: all of its attention is computed by us, and the same
    assert_close(model(**forms[0])[0][mask.bool()], plain[0][mask.bool()], rtol=1e-4, atol=1e-4)
    by_slots = "albert bert biogpt clip_text_model distilbert electra ernie gpt2".split()
    counts = family not in by_slots  # by the mask or the padding tokens
    for scheme in ("rotary", "sinusoidal:project=false"):
        posswap.swap(model, scheme)
        alone = torch.cat([model(row[row != 0][None])[0][0] for row in tokens])
        for form in (forms[0], forms[3]) if counts else forms[3:4]:
            assert_close(model(**form)[0][mask.bool()], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "scheme"), [("bert-decoder", "alibi"), ("opt", "alibi"), ("gpt2", "relative:clip=4")])
@torch.no_grad()
def test_a_decoder_that_looks_both_ways(make_swapped, family, scheme, tokens):
    """With `is_causal` false in its config a decoder sees later tokens, padded or not, with eager attention and with sdpa."""
    model = make_swapped(family, scheme, "eager")
    for causal, mask in product((True, False), (torch.ones_like(tokens), padded(after=7)["attention_mask"])):
        model.config.is_causal = causal
        model.set_attn_implementation("eager")
        output = model(tokens, attention_mask=mask, output_attentions=True)
        assert (output.attentions[0].triu(1).max() == 0) == causal
        model.set_attn_implementation("sdpa")
        found = model(tokens, attention_mask=mask).logits
        assert_close(found[mask.bool()], output.logits[mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("scheme", ["alibi", "alibi:slopes=fixed", "buckets"])
def test_a_bias_by_distance_needs_no_square(make_swapped, watch, monkeypatch, family, scheme):
    """With no mask but causal, no bias for each pair is made, and outputs and gradients are the same."""
    model, tokens = make_swapped(family, scheme), torch.arange(40).view(2, 20)
    model.set_attn_implementation("sdpa")

    def run(**options):
        model.zero_grad()
        states = model.base_model(tokens, **options).last_hidden_state
        states.square().mean().backward()
        return [states, *(parameter.grad for parameter in model.base_model.parameters() if parameter.grad is not None)]

    calls = watch(attention, "attend_by_distance")
    quick = run()
    assert len(calls) == 2
    run(attention_mask=padded(after=3)["attention_mask"])
    assert len(calls) == 2
    monkeypatch.setattr(PositionedAttention, "_all_by_distance", lambda *_: False)
    assert_close(quick, run(), rtol=1e-3, atol=1e-5)
    refused("a bias on scores, which .* 'flash_attention_2' cannot add", add_bias, None, None, None, "flash_attention_2")


@pytest.mark.parametrize(("family", "scheme"), [("bert", "buckets"), ("gpt2", "alibi")])
def test_another_default_device(make_swapped, family, scheme):
    """A model works on its own device, also where `torch.set_default_device` names another."""
    model, tokens = make_swapped(family, scheme, "sdpa"), torch.arange(40).view(2, 20)

    def run():
        model.zero_grad()
        (logits := model(tokens).logits).square().mean().backward()
        return [logits, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    expected = run()
    with torch.device("meta"):
        assert_close(run(), expected, rtol=0, atol=0)


def test_a_fit_under_another_default_device(make_model, bert_tokenizer):
    """Generators draw on the CPU: so text to fit on is drawn there, and its order, also where the default device is another."""

    def run(model) -> str:
        texts = ["the cat sat on the mat and it was happy " * times for times in range(1, 21)]
        text = posswap.text_batches(texts, bert_tokenizer, 32, tokens=1024)
        return posswap.fit(model, text, steps=1, progress=False).sha256

    models, rows = [posswap.swap(make_model("bert"), "relative:clip=4") for _ in range(2)], torch.arange(2, 42).view(2, 20)
    expected = run(models[0])
    losses = sliding_window_losses(model := make_model("gpt2"), rows, 8, stride=2)
    with torch.device("meta"):
        assert run(models[1]) == expected
        assert_close(sliding_window_losses(model, rows, 8, stride=2), losses, equal_nan=True)
        assert len(few_tokens(check_batches([rows], model, 32), 20)) == 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "block", "scores"), [(1, 128, 2**19), (20, 7, 1), (21, 7, 300), (20, 128, 2**19)])
def test_attention_by_distance_is_exact(monkeypatch, causal, length, block, scores):
    """Against all scores written out, in float64: output and gradients, for whole and broken blocks and groups of heads."""
    monkeypatch.setattr(distance_attention, "BLOCK", block)
    monkeypatch.setattr(distance_attention, "SCORES", scores)
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, length, 8)] * 3 + [(3, 2 * length - 1)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    query, key, value, bias = inputs
    found = attend_by_distance(query.transpose(1, 2).contiguous().transpose(1, 2), key, value, bias, 0.4, causal)
    places = length - 1 + torch.arange(length)[:, None] - torch.arange(length)
    scores = 0.4 * query @ key.mT + bias[:, places]
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1) > 0, -torch.inf)
    expected = scores.softmax(-1) @ value
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    assert_close(found, expected)
    assert_close(torch.autograd.grad(found, inputs, weights), torch.autograd.grad(expected, inputs, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_positions_in_keys_are_exact(dtype):
    """Positions up to 16 million are read from keys as they were written, in half precision too."""
    positions = torch.tensor([[0, 255, 256, 65_535, 1_234_567, 16_777_215]])
    keys = write_positions(torch.randn(2, 3, 6, 8).to(dtype), to_digits(positions))
    assert keys.shape == (2, 3, 6, 16) and torch.equal(read_positions(keys), positions.expand(2, -1))


class Forgetful(attention.AttentionPositions):
    def __init__(self):
        super().__init__()
        self.register_buffer("rates", torch.ones(2), persistent=False)
        self.steps = torch.ones(2)


@dataclass(frozen=True, kw_only=True)
class Mine(posswap.Scheme):
    name: ClassVar[str] = "mine"
    option: Any = None

    def attention_module(self, geometry):
        module = attention.AttentionPositions()
        module.inner = Forgetful()
        return module


def test_what_is_the_users_own(make_model, tmp_path, monkeypatch):
    """Options that no file holds and empty tensors are named; cards and exports claim nothing of the user's own heads."""
    monkeypatch.setitem(posswap.SCHEMES, "mine", Mine)
    for odd in (torch.ones(2), len, {1}, torch.float32):
        refused("mine: config.json cannot hold option=.*: let the", posswap.swap, make_model("gpt2"), Mine(option=odd))
    for odd in ({1: 2}, [{"a": ({None: 2},)}]):
        refused("option=.*, whose keys would become text: let them", posswap.swap, make_model("gpt2"), Mine(option=odd))
    posswap.swap(make_model("gpt2"), "mine").save_pretrained(tmp_path)
    says = "Forgetful makes rates, steps in __init__, and no checkpoint holds that"
    refused(says, AutoModelForCausalLM.from_pretrained, tmp_path, error=posswap.CheckpointError)
    monkeypatch.setattr(architectures.GPT2, "__module__", "mine")
    text = posswap.write_card(tmp_path, base_model="local:tiny").read_text()
    assert "# and here the module that registers its scheme and its family\n" in text and "trust_remote_code" not in text
    posswap.swap(make_model("gpt2"), "mixed:layers=[mine, rotary]").save_pretrained(tmp_path / "mix")
    assert "registers its scheme" in posswap.write_card(tmp_path / "mix", base_model="local:tiny").read_text()
    monkeypatch.setattr(export, "CONVERT", {})
    says = "has no native counterpart: share the swapped model as it is"
    refused(says, posswap.export_native, posswap.swap(make_model("bert"), "rotary"))


OWN = """
from dataclasses import dataclass
from typing import ClassVar
import hf_posswap as posswap

@posswap.register_scheme
@dataclass(frozen=True, kw_only=True)
class Mine(posswap.Rotary):
    name: ClassVar[str] = "mine"
"""
SHARE = """
import os, sys
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
folder, stub = sys.argv[1:]
if not os.fork():  # its author, who has the scheme
    import hf_posswap
    exec(open(f"{folder}/my_scheme.py").read())
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=99, n_positions=16))
    hf_posswap.swap(model, "mine:theta=500").save_pretrained(folder)
    with open(f"{folder}/{stub}", "a") as file:
        file.write("from .my_scheme import Mine\\n")
    os._exit(0)
os.wait()
print(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).position_scheme)
"""


def test_a_scheme_of_ones_own_in_the_folder(tmp_path):
    """Beside the weights, and named in the few lines that are saved there, it loads where only hf_posswap is installed."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "my_scheme.py").write_text(OWN)
    cache = {"HF_MODULES_CACHE": str(tmp_path / "code")}  # where transformers copies code to
    done = run_python("-c", SHARE, tmp_path / "shared", STUB, env=os.environ | cache)
    assert done.stdout.strip() == "mine:theta=500"
