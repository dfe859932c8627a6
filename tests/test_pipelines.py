"""Pipelines of sentence-transformers: swapped whole, fitted on texts, saved, loaded, restored, exported, shared."""

import json
import random

import numpy as np
import pandas
import pytest
from conftest import WORDS, refused, run_python, works
from huggingface_hub import ModelCard
from torch import nn
from transformers import BertForMaskedLM, BertForSequenceClassification, BertModel

import hf_posswap as posswap
from hf_posswap.fitting import choosing
from hf_posswap.pipelines import kind_of, limit
from hf_posswap.sharing.hub import check_files

library = pytest.importorskip("sentence_transformers")

LONG = " ".join(WORDS[number * number % len(WORDS)] for number in range(200))
TEXTS = ["the cat sat on the mat", "a happy dog", LONG]
KINDS = {
    "SentenceTransformer": (BertModel, "sentence-similarity"),
    "CrossEncoder": (BertForSequenceClassification, "text-ranking"),
    "SparseEncoder": (BertForMaskedLM, "feature-extraction"),
}
if hasattr(library, "MultiVectorEncoder"):  # from version 6 on
    KINDS["MultiVectorEncoder"] = BertModel, "feature-extraction"


def says(pipeline) -> np.ndarray:
    """What a pipeline answers on the texts; their norms and directions both count."""
    if isinstance(pipeline, library.CrossEncoder):
        return pipeline.predict([(text, TEXTS[0]) for text in TEXTS], activation_fn=nn.Identity())
    if type(pipeline).__name__ == "MultiVectorEncoder":  # a vector a token
        return np.stack([vectors.mean(0).numpy() for vectors in pipeline.encode(TEXTS)])
    return pipeline.encode(TEXTS, convert_to_tensor=True).to_dense().numpy()


@pytest.fixture
def make_pipeline(make_model, bert_tokenizer, tmp_path):
    """The factory of tiny pipelines: the sentence one pools [CLS], normalises, and has a prompt that is always put in front."""

    def make(kind: str = "SentenceTransformer"):
        folder = tmp_path / f"plain-{kind}"
        make_model("bert", head=KINDS[kind][0], num_labels=1).save_pretrained(folder)
        bert_tokenizer.model_max_length = 24
        bert_tokenizer.save_pretrained(folder)
        if kind != "SentenceTransformer":
            return getattr(library, kind)(str(folder), device="cpu")
        from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

        modules = [Transformer(str(folder)), Pooling(64, pooling_mode="cls"), Normalize()]
        prompts = {"prompts": {"query": "the dog "}, "default_prompt_name": "query"}
        return library.SentenceTransformer(modules=modules, device="cpu", **prompts)

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_swap_save_load_restore_export(make_pipeline, kind, tmp_path):
    """A pipeline reads more after the swap, says the same when it is loaded or exported, and is itself again when restored."""
    pipeline = make_pipeline(kind)
    before, reads = says(pipeline), limit(pipeline)
    assert posswap.swap(pipeline, posswap.Rotary(mark_first=False), max_positions=96) is pipeline
    assert limit(pipeline) == 96 and reads == 24
    assert posswap.describe(pipeline).max_positions == 96 and posswap.describe(pipeline).swapped
    swapped = says(pipeline)
    assert np.abs(swapped - before).max() > 1e-3
    twin = posswap.original(pipeline)
    assert type(twin) is type(pipeline) and limit(twin) == reads and np.allclose(says(twin), before, atol=1e-5)
    assert limit(pipeline) == 96
    pipeline.save_pretrained(str(tmp_path / "swapped"))
    assert kind_of(tmp_path / "swapped") == kind
    loaded = getattr(library, kind)(str(tmp_path / "swapped"), device="cpu")
    assert np.abs(says(loaded) - swapped).max() < 1e-6 and limit(loaded) == limit(pipeline)
    assert getattr(loaded, "prompts", None) == getattr(pipeline, "prompts", None)
    native = posswap.export_native(loaded)
    native.save_pretrained(tmp_path / "native")
    stock = getattr(library, kind)(str(tmp_path / "native"), device="cpu")
    kin = "JinaEmbeddingsV3" if kind == "CrossEncoder" else "RoFormer"
    assert kin in (tmp_path / "native" / "config.json").read_text() and limit(stock) == limit(pipeline)
    for exported in (native.pipeline, stock):
        assert np.abs(says(exported) - swapped).max() < 1e-5
    assert posswap.restore(pipeline) is pipeline and limit(pipeline) == reads
    assert np.array_equal(says(pipeline), before)


def test_a_limit_of_documents(make_pipeline):
    """A pipeline may cut documents at a length of their own: it grows with each swap, and comes back."""
    pipeline = make_pipeline("SentenceTransformer")
    pipeline[0].document_length = 20  # from version 6 on
    for length in (96, 128):
        assert posswap.swap(pipeline, "rotary", max_positions=length)[0].document_length == limit(pipeline) == length
    assert posswap.restore(pipeline)[0].document_length == 20 and limit(pipeline) == 24


def test_in_a_fresh_process(make_pipeline, tmp_path):
    """With the import, with trusted code and without it, and exported without the package: the same vectors, normalised."""
    pipeline = posswap.swap(make_pipeline(), posswap.Rotary(mark_first=False), max_positions=96)
    pipeline.save_pretrained(str(tmp_path / "swapped"))
    posswap.export_native(pipeline).save_pretrained(tmp_path / "native")
    np.save(tmp_path / "vectors.npy", says(pipeline))
    code = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer
wanted, texts = np.load("vectors.npy"), sys.argv[1:]
def same(folder, **options):
    pipeline = SentenceTransformer(folder, device="cpu", **options)
    vectors = pipeline.encode(texts)
    assert abs(vectors - wanted).max() < 1e-6 and abs(np.linalg.norm(vectors, axis=1) - 1).max() < 1e-5
    assert pipeline.max_seq_length == pipeline.tokenizer.model_max_length == 96
same("native")
assert "hf_posswap" not in sys.modules
same("swapped", trust_remote_code=True)
import hf_posswap
same("swapped")
"""
    run_python("-W", "ignore", "-c", code, *TEXTS, cwd=tmp_path)


def test_fit_on_texts(make_pipeline, make_model, bert_tokenizer, watch, program, tmp_path):
    """Texts are enough for a pipeline; a plain model needs a tokenizer for them, and then says the same as with batches."""
    texts = [" ".join(random.Random(number).choices(WORDS, k=200)) for number in range(16)]
    pipeline = posswap.swap(make_pipeline(), "rotary")
    assert pipeline.max_seq_length == 24  # nobody asked for more
    pipeline.model_card_data.training_logs = [{"Step": 1}]  # an evaluator's, between swap and fit
    report = posswap.fit(pipeline, texts, steps=2, progress=False)
    assert not pipeline.model_card_data.training_logs
    assert report.longest == 24 and report.after.total < report.before.total
    make_pipeline().save_pretrained(str(tmp_path / "plain"))
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    fitted = "--fit", tmp_path / "texts.txt", "--fit-steps", 2, "--output", tmp_path / "fitted"
    _, out, err = program("swap", tmp_path / "plain", "--scheme", "rotary", *fitted)
    assert "no sequence was longer than 24 tokens" in " ".join(out.split()), err
    plain = [posswap.swap(make_model("bert"), "rotary") for _ in range(2)]
    refused("posswap.text_batches", posswap.fit, plain[0], texts, error=posswap.DataError)
    refused("must be a list of texts", posswap.fit, plain[0], LONG, error=posswap.DataError)
    one = posswap.fit(plain[0], iter(texts), tokenizer=bert_tokenizer, steps=2, progress=False)
    batches = posswap.text_batches(texts, bert_tokenizer, 32)
    other = posswap.fit(plain[1], batches, steps=2, progress=False)
    assert one.sha256 == other.sha256
    trials = watch(choosing, "fit")  # on texts as long as the pipeline reads, too
    scheme = posswap.choose(make_pipeline(), "rotary:fraction=auto", pandas.Series(texts), steps=1, progress=False)
    assert scheme.fraction in (1, 0.5, 0.25)
    assert {batch["input_ids"].shape[1] for trial in trials for batch in trial.args[1]} == {16, 24}


def test_delta(make_pipeline, tmp_path):
    """A delta goes from one pipeline onto another, which then reads as much."""
    pipeline = posswap.swap(make_pipeline(), "relative:clip=4", max_positions=64)
    for name, parameter in pipeline.named_parameters():
        if ".positions." in name:
            nn.init.normal_(parameter)
    posswap.save_delta(pipeline, tmp_path / "delta")
    other = posswap.load_delta(make_pipeline(), tmp_path / "delta")
    assert other.max_seq_length == 64 and np.array_equal(says(other), says(pipeline))
    assert posswap.restore(other).max_seq_length == 24


@pytest.mark.parametrize("kind", KINDS)
def test_folders_stay_whole(make_pipeline, kind, tmp_path, program):
    """The commands keep what is around the model, and the card is one of sentence-transformers."""
    pipeline = make_pipeline(kind)
    pipeline.save_pretrained(str(tmp_path / "plain"))

    folder, scheme = tmp_path / "swapped", "rotary:mark_first=false"
    options = "--scheme", scheme, "--max-positions", 64, "--output", folder
    assert f"{kind}('" in works(program, "swap", tmp_path / "plain", *options)
    assert "max positions             64 (trained with 32)" in works(program, "describe", folder)
    assert "without hf_posswap" in works(program, "export", folder, "--output", tmp_path / "native")
    works(program, "card", folder, "--base-model", "local:tiny", "--license", "mit")
    posswap.swap(pipeline, scheme, max_positions=64)
    for saved in (folder, tmp_path / "native"):
        assert np.abs(says(getattr(library, kind)(str(saved), device="cpu")) - says(pipeline)).max() < 1e-5
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == KINDS[kind][1]
    assert f'{kind}("swapped")' in card.text and "AutoTokenizer" not in card.text.partition("What the swap cost")[0]
    ours, _, theirs = card.text.partition("<!-- written by hf_posswap: end -->")  # before a way to load that does not work
    assert "import hf_posswap" in ours and "_model_id" not in ours and "_model_id" in theirs
    (folder / "1_CNN").mkdir()
    (folder / "1_CNN" / "cnn_config.json").write_text("{}")  # a further module has a config of its own name
    assert {"modules.json", "1_CNN/cnn_config.json"} <= set(check_files(folder))
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"type": "somebody.Else", "path": "", "name": "x", "idx": 9}]))
    refused("what is shared is run", check_files, folder, error=posswap.CheckpointError)


def test_the_card_of_the_original(make_pipeline, tmp_path):
    """What a card says, such as scores on benchmarks, is not saved with other weights, nor where a loaded model is swapped."""
    make_pipeline().save_pretrained(str(tmp_path))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n\nIt scores 99 on MTEB.\n")
    pipeline = library.SentenceTransformer(str(tmp_path), device="cpu")
    pipeline.model_card_data.eval_results_dict = {"an evaluator": {"cosine": 0.99}}  # as one notes when it is called

    def saved() -> str:
        pipeline.save_pretrained(str(tmp_path))
        return (tmp_path / "README.md").read_text()

    for scheme in ("rotary", "alibi"):
        posswap.swap(pipeline, scheme)
        assert not pipeline.model_card_data.eval_results_dict
        assert "MTEB" not in saved() and "SentenceTransformer" in saved()
    (tmp_path / "README.md").write_text("It scores 98 on MTEB.\n")
    again = library.SentenceTransformer(str(tmp_path), device="cpu")
    posswap.swap(again, "rotary").save_pretrained(str(tmp_path))
    assert "MTEB" not in (tmp_path / "README.md").read_text()
    posswap.restore(pipeline)
    assert "99 on MTEB" in saved()
    posswap.swap(again, "alibi").save_pretrained(str(tmp_path))  # which cuts texts where it did before
    assert "It reads 24 tokens" in (card := posswap.write_card(tmp_path, base_model="local:tiny").read_text())
    assert "Texts are cut after 24 tokens" in card and "are an error" not in card


def test_refusals(make_pipeline, bert_tokenizer):
    """What cannot be swapped is an error with a remedy, and nothing is changed."""
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    words = StaticEmbedding(bert_tokenizer.backend_tokenizer, embedding_dim=8)
    static = library.SentenceTransformer(modules=[words], device="cpu")
    with pytest.raises(posswap.UnsupportedModelError, match="StaticEmbedding, which holds no PyTorch model"):
        posswap.swap(static, "rotary")
    pipeline = make_pipeline()
    before = says(pipeline)
    pipeline.max_seq_length = 100
    refused("max_seq_length=100 is more than the 32 .* pass max_positions=100", posswap.swap, pipeline, "rotary")
    pipeline.max_seq_length = 24
    pipeline.tokenizer.pad_token = None
    refused("no padding token", posswap.swap, pipeline, "rotary", max_positions=64)
    pipeline.tokenizer.pad_token = "[PAD]"
    pipeline[0].processing_kwargs = {"text": {"max_length": 24}}
    refused("cut texts by max_length", posswap.swap, pipeline, "rotary", max_positions=64)
    pipeline[0].processing_kwargs = {}
    assert not posswap.describe(pipeline).swapped and np.array_equal(says(pipeline), before)
    posswap.swap(pipeline, "rotary", max_positions=64).max_seq_length = 128
    refused("set up for 64", pipeline.encode, LONG, error=posswap.SequenceTooLongError)


def test_kinds_of_folders(tmp_path):
    """Before version 5.4 a CrossEncoder has no modules.json, only an entry in config.json; a plain model has neither."""
    for about, kind in (({"sentence_transformers": {"version": "4.1.0"}}, "CrossEncoder"), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **about}))
        assert kind_of(tmp_path) == kind
