"""What a hostile user once found wrong without a word, finding by finding; caches that are moved: test_relative_models."""

import accelerate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import hf_posswap as posswap

LONGROPE = "rotary:scaling={rope_type=longrope,short_factor=[1,1,1,1,1,1,1,1],long_factor=[4,4,4,4,4,4,4,4],factor=2}"


@pytest.mark.parametrize("scheme", ["relative:clip=4", "rotary", "sinusoidal"])
@torch.no_grad()
def test_blocks_that_are_offloaded(make_swapped, family, scheme, tokens):
    """Weights that accelerate loads as a module is called, those of positions too."""
    model = make_swapped(family, scheme, "sdpa")
    expected = model(tokens).logits
    model.tie_weights()
    assert torch.equal(accelerate.cpu_offload(model, execution_device=torch.device("cpu"))(tokens).logits, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_a_trace_of_longrope_knows_both_lengths(make_model):
    """What is traced on a short input is right on a long one: frequencies are chosen by its length."""
    model = posswap.swap(make_model("bert", "eager"), LONGROPE, max_positions=96).bert.eval()
    tokens = {n: torch.randint(2, 98, (1, n), generator=torch.Generator().manual_seed(n)) for n in (20, 70)}
    model.config.return_dict = False
    traced = torch.jit.trace(model, tokens[20], check_trace=False)
    for ids in tokens.values():
        assert_close(traced(ids)[0], model(ids)[0], rtol=1e-4, atol=1e-4)
    short = posswap.swap(
        make_model("bert", "eager"), LONGROPE.replace("[4,4,4,4,4,4,4,4]", "[1,1,1,1,1,1,1,1]"), max_positions=96
    )
    assert (short.bert(tokens[70])[0] - model(tokens[70])[0]).abs().max() > 0.01


@pytest.mark.parametrize("scheme", ["learned", "none", "rotary", "relative:clip=4"])
@torch.no_grad()
def test_boolean_masks_of_four_dimensions(make_swapped, family, backend, scheme, tokens):
    """True means attend, with eager attention as with sdpa."""
    model = make_swapped(family, scheme, backend)
    mask = torch.ones_like(tokens)
    mask[1, 14:] = 0
    seen = mask[:, None, None].bool().expand(2, 1, 20, 20)
    seen = seen & torch.ones(20, 20, dtype=torch.bool).tril() if family != "bert" else seen
    given, expected = (model(tokens, attention_mask=one).logits[mask.bool()] for one in (seen, mask))
    assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("fitted", [False, True])
def test_restore_after_a_merged_adapter(make_model, tokens, fitted):
    """A mixture of old positions and merged weights is refused, and given to who asks for it."""
    model = posswap.swap(make_model("bert", "sdpa"), "rotary")
    if fitted:
        posswap.fit(model, [tokens.repeat(4, 1)], reconstruct=1, progress=False)
    tuned = get_peft_model(model, LoraConfig(target_modules=["query", "dense"], init_lora_weights=False))
    merged = tuned.merge_and_unload()
    with pytest.raises(posswap.PosswapError, match="would be a mixture"):
        posswap.restore(merged)
    assert posswap.describe(merged).swapped
    posswap.restore(merged, keep_training=True)
    assert not posswap.describe(merged).swapped


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:Could not find a config")
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapter_of_a_swapped_model_on_a_plain_one(make_model, tokens, tmp_path, task):
    """PEFT puts it there without a word; whatever is done with it next here is an error, and on its own base it is right."""
    model = posswap.swap(make_model("gpt2"), "rotary")
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    options = LoraConfig(target_modules=["c_attn"], task_type=task, fan_in_fan_out=True, init_lora_weights=False)
    adapted = get_peft_model(model, options)
    adapted.save_pretrained(tmp_path / "adapter")
    wrong = PeftModel.from_pretrained(make_model("gpt2"), tmp_path / "adapter")
    for use in (posswap.describe, lambda one: posswap.swap(one, "rotary")):
        with pytest.raises(posswap.PosswapError, match="trained on a swapped model"):
            use(wrong)
    right = PeftModel.from_pretrained(posswap.swap(make_model("gpt2"), "rotary"), tmp_path / "adapter")
    assert posswap.describe(right).swapped
    assert torch.equal(right(tokens).logits, adapted(tokens).logits)


@pytest.mark.parametrize(
    ("family", "scheme", "span"), [("gpt2", "relative:clip=4", None), ("gpt2", "none", 8), ("roberta-decoder", "rotary", None)]
)
def test_continuous_batching(make_model, family, scheme, span):
    """A paged cache shows attention no distances: an error, where there were empty lists. RoBERTa's ids would be padding's."""
    model = posswap.swap(make_model(family, "sdpa"), scheme, span=span)
    with pytest.raises(posswap.PosswapError, match=f"{scheme[:4]}.* cannot use the paged cache of generate_batch"):
        model.generate_batch([[5, 6, 7], [8, 9]])


@torch.no_grad()
def test_an_exported_program_takes_any_batch(make_swapped, tokens):
    """Relative positions leave batch and length as free as rotary ones, in `torch.export` and so in ONNX."""
    model = make_swapped("gpt2", "relative:clip=4", "sdpa", max_positions=64, n_layer=1).base_model
    model.config.use_cache = False
    free = ({0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(model, (tokens,), dynamic_shapes=free, strict=False)
    other = tokens.repeat(2, 2)[:3, :33]
    assert_close(program.module()(other)[0], model(other)[0], rtol=1e-4, atol=1e-4)
