"""Passkey: what the texts are, what counts as right, and the recipe from end to end."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import refused
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertForQuestionAnswering, BertTokenizer, PreTrainedTokenizerFast, RobertaForQuestionAnswering

from hf_posswap.data.text import split_of
from hf_posswap.errors import DataError
from hf_posswap.measure import passkey
from hf_posswap.measure.passkey import FILLER, NAMES, PasskeyExamples, PasskeyTexts, depth_texts, point_at_keys, recall_keys
from hf_posswap.training import pad

DIGITS = [str(digit) for digit in range(10)]
WORDS = sorted({*" ".join(FILLER).replace(".", "").split(), *NAMES, *"The key is Remember it What the".split(), ".", "?"})


@pytest.fixture
def gpt2_tokenizer():
    """One token for each word, and for each digit of a number."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<|endoftext|>", "<unk>", *DIGITS, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    special = {"eos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture
def bert_tokenizer():
    """The same words for a BERT, whose numbers are several pieces."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *DIGITS, *(f"##{digit}" for digit in DIGITS)]
    words = sorted({word.lower() for word in WORDS})
    return BertTokenizer(vocab={word: number for number, word in enumerate([*pieces, *words])})


@pytest.fixture(params=[True, False], ids=["causal", "encoder"])
def tokenizer(request, gpt2_tokenizer, bert_tokenizer):
    """The tokenizer of one family, which knows whether that is causal."""
    return SimpleNamespace(causal=request.param, it=gpt2_tokenizer if request.param else bert_tokenizer)


PROSE = "The grass of the garden is green again. Remember the first key! In 1234 the house was red. The car is here."


@pytest.fixture
def prose(monkeypatch):
    """Other prose for each split, in place of the standard library's, which takes long to read."""
    chosen = {"train": [PROSE], "validation": ["The last key is the red key of the school."]}
    monkeypatch.setattr("hf_posswap.measure.passkey.stdlib_prose", chosen.get)
    words = " ".join(random.Random(0).choices(PROSE.split(), k=2000))
    monkeypatch.setattr("hf_posswap.data.text.stdlib_documents", lambda split: {"": words})


@pytest.fixture
def recipe(recipe, prose):
    return recipe("passkey")


def _places(ids: list[int], key: tuple[int, ...]) -> list[int]:
    return [place for place in range(len(ids)) if tuple(ids[place : place + len(key)]) == key]


@pytest.mark.parametrize("decoys", [0, 3])
@pytest.mark.parametrize("length", [80, 137, 300])
def test_texts(tokenizer, decoys, length):
    """Texts are of the exact length, say the key once before it is asked for, and at the depth asked for."""
    texts = PasskeyTexts(tokenizer.it, "train", causal=tokenizer.causal, decoys=decoys)
    longest = 24  # of what may stand between depth and the next end of a sentence, and of decoys before the key
    for depth in (0.0, 0.25, 0.6, 1.0):
        text = texts.draw(length, depth, random.Random(f"{length} {depth}"))
        assert len(text.input_ids) == length and len(text.key) == 4
        places = _places(text.input_ids, text.key)
        assert places == [text.start, length - 4] if tokenizer.causal else places == [text.start]
        assert len(set(text.candidates)) == passkey.CANDIDATES  # the right one, then those of decoys; the text has no other
        counts = [len(_places(text.input_ids, key)) for key in text.candidates[1:]]
        assert counts == [1] * decoys + [0] * (passkey.CANDIDATES - 1 - decoys)
        words = tokenizer.it.decode(text.input_ids).lower()
        assert words.count("key is") == 1 + decoys + tokenizer.causal and words.count("what is the") == 1
        asked = words.split("what is the ")[1].split()[0]
        said = tokenizer.it.decode(text.key)
        assert f"the {asked} key is {said}" in words, words
        filler = length - (texts.shortest - 1)
        before = text.start - 4 - (0 if tokenizer.causal else text.question_size)
        assert abs(before - depth * filler) <= 6 + decoys * longest


def test_the_right_key_stands_before_and_after_decoys(gpt2_tokenizer):
    """Where keys stand at one place, as in short texts, order tells nothing."""
    texts = PasskeyTexts(gpt2_tokenizer, "train", causal=True, decoys=1)
    first = 0
    for seed in range(60):
        text = texts.draw(texts.shortest, 0.0, random.Random(seed))
        first += text.start < _places(text.input_ids, text.candidates[1])[0]
    assert 15 < first < 45


def test_seeds_and_splits(tokenizer):
    """One seed gives one text, another another; no key of the test is in training."""
    train, test = (PasskeyTexts(tokenizer.it, split, causal=tokenizer.causal) for split in ("train", "validation"))
    assert depth_texts(test, 90, 0.5, 4, seed=1) == depth_texts(test, 90, 0.5, 4, seed=1)
    drawn = [text for seed in (1, 2) for text in depth_texts(test, 90, 0.5, 8, seed=seed)]
    assert len({text.key for text in drawn}) >= 15
    assert not set(train.keys) & set(test.keys) and len(train.keys) > 4 * len(test.keys) > 2000
    said = [tokenizer.it.convert_ids_to_tokens(list(key)) for key in test.keys]
    assert all(split_of("".join(digit.removeprefix("##") for digit in digits)) == "validation" for digits in said)
    examples = [PasskeyExamples(train, (60, 90), 40, seed=seed) for seed in (0, 0, 1)]
    ids = [[example["input_ids"].tolist() for example in one] for one in examples]
    assert ids[0] == ids[1] != ids[2] and {len(row) for row in ids[0]} == {60, 90} and len({str(row) for row in ids[0]}) == 40


def test_prose_as_filler(tokenizer, prose):
    """The standard library's prose, each split's own, without sentences that have a number; it goes around."""
    options = {"causal": tokenizer.causal, "filler": "text"}
    train, test = (PasskeyTexts(tokenizer.it, split, **options) for split in ("train", "validation"))
    assert (len(train._filler), len(test._filler)) == (3, 1)
    for texts, has in ((train, "garden"), (test, "school")):
        text = texts.draw(400, 0.5, random.Random(0))
        words = tokenizer.it.decode(text.input_ids)
        assert len(text.input_ids) == 400 and words.count(has) > 5 and "1 2 3 4" not in words
        assert len(_places(text.input_ids, text.key)) == 1 + tokenizer.causal


def test_training_examples(tokenizer):
    """A causal model is asked for the key alone; an encoder for its span; padding is neither."""
    texts = PasskeyTexts(tokenizer.it, "train", causal=tokenizer.causal)
    batch = pad([PasskeyExamples(texts, (length,), 1)[0] for length in (40, 64)])
    assert batch["input_ids"].shape == (2, 64)
    if tokenizer.causal:
        for row, length in zip(range(2), (40, 64), strict=True):
            asked = batch["labels"][row] != -100
            assert asked.nonzero()[:, 0].tolist() == list(range(length - 4, length))
            assert torch.equal(batch["labels"][row][asked], batch["input_ids"][row][asked])
    else:
        assert batch["attention_mask"].sum(1).tolist() == [40, 64]
        for row, start, end in zip(range(2), batch["start_positions"], batch["end_positions"], strict=True):
            key = tuple(batch["input_ids"][row][start : end + 1].tolist())
            assert key in texts.keys
            sep = batch["input_ids"][row].tolist().index(3)
            assert batch["token_type_ids"][row][:40].tolist() == [0] * (sep + 1) + [1] * (39 - sep)


def test_saying_is_what_generate_writes(make_model, gpt2_tokenizer):
    """A key is right if greedy generation would write it; candidates are ranked by their likelihoods."""
    model = make_model("gpt2", n_positions=64, eos_token_id=None)
    texts = depth_texts(PasskeyTexts(gpt2_tokenizer, "train", causal=True), 50, 0.5, 6)
    written = []
    for text in texts:
        prompt = torch.tensor([text.input_ids[:-4]])
        out = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(prompt))
        written.append(tuple(out[0, -4:].tolist()))
    assert recall_keys(model, texts)[0] == [False] * 6  # a random model
    # The same with what it does say as the key, for three of the texts.
    wanted = [written[n] if n < 3 else texts[n].key for n in range(6)]
    asked = [
        passkey.PasskeyText([*text.input_ids[:-4], *key], text.start, 0, [key, *text.candidates[1:]])
        for text, key in zip(texts, wanted, strict=True)
    ]
    said, _ = recall_keys(model, asked)
    assert said == [True] * 3 + [False] * 3


@pytest.mark.parametrize("span", [None, 8])
def test_keys_behind_a_span(make_swapped, gpt2_tokenizer, span):
    """Candidates are ranked by their likelihoods, as if each text was read whole, also behind a span that forgets keys."""
    model = make_swapped("gpt2", "rotary", "sdpa", span=span, n_positions=64)
    asked = ([], [])  # with the likeliest candidate as the key, and with the second
    for text in depth_texts(PasskeyTexts(gpt2_tokenizer, "train", causal=True), 50, 0.5, 8):
        ids = torch.tensor([[*text.input_ids[:-4], *key] for key in text.candidates])
        scores = model(ids).logits[:, -5:-1].log_softmax(-1).gather(-1, ids[:, -4:, None]).mean((1, 2))
        keys = [text.candidates[place] for place in scores.argsort(descending=True)]
        for place, texts in enumerate(asked):
            own = [*keys[place:], *keys[:place]]
            texts.append(passkey.PasskeyText([*text.input_ids[:-4], *own[0]], text.start, 0, own))
    assert [recall_keys(model, texts)[1] for texts in asked] == [[True] * 8, [False] * 8]


def test_encoders_without_token_types(make_model, bert_tokenizer):
    """RoBERTa's kin read no token types: examples have none, and a model is asked without."""
    bert_tokenizer.model_input_names = ["input_ids", "attention_mask"]
    texts = PasskeyTexts(bert_tokenizer, "train", causal=False)
    assert "token_type_ids" not in PasskeyExamples(texts, (28,), 1)[0]
    model = make_model("roberta", head=RobertaForQuestionAnswering, type_vocab_size=1)
    assert len(point_at_keys(model, depth_texts(texts, 28, 0.5, 2), kinds=texts.kinds)) == 2


def test_pointing(make_model, bert_tokenizer):
    """Both ends of the span must be the key's."""
    texts = depth_texts(PasskeyTexts(bert_tokenizer, "train", causal=False), 32, 0.5, 3)

    class Pointer(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, token_type_ids):
            starts, ends = torch.zeros(2, *input_ids.shape).unbind()
            for row, text in enumerate(texts):
                assert token_type_ids[row].tolist().index(1) == text.question_size
                starts[row, text.start + (row == 1)] = 1
                ends[row, text.start + 3 + (row == 2)] = 1
            return SimpleNamespace(start_logits=starts, end_logits=ends)

    assert point_at_keys(Pointer(), texts) == [True, False, False]


@pytest.fixture
def checkpoint(save, gpt2_tokenizer, bert_tokenizer):
    """The function that saves a tiny model that reads 64 tokens, with its tokenizer."""

    def write(family: str) -> str:
        if family == "gpt2":
            return str(save("gpt2", initializer_range=0.05, vocab_size=len(gpt2_tokenizer), n_positions=64))
        sizes = {"vocab_size": len(bert_tokenizer), "max_position_embeddings": 64}
        return str(save("bert", head=BertForQuestionAnswering, initializer_range=0.05, **sizes))

    return write


@pytest.fixture
def config(recipe, checkpoint):
    """Two steps on the tiny GPT-2; tests replace what they are about."""
    return recipe.PasskeyConfig(
        model=checkpoint("gpt2"), scheme="rotary", max_steps=2, batch_size=4, train_lengths=(32, 40), lengths=(40, 150),
        depths=(0.0, 1.0), examples=3, fit_tokens=512, fit_steps=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"scheme": "relative:clip=4"},
        {"start": "fit", "seed": 3},
        {"filler": "text", "decoys": 1},
        {"model": "bert"},
        {"skip_to": 200},
    ],
)
def test_end_to_end(recipe, config, checkpoint, tmp_path, watch, options):
    """Figures for each depth and length, means, picture and cost; of encoders the first. The seed draws a fit's text, too."""
    draws, names = watch(recipe, "text_batches"), ("accuracy",) if "model" in options else ("accuracy", "candidates")
    options = {name: checkpoint(value) if name == "model" else value for name, value in options.items()}
    answer = recipe.run(replace(config, **options, lengths=(64, 150), train_lengths=(64,)), tmp_path, False)
    assert list(answer["figures"]) == [f"{name}_{length}" for name in names for length in (64, 150)]
    for name in names:
        matrix = answer["details"][name]
        assert len(matrix) == 2 and all(len(row) == 2 and 0 <= min(row) <= max(row) <= 1 for row in matrix)
        assert answer["figures"][f"{name}_150"] == pytest.approx(sum(row[1] for row in matrix) / 2)
        assert len(answer["items"][f"{name}_150"]) == 6 and sum(answer["items"][f"{name}_150"][3:]) == 3 * matrix[1][1]
    assert answer["cost"]["tokens"] == 2 * 4 * 64 and len(answer["details"]["losses"]) == 2
    assert (tmp_path / "heat_map.png").read_bytes().startswith(b"\x89PNG")
    assert [draw.kwargs["seed"] for draw in draws] == ([3] if "seed" in options else [])


def test_without_training(recipe, config, checkpoint, tmp_path):
    """What a checkpoint can do as it is: nothing is trained, and an encoder must have the head."""
    answer = recipe.run(replace(config, train=False, scheme="original", lengths=(40,), train_lengths=(999,)), tmp_path, False)
    assert answer["details"]["losses"] == [] and "tokens" not in answer["cost"]
    answer = recipe.run(replace(config, train=False, model=checkpoint("bert")), tmp_path, False)
    assert list(answer["figures"]) == ["accuracy_40", "accuracy_150"]


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_it_learns(recipe, config, checkpoint, tmp_path, family, monkeypatch):
    """With twenty keys, the same in test and training, and next to no filler, a tiny model gets all of them right."""
    build = PasskeyTexts.__init__

    def few_keys(self, *given, **options):
        build(self, *given, **options)
        self.keys = [tuple(self._tokens([number])[0]) for number in ("1111", "2222", "3333", *map(str, range(4444, 4461)))]

    monkeypatch.setattr(PasskeyTexts, "__init__", few_keys)
    config = replace(
        config, model=checkpoint(family), scheme="rotary", train_lengths=(32,), lengths=(32,), max_steps=150, batch_size=16,
        learning_rate=5e-3, dropout=False, examples=10,
    )  # fmt: skip
    answer = recipe.run(config, tmp_path, False)
    assert answer["figures"]["accuracy_32"] == 1.0, answer["details"]["losses"][::10]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lengths": (16,)}, "length=16 is too short: keys and question take"),
        ({"train_lengths": (16,)}, "length=16 is too short: keys and question take"),
        ({"max_positions": 100}, "max_positions=100 is less than the 150 tokens"),
        ({"scheme": "original"}, "the original reads 64 tokens, not 150"),
        ({"decoys": 12}, "decoys=12 must be from 0 to"),
        ({"model": "bert", "train": False}, "no question-answering head"),
        ({"lengths": ()}, "is an empty list"),
        ({"depths": ()}, "is an empty list"),
        ({"train_lengths": ()}, "is an empty list"),
        ({"depths": (0.5, 1.2)}, "depths=.*must be from 0"),
        ({"depths": (-0.1,)}, "depths=.*must be from 0"),
        ({"examples": 0}, "examples=0 must be at least 1"),
    ],
)
def test_refused_before_training(recipe, config, save, tmp_path, monkeypatch, options, says):
    """Texts that do not fit are refused before anything is trained."""
    if "model" in options:
        options = {**options, "model": str(save(options["model"]))}
    monkeypatch.setattr(recipe, "train", lambda *given, **options: pytest.fail("it was trained"))
    refused(says, lambda: recipe.run(replace(config, **options), tmp_path, False))


def test_tokenizers_that_cannot_write_keys(gpt2_tokenizer):
    """A tokenizer without the special tokens of an encoder, or with the same token for all numbers, is refused."""
    refused(r"needs a \[CLS\]", PasskeyTexts, gpt2_tokenizer, "train", causal=False, error=DataError)
    wordy = BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "the": 5})
    refused("tells only .* numbers of four digits apart", PasskeyTexts, wordy, "train", causal=False, error=DataError)
