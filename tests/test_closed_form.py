"""Closed forms of the warm start against planted problems, dense least squares and naive loops, in float64."""

import cmath

import pytest
import torch

import hf_posswap as posswap
from hf_posswap.architectures import QueryKey
from hf_posswap.fitting.fit import fit
from hf_posswap.functional.closed_form import Evidence, balance, fit_kernel, missing_scores, second_moment, write_kernel
from hf_posswap.schemes import Geometry, Relative, Rotary, relative

HEADS, DIM, LENGTH = 2, 8, 12
GEOMETRY = Geometry(hidden_size=HEADS * DIM, num_heads=HEADS, head_dim=DIM, max_positions=64, trained_positions=64)
SCALING = DIM**-0.5


@pytest.fixture
def random():
    """Random float64 numbers of a shape, from a fixed seed."""
    generator = torch.Generator().manual_seed(3)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def allow(rows: int, length: int, causal: bool, padding: int = 0) -> torch.Tensor:
    """Which keys a query may see, (B, 1, L, L): the last row has padding on its right."""
    mask = torch.ones(rows, length, dtype=torch.bool)
    if padding:
        mask[-1, -padding:] = False
    allowed = mask[:, None, None, :] & mask[:, None, :, None]
    return allowed & torch.ones(length, length, dtype=torch.bool).tril() if causal else allowed


def softmax(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Probabilities, zero for queries that see nothing."""
    return scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num()


def distances(length: int, clip: int) -> torch.Tensor:
    """The row r of a relative table for each query and key, by a plain loop."""
    return torch.tensor([[min(max(j - i, -clip), clip) + clip for j in range(length)] for i in range(length)])


def centred(values: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """Less the mean over the keys that a query sees: what a softmax cannot feel is gone."""
    mean = values.masked_fill(~allowed, 0).sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True).clamp_min(1)
    return (values - mean).masked_fill(~allowed, 0)


def projections(random) -> QueryKey:
    """Query and key projections that belong to nobody."""
    size = HEADS * DIM
    return QueryKey(0.3 * random(size, size), 0.5 * random(size), 0.3 * random(size, size), 0.5 * random(size), True)


def project(query_key: QueryKey, states: torch.Tensor) -> list[torch.Tensor]:
    """Queries and keys (B, H, L, D) of hidden states (B, L, E)."""
    pairs = ((query_key.query, query_key.query_bias), (query_key.key, query_key.key_bias))
    return [(states @ w.T + b).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for w, b in pairs]


@pytest.mark.parametrize("causal", [True, False])
def test_missing_scores(random, causal):
    """Centred under the weights, zero where masked, blind to row constants, and the missing score where nothing else is."""
    query, key, extra = random(2, HEADS, LENGTH, DIM), random(2, HEADS, LENGTH, DIM), random(2, HEADS, LENGTH, LENGTH)
    allowed = allow(2, LENGTH, causal, padding=4)
    scores = query @ key.mT
    evidence = Evidence(query, key, query, softmax((scores + extra) * SCALING, allowed), query, allowed)
    weights, missing = missing_scores(evidence, scores, SCALING)
    assert (weights * missing).sum(-1).abs().max() < 1e-12
    masked = ~allowed.expand_as(missing)
    assert masked.any() and not weights[masked].any() and not missing[masked].any() and bool((weights[~masked] > 0).all())
    torch.testing.assert_close(weights.sum(-1)[0], torch.full((HEADS, LENGTH), 1.02, dtype=torch.float64))
    torch.testing.assert_close(centred(missing, allowed), centred(extra, allowed), rtol=0, atol=1e-10)
    again = missing_scores(evidence, scores + random(2, HEADS, LENGTH, 1), SCALING)
    torch.testing.assert_close(again, (weights, missing), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", [Rotary(), Rotary(layout="half"), Rotary(fraction=0.5)], ids=str)
def test_balance(random, scheme):
    """q.k stays; both moments become one diagonal, largest first along the dimensions from slow to fast."""
    query_key, states = projections(random), random(20, 10, HEADS * DIM)
    query, key = project(query_key, states)
    order = scheme.attention_module(GEOMETRY).dims_slow_to_fast()
    balance(query_key, *(second_moment(s.transpose(0, 1).flatten(1, 2)) for s in (query, key)), order)
    after = project(query_key, states)
    torch.testing.assert_close(after[0] @ after[1].mT, query @ key.mT, rtol=0, atol=1e-9)
    assert sorted(order.tolist()) == list(range(DIM)) and not torch.allclose(after[0], query)
    moments = [second_moment(s.transpose(0, 1).flatten(1, 2)) for s in after]
    diagonal = moments[0].diagonal(dim1=1, dim2=2)
    for moment in moments:  # up to the floor of 1e-6 under the Cholesky factors
        torch.testing.assert_close(moment, torch.diag_embed(diagonal), rtol=0, atol=1e-4 * diagonal.max().item())
    assert bool((diagonal[:, order].diff() < 0).all())


def test_balance_of_a_dead_head(random):
    """A head whose queries are zero, as masks leave them, scores nothing as before, and its keys keep their size."""
    query_key, states = projections(random), random(20, 10, HEADS * DIM)
    for tensor in query_key.tensors()[:2]:  # weight and bias of queries
        tensor[:DIM] = 0
    query, key = project(query_key, states)
    moments = [second_moment(s.transpose(0, 1).flatten(1, 2)) for s in (query, key)]
    balance(query_key, *moments, torch.arange(DIM))
    after = project(query_key, states)
    torch.testing.assert_close(after[0] @ after[1].mT, query @ key.mT, rtol=0, atol=1e-9)
    assert not after[0][:, 0].any() and after[1][:, 0].std() > 0.1


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_write_kernel(random, layout, fraction):
    """The means of q and k, as they are projected, meet in Z + change; neither dimensions that stay nor weights move."""
    positions = Rotary(layout=layout, fraction=fraction).attention_module(GEOMETRY)
    planes = positions.planes()
    query_key, states = projections(random), random(4, 6, HEADS * DIM)
    weights = query_key.query.clone(), query_key.key.clone()

    def means():
        return [side.mean((0, 2)) for side in project(query_key, states)]

    def product():
        query, key = (torch.complex(mean[:, planes[:, 0]], mean[:, planes[:, 1]]) for mean in means())
        return query.conj() * key

    before, start = product(), means()
    change = torch.complex(random(HEADS, len(planes)), random(HEADS, len(planes)))
    write_kernel(query_key, *start, change, planes)
    torch.testing.assert_close(product(), before + change, rtol=0, atol=1e-12)
    still = sorted(set(range(DIM)) - set(planes.flatten().tolist()))
    assert len(still) == DIM - int(DIM * fraction)
    for now, then in zip(means(), start, strict=True):
        assert torch.equal(now[:, still], then[:, still])
        lengths = now[:, planes].norm(dim=-1)
        torch.testing.assert_close(lengths, (before + change).abs().sqrt(), rtol=0, atol=1e-12)
    ends, begins = ([torch.complex(*side[:, planes].unbind(-1)) for side in sides] for sides in (means(), start))
    moved, more, less = (
        sum((end * cmath.exp(1j * angle) - begin).abs().square() for end, begin in zip(ends, begins, strict=True))
        for angle in (0, 0.1, -0.1)
    )
    assert bool((moved < more).all() and (moved < less).all())  # of all with this product, the nearest
    biases = query_key.query_bias.clone(), query_key.key_bias.clone()
    write_kernel(query_key, *means(), torch.zeros_like(change), planes)  # of one length and at their product: nothing moves
    torch.testing.assert_close((query_key.query_bias, query_key.key_bias), biases, rtol=0, atol=1e-12)
    assert torch.equal(query_key.query, weights[0]) and torch.equal(query_key.key, weights[1])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ridge", [1e-13, None, 10.0])
def test_rotary_solves_a_planted_kernel(random, layout, causal, ridge, monkeypatch):
    """Content where nothing turns, and a sum of cosines at the scheme's frequencies: all of the missing score is found."""
    positions = Rotary(layout=layout, fraction=0.5, theta=30).attention_module(GEOMETRY)
    query_key, states = projections(random), random(3, 40, HEADS * DIM)
    planes = positions.planes()
    turning = torch.zeros(HEADS, DIM, dtype=torch.bool)
    turning[:, planes.flatten()] = True
    for tensor in query_key.tensors():
        tensor[turning.flatten()] = 0
    frequencies, _ = positions.frequencies(states.device, None)
    steps = torch.arange(40, dtype=torch.float64)
    angles = (steps[None, :] - steps[:, None])[..., None] * frequencies
    wave = torch.complex(random(HEADS, 1, 1, 2), random(HEADS, 1, 1, 2))
    kernel = (wave * torch.exp(1j * angles)).real.sum(-1)  # (H, L, L)
    query, key = project(query_key, states)
    wanted = query @ key.mT + kernel
    allowed = allow(3, 40, causal, padding=5)
    probabilities = softmax(wanted * SCALING, allowed)

    def observe():
        query, key = project(query_key, states)
        yield Evidence(query, key, query, probabilities, query, allowed)

    def error():
        query, key = project(query_key, states)
        shared = positions.prepare(torch.arange(40)[None], torch.arange(40)[None], 40, None)
        scores = positions.rotate(query, shared) @ positions.rotate(key, shared).mT
        return centred(scores - wanted, allowed).norm()

    if ridge is not None:
        monkeypatch.setattr("hf_posswap.schemes.rotary.fit_kernel", lambda *equations: fit_kernel(*equations, ridge=ridge))
    before = error()
    with torch.no_grad():
        positions.solve(observe, query_key, SCALING)
    left = error() / before
    assert before > 1 and (
        left < 1e-5 if ridge == 1e-13 else 1e-3 < left < 0.05 if ridge is None else left > 0.5
    )  # angles are float32


def dense_keys(queries, masses, targets):
    """Weighted least squares with explicit row constants for one head: a (R, D), by lstsq of smallest norm."""
    (count, dim), rows = queries.shape, masses.shape[1]
    design = torch.zeros(count, rows, rows * dim + count, dtype=torch.float64)
    for t in range(count):
        for r in range(rows):
            design[t, r, r * dim : (r + 1) * dim] = queries[t]
            design[t, r, rows * dim + t] = 1
    root = masses.sqrt()
    design = (design * root[..., None]).flatten(0, 1)
    wanted = torch.where(masses > 0, targets / root.clamp_min(1e-300), torch.zeros_like(root)).flatten()
    return torch.linalg.lstsq(design, wanted[:, None], driver="gelsd").solution[: rows * dim, 0].view(rows, dim)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("unseen", [0, 2])
def test_fit_relative_keys_is_least_squares(random, shared, unseen):
    """Conjugate gradients find the scores of dense weighted least squares; a distance that is never seen gets zeros."""
    heads, count, rows, dim = 2, 25, 5, 3
    queries, masses, targets = random(heads, count, dim), random(heads, count, rows).abs(), random(heads, count, rows)
    masses[..., rows - unseen :] = 0
    targets = targets * masses
    targets = targets - masses * targets.sum(-1, keepdim=True) / masses.sum(-1, keepdim=True)  # as `missing_scores` gives them
    found = relative.fit_relative_keys(queries, masses, targets, shared=shared, ridge=1e-12, tolerance=1e-12)
    assert found.shape == (1 if shared else heads, rows, dim)
    if shared:
        expected = dense_keys(queries.flatten(0, 1), masses.flatten(0, 1), targets.flatten(0, 1))[None]
    else:
        expected = torch.stack([dense_keys(*parts) for parts in zip(queries, masses, targets, strict=True)])
    scores = [queries @ table.mT for table in (found, expected)]
    means = [(masses * s).sum(-1, keepdim=True) / masses.sum(-1, keepdim=True) for s in scores]
    felt = [(s - mean)[..., : rows - unseen] for s, mean in zip(scores, means, strict=True)]
    torch.testing.assert_close(*felt, rtol=0, atol=1e-7)
    assert felt[0].abs().max() > 0.1 and not found[:, rows - unseen :].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{}, {"share_heads": True}, {"values": False}], ids=str)
def test_relative_solves_planted_tables(random, causal, options, monkeypatch):
    """At no ridge a layer's attention is found to numerical precision, padding and all."""
    exact = {"ridge": 1e-12, "tolerance": 1e-12}
    monkeypatch.setattr(relative, "fit_relative_keys", lambda *a, own=relative.fit_relative_keys, **k: own(*a, **k, **exact))
    monkeypatch.setattr(relative, "solve_with_ridge", lambda a, b, _, own=relative.solve_with_ridge: own(a, b, 1e-12))
    positions = Relative(clip=3, **options).attention_module(GEOMETRY).double()
    planted = Relative(clip=3, **options).attention_module(GEOMETRY).double()
    with torch.no_grad():
        for parameter in planted.parameters():
            parameter.copy_(0.5 * random(*parameter.shape))
    query, key, value = (random(8, HEADS, LENGTH, DIM) for _ in range(3))
    allowed, index = allow(8, LENGTH, causal, padding=4), distances(LENGTH, 3).expand(8, HEADS, -1, -1)

    def attention(module):
        scores = query @ key.mT + (query @ module.key_table.mT).gather(-1, index)
        probabilities = softmax(scores * SCALING, allowed)
        output = probabilities @ value
        if module.value_table is not None:
            rows = torch.nn.functional.one_hot(index, 7).double()
            output = output + torch.einsum("bhij,bhijr->bhir", probabilities, rows) @ module.value_table
        return probabilities, output

    with torch.no_grad():
        start, wanted = attention(positions), attention(planted)
        positions.solve(lambda: iter([Evidence(query, key, value, *wanted, allowed)]), None, SCALING)
        for got, right, plain in zip(attention(positions), wanted, start, strict=True):
            assert (plain - right).abs().max() > 0.05
            torch.testing.assert_close(got, right, rtol=0, atol=1e-7)
    if causal:
        assert all(not table[..., 4:, :].any() for table in positions.parameters())  # to the right: never seen


@pytest.mark.parametrize(
    ("family", "backend", "options"),
    [
        ("bert", "eager", "values=true"),
        ("gpt2", "sdpa", "share_heads=true"),
        ("bert", "sdpa", "values=false"),
        ("gpt2", "eager", "values=true"),
    ],
)
def test_fit_finds_planted_models(make_model, family, backend, options):
    """A model whose attention is relative teaches a copy without tables: outputs are recovered but for the ridge."""
    planted, copy = (posswap.swap(make_model(family, backend).double(), f"relative:clip=3,{options}") for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for attention in planted.architecture.self_attentions(planted.base_model):
            for parameter in attention.positions.parameters():
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    ids = torch.randint(2, 98, (200, 20), generator=generator)
    with torch.no_grad():
        wanted, start = planted(ids[:20]).logits, copy(ids[:20]).logits
        report = fit(copy, ids, original_model=planted, steps=0, progress=False)
        found = copy(ids[:20]).logits
    assert all(layer.kept for layer in report.layers) and report.after.total < 0.01 * report.before.total
    assert (found - wanted).norm() < 0.1 * (start - wanted).norm()
    assert torch.equal(planted(ids[:20]).logits, wanted)
