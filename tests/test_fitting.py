"""Fitting a swapped model to its original: what it wins, what it leaves alone, and that a failure leaves no trace."""

import copy
import pickle
import tempfile

import accelerate
import pytest
import torch
from conftest import changes, refused, snapshot
from peft import LoraConfig, get_peft_model
from torch.nn.utils import prune
from transformers import BatchEncoding

import hf_posswap as posswap
from hf_posswap.contract.subject import move
from hf_posswap.fitting import layerwise
from hf_posswap.fitting.fit import fit
from hf_posswap.measure.damage import damage
from hf_posswap.swapping import original

CASES = [
    ("none", "float32", None),
    ("sinusoidal:project=false", "bfloat16", "left"),
    ("relative:clip=4", "float32", None),
    ("relative:clip=4", "float32", "left"),
    ("relative:share_heads=true,values=false", "float32", "right"),
    ("relative:clip=4", "bfloat16", "right"),
    ("rotary", "float32", "left"),
    ("rotary:fraction=0.5,layout=half", "float32", None),
    ("rotary", "bfloat16", "right"),
]


def text(rows: int = 40, length: int = 20, seed: int = 0) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(2, 98, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(side: str | None = None, **options) -> dict[str, torch.Tensor]:
    """Tokens with a mask; every third row is padded by a quarter."""
    ids = text(**options)
    mask = torch.ones_like(ids)
    if side is not None:
        quarter = ids.shape[1] // 4
        mask[::3, slice(quarter) if side == "left" else slice(-quarter, None)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def quick(model, batches=None, **options):
    options = {"steps": 10, "learning_rate": 3e-3, "progress": False, **options}
    return fit(model, text() if batches is None else batches, **options)


def attention_names(model) -> set[str]:
    own = {id(p) for a in model.architecture.self_attentions(model.base_model) for p in a.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def changed(model, before: dict) -> set[str]:
    """Names of weights that differ from a snapshot; nothing else may."""
    found = changes(model, before)
    assert {part for part, _ in found} <= {"weights"}, found
    return {name for _, name in found}


@pytest.mark.parametrize(
    ("family", "scheme", "dtype", "side"),
    [
        *((("bert", "bert-decoder", "gpt2")[(turn + turn // 3) % 3], *case) for turn, case in enumerate(CASES)),
        ("roberta", "relative:clip=4", "float32", "left"),
        ("opt", "rotary", "float32", "right"),
        ("albert", "relative:clip=4", "bfloat16", "right"),
        ("distilbert", "rotary", "float32", None),
        ("biogpt", "rotary", "float32", "left"),
    ],
)
def test_contract(make_model, family, scheme, dtype, side, tmp_path):
    """A fit lowers the damage on other text and changes attention alone; saving keeps it, and restore undoes it exactly."""
    model = make_model(family, "sdpa").to(getattr(torch, dtype))
    plain, wanted = snapshot(model), model(**batch(side)).logits
    posswap.swap(model, scheme)
    model.train().get_input_embeddings().weight.requires_grad_(False)
    model.base_model.get_input_embeddings().eval()
    attention = next(iter(model.architecture.self_attentions(model.base_model)))
    next(attention.parameters()).requires_grad_(False)
    before, other = snapshot(model), [batch(side, seed=1)]
    start = damage(model, original(model), other)
    report = quick(model, batch(side, rows=60))
    assert damage(model, original(model), other).total < start.total and report.after.total < report.before.total
    assert changed(model, before) == attention_names(model)
    model.eval()
    torch.testing.assert_close(original(model)(**batch(side)).logits, wanted, rtol=0, atol=0)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert torch.equal(loaded(**batch(side)).logits, model(**batch(side)).logits)
    if family == "gpt2":  # the others have nothing left to win on random tokens
        quick(model, batch(side, seed=2), learning_rate=1e-3)
    posswap.restore(model)
    model.requires_grad_(True)
    assert changed(model, plain) == set() and torch.equal(model(**batch(side)).logits, wanted)


@pytest.mark.parametrize(("family", "scheme"), [("bert", "relative:clip=4"), ("gpt2", "rotary")])
def test_a_swap_after_a_fit_starts_from_the_original(make_model, family, scheme):
    """Nothing of a fit is left in the next swap; one that fails leaves the fit as it is."""
    model, alone = make_model(family), posswap.swap(make_model(family), scheme)
    plain = snapshot(model)
    quick(posswap.swap(model, "rotary"))
    before = snapshot(model)
    refused("max_positions=3", posswap.swap, model, scheme, max_positions=3)
    assert changed(model, before) == set()
    posswap.swap(model, scheme)
    assert torch.equal(model(text()).logits, alone(text()).logits)
    quick(model)
    quick(alone)
    assert torch.equal(model(text()).logits, alone(text()).logits)
    posswap.restore(model)
    assert changed(model, plain) == set()


def test_training_before_a_fit_is_not_forgotten(make_model):
    """Trained since its swap, a model needs its original from outside, and still refuses another swap afterwards."""
    model = posswap.swap(make_model("gpt2"), "relative:clip=4")
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.add_(0.01)
    trained = model.transformer.h[0].attn.c_attn.weight.clone()
    refused("has changed since it was swapped", quick, model)
    quick(model, original_model=make_model("gpt2"))
    refused("changed since it was swapped", posswap.swap, model, "rotary")
    refused("would be a mixture", posswap.restore, model)
    refused("would be a mixture", posswap.original, model)
    assert torch.equal(posswap.restore(model, keep_training=True).transformer.h[0].attn.c_attn.weight, trained)


def test_copies_of_fitted_models(make_model):
    """A fitted model can still be pickled and copied; each copy restores to the original."""
    model = make_model("gpt2")
    wanted = model(text()).logits
    quick(posswap.swap(model, "rotary"))
    fitted = model(text()).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(text()).logits, fitted)
        assert torch.equal(posswap.restore(twin)(text()).logits, wanted)
    assert torch.equal(model(text()).logits, fitted)


@pytest.mark.parametrize(("scheme", "fits"), [("relative:clip=4", True), ("rotary", False)])
def test_restore_of_pruned_projections(make_model, scheme, fits):
    """Where old weights have no place any more, those before a fit or a balanced basis, restore says so and changes nothing."""
    model = posswap.swap(make_model("bert"), scheme)
    if fits:
        quick(model)
    projection = getattr(model.bert.encoder.layer[1].attention.self, "value" if fits else "query")
    prune.l1_unstructured(projection, "weight", 0.1 if fits else 0)
    before = snapshot(model)
    refused("undo that first", posswap.restore, model)
    assert changed(model, before) == set()
    prune.remove(projection, "weight")
    posswap.restore(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_restore_under_adapters(make_model, family):
    """Adapters around fitted projections: restore finds the weights inside. A fit of wrapped projections is refused."""
    model = make_model(family)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    quick(posswap.swap(model, "rotary"))
    options = {"r": 2, "fan_in_fan_out": family == "gpt2"}
    adapted = get_peft_model(model, LoraConfig(target_modules=["query" if family == "bert" else "c_attn"], **options))
    refused("adapters", quick, adapted)
    posswap.restore(adapted)
    after = {name.replace("base_layer.", ""): value for name, value in model.state_dict().items() if "lora" not in name}
    assert after.keys() == plain.keys() and all(torch.equal(after[name], value) for name, value in plain.items())
    partly = posswap.swap(make_model(family), "relative:clip=4")
    options["target_modules"] = ["value" if family == "bert" else "attn.c_proj"]
    refused("adapters", quick, get_peft_model(partly, LoraConfig(**options)))
    partly = posswap.swap(make_model(family), "relative:clip=4")
    options["target_modules"] = ["intermediate.dense" if family == "bert" else "mlp.c_fc"]  # it would be in the teacher, too
    refused("is new since the swap", quick, get_peft_model(partly, LoraConfig(**options)))


def test_inputs_seed_and_random_state(make_model):
    """Tensors, lists, generators, dicts and encodings of one text give one fit; no global generator moves."""
    ids = text()
    forms = [ids, [ids], iter([ids.int()]), {"input_ids": ids}, [BatchEncoding({"input_ids": ids})]]
    forms += [BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids).float()})]
    models = [posswap.swap(make_model("gpt2"), "relative:clip=4") for _ in range(len(forms) + 1)]
    state = torch.get_rng_state()
    for model, form in zip(models, [*forms, ids], strict=True):
        quick(model, form, seed=int(model is models[-1]))
    assert torch.equal(torch.get_rng_state(), state)
    logits = [model(ids).logits for model in models]
    # 36 rows are one step: only smaller batches come in an order.
    assert all(torch.equal(one, logits[0]) for one in logits)
    model, other = (posswap.swap(make_model("gpt2"), "relative:clip=4") for _ in range(2))
    quick(model, [ids[:10], ids[10:20], ids[20:]]), quick(other, [ids[:10], ids[10:20], ids[20:]], seed=1)
    assert not torch.equal(model(ids).logits, other(ids).logits)


@pytest.mark.parametrize(("family", "share"), [("bert", True), ("bert-decoder", False), ("gpt2", True)])
def test_original(make_model, family, share):
    """The original as a second model: exact before and after a fit, with shared weights or none."""
    model = make_model(family)
    wanted = model(text()).logits
    posswap.swap(model, "rotary")
    attention = attention_names(model)
    for _ in range(2):
        twin = original(model, share_weights=share)
        ours = {name: id(p) for name, p in model.named_parameters() if name not in attention and "position" not in name}
        theirs = {name: id(p) for name, p in twin.named_parameters()}
        assert len(ours) > 10 and all((theirs[name] == one) == share for name, one in ours.items() if name in theirs)
        assert not {id(p) for n, p in model.named_parameters() if n in attention} & set(theirs.values())
        assert torch.equal(twin(text()).logits, wanted) and not any(module.training for module in twin.modules())
        assert share or not any(parameter.requires_grad for parameter in twin.parameters())
        quick(model)


BAD_TEXT = {
    "beyond the vocabulary": (lambda: text() + 2, "are 4 to 99, of 99 tokens: use the model's tokenizer"),
    "negative": (lambda: text() - 50, "use the model's tokenizer"),
    "floats": (lambda: text().float(), "must be int64 or int32"),
    "one token": (lambda: [{"input_ids": text(), "attention_mask": (torch.arange(20) < 1) | text() * 0}], "is one token"),
    "one row": (lambda: text()[0], "shape"),
    "no rows": (lambda: text()[:0], "shape"),
    "too long": (lambda: text(20, 33), "positions for 32.*cut the batches, or swap with max_positions=33"),
    "empty": (list, "no batches"),
    "string": (lambda: "the cat sat", "token ids"),
    "strings": (lambda: ["the cat sat"], "pass tokenizer="),
    "number": (lambda: 5, "iterable"),
    "keys": (lambda: {"input_ids": text(), "labels": text()}, "keys.*labels.*give input_ids"),
    "no ids": (lambda: {"attention_mask": text()}, "give input_ids"),
    "lists": (lambda: {"attention_mask": text(), "input_ids": text().tolist()}, "tensors"),
    "mask of another shape": (lambda: {"input_ids": text(), "attention_mask": text()[:, 1:]}, "one shape"),
    "additive mask": (lambda: {"input_ids": text(), "attention_mask": -1e4 * (text() > 50)}, "0 where there is padding"),
    "padding": (lambda: torch.where(torch.arange(20) < 9, text(), 0), "padding .token 0.*would count as text: give dicts"),
    "ends of text": (lambda: torch.where(torch.arange(20) < 9, text(), 98), "padding .token 98.*would count as text"),
    "masked row": (lambda: {"input_ids": text(), "attention_mask": text() * 0}, "leave that row"),
    "types": (lambda: {"input_ids": text(), "token_type_ids": text()}, "token_type_ids must be integers from 0 to 1"),
    "types of a mask": (lambda: {"input_ids": text(), "token_type_ids": text() > 50}, "int64 or int32, not torch.bool"),
    "too few": (lambda: text(3), "too few"),
    "one sequence": (lambda: [text(1, 32)], "too few"),
    "copies of it": (lambda: text(1, 32).repeat(40, 1), "0 tokens to fit on in 4 sequences, less copies"),
    "hardly anything else": (lambda: torch.where(text(40) < 15, text(40), 7), "three quarters of the text are token 7"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text(make_model, name):
    """Text that is none of this model is refused by its name, and nothing changes."""
    make, says = BAD_TEXT[name]
    model, teacher = posswap.swap(make_model("bert"), "relative:clip=4").train(), make_model("bert").train()
    before = snapshot(model), snapshot(teacher)
    for given in (None, teacher):
        refused(says, quick, model, make(), original_model=given)
    assert changed(model, before[0]) == changed(teacher, before[1]) == set()


def spoil(model):
    with torch.no_grad():
        next(reversed(list(model.parameters())))[0] = float("nan")
    return model


def dispatched(model, device_map=None):
    """As accelerate lays it out, here all on the CPU."""
    return accelerate.dispatch_model(model, device_map or {"": "cpu"}, main_device="cpu", force_hooks=True)


BAD_CALLS = {
    "no rate": (None, {"learning_rate": 0.0}, "a number above 0"),
    "rate as text": (None, {"learning_rate": "1e-3"}, "a number above 0"),
    "not swapped": (posswap.restore, {}, "call posswap.swap"),
    "negative": (None, {"steps": -1}, "0 or more"),
    "float": (None, {"steps": 1.5}, "0 or more"),
    "nan": (spoil, {}, "NaN"),
    "nan in the original": (None, {"original_model": lambda make: spoil(make("gpt2"))}, "NaN"),
    "family": (None, {"original_model": lambda make: make("bert")}, "is bert .*pass what it was swapped from"),
    "size": (None, {"original_model": lambda make: make("gpt2", n_layer=1)}, "pass what it was"),
    "seed": (None, {"original_model": lambda make: make("gpt2", seed=1)}, r"another model .*\(correlation -?0.0"),
    "part": (lambda model: model.transformer, {"original_model": lambda make: make("gpt2").transformer}, "the whole model"),
    "cast": (lambda model: model.bfloat16(), {}, "fit right after the swap"),
    "no closed form": (lambda model: posswap.swap(model, "none"), {"steps": 0}, "give steps a number"),
    "dispatched": (dispatched, {}, "original_model="),
    "another thing": (lambda model: torch.nn.Linear(2, 2), {}, "pass a model of transformers"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.filterwarnings("ignore:.*dispatch")
def test_bad_calls(make_model, name, tmp_path, monkeypatch):
    """A fit that cannot be says what to do, and neither changes nor leaves anything."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    prepare, options, says = BAD_CALLS[name]
    model = posswap.swap(make_model("gpt2"), "rotary")
    target = prepare(model) if prepare else model
    options = {key: value(make_model) if callable(value) else value for key, value in options.items()}
    before = snapshot(model)
    refused(says, quick, target, **options)
    assert changed(model, before) == set() and list(tmp_path.iterdir()) == []


def test_what_does_not_help_is_undone(make_model, monkeypatch):
    """Steps that make a layer worse are not kept, and a fit that helps no layer changes nothing and says so."""
    monkeypatch.setattr("hf_posswap.schemes.rotary.RotaryPositions.solve", lambda *_: None)
    model = posswap.swap(make_model("gpt2"), "rotary")
    before = snapshot(model)
    with pytest.warns(UserWarning, match="was undone.*more text"):
        report = quick(model, learning_rate=1e3)
    assert changed(model, before) == set() and posswap.describe(model).can_restore
    assert report.after == report.before and not any(layer.reconstructed or layer.kept for layer in report.layers)
    assert "(no steps)" in str(report)
    report = quick(model)
    assert report.after.total < report.before.total and all(layer.reconstructed for layer in report.layers)


def test_a_smaller_rate_is_tried(make_model, monkeypatch):
    """Where the given rate makes a layer worse, a tenth of it is tried before the layer is left as it was."""
    rates, inner = [], layerwise.Walk._reconstruct

    def watched(self, stage, attentions, steps, rate, bar):
        rates.append(rate)
        return inner(self, stage, attentions, steps, 1e3 if len(rates) == 1 else rate, bar)

    monkeypatch.setattr(layerwise.Walk, "_reconstruct", watched)
    report = quick(posswap.swap(make_model("gpt2"), "rotary"))
    assert rates == pytest.approx([3e-3, 3e-4, 3e-3]) and all(layer.reconstructed for layer in report.layers)


def test_nothing_to_fit(make_model):
    """The original's own table needs no fit: the report says so, nothing changes."""
    model = posswap.swap(make_model("gpt2"), "learned")
    before = snapshot(model)
    report = quick(model)
    assert report.before == report.after and report.before.total < 1e-7 and report.layers == ()
    assert "the swap had lost nothing" in str(report)
    assert changed(model, before) == set()


@pytest.mark.parametrize(("dtype", "call"), [("float32", 1), ("bfloat16", 9), ("float32", 20)])
def test_an_interrupt_undoes_everything(make_model, call, dtype, tmp_path, monkeypatch):
    """An interrupt leaves no trace wherever it comes, and the next fit works."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make = layerwise.Walk._compare
    model = posswap.swap(make_model("bert").to(getattr(torch, dtype)), "relative:clip=4")
    before, calls = snapshot(model), []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return make(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(layerwise.Walk, "_compare", interrupted)
        quick(model)
    assert len(calls) == call and changed(model, before) == set() and list(tmp_path.iterdir()) == []
    quick(model)
    assert list(tmp_path.iterdir()) == []


def test_inside_inference_mode(make_model):
    """A fit inside no_grad works; inside inference_mode, which allows no gradients, it is refused."""
    model = posswap.swap(make_model("gpt2"), "rotary")
    with torch.inference_mode(), pytest.raises(posswap.PosswapError, match="outside"):
        quick(model)
    with torch.no_grad():
        quick(model)


def test_loaded_from_a_swapped_checkpoint(make_model, tmp_path):
    """A loaded model is fitted as the swapped model itself, if its original is given, which stays as it is."""
    model, teacher = posswap.swap(make_model("gpt2"), "rotary"), make_model("gpt2").train()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    before = snapshot(loaded), snapshot(teacher)
    remedy = "Load the original checkpoint and pass it as original_model="
    refused(remedy, quick, loaded)
    refused(f"is this swapped model itself.*{remedy}", quick, loaded, original_model=loaded)
    refused(f"this swapped model again.*{remedy}", quick, loaded, original_model=type(model).from_pretrained(tmp_path))
    assert changed(loaded, before[0]) == set()
    quick(loaded, original_model=teacher), quick(model)
    assert changed(teacher, before[1]) == set() and torch.equal(loaded(text()).logits, model(text()).logits)
    move(list(teacher.parameters()), 0.1)  # as if trained further, in half precision
    quick(loaded, original_model=teacher.bfloat16())


@pytest.mark.parametrize(
    "device_map", [{"": "cpu"}, {"transformer.wte": "cpu", "transformer": "cpu", "lm_head": "cpu"}], ids=len
)
@pytest.mark.filterwarnings("ignore:.*dispatch")
def test_dispatched_models(make_model, device_map):
    """With accelerate's hooks a fit gives what it gives without; the original must be given."""
    model, plain = (posswap.swap(make_model("gpt2", "sdpa"), "relative:clip=4") for _ in range(2))
    quick(dispatched(model, device_map), original_model=dispatched(make_model("gpt2", "sdpa"))), quick(plain)
    assert torch.equal(model(text()).logits, plain(text()).logits)
