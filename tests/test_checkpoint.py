"""Saved and loaded: the same logits bit for bit, here and in a fresh process, and nothing loads a folder wrongly."""

import json
import os
import pickle
import re
import subprocess
from dataclasses import asdict
from operator import attrgetter

import pytest
import torch
from conftest import KINDS, refused, rewrite, run_python
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, BertForMaskedLM, GPT2LMHeadModel

import hf_posswap as posswap
from hf_posswap.checkpoint import STUB
from hf_posswap.contract.subject import auto_class
from hf_posswap.scheme_entry import on_hub

STOCK = {"bert": BertForMaskedLM, "gpt2": GPT2LMHeadModel}


def load(family: str, folder, **options):
    """Load without missing, unexpected or mismatched weights."""
    loaded, info = auto_class(family).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return loaded.eval()


def saved_scheme(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["position_scheme"]


def edit_config(folder, entry: dict | None):
    """Change or (with None) drop entries of `position_scheme` in a saved config.json, or drop it as a whole."""

    def change(config: dict):
        scheme = config.pop("position_scheme")
        if entry is not None:
            config["position_scheme"] = {key: value for key, value in (scheme | entry).items() if value is not None}

    rewrite(folder / "config.json", change)


def test_round_trip(model, family, backend, case, tokens, tmp_path):
    """What is loaded, once and again, has the class, the logits bit for bit, and a config with every field of the scheme."""
    model.save_pretrained(tmp_path)
    entry = saved_scheme(tmp_path)
    scheme = {"name": case.scheme.name, **asdict(case.scheme)}
    if scheme["name"] == "mixed":  # an entry for each layer
        scheme = case.scheme.to_dict()
    made_for = {"made_for_positions": model.config.max_position_embeddings} if scheme["name"] == "ladder" else {}
    assert entry == {"format": 1, "trained_positions": 32, **scheme, **made_for}
    loaded = load(family, tmp_path, attn_implementation=backend)
    assert type(loaded) is type(model) and type(loaded.base_model) is type(model.base_model)
    assert loaded.config.position_scheme == entry and loaded.base_model.position_scheme == case.scheme
    assert loaded.config.max_position_embeddings == (case.max_positions or 32)
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert [name for name, _ in loaded.named_parameters()] == [name for name, _ in model.named_parameters()]
    told = posswap.describe(loaded)
    assert (told.new, told.trained_positions, told.can_restore) == (case.scheme, 32, False)
    refused("loaded from a swapped checkpoint", posswap.restore, loaded)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(load(family, tmp_path / "again", attn_implementation=backend)(tokens).logits, model(tokens).logits)


FRESH = """
import json, os, sys, torch
import transformers
tokens, folders = torch.tensor(json.loads(sys.argv[1])), sys.argv[2:]
torch.set_num_threads(1)

class Missing:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "hf_posswap":
            raise ModuleNotFoundError(f"No module named {name!r}")

def load(way, **options):
    for folder in folders:
        auto = transformers.AutoModelForMaskedLM if "/bert-" in folder else transformers.AutoModelForCausalLM
        try:
            model = auto.from_pretrained(folder, attn_implementation="eager", **options).eval()
            torch.save(model(tokens).logits, f"{folder}/{way}.pt")
            model.save_pretrained(f"{folder}/{way}")
        except Exception as error:
            print(way, "failed:", type(error).__name__, " ".join(str(error).split()), flush=True)

if not os.fork():  # a process of its own, that need not import transformers again
    load("trusted", trust_remote_code=True)
    os._exit(0)
os.wait()
sys.meta_path.insert(0, Missing())
load("missing", trust_remote_code=True)
del sys.meta_path[0]
load("bare")
import hf_posswap
load("plugin")
"""


def test_fresh_processes(make_swapped, tokens, tmp_path):
    """Other processes compute the same bits, by import or trust_remote_code; without, they say what is missing."""
    expected = {}
    for number, scheme in enumerate(("rotary:fraction=0.5", "relative:clip=4", "learned:extend=tile")):
        family = ("bert", "gpt2")[number % 2]
        folder = tmp_path / f"{family}-{scheme.partition(':')[0]}"
        model = make_swapped(family, scheme, max_positions=64)
        model.save_pretrained(folder)
        expected[folder] = model(tokens).logits
    cache = {"HF_MODULES_CACHE": str(tmp_path / "code")}  # where transformers copies code to
    arguments = ("-c", FRESH, json.dumps(tokens.tolist()), *expected)
    done = run_python(*arguments, stdin=subprocess.DEVNULL, env=os.environ | cache)
    said = re.findall(r"(missing|bare|plugin|trusted) failed: (.*)", done.stdout)  # transformers asks on the same stream
    assert [way for way, _ in said] == ["missing"] * 3 + ["bare"] * 3, said
    for way, text in said:
        assert ("pip install hf_posswap" if way == "missing" else "pass the argument `trust_remote_code=True`") in text
    for folder, logits in expected.items():
        for way in ("plugin", "trusted"):
            assert torch.equal(torch.load(folder / f"{way}.pt"), logits), (folder.name, way)
        # What was loaded through the few lines saves the same lines again, and no copy of this package.
        stub, again = (folder / STUB).read_text(), folder / "trusted"
        assert (again / STUB).read_text() == stub and len(stub) < 1500
        expected_names = {path.name for path in folder.iterdir() if path.is_file()} - {"plugin.pt", "trusted.pt"}
        assert {path.name for path in again.iterdir()} == expected_names
        maps = [json.loads((place / "config.json").read_text())["auto_map"] for place in (folder, again)]
        assert maps[0] == maps[1] and maps[0]["AutoModel"].startswith("modeling_hf_posswap.Posswap")


@pytest.mark.only(families=("bert", "gpt2"), backends=("eager",), cases=KINDS)
def test_stock_class_refuses_or_agrees(model, family, case, tokens, tmp_path):
    """A stock class named outright refuses the folder; a learned table it may load, and then computes the same."""
    model.save_pretrained(tmp_path)
    if case.scheme.name == "learned":
        stock = STOCK[family].from_pretrained(tmp_path, attn_implementation="eager").eval()
        assert torch.equal(stock(tokens).logits, model(tokens).logits)
    else:
        refused(r"(?s)mismatch", STOCK[family].from_pretrained, tmp_path, error=RuntimeError)


@pytest.mark.only(backends=("eager",), cases=KINDS)
def test_sharded_and_placed(model, family, tokens, tmp_path):
    """Shards of a few kilobytes, and device_map as a dict and "auto", load alike."""
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = model(tokens).logits
    for options in ({"device_map": {"": "cpu"}}, {"device_map": "auto"}, {}):
        if options.get("device_map") == "auto" and torch.cuda.is_available():
            continue  # there `auto` is the GPU, whose sums differ in the last bits
        loaded = load(family, tmp_path, attn_implementation="eager", **options)
        assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
        assert torch.equal(loaded(tokens).logits, expected), options


@pytest.mark.only(cases=KINDS)
def test_other_heads_from_a_folder(make_swapped, family, case, tokens, tmp_path):
    """The headless model and a new head load from the folder of another head, with its positions."""
    model = make_swapped(family, case.scheme, max_positions=case.max_positions)
    model.save_pretrained(tmp_path)
    expected = model.base_model(tokens).last_hidden_state
    for auto in (AutoModel, AutoModelForSequenceClassification):
        loaded, info = auto.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
        assert all(key.split(".")[0] in ("pooler", "bert", "classifier", "score") for key in info["missing_keys"]), info
        assert loaded.base_model.position_scheme == case.scheme
        assert torch.equal(loaded.eval().base_model(tokens).last_hidden_state, expected)


@pytest.mark.only(cases=KINDS)
def test_swap_again_from_a_folder(make_swapped, family, case, tokens, tmp_path):
    """A loaded model can be swapped to any scheme, to a longer one too, saved and restored to what was loaded."""
    first = make_swapped(family, "relative:clip=4" if case.scheme.name == "rotary" else "rotary", max_positions=40)
    first.save_pretrained(tmp_path / "first")
    model = load(family, tmp_path / "first", attn_implementation="eager")
    expected = model(tokens).logits
    if case.scheme == posswap.Learned():  # the folder holds 40 positions, a table of 32 rows was trained
        refused("32 rows", posswap.swap, model, case.scheme)
        return
    posswap.swap(model, case.scheme, max_positions=80)
    told = posswap.describe(model)
    assert (told.trained_positions, told.max_positions) == (32, 80) and told.old == first.base_model.position_scheme
    assert model.num_parameters() == first.num_parameters() + told.parameters_added - told.parameters_dropped
    model.save_pretrained(tmp_path / "second")
    again = load(family, tmp_path / "second", attn_implementation="eager")
    assert torch.equal(again(tokens.repeat(1, 4)).logits, model(tokens.repeat(1, 4)).logits)
    posswap.restore(model)
    assert model.base_model.position_scheme == first.base_model.position_scheme
    assert torch.equal(model(tokens).logits, expected)
    assert model.config.max_position_embeddings == 40


def test_config_and_from_config(make_swapped, family, tmp_path, tokens):
    """AutoConfig reads the entry; a model built from it starts with the family's initialisation and trains."""
    for scheme in ("relative:clip=4", "learned", "sinusoidal"):
        make_swapped(family, scheme).save_pretrained(tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        assert config.model_type == f"posswap-{family.removesuffix('-decoder')}"
        model = auto_class(family).from_config(config)
        model(tokens, labels=tokens).loss.backward()
        assert all(p.isfinite().all() and p.grad is not None for p in model.parameters())
        assert model.get_input_embeddings().weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"format": 2}, r"format 2, not 1: install a newer"),
        ({"format": None}, r"format None"),
        ({"name": "rotery"}, r"unknown scheme 'rotery'.*rotary"),
        ({"clip": 0}, r"clip=0 must be an integer of at least 1"),
        ({"trained_positions": 31}, "not the one that these weights were saved with"),
        ({"name": "rotary"}, "cannot be used"),
        ({"values": False, "edited": True}, "position weights that its scheme does not read"),
        ({"trained_positions": None}, r"complete `position_scheme`"),
        (None, "complete `position_scheme` entry, not None"),
    ],
    ids=str,
)
def test_broken_config(make_swapped, entry, message, tmp_path):
    """A config of a newer format, or one that does not hold a scheme, is refused with what is wrong and what to do."""
    family = "gpt2" if entry and "clip" in entry else "bert"
    make_swapped(family, "relative:clip=4").save_pretrained(tmp_path)
    edit_config(tmp_path, entry)
    refused(message, auto_class(family).from_pretrained, tmp_path)


@pytest.mark.parametrize(("family", "size"), [("bert", 0), ("bert-decoder", 4), ("gpt2", 100), ("bert", 20_000)])
def test_truncated_weights(make_swapped, family, size, tmp_path):
    """A weight file that was cut short is refused in our words, wherever it was cut; so is one that is pickled."""
    make_swapped(family, "rotary").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused("truncated or corrupted", auto_class(family).from_pretrained, tmp_path)
    path.unlink()
    torch.save(make_swapped(family, "rotary").state_dict(), tmp_path / "pytorch_model.bin")
    refused("no file named model.safetensors", auto_class(family).from_pretrained, tmp_path, error=OSError)


LOST = [
    ("bert", "relative:clip=4", "key_table"), ("gpt2", "relative:clip=4", "value_table"), ("bert", "rotary", "mean"),
    ("gpt2", "rotary", "mean"), ("bert-decoder", "sinusoidal", "projection"), ("gpt2", "learned:extend=tile", "positions"),
    ("bert", "learned:extend=tile", "positions"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "scheme", "lost"), LOST)
def test_missing_position_weights(make_swapped, family, scheme, lost, tmp_path):
    """Position weights that a folder lacks are named, never made up."""
    model = make_swapped(family, scheme)
    model.save_pretrained(tmp_path)
    ends = ("position_embeddings.weight", "wpe.weight") if lost == "positions" else lost
    dropped = [name for name in load_file(tmp_path / "model.safetensors") if name.endswith(ends)]
    assert len(dropped) in (1, 2)
    rewrite(tmp_path / "model.safetensors", lambda weights: [weights.pop(name) for name in dropped])
    with pytest.raises(posswap.PosswapError, match="lacks position weights") as raised:
        auto_class(family).from_pretrained(tmp_path)
    assert all(name in str(raised.value) for name in dropped)


META = [("bert", "rotary"), ("gpt2", "alibi"), ("opt", "alibi"), ("gpt2", "relative"), ("bert", "buckets")]


@pytest.mark.parametrize(("family", "scheme"), META)
def test_built_on_meta(make_swapped, family, scheme):
    """A model that is built empty and then initialised, as transformers loads, has the values of one built directly."""
    model = make_swapped(family, scheme, max_positions=40)
    kind, config = type(model), model.config
    with torch.device("meta"):
        built = kind(config)
    built.to_empty(device="cpu")
    for tensor in (*built.parameters(), *built.buffers()):
        tensor.data.fill_(77)
    built.init_weights()
    direct = kind(config)
    parts = [(key, part) for key, part in direct.named_modules() if hasattr(part, "initial_values")]
    held = [(key, name) for key, part in parts for name in part.initial_values()]
    values = [f"{key}.{name}" for key, name in held] + [name for name, _ in direct.named_buffers()]
    assert held and [name for name in values if not torch.equal(attrgetter(name)(direct), attrgetter(name)(built))] == []


def test_position_weights_of_another_shape(make_swapped, family, tmp_path):
    """Tables that do not fit the scheme in the config are refused, even where transformers is told to ignore that."""
    make_swapped(family, "relative:clip=4").save_pretrained(tmp_path)
    edit_config(tmp_path, {"clip": 5, "edited": True})
    refused("mismatch", auto_class(family).from_pretrained, tmp_path, error=(RuntimeError, posswap.PosswapError))
    refused("key_table", auto_class(family).from_pretrained, tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("scheme", ["learned", "learned:extend=tile"])
def test_a_table_with_a_span(make_model, family, tokens, scheme, tmp_path):
    """Plain classes know no span and refuse its weights; swapped ones compute the same again, and restore still undoes it."""
    model = make_model(family)
    plain = type(model)
    posswap.swap(model, scheme, max_positions=None if scheme == "learned" else 48, span=4).save_pretrained(tmp_path)
    refused("ignore_mismatched_sizes", plain.from_pretrained, tmp_path, error=RuntimeError)
    again = auto_class(family).from_pretrained(tmp_path).eval()
    expected = model(tokens).logits
    torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(posswap.restore(model)(tokens).logits, make_model(family)(tokens).logits, rtol=0, atol=0)
    # A folder of before, whose table has no row more, is still read, and saved again.
    rewrite(tmp_path / "config.json", lambda config: config["position_scheme"].pop("guarded"))
    names = load_file(tmp_path / "model.safetensors")
    table = next(name for name in names if re.search(r"(wpe|position_embeddings)\.weight", name))
    rewrite(tmp_path / "model.safetensors", lambda weights: weights.update({table: weights[table][:-1].clone()}))
    for _ in range(2):
        again = auto_class(family).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(tokens).logits, expected, rtol=1e-3, atol=1e-4)
        again.save_pretrained(tmp_path)


def test_a_state_of_another_scheme(make_swapped, family):
    """A trainer that resumes calls load_state_dict: names and shapes may fit where the scheme does not."""
    state = make_swapped(family, "rotary").state_dict()
    for scheme in ("rotary:theta=500", "alibi"):
        other = pickle.loads(pickle.dumps(make_swapped(family, scheme)))
        refused("weights belong to another position scheme", other.load_state_dict, state, strict=False, error=RuntimeError)
    same = make_swapped(family, "rotary")
    same.load_state_dict(state)
    with torch.device("meta"):
        empty = type(same)(same.config)
    empty.to_empty(device="cpu").load_state_dict(state)
    edited = make_swapped(family, "rotary:theta=500").config
    edited.position_scheme["edited"] = True
    type(same)(edited).load_state_dict(state)


def test_an_edited_config_that_is_meant(make_swapped, tmp_path):
    """It says so itself; and only positions are guarded: other shapes are between the user and transformers."""
    make_swapped("gpt2", "relative:clip=4").save_pretrained(tmp_path)
    edit_config(tmp_path, {"trained_positions": 31, "edited": True})
    model = auto_class("gpt2").from_pretrained(tmp_path, vocab_size=50, ignore_mismatched_sizes=True)
    assert posswap.describe(model).trained_positions == 31 and model.get_input_embeddings().num_embeddings == 50


@pytest.mark.parametrize("auto", [AutoModel, auto_class("gpt2")])
def test_broken_position_weights(make_swapped, auto, tmp_path):
    make_swapped("gpt2", "relative:clip=4").save_pretrained(tmp_path)
    table = "transformer.h.0.attn.positions.key_table"
    rewrite(tmp_path / "model.safetensors", lambda weights: weights[table].fill_(float("nan")))
    refused("key_table holds NaN or infinite numbers", auto.from_pretrained, tmp_path, error=posswap.CheckpointError)


def test_a_base_on_the_hub_is_known(make_model, tmp_path, monkeypatch):
    """A swap of a checkpoint that is in the Hub's cache notes its id; a folder is none; another base is refused."""
    monkeypatch.setattr("hf_posswap.scheme_entry.HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--org--tiny" / "snapshots" / "f00").mkdir(parents=True)
    model = make_model("bert")
    model.name_or_path = model.config._name_or_path = "org/tiny"
    posswap.swap(model, "none")
    posswap.swap(model, "sinusoidal")
    model.save_pretrained(tmp_path / "swapped")
    assert saved_scheme(tmp_path / "swapped")["base_model"] == {"id": "org/tiny", "revision": "f00"}
    again = type(model).from_pretrained(tmp_path / "swapped")
    posswap.swap(again, "none").save_pretrained(tmp_path / "again")
    assert saved_scheme(tmp_path / "again")["base_model"]["id"] == "org/tiny"
    text = posswap.write_card(tmp_path / "again").read_text()
    assert "[org/tiny](https://huggingface.co/org/tiny)" in text and "revision `f00`" in text
    refused("was swapped from org/tiny, not from org/other", posswap.write_card, tmp_path / "again", base_model="org/other")
    for name in (str(tmp_path), str(tmp_path / "gone" / "since"), "models/tiny", "", "a//b"):
        local = make_model("bert")
        local.name_or_path = local.config._name_or_path = name
        assert "base_model" not in posswap.swap(local, "none").config.position_scheme
    (tmp_path / "cache" / "models--org--tiny" / "snapshots" / "f01").mkdir()
    assert on_hub("org/tiny") == {"id": "org/tiny", "revision": None}  # which of the two, nobody knows
    assert on_hub(posswap.embedded_model("minilm"))["id"] == "sentence-transformers/all-MiniLM-L6-v2"
