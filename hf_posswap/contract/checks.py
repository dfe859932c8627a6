"""The checks: each puts one scheme into a tiny model and computes the same thing in two ways.

In the report, the first line of a docstring says what the check means, and the rest what to look for when it fails. A message
"13 tokens with padding, and alone" names two inputs whose outputs must be equal.
"""

import copy
import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
from transformers import DynamicCache, StaticCache

from hf_posswap.contract import subject as tools
from hf_posswap.contract.subject import Failure, NotApplicable, Subject, count_from, different, in_parts, padded, same, text
from hf_posswap.errors import SequenceTooLongError
from hf_posswap.schemes import Learned, NoPositions, parse_scheme, scheme_from_dict
from hf_posswap.swapping import restore, swap

FAR = 4000  # a distant position


def builds(subject: Subject) -> None:
    """It can be made, swapped in and run.

    A scheme is a frozen keyword-only dataclass with `name` and `summary`. Its modules must have the sizes of their Geometry,
    here 2 heads of 16 dimensions and 32 trained positions.
    """
    kind = type(subject.scheme)
    if missing := [field for field in ("name", "summary") if not isinstance(getattr(kind, field, None), str)]:
        raise Failure(f"{kind.__name__} has no {' and no '.join(missing)}")
    if not kind.__dataclass_params__.frozen:
        raise Failure(f"{kind.__name__} is not frozen")
    if not subject.model(text())[0].isfinite().all():
        raise Failure("outputs are NaN or infinite")


def table_kept(subject: Subject) -> None:
    """`learned`, the table as it is, changes nothing.

    This asks the family: `table_owner`, `first_row`, `first_id` and `position_ids` must be what its own forward does.
    """
    if subject.scheme != Learned():
        raise NotApplicable("only `learned` keeps the table")
    model = tools.tiny_model(subject.family, subject.backend)
    inputs = {"embeddings": {"inputs_embeds": model.get_input_embeddings()(text()), "attention_mask": torch.ones_like(text())}}
    for what, one in (("tokens", padded()), ("padding behind", padded(after=7)), ("padding before", padded(before=7))):
        mask = one["attention_mask"]
        inputs[what] = {"input_ids": text().masked_fill(mask == 0, model.config.pad_token_id), "attention_mask": mask}
    expected = {what: model(**one)[0] for what, one in inputs.items()}
    swap(model, subject.scheme)
    for what, one in inputs.items():
        real = one["attention_mask"].bool()
        same(model(**one)[0][real], expected[what][real], f"before and after the swap, {what}")


def options(subject: Subject) -> None:
    """config.json and strings hold all that it is.

    Options must be numbers, strings, booleans, None, or lists and dicts of them: convert others in __post_init__. The class
    needs its own @dataclass decorator and its own name.
    """
    scheme = subject.scheme
    with tools.registered(scheme):
        for how, again in (
            ("config.json", scheme_from_dict(json.loads(json.dumps(scheme.to_dict())))),
            (f"the string {str(scheme)!r}", parse_scheme(str(scheme))),
        ):
            if again != scheme:
                raise Failure(f"{scheme!r} comes back from {how} as {again!r}")


def restores(subject: Subject) -> None:
    """`restore` gives the original back, bit for bit.

    A swap may change only its model. Look for patches of torch or transformers, global hooks, and tensors changed in place.
    """
    model = tools.tiny_model(subject.family, subject.backend)
    weights = copy.deepcopy(model.state_dict())
    swap(model, subject.scheme)(text())
    restore(model)
    for name, value in model.state_dict().items():
        same(value, weights[name], name, tolerance=0)
    same(model(text())[0], subject.untouched, "outputs", tolerance=0)


def switched_on(subject: Subject) -> None:
    """It computes something else than no positions.

    Is embedding_module or attention_module spelled right, and does it return the module? Of that module only `forward`, or the
    hooks of AttentionPositions, are called. LayerNorm removes a number that is added to all dimensions.
    """
    if isinstance(subject.scheme, NoPositions):
        raise NotApplicable("it is no positions, the baseline")
    model, none = subject.swapped(warm_start=False), tools.tiny_model(subject.family, subject.backend)
    swap(none, NoPositions(), warm_start=False)
    with torch.no_grad():  # both get the same vector at position 1, so a vector that all positions share makes no difference
        tables = [one.architecture.table(one.base_model) for one in (none, model)]
        tables[0].mean.copy_(tables[1](torch.tensor([[1]]))[0, 0])
    different(*(one(text(), position_ids=count_from(1))[0] for one in (model, none)), "with and without positions")


def order_matters(subject: Subject) -> None:
    """An encoder tells the same tokens in another order.

    What is computed for a token must depend on its own position, or on those of others.
    """
    if subject.causal:
        raise NotApplicable("a decoder sees order through its causal mask")
    order = torch.randperm(tools.LENGTH, generator=torch.Generator().manual_seed(1))
    shuffled, expected = (subject.model(tokens, position_ids=count_from(1))[0] for tokens in (text()[:, order], text()))
    compare = same if isinstance(subject.scheme, NoPositions) else different
    compare(shuffled, expected[:, order], "tokens in another order")


def position_ids(subject: Subject) -> None:
    """Positions that are given are the ones that count.

    Compute from the position_ids that forward and prepare get, not from indices into the tensor. Write to a new tensor, since
    theirs belongs to the caller.
    """
    model, tokens, positions = subject.model, text(), count_from(0).repeat(2, 1)
    expected = model(tokens)[0]
    given = model(tokens, position_ids=positions)[0]
    if not positions.equal(count_from(0).repeat(2, 1)):
        raise Failure("the position_ids that the model was given are changed in place")
    same(given, expected, "position_ids 0, 1, 2... for each row, and none")
    same(model(tokens, position_ids=positions[:1])[0], expected, "position_ids 0, 1, 2... for all rows, and none")
    if not isinstance(subject.scheme, NoPositions):
        outputs = (model(tokens, position_ids=places)[0] for places in (count_from(2) // 2, count_from(1)))
        different(*outputs, "position_ids 1, 1, 2, 2... and 1, 2, 3...")
    if not subject.causal:
        listed = model(tokens.flip(1), position_ids=positions.flip(1))[0]
        same(listed.flip(1), expected, "tokens listed from last to first, each with its position")


def padding(subject: Subject) -> None:
    """Tokens get what they get without padding around them.

    `attend` must apply the mask that it gets. Do not divide positions by the length, and do not use indices into the tensor:
    both count padding.
    """
    model, tokens = subject.model, text()
    for side, inputs in (("right", {"attention_mask": padded(after=7)["attention_mask"]}), ("left", padded(before=7))):
        real = inputs["attention_mask"][1].bool()
        outputs = model(tokens, **inputs)[0]
        same(outputs[1:, real], model(tokens[1:, real])[0], f"13 tokens with 7 of padding on the {side}, and alone")
        same(outputs[:1], model(tokens[:1])[0], f"a row next to one with padding on the {side}, and alone")


def packing(subject: Subject) -> None:
    """Two documents in one row get what they get alone.

    Positions start again within a row: take them from position_ids. `attend` also gets masks of 4 dimensions.
    """
    if subject.model.architecture.embeddings_read_mask:
        raise NotApplicable("the family takes only masks of 2 dimensions")
    tokens, lengths = text(), [12, 8]
    document = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    allowed = document[:, None] == document[None]
    allowed = allowed.tril() if subject.causal else allowed
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)
    positions = torch.cat([torch.arange(length) for length in lengths]).repeat(2, 1)
    alone = torch.cat([subject.model(part)[0] for part in tokens.split(lengths, dim=1)], dim=1)
    packed = subject.model(tokens, attention_mask=mask, position_ids=positions)[0]
    same(packed, alone, "documents of 12 and 8 tokens in one row, and alone")


def batch_independence(subject: Subject) -> None:
    """A row alone gets what it gets in a batch.

    position_ids are (1, L) or (B, L), so rows may have their own, and nothing may be summed over the batch.
    """
    tokens, positions = text(), torch.cat([count_from(9), count_from(0)])
    together = subject.model(tokens, position_ids=positions.clone())[0]
    for row, output in enumerate(together.split(1)):
        alone = subject.model(tokens[row : row + 1], position_ids=positions[row : row + 1])[0]
        same(output, alone, f"row {row} of a batch with positions from 9 and from 0, and alone")


def shift_invariance(subject: Subject) -> None:
    """A shift of all positions changes nothing, if so claimed.

    Only differences of positions may count: look for absolute positions, or leave shift_invariant at False.
    """
    # What is scaled or grouped shows beyond the trained length only.
    longest = tools.TRAINED if subject.refuses(2 * tools.TRAINED) else 2 * tools.TRAINED
    tokens = text(length=longest - 12)
    near, far = (subject.model(tokens, position_ids=torch.arange(first, first + longest - 12)[None])[0] for first in (1, 12))
    if not subject.scheme.shift_invariant:
        holds = (far - near).abs().max() < tools.TOLERANCE * near.abs().max()
        truth = "but holds: `shift_invariant: ClassVar[bool] = True` would say so" if holds else "and does not hold"
        raise NotApplicable(f"it is not claimed, {truth}")
    same(far, near, "positions from 12 and from 1")


def cache(subject: Subject) -> None:
    """Decoding with a cache equals one forward without.

    With a cache, position_ids are those of the new tokens. A token's result must not depend on later tokens, nor on how many
    come at once. The cache keeps keys as `rotate` returned them; with needs_key_positions, `prepare` gets their positions.
    """
    if not subject.caches:
        raise NotApplicable("an encoder has no cache")
    model, config = subject.model, subject.model.config
    expected = model(text(), use_cache=False)[0]
    alone = model(text()[1:, 7:], use_cache=False)[0]
    static = partial(StaticCache, max_cache_len=tools.LENGTH + 3)
    for kind, new in (("", DynamicCache), (", with a static cache", static)):
        same(in_parts(model, (1, 1, 8, 1, 5, 4), new(config=config)), expected, f"in parts of 1, 1, 8, 1, 5 and 4 tokens{kind}")
        parts = in_parts(model, (11, 5, 1, 3), new(config=config), padded(before=7))
        same(parts[1:, 7:], alone, f"in parts, after padding on the left{kind}, and alone")


def backends_agree(subject: Subject) -> None:
    """Eager attention and sdpa give the same.

    `attend` must give the same result whether or not it is asked for probabilities.
    """
    if len(tools.backends_of(subject.scheme)) == 1:
        raise NotApplicable(f"it runs with {' and '.join(subject.scheme.implementations)} alone")
    model, mask = subject.model, padded(after=7)["attention_mask"]
    other = subject.twin(model)
    same(*(one(text(), attention_mask=mask)[0][mask.bool()] for one in (model, other)), "outputs")
    tools.same_gradients(tools.gradients_of(model), tools.gradients_of(other), "with one and with the other")


def attention_span(subject: Subject) -> None:
    """Within a span, blocks, a mask and a cache give the same.

    `attend` and `bias` must read what `prepare` returned for this block of queries, by its `block`, and compute distances
    from it: see `Places`.
    """
    if not any(spans for _, spans in subject.scheme.kinds()):
        raise NotApplicable("a span holds in none of its layers")
    span = {"span": 6, "first": 2}
    model = subject.swapped(**span)
    expected = model(text())[0]
    if len(tools.backends_of(subject.scheme)) > 1:
        same(subject.twin(model, **span)(text())[0], expected, "eager attention and sdpa")
    elif not subject.caches:
        raise NotApplicable(f"it runs with {' and '.join(subject.scheme.implementations)} alone, without a cache")
    if subject.caches:
        parts = in_parts(model, (9, 1, 1, 6, 3), DynamicCache(config=model.config))
        same(parts, expected, "in parts of 9, 1, 1, 6 and 3 tokens, and in one")


def scale_and_dropout(subject: Subject) -> None:
    """It keeps to the model's scale and dropout.

    `attend` must multiply scores by `scaling`, which is not 1 / sqrt(head_dim) in every model, and apply `dropout`, as `weigh`
    does.
    """
    model = subject.swapped()
    attentions = model.architecture.self_attentions(model.base_model)
    attentions = [attention for attention in attentions if getattr(getattr(attention, "positions", None), "attend", None)]
    if not attentions:
        raise NotApplicable("the model's own attention does")

    class Other(type(model.architecture)):
        def scaling(self, attention):
            return 2 * super().scaling(attention)

        def dropout(self, attention):
            return 0.5

    expected = model(text())[0]
    for attention in attentions:
        attention.architecture = Other()
        different(model.eval()(text())[0], expected, "scores of twice the size, and of the usual one")
        different(*(model.train()(text())[0] for _ in range(2)), "two forwards with dropout")
        attention.architecture = model.architecture


def gradients(subject: Subject) -> None:
    """Each parameter gets a gradient in each backward.

    Make only parameters that every forward uses, in every layer. `detach` and rounding stop gradients.
    """
    found = tools.gradients_of(subject.model)
    unused = [name for name, gradient in found.items() if gradient is None]
    broken = [name for name, gradient in found.items() if gradient is not None and not gradient.isfinite().all()]
    idle = [name for name, gradient in found.items() if gradient is not None and not gradient.any()]
    reasons = {"none, as no forward uses it, and DDP waits for it": unused, "not finite": broken, "zero everywhere": idle}
    if said := [f"{', '.join(names)}: the gradient is {reason}" for reason, names in reasons.items() if names]:
        raise Failure("; ".join(said))


def gradient_checkpointing(subject: Subject) -> None:
    """Gradients are the same with layers run twice.

    A layer may run twice: do not count calls or consume values, and share values between layers by what `prepare` returns.
    """
    model = subject.swapped().train()
    if not model.supports_gradient_checkpointing:
        raise NotApplicable("transformers has none for this family")
    expected = tools.gradients_of(model)
    # transformers 5.23 renamed it, and warns of the old name
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        tools.same_gradients(tools.gradients_of(model), expected, f"with and without checkpointing, use_reentrant={reentrant}")


def save_and_reload(subject: Subject) -> None:
    """A saved model loads with the same outputs, bit for bit.

    Options, parameters and persistent buffers are loaded. Other tensors made in __init__ or fit_table are lost, since
    transformers loads into empty modules: compute them in forward.
    """
    with tools.registered(subject.scheme), tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        again = tools.auto_class(subject.family).from_pretrained(folder, attn_implementation=subject.backend).eval()
    if again.base_model.position_scheme != subject.scheme:
        raise Failure(f"it is loaded as {again.base_model.position_scheme!r}")
    same(again(text())[0], subject.model(text())[0], "outputs of the loaded model", tolerance=0)


def deepcopy(subject: Subject) -> None:
    """A copy computes the same, and shares nothing.

    Keep tensors in the module, not in Python modules or classes, and keep none that has a gradient history.
    """
    model = subject.swapped()
    expected = model(text())[0]
    twin = copy.deepcopy(model)
    same(twin(text())[0], expected, "outputs of the copy", tolerance=0)
    tools.move(list(twin.parameters()), 0.3)
    different(twin(text())[0], expected, "the copy, changed, and the model")
    restore(twin, keep_training=True)
    same(model(text())[0], expected, "the model after its copy was changed and restored", tolerance=0)


def longer_than_trained(subject: Subject) -> None:
    """Twice the length runs, and what is too long is refused.

    Build for geometry.max_positions, not trained_positions; or refuse in `check`, with a PosswapError.
    """
    refusal = subject.refuses(2 * tools.TRAINED)
    reach = tools.TRAINED if refusal else 2 * tools.TRAINED
    tokens = text(length=reach + 1)
    if not subject.model(tokens[:, :reach])[0].isfinite().all():
        raise Failure(f"there are NaN or infinite numbers on {reach} tokens")
    with suppress(SequenceTooLongError):
        subject.model(tokens)
        raise Failure(f"{reach + 1} tokens run in a model that is set up for {reach}")
    if refusal:
        raise NotApplicable(refusal)
    models = subject.model, subject.swapped(tools.TRAINED)
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in models]
    other = sorted(name for name, _ in shapes[0].items() ^ shapes[1].items())
    table = subject.model.architecture.table(subject.model.base_model)
    if other and subject.scheme.resizable and not table.keeps_table:
        raise Failure(f"{other[0]} has another shape at another length: say `resizable: ClassVar[bool] = False`")


def phase_precision(subject: Subject) -> None:
    """bfloat16 errs as little at position 4000 as at 1.

    Compute angles in float32 or better, and round once, at the end. Buffers are cast with the model: keep frequencies as
    Python numbers, and make the tensor in forward.
    """
    if refusal := subject.refuses(2 * FAR):
        raise NotApplicable(refusal)
    coarse, fine, tokens = subject.swapped(2 * FAR).bfloat16(), subject.swapped(2 * FAR), text(rows=8)
    with torch.no_grad():  # the same weights for both, so that only arithmetic differs; buffers stay as they are
        for target, source in zip(fine.parameters(), coarse.parameters(), strict=True):
            target.copy_(source)
        outputs = [[model(tokens, position_ids=count_from(first))[0] for model in (coarse, fine)] for first in (1, FAR)]
    near, far = (float((rough.float() - exact).square().mean().sqrt()) for rough, exact in outputs)
    if not far <= 3 * near:
        raise Failure(f"bfloat16 is off by {far:.2g} at position {FAR}, and by {near:.2g} at position 1")


# In the order that they run in.
CHECKS: tuple[Callable[[Subject], None], ...] = (
    builds, table_kept, options, restores, switched_on, order_matters, position_ids, padding, packing, batch_independence,
    shift_invariance, cache, backends_agree, attention_span, scale_and_dropout, gradients, gradient_checkpointing,
    save_and_reload, deepcopy, longer_than_trained, phase_precision,
)  # fmt: skip
