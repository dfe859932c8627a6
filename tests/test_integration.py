"""Swapped models in the hands of others: torch.compile, programs, bfloat16, PEFT, Trainer, pipelines, flex attention."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from conftest import refused
from peft import LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close

import hf_posswap as posswap
from hf_posswap.architectures import ARCHITECTURES
from hf_posswap.contract.subject import move, padded, position_parameters
from hf_posswap.measure.positions import position_table

FAMILIES = ("bert", "gpt2")
SCHEMES = ("learned", "sinusoidal", "relative:clip=4", "rotary:fraction=0.5", "none")
# Every scheme with every family; what else a test varies takes turns.
PAIRS = [(FAMILIES[turn % 2], SCHEMES[turn % 5]) for turn in range(10)]
TARGETS = {"bert": ["query", "key", "value"], "gpt2": ["c_attn"]}
# PEFT asks for `is_gradient_checkpointing`, which transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing:FutureWarning")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture
def fresh_compiler():
    """Forget compiled code before and after, so that no test runs into dynamo's limit of recompilations."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


SCALED = [("gpt2", f"rotary:layout=half,scaling={{rope_type={kind},factor=2.0}}") for kind in ("yarn", "dynamic")]


OTHERS = [
    ("bert", "alibi"),
    ("gpt2", "buckets"),
    ("gpt2", "self-extend:near=4,group=2"),
    ("gpt2", "mixed:layers=[rotary,alibi]"),
]


@pytest.mark.parametrize(("family", "scheme"), PAIRS[:5] + OTHERS + SCALED)
def test_compile_without_graph_breaks(make_swapped, family, scheme, tokens, fresh_compiler):
    """Every scheme traces as one graph, with padding, and gives the same logits; beyond the trained length, if scaled."""
    model = make_swapped(family, scheme, "sdpa", max_positions=64 if "scaling" in scheme else None)
    mask = padded(after=7)["attention_mask"]
    if "scaling" in scheme:
        tokens, mask = tokens.repeat(1, 2), mask.repeat_interleave(2, dim=1)
    inputs = {"attention_mask": mask} | ({} if family == "bert" else {"use_cache": False})
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert_close(compiled(tokens, **inputs).logits, model(tokens, **inputs).logits, **CLOSE)


@pytest.mark.parametrize("scheme", ["relative:clip=4", "rotary"])
def test_compile_with_positions_and_cache(make_swapped, scheme, tokens, fresh_compiler):
    """Custom position_ids and a decoding step on a static cache trace as one graph too."""
    model = make_swapped("gpt2", scheme)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    position_ids = torch.arange(20)[None].flip(1)
    with torch.no_grad():
        actual = compiled(tokens, position_ids=position_ids, use_cache=False).logits
        assert_close(actual, model(tokens, position_ids=position_ids, use_cache=False).logits, **CLOSE)
        cache = transformers.StaticCache(config=model.config, max_cache_len=24)
        model(tokens[:, :19], past_key_values=cache)
        last = compiled(tokens[:, 19:], past_key_values=cache, position_ids=torch.tensor([[19]])).logits
        assert_close(last[:, 0], model(tokens, use_cache=False).logits[:, -1], **CLOSE)


def test_compiled_gradients(make_swapped, tokens, fresh_compiler):
    """Training through a compiled model gives the gradients of the model itself."""
    model = make_swapped("gpt2", "relative:clip=4")
    model(tokens, use_cache=False).logits.square().mean().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(tokens, use_cache=False).logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_gradients_of_each_text(make_swapped, family, tokens):
    """`torch.vmap` gives them as autograd does, one text after the other; a text that is too long stays an error."""
    model = make_swapped(family, "relative:clip=3")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    causal = model.architecture.is_causal(model.config)

    def loss(weights, text):
        mask = torch.ones_like(text)[None] if causal else None  # with one, or without: transformers' own way cannot be mapped
        return torch.func.functional_call(model, weights, (text[None],), {"attention_mask": mask})[0][..., 5].sum()

    of_each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    together = torch.func.grad(lambda weights: sum(loss(weights, text) for text in tokens))(weights)
    assert_close({name: grad.sum(0) for name, grad in of_each(weights, tokens).items()}, together, rtol=1e-3, atol=1e-3)
    refused("reaches 40 positions", of_each, weights, tokens.repeat(1, 2), error=posswap.SequenceTooLongError)


@pytest.mark.parametrize(
    ("family", "scheme", "backend"), [(*pair, ("eager", "sdpa")[i // 3 % 2]) for i, pair in enumerate(PAIRS[5:] + OTHERS)]
)
def test_autocast(make_swapped, family, scheme, backend, tokens):
    """Under autocast to bfloat16 every scheme runs and trains, close to float32; what is added to the embeddings is the same:
    the projection of sinusoids has large terms of both signs, whose sum would be off by a tenth if they were rounded first.
    """
    model = make_swapped(family, scheme, backend)
    expected, table = model(tokens).logits, position_table(model) if scheme in ("learned", "sinusoidal") else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert table is None or torch.equal(position_table(model), table)
        output = model(tokens, labels=tokens)
    assert (output.logits.float() - expected).norm() / expected.norm() < 0.05
    output.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def add_lora(model, family: str) -> PeftModel:
    """LoRA on queries, keys and values, with an effect."""
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS[family], fan_in_fan_out=family == "gpt2"))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return adapted.eval()


def test_lora_on_the_table(make_model, tokens, tmp_path):
    """No adapter on a table whose rows a merge would not meet; positions that PEFT trains whole are loaded by Auto classes."""
    options = LoraConfig(target_modules=["position_embeddings"], init_lora_weights=False)
    adapted = get_peft_model(posswap.swap(make_model("bert"), "learned"), options).eval()
    expected = adapted(tokens).logits
    assert_close(adapted.merge_and_unload()(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    refused("adapt other modules", get_peft_model(posswap.swap(make_model("roberta"), "learned"), options), tokens)
    posswap.swap(make_model("gpt2"), "rotary").save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    options = LoraConfig(target_modules=["c_attn"], modules_to_save=["wpe"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    adapted = get_peft_model(model, options).eval()
    move([parameter for name, parameter in adapted.named_parameters() if "wpe.modules_to_save" in name], 0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", attn_implementation="eager").eval()
    assert torch.equal(loaded(tokens).logits, adapted(tokens).logits)
    refused("swap after merge_and_unload", posswap.swap, adapted, "rotary", max_positions=64)


@pytest.mark.parametrize(("family", "scheme", "swap_first"), [(*pair, i % 3 > 0) for i, pair in enumerate(PAIRS[:5])])
@pytest.mark.filterwarnings("ignore:query and key projections are wrapped:UserWarning", "ignore:the new positions train")
def test_lora(make_model, family, scheme, swap_first, tokens, tmp_path):
    """The adapter's effect goes through the scheme: its output is that of the weights it is merged into."""
    model = make_model(family)
    if swap_first:
        posswap.swap(model, scheme)
        base = model(tokens).logits
        adapted = add_lora(model, family)
    else:
        adapted = add_lora(model, family)
        assert posswap.swap(adapted, scheme) is adapted
        with adapted.disable_adapter():
            base = adapted(tokens).logits
    assert posswap.describe(adapted).new == model.base_model.position_scheme
    expected = adapted(tokens).logits
    assert (expected - base).abs().max() > 0.1
    merged = adapted.merge_and_unload()
    assert_close(merged(tokens).logits, expected, rtol=1e-3, atol=1e-3)
    merged.save_pretrained(tmp_path)
    auto = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert torch.equal(loaded(tokens).logits, merged(tokens).logits)


def test_lora_warns(make_model):
    """An adapter keeps the balanced basis out of the warm start, and saves no positions that train beside it."""
    adapted, lora = add_lora(make_model("bert"), "bert"), "balanced basis is left out.*swap before adding adapters"
    with pytest.warns(UserWarning, match=lora), pytest.warns(UserWarning, match="PEFT's save_pretrained leaves them out"):
        posswap.swap(adapted, "rotary")
    swapped = add_lora(posswap.swap(make_model("bert"), "rotary"), "bert")
    refused("or adapters were added", posswap.swap, swapped, "alibi")


@pytest.mark.parametrize("swap_first", [True, False])
@pytest.mark.filterwarnings("ignore:query and key projections are wrapped:UserWarning", "ignore:the new positions train")
def test_the_original_of_a_trained_head(make_model, swap_first):
    """PEFT trains a copy of the head; the original has the head of before, also where a copy is made in inference mode."""
    model, options = (
        make_model("bert", head=transformers.BertForSequenceClassification),
        LoraConfig(task_type="SEQ_CLS", target_modules=["query"]),
    )
    adapted = get_peft_model(posswap.swap(model, "rotary") if swap_first else model, options)
    if not swap_first:
        posswap.swap(adapted, "rotary")
    before = model.classifier.original_module.weight.clone()
    move(model.classifier.modules_to_save.parameters(), 1.0)
    for mode in (nullcontext(), torch.inference_mode()):
        with mode:
            assert torch.equal(posswap.original(adapted).classifier.weight, before)
    assert not torch.equal(model.classifier.modules_to_save["default"].weight, before)


@pytest.mark.parametrize(("family", "scheme"), [(FAMILIES[turn % 2], scheme) for turn, scheme in enumerate(SCHEMES)])
def test_trainer_and_pipelines(make_swapped, bert_tokenizer, gpt2_tokenizer, family, scheme, tmp_path):
    """Two steps of the Trainer move every position parameter; a pipeline on the folder it saved fills a mask, or continues."""
    masked = family == "bert"
    model, tokenizer = make_swapped(family, scheme), bert_tokenizer if masked else gpt2_tokenizer
    texts = ["the cat sat on the mat", "a dog ran under the log and it was happy", "then the cat was sad"] * 4
    data = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(tmp_path, learning_rate=1e-3, max_steps=2, per_device_train_batch_size=4, **quiet),
        train_dataset=data,
        eval_dataset=data,
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=masked, mlm_probability=0.3),
        processing_class=tokenizer,
    )
    before = [(parameter, parameter.detach().clone()) for parameter in position_parameters(model)]
    trainer.train()
    assert not any(torch.equal(*pair) for pair in before)
    assert torch.tensor(trainer.evaluate()["eval_loss"]).isfinite()
    trainer.save_model(tmp_path)
    task, folder = "fill-mask" if masked else "text-generation", str(tmp_path)
    pipeline = transformers.pipeline(task, model=folder, tokenizer=folder, device="cpu")
    assert pipeline.model.base_model.position_scheme == model.base_model.position_scheme
    if masked:
        expected = model.eval()(**tokenizer("the cat [MASK] on the mat", return_tensors="pt")).logits[0, 3].softmax(-1)
        for answer in pipeline("the cat [MASK] on the mat"):
            assert answer["score"] == pytest.approx(expected[answer["token"]].item(), rel=1e-4)
        return
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.eval().generate(**tokenizer("the cat", return_tensors="pt"), **options)
    written = pipeline("the cat", return_full_text=False, **options)[0]["generated_text"]
    assert written == tokenizer.decode(expected[0, -5:], skip_special_tokens=True)


def test_smoothed_labels_are_shifted(make_model, tokens, tmp_path):
    """The Trainer knows a causal model by its class's name: a swapped one learned to write the token that it reads."""
    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "label_smoothing_factor": 0.1}
    arguments, data = transformers.TrainingArguments(tmp_path, **options), [{"input_ids": row, "labels": row} for row in tokens]
    models = make_model("gpt2"), posswap.swap(make_model("gpt2"), "learned")
    one, other = (transformers.Trainer(model, arguments, eval_dataset=data).evaluate()["eval_loss"] for model in models)
    assert one == pytest.approx(other)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch|transformers", "ignore:flex_attention called without")
@pytest.mark.parametrize("scheme", ["rotary:fraction=0.5", "alibi"])
def test_flex_attention(make_swapped, scheme, tokens):
    """Flex attention, not compiled, agrees with sdpa, whether a mask is for tokens or, True = attend, for pairs."""
    model = make_swapped("bert-decoder", scheme, "sdpa")
    real = padded(after=7)["attention_mask"]
    pairs = real[:, None, None].bool() & torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril().triu(-4)
    with torch.no_grad():
        expected = [model(tokens, attention_mask=mask).logits for mask in (real, pairs)]
        model.set_attn_implementation("flex_attention")
        with torch.compiler.set_stance("force_eager"):
            actual = [model(tokens, attention_mask=mask).logits for mask in (real, pairs)]
    for ours, theirs in zip(actual, expected, strict=True):
        assert_close(ours[real.bool()], theirs[real.bool()], rtol=1e-3, atol=1e-3)


class Reader(torch.nn.Module):
    """A model as a program sees it: tokens and a mask in, states out."""

    def __init__(self, model):
        super().__init__()
        self.model = model.base_model

    def forward(self, tokens, mask=None):
        return self.model(input_ids=tokens, attention_mask=mask, return_dict=False)[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("family", "scheme", "span"), [("gpt2", "relative:clip=4", None), ("bert", "relative:clip=4", 5), ("gpt2", "alibi", 5)]
)
def test_programs_take_any_batch(make_swapped, tokens, family, scheme, span):
    """Batch and length stay free, above a span and below, in `torch.export` and so in ONNX, and in traces of any length."""
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    model = make_swapped(family, scheme, "sdpa", max_positions=64, span=span, **layers)
    model.config.use_cache = False
    reader, free = Reader(model), {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    given = (tokens,) if span is None else (tokens, torch.ones_like(tokens))
    programs = [torch.export.export(reader, given, dynamic_shapes=(free,) * len(given), strict=False).module()]
    programs += [torch.jit.trace(reader, tuple(one[:, :n] for one in given), check_trace=False) for n in (4, 20)]
    for program in programs:
        for rows, length in ((1, 33), (3, 33), (3, 4)):
            other = [one.repeat(2, 2)[:rows, :length] for one in given]
            if span:
                other[1][-1, 20:] = 0
            assert_close(program(*other), reader(*other), rtol=1e-4, atol=1e-4)
