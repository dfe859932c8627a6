"""Which way relative positions take inside a model, and that positions are worked out once for all layers."""

import inspect

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import hf_posswap as posswap
from hf_posswap.schemes import relative, rotary

SCHEME = posswap.Relative(clip=4)


@pytest.fixture
def taken(monkeypatch) -> list[tuple[str, tuple | None]]:
    """The way that each layer took, with the shape of the key mask."""
    ways = []
    fast, slow = relative.attend, relative.attend_by_index

    def by_window(*arguments, **options):
        key_mask = inspect.signature(fast).bind(*arguments, **options).arguments["key_mask"]
        ways.append(("window", None if key_mask is None else tuple(key_mask.shape)))
        return fast(*arguments, **options)

    def by_index(*arguments, **options):
        ways.append(("index", None))
        return slow(*arguments, **options)

    monkeypatch.setattr(relative, "attend", by_window)
    monkeypatch.setattr(relative, "attend_by_index", by_index)
    return ways


def padded(side: str) -> torch.Tensor:
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, : 7 if side == "left" else None] = 0 if side == "left" else 1
    if side == "right":
        mask[1, 13:] = 0
    return mask


@pytest.mark.parametrize("family", ["bert", "bert-decoder", "gpt2"])
def test_positions_in_order_take_the_window(make_swapped, taken, tokens, family):
    """Without a mask, padded on either side, with positions that start anywhere: no mask of size Q x K anywhere."""
    model = make_swapped(family, SCHEME, "sdpa")
    left = padded("left")
    shifted = torch.arange(3, 23)[None]
    from_mask = (left.cumsum(-1) - 1).clamp(min=0)
    options = {"use_cache": False} if family != "bert" else {}
    for inputs, shape in (
        ({}, None),
        ({"attention_mask": torch.ones(2, 20)}, (2, 20)),
        ({"attention_mask": padded("right")}, (2, 20)),
        ({"attention_mask": left}, (2, 20)),
        ({"attention_mask": left, "position_ids": from_mask}, (2, 20)),
        ({"position_ids": shifted}, None),
    ):
        taken.clear()
        model(tokens, **inputs, **options)
        assert taken == [("window", shape)] * 2


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_everything_else_goes_by_index(make_swapped, taken, tokens, family):
    """Gaps, packed documents, a mask for each pair and eager attention go by index."""
    model, eager = make_swapped(family, SCHEME, "sdpa"), make_swapped(family, SCHEME, "eager")
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None]
    pairs = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    gaps = padded("left").cumsum(-1)
    for asked, inputs in (
        (model, {"position_ids": 1 + torch.arange(20)[None].flip(1)}),
        (model, {"position_ids": packed}),
        (model, {"position_ids": gaps}),  # the pads are not masked, so their positions count
        (model, {"attention_mask": pairs}),
        (eager, {}),
        (eager, {"attention_mask": padded("right")}),
    ):
        taken.clear()
        asked(tokens, **inputs)
        assert taken == [("index", None)] * 2


@torch.no_grad()
def test_generation_takes_the_window(make_swapped, taken, tokens):
    """Left-padded prompts with a growing cache; a static cache is longer than what it holds."""
    model = make_swapped("gpt2", SCHEME, "sdpa")
    model.generation_config.eos_token_id = None
    mask = padded("left")
    model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=4)
    assert taken == [("window", (2, 20 + step)) for step in range(4) for _ in range(2)]
    taken.clear()
    cache = StaticCache(config=model.config, max_cache_len=29)
    expected = model(tokens, use_cache=False).logits
    parts = [model(part, past_key_values=cache).logits for part in tokens.split((12, 1, 7), dim=1)]
    assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert {way for way, _ in taken} == {"window"}


@torch.no_grad()
def test_attention_masks_of_all_kinds_agree(make_swapped, tokens):
    """Padding as two dimensions, four dimensions, boolean and additive, in both ways: the same states of real tokens."""
    model, eager = make_swapped("bert", SCHEME, "sdpa"), make_swapped("bert", SCHEME, "eager")
    mask = padded("right")
    pairs = mask.bool()[:, None, None].expand(2, 1, 20, 20)
    additive = torch.zeros(2, 1, 20, 20).masked_fill(~pairs, torch.finfo(torch.float32).min)
    outputs = [
        asked(tokens, attention_mask=m).logits for asked in (model, eager) for m in (mask, mask.float(), pairs, additive)
    ]
    for output in outputs[1:]:
        assert_close(output[mask.bool()], outputs[0][mask.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["rotary", "relative:clip=4"])
def test_positions_are_worked_out_once_for_all_layers(make_swapped, monkeypatch, tokens, scheme):
    """One call of `prepare` for a forward of two layers; angles are computed nowhere else."""
    model = make_swapped("bert", scheme, "sdpa")
    kind = rotary.RotaryPositions if scheme == "rotary" else relative.RelativePositions
    calls = {"prepare": 0, "angles": 0}

    def count(name):
        original = getattr(kind, name)

        def counted(*arguments, **options):
            calls[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(kind, name, counted)

    count("prepare")
    if scheme == "rotary":
        count("angles")
    model(tokens)
    assert calls == {"prepare": 1, "angles": int(scheme == "rotary")}


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_formulas_agree(layout, dtype):
    """The form for eager mode, that for the compiler, and odd strides turn alike, and so do their gradients."""
    torch.manual_seed(0)
    geometry = posswap.schemes.Geometry(hidden_size=14, num_heads=2, head_dim=7, max_positions=9, trained_positions=9)
    module = posswap.Rotary(layout=layout, fraction=6 / 7, theta=50).attention_module(geometry)
    slots = torch.arange(9)[None]
    states = torch.randn(2, 9, 2, 7, dtype=dtype).transpose(1, 2).requires_grad_()
    eager = module.prepare(slots, slots, 9, None)
    assert [tensor.is_complex() for tensor in eager] == ([True] if layout == "interleaved" else [False, False])
    compiled = module.angles(slots, 9)
    grad = torch.randn(2, 2, 9, 7, dtype=dtype)
    results = []
    for shared in (eager, compiled):
        turned = module.rotate(states, shared)
        assert turned.dtype == dtype
        results.append((turned, *torch.autograd.grad(turned, states, grad)))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs)


def live_peak(model, tokens) -> int:
    """The most bytes of tensors that are alive at once in a training step."""
    model(tokens).logits.sum().backward()  # gradients exist from here on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(tokens).logits.sum().backward()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_memory_of_a_training_step(make_model):
    """Rotary needs what the original needs, relative little more; attention by index needs several times as much."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024, "max_position_embeddings": 1024}
    tokens = torch.randint(2, 98, (1, 1024))
    peaks = {}
    for scheme, backend in ((None, "sdpa"), ("rotary", "sdpa"), ("relative", "sdpa"), ("relative", "eager")):
        model = make_model("bert", backend, **sizes)
        if scheme:
            posswap.swap(model, scheme, warm_start=False)
        peaks[scheme, backend] = live_peak(model, tokens)
    original = peaks[None, "sdpa"]
    assert original > 20e6
    assert peaks["rotary", "sdpa"] < 1.05 * original
    assert peaks["relative", "sdpa"] < 1.2 * original
    assert peaks["relative", "eager"] > 2.5 * original


# -- what a hostile tester found: positions that are lost, and masks that are not seen -------------------------------


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_a_cache_that_the_model_makes_knows_its_positions(make_swapped, tokens, backend):
    """The first call without a cache, shifted and left-padded; then a step with what it returned."""
    model = make_swapped("gpt2", SCHEME, backend)
    mask = padded("left")
    shifted = torch.arange(5, 25)[None]
    from_mask = (mask.cumsum(-1) - 1).clamp(min=0)
    for positions, given in ((shifted, None), (from_mask, mask)):
        expected = model(tokens, position_ids=positions, attention_mask=given, use_cache=False).logits[:, -1]
        first = None if given is None else given[:, :19]
        made = model(tokens[:, :19], position_ids=positions[:, :19], attention_mask=first, use_cache=True)
        step = {"position_ids": positions[:, 19:], "attention_mask": given, "past_key_values": made.past_key_values}
        assert_close(model(tokens[:, 19:], **step).logits[:, -1], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@torch.no_grad()
def test_a_compiled_call_in_between(make_swapped, tokens, backend):
    """Compiled and other calls on one cache know each other's positions."""
    model = make_swapped("gpt2", SCHEME, backend)
    compiled = torch.compile(model.forward, backend="eager")
    for start in (0, 5):
        cache = DynamicCache(config=model.config)
        positions = torch.arange(start, start + 20)[None]
        expected = model(tokens, position_ids=positions, use_cache=False).logits[:, -1]
        model(tokens[:, :10], past_key_values=cache, position_ids=positions[:, :10])
        compiled(tokens[:, 10:15], past_key_values=cache, position_ids=positions[:, 10:15])
        last = {"past_key_values": cache, "position_ids": positions[:, 15:]}
        assert_close(model(tokens[:, 15:], **last).logits[:, -1], expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@torch.no_grad()
def test_compiled_layers_and_traces(make_swapped):
    """A compiled layer whose length changes, and a traced model that is used for another length, are right."""
    model = make_swapped("gpt2", SCHEME, "sdpa", n_positions=200)
    lengths = [torch.randint(2, 98, (1, n)) for n in (20, 150, 33, 140)]
    expected = [model(tokens, use_cache=False).logits for tokens in lengths]
    layer = model.transformer.h[1]
    model.transformer.h[1] = torch.compile(layer, backend="aot_eager")
    for tokens, logits in zip(lengths, expected, strict=True):
        assert_close(model(tokens, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
    model.transformer.h[1] = layer
    torch.compiler.reset()


@torch.no_grad()
@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_cache_that_is_moved(make_swapped, tokens, rebuilt):
    """Rows of a left-padded batch reordered, selected and repeated, in the cache or in one built from its tensors."""
    model = make_swapped("gpt2", SCHEME, "sdpa")
    mask = padded("left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for rows in ([1, 0], [1], [0, 0, 1, 1], [1, 1, 0]):
        cache = DynamicCache(config=model.config)
        model(tokens[:, :15], attention_mask=mask[:, :15], position_ids=positions[:, :15], past_key_values=cache)
        rows = torch.tensor(rows)
        cache.reorder_cache(rows) if len(rows) == 2 else cache.batch_select_indices(rows)
        if rebuilt:
            cache = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
        later = {"attention_mask": mask[rows], "position_ids": positions[rows]}
        expected = model(tokens[rows], use_cache=False, **later).logits[:, 15:]
        given = model(tokens[rows, 15:], past_key_values=cache, **later | {"position_ids": positions[rows, 15:]}).logits
        assert_close(given, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_gpt2_that_looks_both_ways(make_swapped, tokens):
    """`is_causal = False` in the config, with and without a mask, as in the original."""
    for backend in ("sdpa", "eager"):
        model = make_swapped("gpt2", SCHEME, backend)
        for inputs in ({}, {"attention_mask": padded("right")}):
            causal = model(tokens, use_cache=False, **inputs).logits[0, 0]
            model.config.is_causal = False
            both = model(tokens, use_cache=False, **inputs).logits[0, 0]
            model.config.is_causal = True
            assert (causal - both).abs().max() > 0.01


def test_masks_that_are_no_tensors(make_swapped, tokens):
    """Masks that are no tensors are an error: they would be taken for no mask at all."""
    with pytest.raises(posswap.PosswapError, match="masks as tensors of 2 or 4 dimensions, not dict"):
        make_swapped("bert", SCHEME, "sdpa")(tokens, attention_mask={"full_attention": torch.ones(2, 20)})


@torch.no_grad()
def test_sliding_cache(make_swapped, tokens):
    """Past the window of a sliding cache, sdpa and eager agree token by token."""
    logits = []
    for backend in ("sdpa", "eager"):
        model = make_swapped("gpt2", SCHEME, backend)
        model.config.sliding_window = 8
        cache = DynamicCache(config=model.config)
        steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(20)]
        logits.append(torch.cat(steps, dim=1))
    assert_close(*logits, rtol=1e-4, atol=1e-4)
