"""ListOps: the grammar against a recursive generator and Python's own evaluation, and the recipe from end to end."""

import itertools
import random
import statistics

import pytest
from conftest import refused, works

from hf_posswap.errors import DataError
from hf_posswap.measure.listops import OPERATORS, SYMBOLS, TOKEN_IDS, ListOpsExamples, depth, evaluate
from hf_posswap.measure.listops import listops_expressions as draw
from hf_posswap.training import pad

TINY = {"min_length": 4, "max_length": 12, "max_depth": 2, "max_args": 5}


@pytest.fixture
def recipe(recipe):
    return recipe("listops")


def _by_python(text: str) -> int:
    """Evaluate as Python evaluates a nested call."""
    names = {"[MIN": "min([", "[MAX": "max([", "[MED": "med([", "[SM": "sm([", "]": "]),"}
    code = " ".join(names.get(symbol, f"{symbol},") for symbol in text.split())
    functions = {"med": lambda v: int(statistics.median(v)), "sm": lambda v: sum(v) % 10, "min": min, "max": max}
    return eval(code, {"__builtins__": {}}, functions)[0]


def test_against_python():
    """Values are those of Python, for all operators on pairs and triples of digits and for drawn expressions."""
    texts = [f"{o} {a} {b} ]" for o in OPERATORS for a in range(10) for b in range(10)]
    texts += [f"{o} {a} {b} {c} ]" for o in OPERATORS for a, b, c in itertools.product(range(0, 10, 3), repeat=3)]
    texts += draw(100, min_length=5, max_length=200, max_depth=6, max_args=5)
    assert max(map(depth, texts)) == 6 and len(texts) == 756
    for text in texts:
        assert evaluate(text) == _by_python(text), text


@pytest.mark.parametrize("text", ["", "]", "[MIN 1 2", "[MIN 1 ]", "1 2", "10", "[MIN 1 2 ] ]", "[XOR 1 2 ]", "[PAD]", "¹"])
def test_no_expressions(text):
    with pytest.raises(DataError):
        evaluate(text)


def test_limits_and_seeds(monkeypatch):
    """Lengths lie strictly between the bounds, depth and arguments do not pass theirs, nothing occurs twice, seeds count."""
    bounds = {"min_length": 20, "max_length": 60, "max_depth": 4, "max_args": 5}
    texts = draw(300, **bounds, seed=3)
    assert len(set(texts)) == 300 and texts == draw(300, **bounds, seed=3)
    assert len(set(texts) & set(draw(300, **bounds, seed=4))) < 10
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) == 21 and 50 < max(lengths) < 60
    assert max(map(depth, texts)) == 4
    assert {symbol for text in texts for symbol in text.split()} == set(SYMBOLS) and len(SYMBOLS) == 15
    arguments = []
    for name in OPERATORS:
        monkeypatch.setitem(OPERATORS, name, lambda values: arguments.append(len(values)) or 0)
    assert [evaluate(text) for text in texts] == [0] * 300 and set(arguments) == {2, 3, 4, 5}


def test_chances_are_those_of_the_published_generator():
    """Lengths and depths are spread as those of the recursion of Long Range Arena's generate_tree, over the same bounds."""
    chance = random.Random(1)

    def tree(level: int) -> list[str]:
        if level >= 5 or chance.random() > 0.25:
            return [str(chance.choice(range(10)))]
        children = [tree(level + 1) for _ in range(chance.randint(2, 4))]
        return [chance.choice(list(OPERATORS)), *itertools.chain(*children), "]"]

    theirs = {}
    while len(theirs) < 2000:
        symbols = tree(1)
        if 8 < len(symbols) < 40:
            theirs[" ".join(symbols)] = None
    ours = draw(2000, min_length=8, max_length=40, max_depth=5, max_args=4)
    for measure in (lambda text: len(text.split()), depth, lambda text: text.count("[SM"), lambda text: text.count("7")):
        here, there = ([measure(text) for text in texts] for texts in (ours, list(theirs)))
        error = statistics.stdev(there) * (2 / 2000) ** 0.5
        assert abs(statistics.mean(here) - statistics.mean(there)) < 4 * error


def test_impossible_bounds():
    """What cannot be drawn is refused, not waited for."""
    refused("no length lies between", draw, 1, min_length=10, max_length=11, error=DataError)
    refused("must be at least 2", draw, 1, max_depth=1, error=DataError)
    rare = {"min_length": 10, "max_length": 20, "max_depth": 2, "max_args": 2}
    refused("too rare at max_depth=2, max_args=2", draw, 1, **rare, error=DataError)


def test_batches():
    """Each symbol has one id, between [CLS] and [SEP]; padding is masked."""
    batch = pad(list(ListOpsExamples(["[MAX 1 9 ]", "3"])))
    names = {number: symbol for symbol, number in TOKEN_IDS.items()}
    rows = [[names[number] for number in row] for row in batch["input_ids"].tolist()]
    assert rows[0] == "[CLS] [MAX 1 9 ] [SEP]".split() and rows[1] == "[CLS] 3 [SEP] [PAD] [PAD] [PAD]".split()
    assert batch["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]] and batch["labels"].tolist() == [9, 3]
    assert len(names) == len(TOKEN_IDS) == 18


@pytest.fixture
def checkpoint(save):
    return lambda family: str(save(family, initializer_range=0.05))


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {"scheme": "rotary"}),
        ("bert", {"scheme": "relative:clip=4", "hidden_size": 16, "num_layers": 1, "num_heads": 4}),
        ("roberta", {"scheme": "original"}),
        ("bert", {"scheme": "sinusoidal", "start": "swap"}),  # fewer positions than the checkpoint has are no error
    ],
)
def test_end_to_end(recipe, checkpoint, tmp_path, watch, family, options):
    """Both families, from scratch and from a checkpoint: figures, groups that add up, and what it cost; no expression is
    trained on and tested.
    """
    seen = watch(recipe, "ListOpsExamples")
    options = {"max_steps": 3, "batch_size": 8, "train_examples": 40, "examples": 50, **TINY, **options}
    config = recipe.ListOpsConfig(model=checkpoint(family), **options)
    answer = recipe.run(config, tmp_path, False)
    trained, tested = sorted((one.args[0] for one in seen), key=len)
    assert (len(trained), len(tested)) == (40, 50) and not set(trained) & set(tested)
    assert 0 <= answer["figures"]["accuracy"] <= 1 and 0.1 <= answer["figures"]["majority"] < 0.4
    assert len(answer["items"]["accuracy"]) == 50
    for groups in (answer["details"]["by_length"], answer["details"]["by_depth"]):
        assert sum(group["examples"] for group in groups.values()) == 50
        right = sum(group["accuracy"] * group["examples"] for group in groups.values())
        assert right / 50 == pytest.approx(answer["figures"]["accuracy"])
    assert list(answer["details"]["by_depth"]) == ["2"] and len(answer["details"]["losses"]) == 3
    assert answer["cost"]["tokens"] > 0 and (answer["cost"]["parameters"] < 5000) is ("hidden_size" in options)


def test_it_learns(recipe, checkpoint, tmp_path, monkeypatch):
    """The largest of two or three digits is soon learnt, and known of held-out ones."""
    monkeypatch.setattr("hf_posswap.measure.listops.OPERATORS", {"[MAX": max})
    config = recipe.ListOpsConfig(
        model=checkpoint("gpt2"), scheme="rotary", max_steps=300, batch_size=16, learning_rate=5e-3, dropout=False,
        train_examples=900, examples=100, min_length=3, max_length=6, max_depth=2, max_args=3,
    )  # fmt: skip
    answer = recipe.run(config, tmp_path, False)
    assert answer["figures"]["accuracy"] > 0.9 and answer["figures"]["majority"] < 0.5, answer["details"]["losses"][::20]


def test_a_saved_model(recipe, make_model, tmp_path, program):
    """It has no tokenizer, whose tokens would be others than the symbols, and needs none."""
    make_model("bert").save_pretrained(tmp_path / "bare")
    options = "--max-steps 1 --batch-size 4 --train-examples 9 --examples 5 --min-length 4 --max-length 12 --report-to none"
    given = (*options.split(), "--scheme", "rotary", "--save-model", "--model", tmp_path / "bare", "--output", tmp_path / "out")
    works(program, *given, main=lambda: recipe.main(recipe.ListOpsConfig, recipe.run))
    found = {path.name for path in (tmp_path / "out/model").iterdir()}
    assert found == {"config.json", "model.safetensors", "modeling_hf_posswap.py"}


def test_bad_input(recipe, checkpoint, tmp_path):
    """Sizes of a checkpoint, starts that need text, and positions that are too few are refused before training."""
    for options, says in (
        ({"num_layers": 2, "start": "swap"}, "for --start scratch"),
        ({"examples": 0}, "examples=0 must be at least 1"),
    ):
        refused(says, recipe.ListOpsConfig, **options)
    for options, says in (
        ({"max_positions": 12}, "max_positions=12 is less than the 13 tokens"),
        ({"hidden_size": 30, "num_heads": 4}, "hidden_size=30 does not divide into num_heads=4"),
    ):
        config = recipe.ListOpsConfig(model=checkpoint("bert"), scheme="rotary", max_steps=1, **TINY, **options)
        refused(says, recipe.run, config, tmp_path, False)
