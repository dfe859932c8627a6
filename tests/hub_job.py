"""Sharing models and reading data sets, against one Hub on loopback, whose address the client reads when it is imported:
test_hub.py runs these checks in a process of their own.
"""

import copy
import json
import os
from contextlib import contextmanager
from unittest.mock import patch

import datasets
import pytest
import torch
from hub import Repo, serve
from transformers import AutoConfig, AutoModelForMaskedLM, BertConfig, BertForMaskedLM, BertModel

import hf_posswap as posswap
from hf_posswap.data.tables import TableConfig, read_hub, read_task
from hf_posswap.data.text import read_documents

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
TOKENS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def hub():
    """The Hub, with what all checks have put there."""
    with serve(os.environ["HF_ENDPOINT"]) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


@pytest.fixture
def model(folder):
    return new_model(folder)


def files(hub, name, revision="main"):
    """Return the paths of a repository, but git's own."""
    return set(hub.repos[name].files(revision)) - {".gitattributes"}


@contextmanager
def refused(says):
    """Inside, our error is raised, says this, a regular expression, and does not show the token."""
    with pytest.raises(posswap.PosswapError, match=says) as raised:
        yield
    assert os.environ["HF_TOKEN"] not in str(raised.value)


def new_model(folder, **options):
    """Write a swapped model whose layers are too small for anything but a test."""
    model = BertForMaskedLM(BertConfig(**SIZES, initializer_range=0.3)).eval()
    posswap.swap(model, "rotary:theta=500").save_pretrained(folder, **options)
    return model


def push(folder, repo_id, **options):
    """Share with a base that is on no Hub."""
    return posswap.share(folder, repo_id, base_model="local:tiny", license="mit", **options)


def check_push_and_pull(hub, folder, model):
    """All files arrive, the model loads as it was; a second push of the same sends nothing; a changed card alone is sent."""
    (folder / "bpe.codes").write_text("t h 5")  # of a PhoBERT's tokenizer
    assert push(folder, "tester/first") == f"{hub.endpoint}/tester/first"
    expected = {"README.md", "bpe.codes", "posswap_results.json", "config.json", "model.safetensors", "modeling_hf_posswap.py"}
    assert files(hub, "tester/first") == expected, files(hub, "tester/first")
    assert 'from_pretrained("tester/first")' in hub.repos["tester/first"].files()["README.md"].decode()
    pulled = AutoModelForMaskedLM.from_pretrained("tester/first")
    assert torch.equal(pulled(TOKENS).logits, model(TOKENS).logits)
    commits = len(hub.repos["tester/first"].commits)
    push(folder, "tester/first")
    assert len(hub.repos["tester/first"].commits) == commits
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore.\n")
    before = hub.repos["tester/first"].files()
    push(folder, "tester/first")  # the card there has no text of its own that could be lost
    after = hub.repos["tester/first"].files()
    assert len(hub.repos["tester/first"].commits) == commits + 1 and b"More." in after["README.md"]
    assert [path for path in after if after[path] is not before[path]] == ["README.md"]
    for path in folder.rglob("*"):
        assert not path.is_file() or os.environ["HF_TOKEN"].encode() not in path.read_bytes()


def check_the_base_is_recorded(hub, folder, model):
    """A checkpoint that was loaded from the Hub is named in the swapped one's config, with its commit."""
    BertModel(BertConfig(**SIZES)).push_to_hub("tester/base")
    model = posswap.swap(BertModel.from_pretrained("tester/base"), "none")
    expected = {"id": "tester/base", "revision": hub.repos["tester/base"].resolve("main")}
    assert model.config.position_scheme["base_model"] == expected, model.config.position_scheme
    model.save_pretrained(folder)
    posswap.share(folder, "tester/of-base")
    with refused("holds a model that was not shared with hf_posswap"):  # the base's own repository
        posswap.share(folder, "tester/base")
    assert hub.repos["tester/base"].resolve("main") == expected["revision"]
    posswap.share(folder, "tester/base", overwrite=True)
    assert f"revision `{expected['revision']}`" in hub.repos["tester/of-base"].files()["README.md"].decode()


def check_another_model(hub, folder, model):
    """Weights, card and results of what was there before go: they are not read in the place of the new, sharded ones."""
    push(folder, "tester/changing")
    model = new_model(folder / "second", max_shard_size="10KB")
    push(folder / "second", "tester/changing")
    assert "model.safetensors" not in files(hub, "tester/changing")
    headless = posswap.swap(BertModel(BertConfig(**SIZES)), "rotary")
    headless.save_pretrained(folder / "third")
    push(folder / "third", "tester/changing")
    assert b"pipeline_tag: feature-extraction" in hub.repos["tester/changing"].files()["README.md"]
    hub.repos["tester/changing"].add("adapter_config.json", b"{}")  # which transformers reads in the model's place
    push(folder / "second", "tester/changing", overwrite=True)
    assert "adapter_config.json" not in files(hub, "tester/changing")
    pulled = AutoModelForMaskedLM.from_pretrained("tester/changing")
    assert torch.equal(pulled(TOKENS).logits, model(TOKENS).logits)


def check_private(hub, folder, model):
    """A new repository is as private as asked; one that is there is not changed, nor pushed to by mistake."""
    push(folder, "tester/hidden", private=True)
    assert hub.repos["tester/hidden"].private
    push(folder, "tester/hidden")
    push(folder, "tester/open", private=False)
    with refused("tester/open is public already"):
        push(folder, "tester/open", private=True)


def check_pull_request(hub, folder, model):
    """Into somebody else's repository: refused with the way out, and that way works, and leaves main alone."""
    hub.repos["other/theirs"] = Repo()
    with refused("open a pull request with create_pr=True"):
        push(folder, "other/theirs")
    assert (folder / "README.md").is_file() and files(hub, "other/theirs") == set()
    url = push(folder, "other/theirs", create_pr=True)
    assert url.endswith("/other/theirs/discussions/1"), url
    assert files(hub, "other/theirs") == set() and "model.safetensors" in files(hub, "other/theirs", "refs/pr/1")
    assert AutoConfig.from_pretrained("other/theirs", revision="refs/pr/1").position_scheme["theta"] == 500
    with refused("you may not write to other/new"):
        push(folder, "other/new")
    with refused("there is no model other/new"):
        push(folder, "other/new", create_pr=True)
    with patch.dict(os.environ, HF_TOKEN="hf_wrong_and_secret"), refused(r"log in \(hf auth login, or HF_TOKEN\)"):
        push(folder, "tester/unknown")


def check_busy(hub, folder, model):
    """The commit is tried again where the Hub is busy, and where the connection is cut; in the end there is one."""
    for number, status in enumerate((429, 503, 500, 0)):
        hub.fail_next("POST", "/commit/", status, times=2 if status else 1, **{"Retry-After": "0"})
        push(folder, f"tester/busy-{number}")
        assert not hub.planned and len(hub.repos[f"tester/busy-{number}"].commits) == 2, status


def check_giving_up(hub, folder, model):
    """After some tries it says so; nothing is lost, nothing half there, and the same call goes on."""
    hub.fail_next("POST", "/api/repos/create", 0, times=9)
    with refused(f"All files are in {folder}"):
        push(folder, "tester/later")
    assert (folder / "README.md").is_file() and "tester/later" not in hub.repos
    hub.planned.clear()
    hub.fail_next("POST", "/commit/", 503, times=6, **{"Retry-After": "0"})
    with refused("the Hub answered 503"):
        push(folder, "tester/later")
    assert not hub.planned and files(hub, "tester/later") == set() and (folder / "model.safetensors").is_file()
    push(folder, "tester/later")
    assert "model.safetensors" in files(hub, "tester/later")
    hub.repos["other/slow"] = Repo()
    for status, says in ((502, "the Hub answered 502"), (0, "could not be reached")):
        hub.fail_next("POST", "/commit/", status)  # the pull request may be open: another try would open a second one
        with refused(says):
            push(folder, "other/slow", create_pr=True)
    assert not hub.planned and not hub.repos["other/slow"].pull_requests()


def check_somebody_else(hub, folder, model):
    """A commit in between is not written over."""
    push(folder, "tester/shared")
    repo = hub.repos["tester/shared"]
    hub.before_next("POST", "/commit/", lambda _: repo.add("NOTES.md", b"mine"))
    (folder / "README.md").write_text((folder / "README.md").read_text() + "\nMore.\n")
    with refused("somebody has changed tester/shared meanwhile"):
        push(folder, "tester/shared")
    assert repo.files()["NOTES.md"] == b"mine" and b"More." not in repo.files()["README.md"]
    push(folder, "tester/shared")
    assert repo.files()["NOTES.md"] == b"mine" and b"More." in repo.files()["README.md"]


def check_a_card_that_is_there(hub, folder, model):
    """What somebody has written into the card on the Hub stays around ours when the folder has no card yet."""
    hub.repos["tester/written"] = repo = Repo()
    repo.add("README.md", b"---\nlanguage: de\n---\n\nRead me first.\n")
    push(folder, "tester/written")
    card = repo.files()["README.md"].decode()
    assert "language: de" in card and "Read me first." in card and "written by hf_posswap: begin" in card
    repo.add("README.md", card.replace("Read me first.", "Read me first. And this.").encode())
    with refused("has text that"):
        push(folder, "tester/written")
    assert b"And this." in repo.files()["README.md"]
    push(folder, "tester/written", overwrite=True)
    assert b"And this." not in repo.files()["README.md"]


def check_what_is_not_sent(hub, folder, model):
    """Pickles, leftovers of training, foreign code, broken weights, strange indices, links, names: before any request."""
    requests = hub.requests
    with refused("is no name for a repository"):
        push(folder, "tester/a/b")
    with refused("give owner/name"):
        push(folder, "never")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("token")  # left alone
    (folder.parent / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    runs = "is run: save the model again"
    unknown = ("training_args.bin", "checkpoint-5/optimizer.pt", "evil.py", "token.json", "more/config.json")
    foreign = {"auto_map": {"AutoTokenizer": ["o/x--a.Evil", None]}}
    index = {"weight_map": {"a": "../secret.safetensors"}}
    for name, change, says in (
        *((name, lambda _: b"{}", "no part of a shared model") for name in unknown),
        ("modeling_hf_posswap.py", lambda code: code + b"import os\n", runs),
        ("modeling_hf_posswap.py", lambda code: code.replace(b"BertModel,", b"BertEvil,"), runs),
        ("modeling_hf_posswap.py", lambda code: code.replace(b"    PosswapBertModel,\n", b""), runs),
        ("config.json", lambda text: text.replace(b"hf_posswap.PosswapBertM", b"evil.PosswapM"), runs),
        ("tokenizer_config.json", lambda _: json.dumps(foreign).encode(), runs),
        ("more.safetensors", lambda _: b"\x10" * 40, "cannot be read"),
        ("model.safetensors.index.json", lambda _: json.dumps(index).encode(), "is no file next to it"),
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(change(before))
        assert path.read_bytes() != before
        with refused(says):
            push(folder, "tester/never")
        path.write_bytes(before) if before else path.unlink()
    (folder / "link.json").symlink_to("/etc/hostname")
    with refused("leads out of the folder"):
        push(folder, "tester/never")
    (folder / "link.json").unlink()
    weights = (folder / "model.safetensors").rename(folder.parent / "aside")
    with refused("has no weights"):
        push(folder, "tester/never")
    weights.rename(folder / "model.safetensors")
    assert not (folder / "README.md").exists() and hub.requests == requests
    push(folder, "tester/always")
    assert not [name for name in files(hub, "tester/always") if ".git" in name]


def check_delta_and_leaderboard(hub, folder, model):
    """A delta is shared and loaded by its id; leaderboards read repositories, by revision too, and say what is missing."""
    base = BertModel(BertConfig(**SIZES))
    posswap.save_delta(posswap.swap(copy.deepcopy(base), "relative:clip=4"), folder / "delta", base_model=base)
    push(folder / "delta", "tester/delta")
    assert str(posswap.describe(posswap.load_delta(base, "tester/delta")).new) == "relative:clip=4"
    posswap.restore(base)
    hub.repos["tester/bare"], commit = Repo(), hub.repos["tester/delta"].resolve("main")
    for call, words in (
        (lambda: posswap.leaderboard([f"tester/delta@{commit}"]), f"none of tester/delta@{commit} has a comparison"),
        (lambda: posswap.leaderboard(["tester/delta@nope"]), "no revision nope"),
        (lambda: posswap.leaderboard(["tester/bare"]), "it was not shared with hf_posswap"),
        (lambda: posswap.load_delta(base, "tester/delta", revision="nope"), "no revision nope"),
        (lambda: posswap.load_delta(base, "tester/absent"), "there is no folder tester/absent, and no such model"),
        (lambda: posswap.load_delta(base, "a/b/c"), "neither a folder nor a name"),
    ):
        with refused(words):
            call()


def check_pushed_by_transformers(hub, folder, model):
    """push_to_hub does as well: beside the weights lies the code by which trust_remote_code loads them."""
    model.push_to_hub("tester/pushed")
    assert {"config.json", "model.safetensors", "modeling_hf_posswap.py"} <= files(hub, "tester/pushed")
    trusted = AutoModelForMaskedLM.from_pretrained("tester/pushed", trust_remote_code=True)
    assert type(trusted) is type(model) and torch.equal(trusted(TOKENS).logits, model(TOKENS).logits)


SENTENCES = [f"The cat sat on {number} {'mats' if number % 2 else 'hats'}." for number in range(60)]
COLA = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=["wrong", "right"])})


def data_set(config, **splits):
    """Return the files of a data set on the Hub: each split's rows, and a card that says where they are."""
    files = "".join(f"  - split: {split}\n    path: {config}/{split}-*\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    return {"README.md": card.encode()} | {f"{config}/{split}-0.parquet": rows for split, rows in splits.items()}


def parquet(folder, columns, features=None):
    datasets.Dataset.from_dict(columns, features).to_parquet(folder / "rows.parquet")
    return (folder / "rows.parquet").read_bytes()


def glue(folder):
    """Return CoLA as GLUE has it, whose test labels are secret."""
    labels = {"train": [number % 2 for number in range(60)], "validation": [0, 1] * 10, "test": [-1] * 5}
    tables = {split: {"sentence": SENTENCES[: len(some)], "label": some} for split, some in labels.items()}
    return data_set("cola", **{split: parquet(folder, table, COLA) for split, table in tables.items()})


def read(name):
    """Return what is read of a data set's labels, sizes and texts; it has no test part whose labels are not secret."""
    task = read_task(TableConfig(dataset=name))
    assert task.test is None
    return [list(task.label_names), len(task.train), len(task.validation), task.validation.texts[0]]


def check_reading(hub, folder, model):
    """Data sets are read by the names that people write, once read also without a network; others are an error."""
    lines = parquet(folder, {"text": ["", " = A title = \n", "The cat sat on the mat. \n"]})
    for name, tree in {
        "nyu-mll/glue": glue(folder),
        "Salesforce/wikitext": data_set("wikitext-2-raw-v1", train=lines, validation=lines),
        "other/unsplit": data_set("default", train=glue(folder)["cola/train-0.parquet"]),
        "other/private": {"train.parquet": lines},
        "other/script": {"script.py": b"raise SystemExit('code of a stranger was run')"},
    }.items():
        hub.repos[f"datasets/{name}"] = Repo(tree, private="private" in name)
    expected = [["wrong", "right"], 60, 20, SENTENCES[0]]
    assert read("glue/cola") == read("nyu-mll/glue:cola") == expected
    assert read("other/unsplit")[1:3] == [54, 6] and len(read_hub("other/unsplit", None, "train")) == 60
    for options, says in (
        ({"validation_split": "test"}, "label -1, out of range"),
        ({"validation_split": "dev"}, r"no split 'dev'; it has \['test', 'train', 'validation'\]"),
        ({"dataset_config": "sst2"}, "give one"),
        ({"test_file": "t.csv"}, "one of them"),
    ):
        with refused(says):
            read_task(TableConfig(dataset="glue/cola", **options))
    texts = [" = A title = \n", "The cat sat on the mat. \n"]
    assert read_documents("wikitext:wikitext-2-raw-v1", split="validation") == texts
    for name, says in (
        ("glue/nothing", "nothing.*cola"),
        ("other/private", "exist"),
        ("other/script", "scripts are no longer supported"),
        ("no/such", "exist"),
    ):
        with refused(f"cannot read the Hub data set .*{says}"):
            read(name)
    requests = hub.requests
    with patch("datasets.config.HF_HUB_OFFLINE", True), patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
        assert read("glue/cola") == expected and hub.requests == requests


def check_faults_while_reading(hub, folder, model):
    """A Hub that answers with an error, or cuts the connection, is an error of one line; the same again goes on."""
    for status in (503, 0):
        name = f"faulty/glue{status}"
        hub.repos[f"datasets/{name}"] = Repo(glue(folder))
        with patch("time.sleep"):  # the client waits between its tries
            for method in ("GET", "HEAD"):
                hub.fail_next(method, "datasets", status, times=1000)
            with refused(f"^cannot read the Hub data set {name}, cola: "):
                read(f"{name}/cola")
            hub.planned.clear()
            assert read(f"{name}/cola")[1:3] == [60, 20]
