"""Tiny random models, and the matrix of schemes, families and attention backends that the contract is tested over.

Weights are drawn with a standard deviation of 0.3: at transformers' 0.02, switching positions off changes the logits of
so small a model by less than any sensible tolerance, and no test could fail.
"""

import os
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported: no test may reach the network
os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start: more threads than cores wait for each other, spinning

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

import hf_posswap as posswap


@dataclass(frozen=True)
class Case:
    """A scheme, and the longest input that it is set up for."""

    scheme: posswap.Scheme
    max_positions: int | None = None


CASES = {
    "learned": Case(posswap.Learned()),
    "learned-tile": Case(posswap.Learned(extend="tile"), 64),
    "learned-interpolate": Case(posswap.Learned(extend="interpolate"), 48),
    "sinusoidal": Case(posswap.Sinusoidal()),
    "sinusoidal-halves": Case(posswap.Sinusoidal(layout="halves", base=500), 64),
    "sinusoidal-raw": Case(posswap.Sinusoidal(project=False)),
    "sinusoidal-raw-t2t": Case(posswap.Sinusoidal(layout="tensor2tensor", project=False), 64),
    "ladder-add": Case(posswap.Ladder(rung="centred"), 64),
    "ladder-concatenate": Case(posswap.Ladder(rung="dials", combine="concatenate")),
    "relative": Case(posswap.Relative(clip=4)),
    "relative-keys": Case(posswap.Relative(clip=4, values=False), 64),
    "relative-shared": Case(posswap.Relative(clip=3, share_heads=True)),
    "relative-shared-keys": Case(posswap.Relative(clip=40, values=False, share_heads=True)),
    "relative-sinusoidal": Case(posswap.Relative(clip=12, vectors="sinusoidal"), 64),
    "relative-key-query": Case(posswap.Relative(clip=4, key_query=True)),
    "rotary": Case(posswap.Rotary(), 64),
    "rotary-half": Case(posswap.Rotary(layout="half", theta=100)),
    "rotary-partial": Case(posswap.Rotary(fraction=0.5)),
    "rotary-linear": Case(posswap.Rotary(fraction=0.5, layout="half", scaling={"rope_type": "linear", "factor": 2.0}), 64),
    "rotary-unmarked": Case(posswap.Rotary(mark_first=False)),
    "none": Case(posswap.NoPositions()),
}


def pytest_configure(config):
    """Keep one thread: the models are too small for more, and sums come out in one order."""
    torch.set_num_threads(1)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request) -> Case:
    """One scheme of the matrix."""
    return request.param


@pytest.fixture(params=("bert", "bert-decoder", "gpt2"))
def family(request) -> str:
    """One family of the matrix, BERT as encoder and as decoder."""
    return request.param


@pytest.fixture(params=("eager", "sdpa"))
def backend(request) -> str:
    """One attention implementation of the matrix."""
    return request.param


def _config(family: str, backend: str, changes: dict):
    common = {"vocab_size": 99, "initializer_range": 0.3, "pad_token_id": 0, "attn_implementation": backend}
    if family == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2Config(**{**common, **sizes, **dropouts, "bos_token_id": 1, "eos_token_id": 98, **changes})
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    decoder = {"is_decoder": True, "bos_token_id": 1, "eos_token_id": 98} if family == "bert-decoder" else {}
    return BertConfig(**{**common, **sizes, **dropouts, **decoder, "max_position_embeddings": 32, **changes})


def _make_model(family: str, backend: str = "eager", *, head: type | None = None, seed: int = 0, **changes):
    heads = {"bert": BertForMaskedLM, "bert-decoder": BertLMHeadModel, "gpt2": GPT2LMHeadModel}
    torch.manual_seed(seed)
    model = (head or heads[family])(_config(family, backend, changes)).eval()
    with torch.no_grad():  # biases and norms away from 0 and 1, as in a trained model
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _position_parameters(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    base = model.base_model
    owner, name = model.architecture.table_owner(base)
    attentions = [a for a in model.architecture.self_attentions(base) if hasattr(a, "positions")]
    modules = [getattr(owner, name), *(attention.positions for attention in attentions)]
    ours = {id(parameter) for module in modules for parameter in module.parameters()}
    return {key: parameter for key, parameter in model.named_parameters() if id(parameter) in ours}


def _make_swapped(family: str, scheme, backend: str = "eager", *, max_positions=None, seed=0, **options):
    model = _make_model(family, backend, seed=seed, **options)
    posswap.swap(model, scheme, max_positions=max_positions)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():  # zero tables and a constant would hide that they are not used
        for parameter in _position_parameters(model).values():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture
def make_model():
    """The factory of plain models: `make_model(family, backend, head=, seed=, **config)`."""
    return _make_model


@pytest.fixture
def make_swapped():
    """The factory of swapped models with random position parameters: `make_swapped(family, scheme, backend, ...)`."""
    return _make_swapped


@pytest.fixture
def position_parameters():
    """The function that returns the parameters which a swap has added, by name."""
    return _position_parameters


@pytest.fixture
def model(family, backend, case) -> PreTrainedModel:
    """A swapped model of the matrix, with random position parameters."""
    return _make_swapped(family, case.scheme, backend, max_positions=case.max_positions)


@pytest.fixture
def tokens() -> torch.Tensor:
    """Two rows of 20 tokens, none of them special."""
    return torch.randint(2, 98, (2, 20), generator=torch.Generator().manual_seed(5))


WORDS = "the a cat dog sat ran on under mat log and then it was happy sad".split()


@pytest.fixture
def bert_tokenizer():
    """A WordPiece tokenizer with a handful of words, built here."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizer(vocab={word: number for number, word in enumerate(vocabulary)})


@pytest.fixture
def gpt2_tokenizer():
    """A word-level tokenizer with an end-of-text token, built here."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<|endoftext|>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
