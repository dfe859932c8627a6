"""Claims about position schemes, checked: each is a function that computes where the claim holds, and by how much.

The claims come from papers, lectures and posts that teach positional encodings. A claim that holds in one case and fails in
another has a finding for each. Codes have E = 128 numbers per position unless a finding says otherwise. Where a trained model
is needed, it is the embedded GPT-2 (256 positions) on held-out text from the standard library, which differs a little between
versions of Python. Models that are trained here are tiny.
"""

import math
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification, BertModel

from hf_posswap.assets import embedded_model
from hf_posswap.contract.subject import tiny_config, tiny_model
from hf_posswap.data.text import embedded_documents, token_blocks
from hf_posswap.measure.damage import perplexity
from hf_posswap.measure.losses import mean_loss, token_losses
from hf_posswap.measure.positions import pair_rotation
from hf_posswap.schemes import Alibi, Buckets, Geometry, Relative, Rotary
from hf_posswap.schemes.distance_bias import AlibiPositions, BucketPositions
from hf_posswap.schemes.ladder import rung_code
from hf_posswap.schemes.sinusoidal import sinusoids
from hf_posswap.swapping import swap

SIZE = 128
SIZES = Geometry(hidden_size=64, num_heads=2, head_dim=32, max_positions=1024, trained_positions=256)


class Finding(NamedTuple):
    """Whether a claim holds under one condition, and the number that shows it."""

    where: str
    holds: bool
    found: str


class Claim(NamedTuple):
    """A claim and its findings."""

    name: str
    statement: str
    findings: tuple[Finding, ...]


def unique() -> Iterator[Finding]:
    """Every position has a code of its own."""
    apart = torch.cdist(signal := _sinusoids(4096), signal).fill_diagonal_(math.inf).min().item()
    yield Finding("sinusoidal, 4,096 positions", apart > 1, f"the nearest two are {apart:.2f} apart")
    for rung, bits in (("binary", 5), ("dials", 5), ("dials", 4)):
        codes = _different(rung_code(torch.arange(32), rung, max_positions=2**bits, size=SIZE))
        yield Finding(f"{rung} with {bits} numbers, 32 positions", codes == 32, f"{codes} codes")
    codes = _different(torch.sin(2 * math.pi * torch.arange(16, dtype=torch.float64)[:, None] / 2 ** torch.arange(4)))
    yield Finding("dials that begin with a whole turn a step, 4 numbers, 16 positions", codes == 16, f"{codes} codes")


def bounded() -> Iterator[Finding]:
    """Its numbers are small, so words are not drowned."""
    for size in (128, 768):
        norms = _sinusoids(512, size).norm(dim=1)
        found = f"entries within 1, every row of norm {norms.mean():.1f}"
        yield Finding(f"sinusoidal, E = {size}, in itself", (norms - (size / 2) ** 0.5).abs().max().item() < 1e-5, found)
    table = _gpt2().transformer.wpe.weight.double()
    printed, learned = (table.shape[1] / 2) ** 0.5, table.norm(dim=1)[1:].median().item()
    found = f"norm {printed:.1f}, a learned row {learned:.2f}"
    yield Finding("sinusoidal beside the table of a trained GPT-2", printed < 2 * learned, found)
    last = rung_code(torch.tensor(511), "count", max_positions=512, size=SIZE).item()
    yield Finding("count", last <= 1, f"position 511 is {last:.0f}")


def same_distance_same_relation() -> Iterator[Finding]:
    """The same distance is the same relation, wherever it is and however long the text."""
    gram = _sinusoids(256) @ _sinusoids(256).T
    error = max(_apart(gram.diagonal(k), gram.diagonal(k).mean()) for k in range(256))
    yield Finding("sinusoidal: dot products depend on the distance alone", error < 1e-4, f"off by {_below(error)}")
    steps = [rung_code(torch.tensor(1), "normalised", max_positions=n, size=1).item() for n in (10, 100)]
    found = f"a step is {steps[0]:.2f} of 10 positions and {steps[1]:.2f} of 100"
    yield Finding("normalised by the length", steps[0] == steps[1], found)


def translation() -> Iterator[Finding]:
    """A shift is a linear map: PE(t + k) = T(k) PE(t), with one T(k) for all t."""
    error = max(_apart(_sinusoids(256) @ translation_matrix(k).T, _sinusoids(256 + k)[k:]) for k in (1, 7, 100))
    yield Finding("sinusoidal, k = 1, 7, 100: T(k) is a rotation of each pair", error < 1e-4, f"off by {_below(error)}")


def sine_alone() -> Iterator[Finding]:
    """Sines alone have no such map: it takes the cosines."""
    for name, size in (("one frequency", 1), ("slowed, E = 128, the best map by least squares", SIZE)):
        code = torch.sin(torch.arange(513.0, dtype=torch.float64)[:, None] * 1e-4 ** (torch.arange(size) / size))
        best = torch.linalg.lstsq(code[:-1], code[1:], driver="gelsd").solution
        missed = ((code[:-1] @ best - code[1:]).norm() / code[1:].norm()).item()
        yield Finding(name, missed > 0.05, f"misses {missed:.0%}")


def dot_product_decreases() -> Iterator[Finding]:
    """Dot products steadily decrease with the distance."""
    products = _sinusoids(SIZE) @ _sinusoids(1)[0]
    rises = (products[1:] > products[:-1]).nonzero().flatten().tolist()
    found = f"rises at {len(rises)} of {SIZE - 1} steps, first from {rises[0]} to {rises[0] + 1}"
    yield Finding("sinusoidal, distances up to 127, step by step", not rises, found)
    halves = products[: SIZE // 2].mean() > products[SIZE // 2 :].mean()
    yield Finding("on the whole", bool(halves), f"mean {products[:64].mean():.1f}, then {products[64:].mean():.1f}")


def dot_product_vanishes() -> Iterator[Finding]:
    """Dot products tend to zero with the distance."""
    products = _sinusoids(4096) @ _sinusoids(1)[0] / (SIZE / 2)
    for first in (128, 1024, 2048):
        largest = products[first:].abs().max().item()
        yield Finding(f"sinusoidal, distances {first:,} to 4,095", largest < 0.05, f"up to {largest:.2f} of that with itself")


def symmetric() -> Iterator[Finding]:
    """Left and right look alike: only how far matters."""
    there, back = (_sinusoids(64)[40] @ _sinusoids(64)[40 + k] for k in (9, -9))
    yield Finding("dot products of sinusoids", abs(there - back).item() < 1e-6, f"both {there:.1f} at distances 9 and -9")
    right, left = sinusoids(torch.tensor([9, -9]), SIZE)
    far = (right - left).norm().item()
    yield Finding("sinusoids at the signed distance: sines turn with the sign", far < 1e-6, f"{far:.1f} apart")
    yield Finding("relative vectors (Shaw), by definition", False, "2 clip + 1 vectors, one for each signed distance")
    bias = AlibiPositions(Alibi(), SIZES).features(torch.tensor([9, -9]))
    yield Finding("ALiBi", bool(bias[0] == bias[1]), f"both {bias[0].item():.0f} slopes at distances 9 and -9")
    right, left = BucketPositions(Buckets(), SIZES).measure(torch.tensor([9, -9])).tolist()
    yield Finding("T5's buckets", right == left, f"bucket {left} at distance -9, {right} at 9")


def layout_does_not_matter() -> Iterator[Finding]:
    """Whether sines and cosines are interleaved or in halves does not matter."""
    permuted = torch.cat([_sinusoids(256)[:, 0::2], _sinusoids(256)[:, 1::2]], dim=1)
    difference = _apart(permuted, _sinusoids(256, layout="halves"))
    yield Finding("halves: the same numbers in another order", difference == 0, f"difference {difference:.1f}")
    difference = _apart(permuted, _sinusoids(256, layout="tensor2tensor"))
    apart = 10_000 ** (63 / 63 - 63 / 64) - 1  # at the slowest pair
    found = f"largest difference {difference:.2f}, frequencies up to {apart:.0%} apart"
    yield Finding("tensor2tensor, which is in halves", difference == 0, found)


def wavelengths() -> Iterator[Finding]:
    """Wavelengths run from 2 pi to 10,000 times 2 pi."""
    for layout, last in (("as printed, exponents 2i / E", 126 / 128), ("tensor2tensor, E/2 - 1 steps", 1.0)):
        longest = 2 * math.pi * 10_000**last
        found = f"the longest is {longest:,.0f} of {20_000 * math.pi:,.0f}"
        yield Finding(layout, math.isclose(longest, 20_000 * math.pi), found)


def binary_is_wasteful() -> Iterator[Finding]:
    """Binary codes are wasteful and not continuous; sinusoids are their smooth counterpart."""
    bits = rung_code(torch.arange(256), "binary", max_positions=256, size=8)
    flips = (bits[1:] - bits[:-1]).abs().sum(1)
    found = f"a bit a number, 8 for 2^8 positions; neighbours differ in {flips.min():.0f} to {flips.max():.0f} of them"
    yield Finding("binary, 256 positions", bool(flips.min() < flips.max()), found)
    steps = (_sinusoids(256)[1:] - _sinusoids(256)[:-1]).norm(dim=1)
    yield Finding("sinusoidal", bool(steps.max() - steps.min() < 1e-5), f"every step is {steps.mean():.2f} long")


def few_dimensions() -> Iterator[Finding]:
    """A few dimensions carry the position, the rest stand still."""
    for size, length in ((768, 512), (768, 1024), (128, 50)):
        angles = _frequencies(size) * (length - 1)
        moving = (angles > math.acos(0.99)).double().mean().item()
        found = f"{moving:.0%} of the pairs turn until the cosine is below 0.99"
        yield Finding(f"sinusoidal, E = {size}, {length} positions", moving < 0.5, found)


def printed_frequency() -> Iterator[Finding]:
    """10,000^(2i / E) is the frequency, as some print it."""
    distances = torch.arange(1, 9, dtype=torch.float64)[:, None]
    near, right = ((distances * frequency).cos().mean().item() for frequency in (1 / _frequencies(), _frequencies()))
    found = f"the eight nearest neighbours have {near:.2f} of the dot product with itself; with the inverse, {right:.2f}"
    yield Finding("taken at its word", near > 0.5, found)


def precision() -> Iterator[Finding]:
    """Angles can be computed in the precision of the model."""
    frequencies = _frequencies()
    for dtype, position in ((torch.float32, 512), (torch.float32, 100_000), (torch.bfloat16, 512), (torch.bfloat16, 4096)):
        angles = (torch.tensor(position, dtype=dtype) * frequencies.to(dtype)).double()
        off = (torch.remainder(angles - position * frequencies + math.pi, 2 * math.pi) - math.pi).abs().max().item()
        yield Finding(f"{str(dtype).removeprefix('torch.')}, position {position:,}", off < 0.01, f"off by {off:.2g} rad")


def generalises_to_longer() -> Iterator[Finding]:
    """It generalises to longer inputs without any effort."""
    ids = _text(1024, 4)
    original = [perplexity(_gpt2(), ids[:, low : low + 256]) for low in (0, 768)]
    for scheme in ("sinusoidal", "alibi", "buckets"):
        losses = token_losses(swap(_gpt2(), scheme, max_positions=1024), ids)
        if scheme == "sinusoidal":
            read = bool(losses[:, 1:].isfinite().all())
            yield Finding("sinusoidal: there is a code for every position", read, "a GPT-2 of 256 positions reads 1,024 tokens")
        ratios = [math.exp(mean_loss(losses[:, low : low + 256])) / one for low, one in zip((0, 768), original, strict=True)]
        found = "perplexity {:.1f} times the original's, which reads these alone, in the first 256 tokens, {:.1f} in the last"
        found = found.format(*ratios)
        yield Finding(f"{scheme}, swapped in, trained on 256: and it is understood", ratios[1] < 1.1 * ratios[0], found)


def deterministic() -> Iterator[Finding]:
    """A position's code is fixed: it depends on neither the words nor the length of the text."""
    same = torch.equal(_sinusoids(512)[:64], _sinusoids(64))
    yield Finding("sinusoidal", same, "the first 64 rows are the same in a text of 64 and of 512")
    for scaling in ({"rope_type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}):
        module = Rotary(scaling=scaling).attention_module(SIZES)
        short, long = (module.frequencies(torch.device("cpu"), length)[0] for length in (256, 1024))
        apart = (short / long).max().item()
        found = "one set of frequencies" if apart == 1 else f"frequencies up to {apart:.1f} times lower at 1,024 than at 256"
        yield Finding(f"rotary, {scaling['rope_type']} scaling", apart == 1, found)


def learned_and_fixed_alike() -> Iterator[Finding]:
    """Learned and sinusoidal positions work alike."""
    ids = _text(256, 8)
    original = perplexity(_gpt2(), ids)
    for scheme, name in (("sinusoidal", "projected onto the learned table"), ("sinusoidal:project=false", "as printed")):
        ratio = perplexity(swap(_gpt2(), scheme), ids) / original
        found = f"perplexity {ratio:.{3 if ratio < 10 else 0}f} times the original's"
        yield Finding(f"sinusoids {name}, put into a GPT-2 that was not trained on them", ratio < 1.02, found)


def early_positions_favoured() -> Iterator[Finding]:
    """Models know early positions better than late ones."""
    model, ids = _gpt2(), _text(64, 16)
    perplexities = []
    for first in (1, 192):  # the first token stays at 0, which the model leans on
        positions = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(first, first + 63)])[None].expand(len(ids), -1)
        logits = model(ids, position_ids=positions).logits[:, 1:-1].flatten(0, 1).double()
        perplexities.append(math.exp(torch.nn.functional.cross_entropy(logits, ids[:, 2:].flatten()).item()))
    ratio = perplexities[1] / perplexities[0]
    found = f"perplexity of the same words at 192 to 254 is {ratio:.2f} times that at 1 to 63"
    where = "the embedded GPT-2, trained on full blocks of 256; the gap behind the first token is a part of it"
    yield Finding(where, ratio > 1.05, found)


def relative_is_slower() -> Iterator[Finding]:
    """Relative positions cost more than absolute ones."""
    # Eager: the counter does not see the products inside of fused kernels.
    config = BertConfig(num_hidden_layers=1, vocab_size=99, max_position_embeddings=1024, attn_implementation="eager")
    models = [swap(BertModel(config, add_pooling_layer=False).eval(), scheme) for scheme in ("learned", "relative")]
    for length in (128, 1024):
        flops = []
        for model in models:
            with FlopCounterMode(display=False) as counter:
                model(torch.zeros(1, length, dtype=torch.long))
            flops.append(counter.get_total_flops())
        ratio = flops[1] / flops[0]
        found = f"{ratio:.2f} times the multiplications of a BERT-base layer"
        yield Finding(f"relative (Shaw, clip 64), {length} tokens", ratio > 1.01, found)


def rotary_keeps_distances() -> Iterator[Finding]:
    """RoPE keeps relative angles when words are put in front: only distances count."""
    ids = _text(64, 2)
    for scheme in ("rotary:mark_first=false", "learned"):
        model = swap(_gpt2(), scheme)
        logits = [model(ids, position_ids=torch.arange(64)[None] + shift).logits for shift in (0, 100)]
        moved, name = _apart(*logits), scheme.partition(":")[0]
        yield Finding(f"{name}, all positions shifted by 100", moved < 1e-3, f"logits move by {_below(moved)}")


def absolute_on_little_data() -> Iterator[Finding]:
    """Absolute positions do well where data is scarce."""
    schemes = ("learned", "sinusoidal:project=false", "rotary", "relative:clip=8")
    scores = {name.partition(":")[0]: sum(_which_comes_first(name, seed) for seed in range(3)) / 3 for name in schemes}
    for scheme in ("learned", "sinusoidal"):
        others = ", ".join(f"{name} {score:.2f}" for name, score in scores.items() if name != scheme)
        found = f"accuracy {scores[scheme]:.2f}, mean of 3 seeds ({others}; chance 0.50)"
        where = f"{scheme}, from scratch, which of two marks is first, 96 examples: 0.05 ahead of rotary and relative"
        ahead = scores[scheme] - max(scores["rotary"], scores["relative"])
        yield Finding(where, ahead > 0.05, found)  # single seeds differ by more


def order_matters() -> Iterator[Finding]:
    """Without positions a transformer sees a bag of words."""
    tokens = torch.randint(99, (1, 12), generator=torch.Generator().manual_seed(0))
    order = torch.cat([torch.randperm(11, generator=torch.Generator().manual_seed(1)), torch.tensor([11])])
    for family, name in (("bert", "an encoder (BERT)"), ("gpt2", "a decoder (GPT-2)")):
        model = swap(tiny_model(family), "none", warm_start=False).base_model
        ends = [model(ids).last_hidden_state[0, -1] for ids in (tokens, tokens[:, order])]
        moved = _apart(*ends)
        yield Finding(f"{name}: the last word, others shuffled", moved < 1e-4, f"its state moves by {_below(moved)}")


def clipping_is_small() -> Iterator[Finding]:
    """Clipped distances keep relative tables small, and free of a longest input."""
    sizes = []
    for n in (512, 65_536):
        base = Geometry(hidden_size=768, num_heads=12, head_dim=64, max_positions=n, trained_positions=512)
        sizes.append(sum(one.numel() for one in Relative(clip=64, share_heads=True).attention_module(base).parameters()))
    unclipped = 2 * (2 * 511 + 1) * 64
    found = f"{sizes[0]:,} numbers a layer (BERT-base, one set for all heads), for 512 positions and for 65,536; unclipped "
    found += f"{unclipped:,}, for 512 and no more"
    yield Finding("relative, clip 64", sizes[0] == sizes[1], found)


CLAIMS: tuple[Callable[[], Iterator[Finding]], ...] = (
    unique, bounded, same_distance_same_relation, generalises_to_longer, deterministic, translation, sine_alone,
    dot_product_decreases, dot_product_vanishes, symmetric, layout_does_not_matter, wavelengths, binary_is_wasteful,
    few_dimensions, learned_and_fixed_alike, early_positions_favoured, relative_is_slower, rotary_keeps_distances,
    absolute_on_little_data, order_matters, clipping_is_small, printed_frequency, precision,
)  # fmt: skip


def check_claims(claims: tuple[Callable[[], Iterator[Finding]], ...] = CLAIMS) -> list[Claim]:
    """Compute the findings of each claim; all of them take a minute or less on one core.

    >>> [finding.holds for finding in check_claims((wavelengths,))[0].findings]
    [False, True]
    """
    bar = tqdm(claims, desc="claims", leave=False, disable=None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return [Claim(claim.__name__, claim.__doc__.removesuffix("."), tuple(claim())) for claim in bar]


def markdown(claims: list[Claim]) -> str:
    """Return the claims as a Markdown table, a line for each finding."""
    lines = ["| | claim | where | | found |", "|---:|---|---|---|---|"]
    for number, claim in enumerate(claims, 1):
        for index, finding in enumerate(claim.findings):
            head = f"| {number} | {claim.statement} " if index == 0 else "| | "
            lines.append(f"{head}| {finding.where} | {'holds' if finding.holds else 'fails'} | {finding.found} |")
    return "\n".join(lines)


def claims(markdown_table: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False):
    """Check common claims about position schemes, and show where each holds, and by how much."""
    table = markdown(check_claims())
    typer.echo(table) if markdown_table else Console().print(Markdown(table))


def translation_matrix(distance: int, size: int = SIZE) -> torch.Tensor:
    """Return T(k) with PE(t + k) = T(k) PE(t) for interleaved sinusoids: a rotation of each pair (sin, cos), (E, E) float64.

    >>> translation_matrix(1, size=2)
    tensor([[ 0.5403,  0.8415],
            [-0.8415,  0.5403]], dtype=torch.float64)
    """
    return pair_rotation(distance * _frequencies(size))


def _frequencies(size: int = SIZE) -> torch.Tensor:
    return 10_000.0 ** -(2 * torch.arange(size // 2, dtype=torch.float64) / size)


def _sinusoids(positions: int, size: int = SIZE, layout: str = "interleaved") -> torch.Tensor:
    return sinusoids(torch.arange(positions), size, layout=layout).double()


def _different(codes: torch.Tensor) -> int:
    return len(torch.unique((1e5 * codes).round(), dim=0))


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def _below(value: float) -> str:
    """Format a number; a very small one as a bound, since machines round differently."""
    return f"{value:.2g}" if value > 1e-3 else "less than 1e-3"


def _gpt2():
    return AutoModelForCausalLM.from_pretrained(embedded_model("stdlib-gpt2")).eval()


def _text(length: int, count: int) -> torch.Tensor:
    """Return held-out text as token blocks (count, length) of the embedded GPT-2."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_model("stdlib-gpt2"))
    documents = embedded_documents("validation", causal=True)[:12]  # enough, and tokenized more quickly than all of it
    return token_blocks(documents, tokenizer, length)[:count]


@torch.enable_grad()
def _which_comes_first(scheme: str, seed: int) -> float:
    """Train a tiny BERT from scratch to say which of two marks comes first among other tokens; return held-out accuracy."""
    generator = torch.Generator().manual_seed(seed)

    def examples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(3, 23, (count, 16), generator=generator)
        places = torch.rand(count, 16, generator=generator).argsort(1)[:, :2]
        return tokens.scatter(1, places, torch.tensor([[1, 2]]).expand(count, -1)), (places[:, 0] < places[:, 1]).long()

    torch.manual_seed(seed)
    config = tiny_config("bert", vocab_size=23, eos_token_id=2, max_position_embeddings=16, initializer_range=0.02)
    model = swap(BertForSequenceClassification(config), scheme, warm_start=False)
    inputs, labels = examples(96)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)  # one call, not one for each of many small tensors
    for step in range(120):
        rows = torch.arange(32 * step, 32 * step + 32) % 96
        model(inputs[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    inputs, labels = examples(512)
    return (model.eval()(inputs).logits.argmax(-1) == labels).double().mean().item()
