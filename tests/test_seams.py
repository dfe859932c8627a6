"""What families and schemes may leave to the seams: positions that are counted another way, and biases on scores."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from transformers import AutoModelForMaskedLM, CamembertConfig, DynamicCache, RobertaConfig, StaticCache, XLMRobertaConfig
from transformers.models.camembert.modeling_camembert import CamembertForMaskedLM
from transformers.models.roberta.modeling_roberta import RobertaForCausalLM, RobertaForMaskedLM
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaForMaskedLM

import hf_posswap as posswap
from hf_posswap import architectures, schemes
from hf_posswap.attention import add_bias, read_positions, write_positions

PAD = 3  # the padding token, so that position 0 is row 4 of the table
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}
ROBERTAS = {
    "roberta": (RobertaForMaskedLM, RobertaConfig),
    "xlm-roberta": (XLMRobertaForMaskedLM, XLMRobertaConfig),
    "camembert": (CamembertForMaskedLM, CamembertConfig),
}


class SlopePositions(schemes.AttentionPositions):
    """ALiBi (Press et al. 2022, https://arxiv.org/abs/2108.12409): -slope * |distance|, a slope for each head."""

    needs_key_positions = True

    def __init__(self, geometry):
        super().__init__()
        self.slopes = torch.nn.Parameter(2.0 ** -torch.arange(1, geometry.num_heads + 1))

    def initial_values(self):
        return {"slopes": 2.0 ** -torch.arange(1, len(self.slopes) + 1)}

    def bias(self, shared, key_length):
        return -self.slopes[:, None, None] * shared.distances(key_length)[:, None].abs()


@dataclass(frozen=True, kw_only=True)
class Slope(schemes.Scheme):
    """The scheme of such modules."""

    name: ClassVar[str] = "slope-of-the-tests"
    summary: ClassVar[str] = "a bias"

    def attention_module(self, geometry):
        return SlopePositions(geometry)


def make_roberta(family="roberta", model_class=None, **changes):
    """A tiny model with 16 positions, whose table has four rows more."""
    found, config_class = ROBERTAS[family]
    torch.manual_seed(0)
    config = config_class(**SIZES, max_position_embeddings=20, pad_token_id=PAD, initializer_range=0.3, **changes)
    return (model_class or found)(config).eval()


@pytest.fixture
def padded():
    """Tokens with padding on the right in one row and on the left in the other, and their mask."""
    tokens = torch.randint(4, 99, (2, 12), generator=torch.Generator().manual_seed(3))
    tokens[0, 9:] = tokens[1, :4] = PAD
    return {"input_ids": tokens, "attention_mask": (tokens != PAD).long()}


@pytest.mark.parametrize("family", ROBERTAS)
@torch.no_grad()
def test_positions_counted_another_way(family, padded, tmp_path):
    """Identity is exact where no padding is; others do not see padding, keep their length, save, load and restore."""
    model = make_roberta(family)
    assert posswap.describe(model).max_positions == 16
    real = padded["attention_mask"].bool()
    before = model(**padded).logits
    posswap.swap(model, "learned")
    assert torch.equal(model(**padded).logits[real], before[real])
    assert posswap.describe(posswap.restore(model)).max_positions == 16 and torch.equal(model(**padded).logits, before)
    for scheme in ("rotary", "relative:clip=4", "sinusoidal", "none"):
        posswap.swap(model, scheme, max_positions=40)
        assert model.config.max_position_embeddings == 44
        logits = model(**padded).logits
        assert (logits - before)[real].abs().max() > 0.01
        alone = [model(tokens[mask.bool()][None]).logits[0] for tokens, mask in zip(*padded.values(), strict=True)]
        assert_close(logits[real], torch.cat(alone), rtol=1e-4, atol=1e-4)
        with pytest.raises(posswap.SequenceTooLongError, match="reaches 41 positions and this model .* was set up for 40"):
            model(torch.full((1, 41), 7))
        assert model(torch.full((1, 40), 7)).logits.shape[1] == 40
        folder = tmp_path / scheme.partition(":")[0]
        model.save_pretrained(folder)
        again = AutoModelForMaskedLM.from_pretrained(folder).eval()
        assert torch.equal(again(**padded).logits, logits) and posswap.describe(again).trained_positions == 16
    posswap.restore(model)
    assert torch.equal(model(**padded).logits, before)


@torch.no_grad()
def test_given_positions_and_embeddings(padded):
    """`position_ids` are rows of the table, as in transformers; embeddings are counted from the first row."""
    model = posswap.swap(make_roberta(), "sinusoidal:project=false")
    tokens = padded["input_ids"][:1, :9]
    rows = torch.arange(9)[None] + PAD + 1
    assert_close(model(tokens).logits, model(tokens, position_ids=rows).logits)
    assert (model(tokens).logits - model(tokens, position_ids=rows + 2).logits).abs().max() > 0.01
    embeds = model.get_input_embeddings()(tokens)
    assert_close(model(inputs_embeds=embeds).logits, model(tokens).logits)


@pytest.mark.parametrize("scheme", ["rotary", "relative:clip=4", "learned"])
@torch.no_grad()
def test_a_cache_counts_on(scheme):
    """A decoder of the family, token by token, as without a cache; the oracle of `learned` is the original."""
    original = make_roberta(model_class=RobertaForCausalLM, is_decoder=True)
    tokens = torch.randint(4, 99, (2, 12), generator=torch.Generator().manual_seed(3))
    expected = original(tokens).logits
    model = posswap.swap(original, scheme)
    whole, cache = model(tokens, use_cache=False).logits, DynamicCache(config=model.config)
    steps = [model(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(12)]
    assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-4)
    if scheme == "learned":
        assert torch.equal(whole, expected)


@pytest.mark.parametrize("family", ["biogpt", "distilbert", "electra", "esm", "opt"])
@torch.no_grad()
def test_ids_are_the_familys_own(make_model, family):
    """With its own table a swapped model reads, in every form of input, what the plain one reads; others see no padding."""
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
        {"inputs_embeds": embeds, "attention_mask": mask},
        {"input_ids": tokens, "attention_mask": mask, "position_ids": counted},
        {"inputs_embeds": embeds[:1], "position_ids": counted[1:] + 7},
    ]
    plain = [model(**form).logits for form in forms]
    posswap.swap(model, "learned")
    for form, expected in zip(forms, plain, strict=True):
        real = form.get("attention_mask", torch.ones(expected.shape[:2])).bool()
        assert torch.equal(model(**form).logits[real], expected[real]), form.keys()
    posswap.swap(model, "rotary")
    alone = torch.cat([model(row[row != 0][None]).logits[0] for row in tokens])
    for form in (forms[0], forms[4]) if family in ("esm", "opt") else forms[4:5]:
        assert_close(model(**form).logits[mask.bool()], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        ("opt", "rotary"),
        ("esm", "relative:clip=3"),
        ("distilbert", "rotary"),
        ("esm", "rotary"),
        ("opt", "relative:clip=3"),
        ("biogpt", "relative:clip=3"),
    ],
)
@torch.no_grad()
def test_scores_are_scaled_once(make_swapped, family, scheme):
    """What attention looks at, against the formula in float64, from weights: some families scale queries before the call."""
    model = make_swapped(family, scheme, "eager").double()
    attention = model.architecture.self_attentions(model.base_model)[0]
    seen = []
    hook = attention.register_forward_pre_hook(lambda _, a, k: seen.append(a[0] if a else k["hidden_states"]), with_kwargs=True)
    tokens = torch.randint(4, 99, (1, 9), generator=torch.Generator().manual_seed(3))
    found = model(tokens, output_attentions=True).attentions[0][0]
    hook.remove()
    layers = [getattr(attention, name) for name in model.architecture.projections[:2]]
    query, key = ((seen[0][0] @ layer.weight.T + layer.bias).view(9, 2, 16).transpose(0, 1) for layer in layers)
    steps, table = torch.arange(9), getattr(attention.positions, "key_table", None)
    if table is None:
        angles = steps[:, None] * 10_000.0 ** (-torch.arange(0, 16, 2).double() / 16)
        turns = torch.polar(torch.ones_like(angles), angles)
        pairs = (torch.view_as_complex(states.unflatten(-1, (8, 2)).contiguous()) * turns for states in (query, key))
        query, key = (torch.view_as_real(states).flatten(-2) for states in pairs)
        scores = query @ key.mT
    else:
        vectors = table[:, (steps - steps[:, None]).clamp(-3, 3) + 3]  # (H, Q, K, D)
        scores = query @ key.mT + torch.einsum("hqd,hqkd->hqk", query, vectors)
    scores = scores / 4
    if model.architecture.is_causal(model.config):
        scores = scores.masked_fill(steps > steps[:, None], float("-inf"))
    assert_close(found, scores.softmax(-1), rtol=1e-5, atol=1e-6)


def test_every_family_is_named_on_import():
    """The model types that the package names on import are those of its families."""
    assert set(posswap._CONFIGS) == set(architectures.ARCHITECTURES)


def naive(model, tokens, mask=None, positions=None):
    """What a bias on scores amounts to: the same model on eager attention, with the bias in its 4D mask."""
    bias = model.base_model.architecture.self_attentions(model.base_model)[0].positions
    positions = torch.arange(tokens.shape[1])[None] if positions is None else positions
    distances = (positions[:, None] - positions[:, :, None]).abs()
    additive = -bias.slopes[:, None, None] * distances[:, None].expand(len(tokens), 1, -1, -1)
    seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
    seen = seen.tril() if model.base_model.architecture.is_causal(model.config) else seen
    seen = seen if mask is None else seen & mask[:, None, None].bool()
    plain = posswap.swap(posswap.original(model, keep_training=True), "none")
    plain.set_attn_implementation("eager")
    return plain(tokens, attention_mask=additive.masked_fill(~seen, -1e30), position_ids=positions).logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_a_bias_of_ten_lines(make_model, family, implementation, tokens):
    """On each implementation: plain, padded, with dynamic and static caches."""
    model = posswap.swap(make_model(family, "sdpa"), Slope(), max_positions=64)
    expected = naive(model, tokens)
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = naive(model, tokens, mask, positions)
    model.set_attn_implementation(implementation)
    assert_close(model(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    given = model(tokens, attention_mask=mask, position_ids=positions).logits
    assert_close(given[mask.bool()], padded[mask.bool()], rtol=1e-4, atol=1e-4)
    if family == "bert":
        return
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=30)):
        parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 7), (7, 8), (8, 20))]
        assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:flex_attention called without")  # transformers' flex masks
@torch.no_grad()
def test_a_bias_on_flex_attention(make_model, tokens):
    """Flex adds it to scores itself, behind its block mask. (transformers has no flex attention for GPT-2.)"""
    model = posswap.swap(make_model("bert-decoder", "flex_attention"), Slope())
    with torch.compiler.set_stance("force_eager"):
        assert_close(model(tokens).logits, naive(model, tokens), rtol=1e-4, atol=1e-4)


def test_a_bias_is_trained(make_model, family, tokens):
    """Gradients reach the slopes of each layer, and are those of the naive way."""
    model = posswap.swap(make_model(family, "sdpa"), Slope())
    model(tokens).logits.pow(2).sum().backward()
    layers = [a.positions for a in model.architecture.self_attentions(model.base_model)]
    assert all(layer.slopes.grad.abs().min() > 0 for layer in layers)


def test_a_bias_needs_something_to_be_added_to():
    """Flash attention adds none: an error, not a silent no-op."""
    with pytest.raises(posswap.PosswapError, match="a bias on scores, which .* 'flash_attention_2' cannot add"):
        add_bias(None, torch.zeros(1, 1, 2, 2), None, "flash_attention_2")
    block = create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, device="cpu")
    assert add_bias(block, torch.zeros(1, 1, 4, 4), None, "flex_attention") is block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_positions_in_keys_are_exact(dtype):
    """Three digits hold 16 million positions in half precision, too."""
    positions = torch.tensor([[0, 255, 256, 65_535, 1_234_567, 16_777_215]])
    keys = write_positions(torch.randn(2, 3, 6, 8).to(dtype), positions)
    assert keys.shape == (2, 3, 6, 11) and torch.equal(read_positions(keys), positions.expand(2, -1))


def test_a_table_in_a_plain_model():
    """What is added to embeddings is written into the family's own table, at the family's own rows."""
    model = posswap.swap(make_roberta(), "sinusoidal", max_positions=40)
    native = posswap.export_native(model).model
    tokens = torch.randint(4, 99, (2, 40), generator=torch.Generator().manual_seed(3))
    assert type(native) is RobertaForMaskedLM and native.config.max_position_embeddings == 44
    with torch.no_grad():
        assert_close(native(tokens).logits, model(tokens).logits)
