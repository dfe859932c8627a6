"""Scheme strings, and each scheme but relative against its formula as a float64 loop, biases against BLOOM's and T5's."""

import cmath
import math
import re
from dataclasses import dataclass, field, make_dataclass
from typing import Literal
from unittest.mock import patch

import pytest
import torch
from conftest import refused
from torch.testing import assert_close
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import hf_posswap as posswap
from hf_posswap import Alibi, Buckets
from hf_posswap.functional.closed_form import Evidence
from hf_posswap.schemes import Geometry, Places, parse_scheme
from hf_posswap.schemes.sinusoidal import sinusoids


def geometry(head_dim: int = 8, **lengths) -> Geometry:
    lengths = {"max_positions": 32, "trained_positions": 32} | lengths
    return Geometry(hidden_size=2 * head_dim, num_heads=2, head_dim=head_dim, **lengths)


def printed(position: int, size: int, base: float) -> list[float]:
    """Vaswani et al. 2017, section 3.5."""
    row = []
    for i in range(size // 2):
        row += [math.sin(position / base ** (2 * i / size)), math.cos(position / base ** (2 * i / size))]
    return row


def get_timing_signal_1d(length: int, channels: int, max_timescale: float, start_index: int = 0) -> torch.Tensor:
    """tensor2tensor's function of this name, tensor2tensor/layers/common_attention.py, in float64."""
    min_timescale = 1.0
    position = torch.arange(length, dtype=torch.float64) + start_index
    num_timescales = channels // 2
    log_timescale_increment = math.log(max_timescale / min_timescale) / max(num_timescales - 1, 1)
    inv_timescales = min_timescale * torch.exp(torch.arange(num_timescales, dtype=torch.float64) * -log_timescale_increment)
    scaled_time = position[:, None] * inv_timescales[None, :]
    signal = torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=1)
    return torch.nn.functional.pad(signal, (0, channels % 2))


@pytest.mark.parametrize("base", [10_000, 300])
@pytest.mark.parametrize("start", [0, 100_000])
def test_sinusoids_equal_the_formulas(start, base):
    """The printed formula, its other layouts and tensor2tensor's code, near zero and at position 100,000."""
    positions = torch.arange(start, start + 12)
    expected = torch.tensor([printed(int(p), 8, base) for p in positions], dtype=torch.float64)
    close = {"rtol": 0.0, "atol": 1e-7, "check_dtype": False}
    assert_close(sinusoids(positions, 8, base=base), expected, **close)
    halves = torch.cat([expected[:, 0::2], expected[:, 1::2]], dim=1)
    assert_close(sinusoids(positions, 8, base=base, layout="halves"), halves, **close)
    turned = expected[:, [1, 0, 3, 2, 5, 4, 7, 6]]
    assert_close(sinusoids(positions, 8, base=base, layout="cosine_first"), turned, **close)
    for size in (8, 7, 3, 2):
        signal = sinusoids(positions, size, base=base, layout="tensor2tensor")
        assert_close(signal, get_timing_signal_1d(12, size, base, start), **close)
    difference = sinusoids(positions, 8, base=base, layout="tensor2tensor") - halves
    assert difference.abs().max() > 0.05  # not a permutation of the printed one


def test_projection_continues_a_table():
    """A linear map of sinusoids is found again and continued; no table at all makes rows beyond it explode."""
    torch.manual_seed(0)
    module = posswap.Sinusoidal(base=20).embedding_module(geometry(head_dim=4, max_positions=200, trained_positions=100))
    signal = sinusoids(torch.arange(200), 8, base=20).double()
    table = signal @ torch.randn(8, 8, dtype=torch.float64) + torch.randn(8, dtype=torch.float64)
    with torch.no_grad():
        module.fit_table(table[:100])
        assert_close(module(torch.arange(200)), table, rtol=0, atol=0.03, check_dtype=False)
        module = posswap.Sinusoidal().embedding_module(geometry(head_dim=16, max_positions=200, trained_positions=50))
        table = torch.randn(50, 32, dtype=torch.float64)
        module.fit_table(table[:50])
        assert module(torch.arange(50, 200)).norm(dim=1).max() < 4 * table.norm(dim=1).mean()


def test_learned_tiles_and_interpolates():
    """Row p is row p mod P, or lies linearly between two rows; without `extend` the table is the table."""
    torch.manual_seed(0)
    table = torch.randn(5, 4, dtype=torch.float64)
    sizes = geometry(head_dim=2, max_positions=13, trained_positions=5)
    modules = {extend: posswap.Learned(extend=extend).embedding_module(sizes).double() for extend in ("tile", "interpolate")}
    for extend, module in modules.items():
        with torch.no_grad():
            module.fit_table(table[:5])
        for position in range(13):
            if extend == "tile":
                expected = table[position % 5]
            else:
                place = position * 4 / 12
                left = min(int(place), 3)
                expected = table[left] + (place - left) * (table[left + 1] - table[left])
            assert_close(module(torch.tensor(position)), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize(("fraction", "turning"), [(1.0, 8), (0.5, 4), (0.25, 2)])
@pytest.mark.parametrize("theta", [10_000, 50.0])
def test_rotary_turns_complex_numbers(theta, fraction, turning, layout):
    """Each pair is one complex number times e^(i p theta^(-2m/R)); the rest of the head stays."""
    torch.manual_seed(0)
    module = posswap.Rotary(theta=theta, fraction=fraction, layout=layout).attention_module(geometry())
    states = torch.randn(2, 2, 6, 8)
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 5], [7, 1000, 31, 3, 0, 5]])
    shared = module.prepare(position_ids, torch.arange(6)[None], None, None)
    query = module.rotate(states, shared)
    assert_close(module.rotate(2 * states, shared), 2 * query)
    expected = states.double().clone()
    for b in range(2):
        for i in range(6):
            for m in range(turning // 2):
                x, y = (2 * m, 2 * m + 1) if layout == "interleaved" else (m, m + turning // 2)
                turn = cmath.exp(1j * float(position_ids[b, i]) * theta ** (-2 * m / turning))
                for h in range(2):
                    number = complex(states[b, h, i, x], states[b, h, i, y]) * turn
                    expected[b, h, i, x], expected[b, h, i, y] = number.real, number.imag
    assert_close(query, expected, rtol=0, atol=1e-6, check_dtype=False)


def test_dynamic_scaling_is_by_the_farthest_position():
    """Where the length is not known from the shapes."""
    module, positions = posswap.Rotary(scaling={"rope_type": "dynamic", "factor": 2.0}).attention_module(geometry()), places(60)
    read, known, trained = (module.angles(positions.queries, length)[0] for length in (None, 60, 32))
    assert torch.equal(read, known) and (read - trained).abs().max() > 0.1


def test_suggested_fractions_work():
    """Every fraction that an error message suggests for a head size gives the dimensions it promises."""
    followed = 0
    for head_dim in range(2, 66):
        for dims in range(1, head_dim + 1):
            scheme = posswap.Rotary(fraction=dims / head_dim)
            try:
                scheme.check(geometry(head_dim=head_dim))
            except posswap.PosswapError as error:
                for fraction, promised in re.findall(r"fraction=([\d.]+) \((\d+) dimensions\)", str(error)):
                    suggested = posswap.Rotary(fraction=float(fraction))
                    suggested.check(geometry(head_dim=head_dim))
                    assert suggested.rotary_dim(head_dim) == int(promised), (head_dim, fraction)
                    followed += 1
    assert followed > 1000


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("learned:extend=null", posswap.Learned()),
        ("sinusoidal:layout=halves,project=false,base=1e4", posswap.Sinusoidal(layout="halves", project=False)),
        ("rotary:theta=5e5, layout=half", posswap.Rotary(theta=500_000, layout="half")),
        ("rotary:scaling={rope_type=linear,factor=2.0}", posswap.Rotary(scaling={"rope_type": "linear", "factor": 2.0})),
    ],
)
def test_scheme_strings(text, scheme):
    """A string gives the scheme that it names."""
    assert parse_scheme(text) == scheme and str(parse_scheme(text)) == str(scheme)  # 5e5 is 500000, in a saved config too


SPELLINGS = {"ALiBi": "alibi", "ROTARY": "rotary", "RoPE": "rotary", "nope": "none", "t5": "buckets"}


@pytest.mark.parametrize(("text", "name"), SPELLINGS.items())
def test_hints_do_not_see_case(text, name):
    """A known scheme is recognised in another spelling, or by the name that it has in papers."""
    refused(f"unknown scheme '{text}' .*'{name}'.*; known are", parse_scheme, text)


def test_schemes_of_ones_own():
    """A class that is defined again, as in a notebook, takes its own place; an option without a default has to be given."""
    with patch.dict(posswap.SCHEMES):
        for _ in range(2):
            kind = dataclass(frozen=True, kw_only=True)(type("Mine", (posswap.Scheme,), {"name": "mine", "summary": "mine"}))
            assert posswap.register_scheme(kind) is kind and type(parse_scheme("mine")) is kind
        names, options = {"name": "needy", "summary": "needs a size"}, {"frozen": True, "kw_only": True}
        given = [("size", int), ("half", int, field(init=False, compare=False))]  # the second is none that is asked for
        given += [("side", Literal["left", "right"], "left"), ("flag", Literal[True, "maybe"], True)]
        names["choices"] = {"side": ("left", "right")}  # so that it may also be "auto"
        kind = posswap.register_scheme(make_dataclass("Needy", given, bases=(posswap.Scheme,), namespace=names, **options))
        refused("needy needs size: write needy:size=value", parse_scheme, "needy")
        refused("needy: side='up' is not one of 'left', 'right'", parse_scheme, "needy:size=3,side=up")
        refused("needy: flag=1 is not one of True, 'maybe'", parse_scheme, "needy:size=3,flag=1")
        assert parse_scheme("needy:size=3,side=left") == kind(size=3)
        assert parse_scheme("needy:size=3,side=auto,flag=maybe").open_options() == ["side"]


GEOMETRY = Geometry(hidden_size=48, num_heads=6, head_dim=8, max_positions=300, trained_positions=64)


def places(length: int) -> Places:
    steps = torch.arange(length)[None]
    return Places(steps, steps, steps)


@pytest.mark.parametrize("heads", [1, 4, 6, 12])
def test_slopes_are_those_of_bloom(heads):
    """ALiBi's bias is BLOOM's up to a constant for each row."""
    module = Alibi().attention_module(Geometry(**{**vars(GEOMETRY), "num_heads": heads}))
    ours = module.bias(places(9), 9).tril()  # (1, H, 9, 9)
    theirs = build_alibi_tensor(torch.ones(1, 9), heads, torch.float32).view(1, heads, 1, 9)
    assert_close(ours, (theirs - theirs.mT).tril(), check_dtype=False)


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_are_those_of_t5(causal):
    """The bias of buckets is T5's, in a decoder (one side) and in an encoder (half of the buckets for each side)."""
    module = Buckets(buckets=16, reach=100).attention_module(GEOMETRY)
    with torch.no_grad():
        module.table.normal_()
    config = T5Config(d_model=48, num_heads=6, d_kv=8, relative_attention_num_buckets=16 if causal else 32)
    config.is_decoder, config.relative_attention_max_distance = causal, 100
    theirs = T5Attention(config, has_relative_attention_bias=True)
    with torch.no_grad():
        theirs.relative_attention_bias.weight.copy_(module.table.T[: 16 if causal else 32])
        ours, expected = module.bias(places(300), 300), theirs.compute_bias(300, 300, torch.device("cpu"))
    assert_close(ours.tril() if causal else ours, expected.tril() if causal else expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scheme", [Alibi(), Buckets(buckets=6, reach=20)])
@torch.no_grad()
def test_closed_form(scheme, causal):
    """Attention that such a bias has made is found again, whatever the constant of each row was."""
    generator = torch.Generator().manual_seed(0)
    truth, module = (scheme.attention_module(GEOMETRY) for _ in range(2))
    for parameter in truth.parameters():
        parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    query, key = torch.randn(2, 3, 6, 24, 8, generator=generator)
    allowed = torch.ones(3, 1, 24, 24, dtype=torch.bool)
    allowed = allowed.tril() if causal else allowed
    allowed[2, :, 15:], allowed[2, ..., 15:] = False, False  # padding

    def attention(positions):
        scores = query @ key.mT * 0.3 + positions.bias(places(24), 24)
        return scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num()

    evidence = Evidence(query, key, key, attention(truth), key, allowed)
    before = (attention(module) - attention(truth)).abs().max()
    module.solve(lambda: [evidence], None, 0.3)
    assert before > 0.05
    assert_close(attention(module), attention(truth), atol=2e-4, rtol=0)


@torch.no_grad()
def test_slopes():
    """A step more is a step more, however far, in half precision; a head that prefers far keys looks everywhere. Fixed slopes
    are no parameters, and a fit leaves them alone, as it does vectors that are multiplied with keys, too.
    """
    module = Alibi().attention_module(GEOMETRY)
    steps = module.bfloat16().bias(places(300), 300)[0, :, 299].diff(dim=-1)
    assert_close(steps, steps[:, :1].expand_as(steps), rtol=1e-3, atol=0)
    module.settle(torch.full((6, 1), -1.0, dtype=torch.float64))  # such a slope would be negative, which has no logarithm
    assert module.bias(places(9), 9).abs().max() < 1e-2
    module = Alibi(slopes="fixed").attention_module(GEOMETRY)
    assert not list(module.parameters()) and not module.state_dict()
    for one in (module, posswap.Relative(key_query=True).attention_module(GEOMETRY)):
        one.solve(None, None, 1.0)


@pytest.mark.parametrize("scheme", ["alibi", "alibi:slopes=fixed", "self-extend:near=4,group=2", "sinusoidal"])
def test_torchs_default_dtype_changes_nothing(make_model, scheme):
    """Neither what a swap sets nor what a float32 model computes depends on the dtype of new tensors."""
    tokens, found = torch.arange(96)[None] % 90, []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("gpt2")
        torch.set_default_dtype(dtype)
        try:
            posswap.swap(model, scheme, max_positions=600)
            with torch.no_grad():
                found.append(model(tokens).logits)
        finally:
            torch.set_default_dtype(torch.float32)
    assert_close(*found)
