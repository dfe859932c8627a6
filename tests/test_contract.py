"""What every scheme keeps in every family under every attention backend: padding, packing, gradients, outputs.

Each test runs over the whole matrix of conftest.py and compares two ways to compute the same thing in one model, or a
swapped model with the original.
"""

import copy
from dataclasses import fields

import pytest
import torch
from torch.testing import assert_close

import hf_posswap as posswap

LENGTH = 20
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def loss_of(model, tokens, **inputs):
    """A loss in which every logit counts."""
    logits = model(tokens, **inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten().roll(1))


def gradients(model, tokens, **inputs):
    """The gradients of all parameters, by name."""
    model.zero_grad()
    loss_of(model, tokens, **inputs).backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def neutral(model, position_parameters, value: float):
    """Give position 0 the vector of all others, where a constant is what is left of the table."""
    for name, parameter in position_parameters(model).items():
        if name.endswith((".first", ".mean")):
            parameter.data.fill_(value)


def block_mask(family: str, lengths: list[int]) -> torch.Tensor:
    """An additive 4D mask for documents packed into one row; each sees itself alone."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = document[:, None] == document[None]
    if family != "bert":
        allowed = allowed.tril()
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]


def test_identity_is_bit_equal(make_model, family, backend, tokens):
    """Learned() leaves logits and all gradients bit-equal, with padding as well."""
    model = make_model(family, backend)
    mask = torch.ones_like(tokens)
    mask[1, 15:] = 0
    for inputs in ({}, {"attention_mask": mask}):
        expected, expected_gradients = model(tokens, **inputs).logits, gradients(model, tokens, **inputs)
        posswap.swap(model, posswap.Learned())
        assert torch.equal(model(tokens, **inputs).logits, expected)
        actual = gradients(model, tokens, **inputs)
        assert actual.keys() == expected_gradients.keys() and len(actual) > 20
        assert all(torch.equal(actual[name], expected_gradients[name]) for name in actual)
        posswap.restore(model)


def test_scheme_changes_the_output(make_model, make_swapped, position_parameters, family, backend, case, tokens):
    """Next to a model without positions, every scheme moves the logits by far more than the tolerances here."""
    model = make_swapped(family, case.scheme, backend, max_positions=case.max_positions)
    neutral(model, position_parameters, 0.0)
    plain = make_model(family, backend)
    if case.scheme.name != "none":  # which is compared with the original
        posswap.swap(plain, posswap.NoPositions(), warm_start=False)
    assert (model(tokens).logits - plain(tokens).logits).abs().max() > 0.1


def test_order_of_tokens_matters(make_swapped, position_parameters, case, backend, tokens):
    """A permuted input permutes an encoder's outputs without positions, and changes them with any other scheme."""
    model = make_swapped("bert", case.scheme, backend, max_positions=case.max_positions)
    neutral(model, position_parameters, 0.2)
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))
    difference = (model(tokens[:, order]).logits - model(tokens).logits[:, order]).abs().max()
    assert difference < 1e-4 if case.scheme.name == "none" else difference > 0.1


def test_right_padding(model, tokens):
    """Real tokens before padding get what they get alone, whatever stands in the padding."""
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0
    padded = model(tokens, attention_mask=mask).logits
    assert_close(padded[1, :13], model(tokens[1:, :13]).logits[0], **CLOSE)
    assert_close(padded[0], model(tokens[:1]).logits[0], **CLOSE)


def test_left_padding(model, tokens):
    """Real tokens after padding get what they get alone, given position_ids that start with them."""
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
    padded = model(tokens, attention_mask=mask, position_ids=position_ids).logits
    assert padded.isfinite().all()
    assert_close(padded[1, 7:], model(tokens[1:, 7:]).logits[0], **CLOSE)
    assert_close(padded[0], model(tokens[:1]).logits[0], **CLOSE)


def test_distances_alone_count(make_swapped, position_parameters, family, backend, case, tokens):
    """In relative and rotary models a shift of all positions changes nothing; in absolute ones it does."""
    model = make_swapped(family, case.scheme, backend, max_positions=case.max_positions)
    neutral(model, position_parameters, 0.2)
    shifted = model(tokens, position_ids=torch.arange(LENGTH)[None] + 9).logits
    difference = (shifted - model(tokens).logits).abs().max()
    assert difference < 2e-4 if case.scheme.shift_invariant else difference > 0.1


def test_custom_position_ids(model, family, case, tokens):
    """Explicit positions are the ones that count: 0, 1, 2... change nothing, and tokens may be listed in any order."""
    positions = torch.arange(LENGTH).expand(2, -1)
    expected = model(tokens).logits
    for given in (positions, positions[:1]):
        assert torch.equal(model(tokens, position_ids=given).logits, expected)
    if case.scheme.name != "none":
        assert (model(tokens, position_ids=positions // 2).logits - expected).abs().max() > 0.05
    if family == "bert":
        order = torch.stack([torch.randperm(LENGTH, generator=torch.Generator().manual_seed(s)) for s in (1, 2)])
        actual = model(tokens.gather(1, order), position_ids=order).logits
        assert_close(actual, expected.gather(1, order[..., None].expand_as(expected)), **CLOSE)


def test_packed_sequences(model, family, tokens):
    """Two documents in one row, with positions that start again and a block-diagonal mask, equal two separate runs."""
    lengths = [12, 8]
    position_ids = torch.cat([torch.arange(n) for n in lengths])[None]
    inputs = {
        "position_ids": position_ids.expand(2, -1),
        "attention_mask": block_mask(family, lengths).expand(2, -1, -1, -1),
    }
    packed = model(tokens, **inputs).logits
    separate = torch.cat([model(part).logits for part in tokens.split(lengths, dim=1)], dim=1)
    assert_close(packed, separate, **CLOSE)
    if family == "gpt2":  # transformers finds the documents by itself where there is no mask and no cache
        assert_close(model(tokens, position_ids=position_ids.expand(2, -1), use_cache=False).logits, separate, **CLOSE)


@pytest.mark.parametrize("backend", ["eager"])
def test_backends_agree(model, backend, tokens):
    """Eager attention and sdpa give the same logits and gradients, under padding too."""
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0
    outcomes = []
    for implementation in ("eager", "sdpa"):
        model.set_attn_implementation(implementation)
        assert model.config._attn_implementation == implementation
        outcomes.append((model(tokens, attention_mask=mask).logits[mask.bool()], gradients(model, tokens)))
    assert_close(outcomes[0][0], outcomes[1][0], **CLOSE)
    assert outcomes[0][1].keys() == outcomes[1][1].keys()
    for name, gradient in outcomes[0][1].items():
        assert_close(gradient, outcomes[1][1][name], rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def test_inputs_embeds(model, tokens):
    """Embeddings instead of token ids, with and without a batch of position_ids, give the same logits."""
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeds).logits, model(tokens).logits)
    position_ids = torch.arange(LENGTH).expand(2, -1) // 2
    expected = model(tokens, position_ids=position_ids).logits
    assert torch.equal(model(inputs_embeds=embeds, position_ids=position_ids).logits, expected)


def test_tuple_outputs(model, tokens):
    """return_dict=False returns the same tensors in a tuple."""
    assert torch.equal(model(tokens, return_dict=False)[0], model(tokens).logits)


def test_hidden_states_and_attentions(model, family, backend, tokens):
    """As many hidden states and attentions as a plain model returns; attention rows sum to 1 and see no padding."""
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0
    with torch.no_grad():
        output = model(tokens, attention_mask=mask, output_hidden_states=True)
        assert len(output.hidden_states) == 3 and all(h.shape == (2, LENGTH, 32) for h in output.hidden_states)
        if backend == "eager":
            output = model(tokens, attention_mask=mask, output_attentions=True)
            assert len(output.attentions) == 2
            for probabilities in output.attentions:
                assert probabilities.shape == (2, 2, LENGTH, LENGTH)
                assert_close(probabilities.sum(-1), torch.ones(2, 2, LENGTH))
                assert probabilities[1, :, :, 13:].abs().max() == 0
                if family != "bert":
                    assert probabilities.triu(1).abs().max() == 0


def test_outputs_recorded_before_the_swap(make_model, family, case, tokens):
    """A model that has recorded attentions before its swap records the new ones after it, and the old ones restored."""
    model = make_model(family)
    before = model(tokens, output_attentions=True, output_hidden_states=True)
    posswap.swap(model, case.scheme, max_positions=case.max_positions)
    swapped = model(tokens, output_attentions=True, output_hidden_states=True)
    assert (len(swapped.attentions), len(swapped.hidden_states)) == (2, 3)
    same = case.scheme in (posswap.Learned(), posswap.Learned(extend="tile"))  # these tokens fit the trained length
    assert torch.equal(swapped.attentions[1], before.attentions[1]) == same
    after = posswap.restore(model)(tokens, output_attentions=True)
    assert len(after.attentions) == 2 and torch.equal(after.attentions[1], before.attentions[1])


def test_every_parameter_gets_a_gradient(model, position_parameters, family, case, tokens):
    """Every parameter has a gradient, so DDP finds none unused; every position parameter has one that is not zero."""
    found = gradients(model, tokens)
    assert [name for name, gradient in found.items() if gradient is None] == []
    ours = position_parameters(model)
    parameter_free = getattr(case.scheme, "combine", None) == "add" or getattr(case.scheme, "project", True) is False
    assert bool(ours) != parameter_free
    for name in ours:
        assert found[name].abs().max() > 1e-6, name


def test_gradient_checkpointing(model, tokens):
    """Gradients with checkpointing equal those without, in both of torch's variants."""
    model.train()
    expected = gradients(model, tokens, use_cache=False)
    # transformers has renamed it, and warns under the old name
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        assert sum(getattr(module, "gradient_checkpointing", False) for module in model.modules()) >= 2
        actual = gradients(model, tokens, use_cache=False)
        for name, gradient in expected.items():
            assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6)


def test_dropout_is_active_in_training_only(make_swapped, family, backend, case, tokens):
    """The swapped attention drops as the family's own does: while training, at the family's rate."""
    rates = {"attn_pdrop": 0.5} if family == "gpt2" else {"attention_probs_dropout_prob": 0.5}
    model = make_swapped(family, case.scheme, backend, max_positions=case.max_positions, **rates)
    assert torch.equal(model(tokens).logits, model(tokens).logits)
    model.train()
    assert (model(tokens).logits - model(tokens).logits).abs().max() > 0.1


@pytest.mark.parametrize("backend", ["eager"])
def test_deepcopy_is_independent(model, backend, tokens):
    """A copy computes the same, and neither training nor restoring it moves the model it was copied from."""
    expected = model(tokens).logits
    twin = copy.deepcopy(model)
    assert torch.equal(twin(tokens).logits, expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert not torch.equal(twin(tokens).logits, expected)
    posswap.restore(twin)
    assert torch.equal(model(tokens).logits, expected)
    assert type(twin) is not type(model) and twin.config is not model.config
    assert isinstance(posswap.describe(model).new, type(model.base_model.position_scheme))


TURNS = {
    "learned": [({"extend": "tile"}, {"extend": "interpolate"})],
    "sinusoidal": [  # a fitted projection undoes the order of the dimensions, so that shows in the raw table only
        ({}, {"base": 100}),
        ({"project": False}, {"project": False, "layout": "halves"}),
        ({}, {"layout": "tensor2tensor"}),
        ({}, {"project": False}),
    ],
    "relative": [
        ({}, {"clip": 5}),
        ({}, {"values": False}),
        ({}, {"share_heads": True}),
        ({}, {"key_query": True}),
        ({}, {"vectors": "sinusoidal"}),
    ],
    "rotary": [
        ({}, {"theta": 100}),
        ({}, {"fraction": 0.5}),
        ({}, {"layout": "half"}),
        ({}, {"scaling": {"rope_type": "linear", "factor": 2.0}}),
        ({}, {"mark_first": False}),
    ],
    "none": [],
    "ladder": [({}, {"rung": "dials"}), ({}, {"combine": "concatenate"})],
}


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_every_option_matters(make_model, family):
    """Every field of every scheme, turned once, changes the logits of a sequence beyond the old maximum."""
    tokens = torch.randint(2, 98, (1, 50), generator=torch.Generator().manual_seed(5))
    turned = set()
    for name, pairs in TURNS.items():
        for before, after in pairs:
            outputs = []
            for options in (before, after):
                model, scheme = make_model(family), posswap.SCHEMES[name](**options)
                # a balanced basis chooses its dimensions by the layout, which then does not show
                warm = name != "rotary" or "mark_first" in after
                posswap.swap(model, scheme, max_positions=64, warm_start=warm)
                torch.manual_seed(7)
                for attention in model.architecture.self_attentions(model.base_model):
                    for parameter in getattr(attention, "positions", torch.nn.Module()).parameters():
                        torch.nn.init.normal_(parameter, std=0.3)
                outputs.append(model(tokens).logits)
            assert (outputs[0] - outputs[1]).abs().max() > 0.05, (name, after)
            turned |= {(name, field) for field in after if after[field] != before.get(field)}
    assert turned == {(name, field.name) for name, scheme in posswap.SCHEMES.items() for field in fields(scheme)}
