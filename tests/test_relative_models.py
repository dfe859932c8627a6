"""Which way relative positions take inside a model, and that positions are worked out once for all layers."""

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

import hf_posswap as posswap
from hf_posswap.contract.subject import padded
from hf_posswap.schemes import relative, rotary

SCHEME = posswap.Relative(clip=4)
LEFT, RIGHT = (padded(**{side: 7})["attention_mask"] for side in ("before", "after"))


@pytest.fixture
def taken(watch):
    """The function that returns the way that each layer took since its last call, with the shape of the key mask."""
    window, index = watch(relative, "relative_attention"), watch(relative, "attend_by_index")

    def ways() -> list[tuple[str, tuple | None]]:
        masks = [one.kwargs["key_mask"] for one in window]
        found = [("window", None if mask is None else tuple(mask.shape)) for mask in masks] + [("index", None) for _ in index]
        window.clear(), index.clear()
        return found

    return ways


@pytest.mark.parametrize("family", ["bert", "bert-decoder", "gpt2"])
def test_positions_in_order_take_the_window(make_swapped, taken, tokens, family):
    """Without a mask, padded on either side, with positions that start anywhere: no mask of size Q x K anywhere."""
    model = make_swapped(family, SCHEME, "sdpa")
    shifted = torch.arange(3, 23)[None]
    from_mask = (LEFT.cumsum(-1) - 1).clamp(min=0)
    options = {"use_cache": False} if family != "bert" else {}
    for inputs, shape in (
        ({}, None),
        ({"attention_mask": torch.ones(2, 20)}, (2, 20)),
        ({"attention_mask": RIGHT}, (2, 20)),
        ({"attention_mask": LEFT}, (2, 20)),
        ({"attention_mask": LEFT, "position_ids": from_mask}, (2, 20)),
        ({"position_ids": shifted}, None),
    ):
        model(tokens, **inputs, **options)
        assert taken() == [("window", shape)] * 2


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_everything_else_goes_by_index(make_swapped, taken, tokens, family):
    """Gaps, packed documents, a mask for each pair and eager attention go by index."""
    model, eager = make_swapped(family, SCHEME, "sdpa"), make_swapped(family, SCHEME, "eager")
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None]
    pairs = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    gaps = LEFT.cumsum(-1)
    for asked, inputs in (
        (model, {"position_ids": 1 + torch.arange(20)[None].flip(1)}),
        (model, {"position_ids": packed}),
        (model, {"position_ids": gaps}),  # the pads are not masked, so their positions count
        (model, {"attention_mask": pairs}),
        (eager, {}),
        (eager, {"attention_mask": RIGHT}),
    ):
        asked(tokens, **inputs)
        assert taken() == [("index", None)] * 2


@torch.no_grad()
def test_generation_takes_the_window(make_swapped, taken, tokens):
    """Left-padded prompts with a growing cache; a static cache is longer than what it holds."""
    model = make_swapped("gpt2", SCHEME, "sdpa")
    model.generation_config.eos_token_id = None
    model.generate(tokens, attention_mask=LEFT, do_sample=False, max_new_tokens=4)
    assert taken() == [("window", (2, 20 + step)) for step in range(4) for _ in range(2)]
    cache = StaticCache(config=model.config, max_cache_len=29)
    expected = model(tokens, use_cache=False).logits
    parts = [model(part, past_key_values=cache).logits for part in tokens.split((12, 1, 7), dim=1)]
    assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert {way for way, _ in taken()} == {"window"}


@pytest.mark.parametrize(
    ("scheme", "kind", "names"),
    [("rotary", rotary.RotaryPositions, ("prepare", "angles")), ("relative:clip=4", relative.RelativePositions, ("prepare",))],
)
def test_positions_are_worked_out_once_for_all_layers(make_swapped, tokens, watch, scheme, kind, names):
    """One call of `prepare` for a forward of two layers; angles are computed nowhere else."""
    model, calls = make_swapped("bert", scheme, "sdpa"), [watch(kind, name) for name in names]
    model(tokens)
    assert [len(one) for one in calls] == [1] * len(names)


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


@torch.no_grad()
def test_compiled_layers(make_swapped):
    """A compiled layer whose length changes is right."""
    model = make_swapped("gpt2", SCHEME, "sdpa", n_positions=200)
    lengths = [torch.randint(2, 98, (1, n)) for n in (20, 150, 33, 140)]
    expected = [model(tokens, use_cache=False).logits for tokens in lengths]
    layer = model.transformer.h[1]
    model.transformer.h[1] = torch.compile(layer, backend="aot_eager")
    for tokens, logits in zip(lengths, expected, strict=True):
        assert_close(model(tokens, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)
    model.transformer.h[1] = layer
    torch.compiler.reset()


def test_a_mask_may_change_before_the_backward(make_swapped, tokens):
    """As that of a loop which fills one tensor again and again."""
    model, mask = make_swapped("bert", SCHEME, "sdpa"), LEFT.bool()
    loss = model(tokens, attention_mask=mask).logits.sum()
    mask.fill_(True)
    loss.backward()


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "padded"])
def test_sliding_cache(make_swapped, tokens, mask):
    """Past the window of a sliding cache, sdpa and eager agree token by token."""
    logits = []
    for backend in ("sdpa", "eager"):
        model = make_swapped("gpt2", SCHEME, backend)
        model.config.sliding_window = 8
        cache = DynamicCache(config=model.config)
        masks = ({} if mask is None else {"attention_mask": mask[:, : i + 1]} for i in range(20))
        steps = [model(tokens[:, i : i + 1], past_key_values=cache, **given).logits for i, given in enumerate(masks)]
        logits.append(torch.cat(steps, dim=1)[torch.ones(2, 20).bool() if mask is None else mask.bool()])
    assert_close(*logits, rtol=1e-4, atol=1e-4)
