"""Uses that once gave a silent wrong answer: each is refused now, or right."""

import copy
import dataclasses

import accelerate
import pytest
import torch
import transformers
from conftest import refused
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

import hf_posswap as posswap


def test_part_of_a_swapped_model(make_model, tmp_path):
    """The inner model of a swapped one is not swapped to something that the outer config does not name."""
    model = posswap.swap(make_model("bert"), "none")
    refused("swap the whole model", posswap.swap, model.bert, "rotary")
    posswap.restore(model)
    posswap.swap(model.bert, "rotary")  # nothing contradicts it now
    model = posswap.swap(make_model("bert"), "none")
    model.save_pretrained(tmp_path)
    refused("swap the whole model", posswap.swap, transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).bert, "rotary")


LONGROPE = "rotary:scaling={rope_type=longrope,short_factor=[1,1,1,1,1,1,1,1],long_factor=[4,4,4,4,4,4,4,4],factor=2}"
OF_ONE_LENGTH = [f"ladder:rung={rung},combine=concatenate" for rung in ("normalised", "binary")]
OF_ONE_LENGTH.append(LONGROPE.replace(",factor=2", ""))


LENGTHS = [(scheme, 32) for scheme in ("relative:clip=4", "rotary", "sinusoidal", "none")]
LENGTHS += [(scheme, 64) for scheme in (LONGROPE, *OF_ONE_LENGTH)]


@pytest.mark.parametrize(("scheme", "length"), LENGTHS)
def test_the_same_scheme_on_a_loaded_model(make_swapped, tokens, tmp_path, scheme, length):
    """For longer input it keeps what was learned, and changes nothing at the old length; another length is refused where a
    learned rung belongs to its N, and a longrope without a factor to the longest input.
    """
    auto = transformers.AutoModelForMaskedLM if length == 32 else transformers.AutoModelForCausalLM
    model, load = make_swapped("bert" if length == 32 else "gpt2", scheme, max_positions=length), auto.from_pretrained
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, attn_implementation="eager").eval()
    if scheme in OF_ONE_LENGTH:
        says, longer = "was made for 64 positions", {"max_position_embeddings": 128}
        refused(says, posswap.swap, loaded, scheme, max_positions=128)
        refused(says, load, tmp_path, error=posswap.CheckpointError, **longer)
    longest = length if scheme in OF_ONE_LENGTH else 2 * length
    assert torch.equal(posswap.swap(loaded, scheme, max_positions=longest)(tokens).logits, model(tokens).logits)
    assert loaded(tokens.repeat(1, longest // 20)).logits.shape[1] == longest // 20 * 20


@pytest.mark.parametrize("extend", ["tile", "interpolate"])
def test_an_extended_table_of_a_loaded_model_keeps_all_rows(make_swapped, tokens, tmp_path, extend):
    """Rows behind the trained length have been learned, too: another span, or other positions near them, start from all."""
    scheme, text = f"learned:extend={extend}", torch.cat([tokens] * 3, dim=1)
    model = make_swapped("bert", scheme, "sdpa", max_positions=60)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    for options in ({}, {"span": 60}):
        assert_close(posswap.swap(loaded, scheme, **options)(text).logits, model(text).logits)
    posswap.swap(loaded, "none")
    assert_close(loaded.bert.embeddings.position_embeddings.mean, model.bert.embeddings.position_embeddings.weight.mean(0))


def test_back_to_the_scheme_that_was_loaded(make_swapped, tokens, tmp_path):
    """Swapped away and back, a loaded rotary encoder is as it was: its projections are balanced once only."""
    model = make_swapped("bert", "rotary")
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    posswap.swap(loaded, "relative:clip=4")
    posswap.swap(loaded, "rotary")
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    query = loaded.bert.encoder.layer[0].attention.self.query.weight.clone()
    posswap.swap(loaded, "rotary:theta=500")
    assert torch.equal(loaded.bert.encoder.layer[0].attention.self.query.weight, query)


def test_schemes_that_could_not_be_loaded_again(make_model):
    """A scheme is refused before the swap if no saved model of it could be read, or if it would load as a built-in one."""
    shared = {"__module__": __name__, "summary": "no positions"}
    wrong = {"must be a dataclass": shared | {"name": "a:b"}, "must be a dataclass, .* with a `name`": shared}
    for option in ("span", "trained_positions", "base_model"):
        wrong[f"under the name '{option}'"] = shared | {"name": "mine", "__annotations__": {option: int}, option: 3}
    for says, own in wrong.items():
        scheme = dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (posswap.Scheme,), own))
        refused(says, posswap.swap, make_model("gpt2"), scheme())
    undecorated = type("Mine", (posswap.Scheme,), shared | {"name": "mine"})
    refused("must be a dataclass", posswap.swap, make_model("gpt2"), undecorated())
    heir = dataclasses.dataclass(frozen=True, kw_only=True)(type("Mine", (posswap.Rotary,), {"__annotations__": {}}))
    refused("a name of its own", posswap.swap, make_model("gpt2"), heir())


def test_scaling_is_copied(make_model, tokens):
    """A dict that is changed after the swap does not change the model."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    model = posswap.swap(make_model("gpt2"), posswap.Rotary(scaling=scaling))
    expected = model(tokens).logits
    scaling["factor"] = 8.0
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("position_ids", torch.arange(40)[None], "do not fit an input of 20 tokens"),
        ("position_ids", torch.ones(1, 20).bool(), "do not fit an input of 20 tokens"),
        ("attention_mask", torch.ones(20, 20).tril().long()[None, None], "boolean or floating point"),  # it would be added
    ],
)
@pytest.mark.parametrize(
    ("scheme", "backend", "span"), [("relative:clip=4", "sdpa", None), ("alibi", "sdpa", 8), ("rotary", "eager", None)]
)
def test_inputs_that_do_not_fit(make_swapped, scheme, backend, span, name, value, says, tokens):
    """Position ids of a wrong length or type, and 4D masks of integers, are an error."""
    refused(says, make_swapped("gpt2", scheme, backend, max_positions=64, span=span), tokens[:1], **{name: value})


@pytest.mark.parametrize("scheme", ["rotary", "relative:clip=4", "alibi", "buckets", "self-extend:near=4,group=2"])
def test_masks_that_are_too_wide(make_swapped, scheme, tokens):
    """They are an error, as in transformers: only the first columns were read, of a mask of 3 dimensions those of row 0."""
    model = make_swapped("gpt2", scheme, "sdpa")
    for shape in ((2, 24), (2, 20, 20), (2, 1, 20, 24)):
        mask = torch.ones(shape, dtype=torch.bool).tril()
        refused("must match the (existing )?size", model, tokens, attention_mask=mask, use_cache=False, error=RuntimeError)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")  # in forward-mode derivatives
@pytest.mark.parametrize("scheme", ["alibi", "buckets", "relative:clip=3"])
def test_second_derivatives_are_refused(make_swapped, scheme, tokens):
    """The written-out backward passes have none; where `torch.func` asks, attention is made of torch's own operations."""
    model = make_swapped("bert", scheme, "sdpa", max_positions=64)
    states = model.get_input_embeddings()(tokens).detach().requires_grad_()

    def loss(states):
        return model(inputs_embeds=states).logits[..., 5].sum()

    refused("first derivatives only.*'eager'", torch.autograd.grad, loss(states), states, create_graph=True)
    (gradient,) = torch.autograd.grad(loss(states), states)
    _, along = torch.func.jvp(loss, (states.detach(),), (states.detach(),))
    assert_close(along, (gradient * states).sum(), rtol=1e-3, atol=1e-3)
    for way in (torch.func.grad, torch.func.jacrev):
        assert_close(way(loss)(states.detach()), gradient, rtol=1e-4, atol=1e-5)
    assert_close(torch.vmap(torch.func.grad(loss))(states.detach()[:, None])[:, 0], gradient, rtol=1e-4, atol=1e-5)
    model.set_attn_implementation("eager")
    (eager,) = torch.autograd.grad(loss(states), states, create_graph=True)
    assert_close(eager, gradient, rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(eager.sum(), states)[0].isfinite().all()


def test_averages_of_a_model(make_swapped, tmp_path):
    """An average over training steps, buffers too, is saved as the scheme's: its digest is no number to be averaged."""
    model = make_swapped("bert", "rotary")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        average.update_parameters(model)
    average.module.save_pretrained(tmp_path)
    transformers.AutoModelForMaskedLM.from_pretrained(tmp_path)
    model.load_state_dict(average.module.state_dict())


def test_averages_of_state_dicts(make_swapped, tmp_path):
    """Bytes wrap in (a + b) / 2: both errors say so, and what they advise works. An average of shares needs no advice."""
    one, other = (make_swapped("bert", "rotary", seed=seed) for seed in (1, 2))
    pairs = {name: (value, other.state_dict()[name]) for name, value in one.state_dict().items()}
    summed = {name: (a + b) / 2 for name, (a, b) in pairs.items()}
    refused("average floating-point tensors alone", one.load_state_dict, summed, error=RuntimeError)
    one.save_pretrained(tmp_path, state_dict=dict(summed))
    refused("average floating-point tensors alone", type(one).from_pretrained, tmp_path)
    one.load_state_dict({name: (a + b) / 2 if a.is_floating_point() else a for name, (a, b) in pairs.items()})
    one.load_state_dict({name: 0.5 * a + 0.5 * b for name, (a, b) in pairs.items()})


def test_head_with_a_config_of_its_own(make_model):
    """A composite model gives parts copies of their config: the new length reaches all of them."""
    model = make_model("gpt2")
    model.config = copy.deepcopy(model.config)
    inner = model.transformer.config
    posswap.swap(model, "rotary", max_positions=64)
    assert model(torch.ones(1, 50, dtype=torch.long)).logits.shape[1] == 50
    posswap.restore(model)
    assert model.transformer.config is inner and model.config is not inner


SPECIAL = {  # what is done to the query and key projections of a BERT's first two layers
    "parametrized": lambda first, second: weight_norm(first.query),
    "pruned": lambda first, second: prune.random_unstructured(first.query, "weight", amount=0.0),
    "shared in a layer": lambda first, second: setattr(first.key, "weight", first.query.weight),
    "shared by layers": lambda first, second: setattr(second.key, "weight", first.key.weight),  # it would be turned twice
}


@pytest.mark.parametrize("name", SPECIAL)
def test_projections_that_are_not_plain(make_model, tokens, name):
    """A balanced basis needs weights of its own to write to: others are left alone, and the caller is warned."""
    model = make_model("bert")
    SPECIAL[name](*(layer.attention.self for layer in model.bert.encoder.layer))
    assert not posswap.describe(model).swapped
    expected, before = model(tokens).logits, model.bert.encoder.layer[0].attention.self.query.weight.clone()
    with pytest.warns(UserWarning, match="parametrized, pruned or shared") as seen:
        posswap.swap(model, "rotary")
    assert seen[0].filename == __file__
    assert torch.equal(model.bert.encoder.layer[0].attention.self.query.weight, before)
    refused("adapters or parametrizations", posswap.fit, model)
    assert_close(posswap.restore(model)(tokens).logits, expected)


def test_a_part_of_another_model(make_model):
    """The language model of a BLIP-2 is refused whatever else was imported: the whole would not load again."""
    text = make_model("opt").config.to_dict()
    small = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 2}
    parts = {"vision_config": small | {"image_size": 28, "patch_size": 14}, "text_config": text}
    parts["qformer_config"] = small | {"encoder_hidden_size": 32}
    whole = transformers.Blip2ForConditionalGeneration(transformers.Blip2Config(**parts, num_query_tokens=4))
    says = "a part of Blip2ForConditionalGeneration.*swap or restore the parts first"
    refused(says, posswap.swap, whole.language_model, "rotary", error=posswap.UnsupportedModelError)


def test_inference_tensors_are_refused(make_model):
    """Models that cannot be changed are refused before anything happens."""
    with torch.inference_mode():
        frozen = make_model("bert")
        refused("swap outside", posswap.swap, frozen, "rotary")
    refused("load it outside", posswap.swap, frozen, "rotary")


@pytest.mark.parametrize("scheme", ["relative:clip=4", "rotary", "sinusoidal"])
@torch.no_grad()
def test_blocks_that_are_offloaded(make_swapped, family, scheme, tokens):
    """Weights that accelerate loads as a module is called, those of positions too."""
    model = make_swapped(family, scheme, "sdpa")
    expected = model(tokens).logits
    model.tie_weights()
    told = posswap.describe(model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model(tokens).logits, expected) and posswap.describe(model) == told


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
    scheme = LONGROPE.replace("[4,4,4,4,4,4,4,4]", "[1,1,1,1,1,1,1,1]")
    short = posswap.swap(make_model("bert", "eager"), scheme, max_positions=96)
    assert (short.bert(tokens[70])[0] - model(tokens[70])[0]).abs().max() > 0.01


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("fitted", [False, True])
def test_restore_after_a_merged_adapter(make_model, tokens, fitted):
    """A mixture of old positions and merged weights is refused, and given to who asks for it."""
    plain, model = make_model("bert", "sdpa"), posswap.swap(make_model("bert", "sdpa"), "rotary")
    if fitted:
        posswap.fit(model, torch.randint(2, 98, (40, 20)), steps=5, progress=False)
    tuned = get_peft_model(model, LoraConfig(target_modules=["query", "dense"], init_lora_weights=False))
    for share in (True, False):  # the original has no adapters
        twin = posswap.original(tuned, share_weights=share)
        assert type(twin) is type(plain) and torch.equal(twin(tokens).logits, plain(tokens).logits)
    merged = tuned.merge_and_unload()
    refused("would be a mixture", posswap.restore, merged)
    rounded = posswap.swap(make_model("bert"), "rotary").half().float()
    refused("rounded by a cast to half precision and back", posswap.restore, rounded)
    assert posswap.describe(merged).swapped
    posswap.restore(merged, keep_training=True)
    assert not posswap.describe(merged).swapped


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:Could not find a config")
@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_an_adapter_of_a_swapped_model_on_a_plain_one(make_model, tokens, tmp_path, task):
    """PEFT puts it there without a word; whatever is done with it next here is an error, and on its own base it is right."""
    model = posswap.swap(make_model("gpt2"), "rotary")
    model.save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager").eval()
    options = LoraConfig(target_modules=["c_attn"], task_type=task, fan_in_fan_out=True, init_lora_weights=False)
    adapted = get_peft_model(model, options)
    adapted.save_pretrained(tmp_path / "adapter")
    wrong = PeftModel.from_pretrained(make_model("gpt2"), tmp_path / "adapter")
    for use in (posswap.describe, lambda one: posswap.swap(one, "rotary")):
        refused("trained on a swapped model", use, wrong)
    right = PeftModel.from_pretrained(posswap.swap(make_model("gpt2"), "rotary"), tmp_path / "adapter")
    assert posswap.describe(right).swapped
    assert torch.equal(right(tokens).logits, adapted(tokens).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:the new positions train")
def test_an_adapter_of_before_the_swap(make_model, tmp_path):
    """What it saves names the plain model no more, onto which PEFT's own loader would put it; restored, it does again."""
    make_model("gpt2").save_pretrained(tmp_path)
    options = LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    adapted = get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path), options)
    for change, name in ((lambda one: posswap.swap(one, "rotary"), None), (posswap.restore, str(tmp_path))):
        change(adapted).save_pretrained(tmp_path / "adapter")
        assert LoraConfig.from_pretrained(tmp_path / "adapter").base_model_name_or_path == name


@pytest.mark.parametrize(
    ("family", "scheme", "span"), [("gpt2", "relative:clip=4", None), ("gpt2", "none", 8), ("roberta-decoder", "rotary", None)]
)
def test_continuous_batching(make_model, family, scheme, span):
    """A paged cache shows attention no distances: an error, where there were empty lists. RoBERTa's ids would be padding's."""
    model = posswap.swap(make_model(family, "sdpa"), scheme, span=span)
    refused(f"{scheme[:4]}.* cannot use the paged cache of generate_batch", model.generate_batch, [[5, 6, 7], [8, 9]])


@pytest.mark.parametrize("scheme", ["rotary", "sinusoidal"])
def test_continuous_batching_generates(make_model, scheme):
    """Where the paged cache serves, it writes what `generate` does."""
    model = posswap.swap(make_model("gpt2", "sdpa"), scheme)
    prompts, length = [[5, 6, 7], [8, 9, 10, 11, 12]], 6
    config = transformers.GenerationConfig(max_new_tokens=length, do_sample=False, eos_token_id=98, pad_token_id=0)
    small = transformers.ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=64)  # the default: most of a machine's memory
    written = model.generate_batch(prompts, generation_config=config, continuous_batching_config=small)
    found = [one.generated_tokens for one in written.values()]
    expected = [model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :] for prompt in prompts]
    assert found == [one.tolist() for one in expected] and len(set(map(tuple, found))) == 2


def test_a_length_that_is_written_into_the_config(make_model, tokens, tmp_path):
    """A model whose config has got another length neither runs nor is saved, can be swapped anew, and is restored."""
    says = "config was changed: its length and padding id .* Set it back; for another length call posswap.swap"
    for family in ("bert", "gpt2", "distilbert", "roberta"):
        plain, model = make_model(family), make_model(family)
        plain.config.sinusoidal_pos_embds = model.config.sinusoidal_pos_embds = True  # a field of DistilBERT's that a swap sets
        posswap.swap(model, "self-extend", max_positions=64)
        before = model(tokens).logits
        written = [("max_position_embeddings", 300), ("pad_token_id", 7), ("pad_token_id", None)]
        for field, value in written[: 3 if family == "roberta" else 1]:
            old = getattr(model.config, field)
            setattr(model.config, field, value)
            folder = tmp_path / family
            assert posswap.describe(model).max_positions == 64
            for what, given in ((model, tokens), (model.save_pretrained, folder)):
                refused(says, what, given)
            setattr(model.config, field, old)
        assert not folder.exists()
        model.config.max_position_embeddings = 300  # GPT-2 has another name for it, and takes this one, too
        posswap.swap(model, "self-extend", max_positions=64)
        assert torch.equal(model(tokens).logits, before)
        model.config.max_position_embeddings, model.config.pad_token_id = 300, None
        posswap.restore(model)
        assert model.config.to_dict() == plain.config.to_dict() | {"pad_token_id": None}
        model.config.pad_token_id = plain.config.pad_token_id
        assert torch.equal(model(tokens).logits, plain(tokens).logits)


def test_a_length_that_was_written_before_the_swap(make_model, tmp_path):
    """A swap refuses a config that says another length than the table's, or than that of a loaded model."""
    model = make_model("bert")
    model.config.max_position_embeddings = 300
    refused("the config says 300 positions, and the table has 32: let the config", posswap.swap, model, "learned")
    model.config.max_position_embeddings = 32
    posswap.swap(model, "rotary", max_positions=64, warm_start=False).save_pretrained(tmp_path)
    model.config.max_position_embeddings = 300
    refused("config was changed", posswap.save_delta, model, tmp_path / "delta")
    loaded = type(model).from_pretrained(tmp_path)
    loaded.config.max_position_embeddings = 300
    refused("config was changed", posswap.swap, loaded, "rotary", max_positions=300)
    model.config.max_position_embeddings = 64
    model.config = copy.deepcopy(model.config)  # a head with a config of its own
    model.config.max_position_embeddings = 300
    refused("config was changed", model.save_pretrained, tmp_path / "head")


def test_inside_autocast(make_model):
    """Copies of weights that autocast keeps are not used after a swap, a fit or a restore, and neither rounds its results."""
    model, twin, seen = make_model("bert"), make_model("bert"), []
    ids = torch.randint(2, 98, (40, 20), generator=torch.Generator().manual_seed(0))
    few = {"steps": 10, "learning_rate": 3e-3, "progress": False}
    swap, fit = (lambda model: posswap.swap(model, "rotary")), (lambda model: posswap.fit(model, ids, **few))
    steps = [lambda model: model, swap, fit, posswap.restore]
    with torch.autocast("cpu", torch.bfloat16):
        for step in steps:
            step(model)
            seen.append(model(ids[:2]).logits)
    for step, found in zip(steps, seen, strict=True):
        step(twin)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(found, twin(ids[:2]).logits)
