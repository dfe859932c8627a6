"""The main job end to end on tiny models and text: figures, files, resuming, and the README's tables."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertModel

import hf_posswap as posswap
from hf_posswap.compare import CompareConfig, compare, figures_of
from hf_posswap.measure import kl_divergence, perplexity, pooled_cosine, pooled_states, word_order_examples
from hf_posswap.report import markdown_table, write_report

ROOT = Path(__file__).parents[1]
SENTENCES = "the cat sat on the mat. a dog ran under the log and sat. then it was happy and the cat ran on. "


@pytest.fixture
def config(make_model, bert_tokenizer, gpt2_tokenizer, tmp_path):
    """A comparison of two tiny models on a tiny text."""
    torch.manual_seed(0)
    for name, model, tokenizer in (
        ("bert", make_model("bert", head=BertModel), bert_tokenizer),
        ("gpt2", make_model("gpt2", vocab_size=99, bos_token_id=1, eos_token_id=1), gpt2_tokenizer),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    words = "Alpha beta gamma delta the cat dog sat ran on under mat log and then".split()
    lines = [" ".join(words[i % 5 :] + words[: i % 5]) + f" w{i} the end." for i in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return CompareConfig(
        models=(str(tmp_path / "bert"), str(tmp_path / "gpt2")),
        schemes=("relative:clip=4", "rotary"),
        data=str(tmp_path / "text.txt"),
        seeds=(0, 1),
        max_steps=2,
        batch_size=4,
        evaluation_tokens=256,
        word_order_sentences=40,
    )


def test_compare_end_to_end(config, tmp_path):
    """Every scheme gets every figure under one budget; files are written; the saved models load; a resume reruns nothing."""
    output = tmp_path / "out"
    results = compare(config, output, progress=False)
    written = write_report(results, output)
    assert all(path.stat().st_size > 0 for path in written) and len(written) == 5
    assert json.loads((output / "results.json").read_text()) == json.loads(json.dumps(results))
    bert, gpt2 = results["models"]
    assert not bert["causal"] and gpt2["causal"]
    assert [row["scheme"] for row in bert["rows"]] == ["original", *config.schemes]
    assert bert["rows"][0]["swapped"]["cosine_32"] == pytest.approx(1.0, abs=1e-5)
    assert gpt2["rows"][0]["swapped"]["kl"] == pytest.approx(0.0, abs=1e-5)
    assert set(gpt2["rows"][1]["swapped"]) == {"perplexity_32", "perplexity_64", "perplexity_128", "kl", "word_order"}
    budgets = {run["tokens"] for model in (bert,) for row in model["rows"] for run in row["tuned"]}
    assert budgets == {bert["tuning_tokens"]}
    assert {run["seed"] for run in gpt2["rows"][2]["tuned"]} == {0, 1}
    assert gpt2["rows"][1]["swapped"] != gpt2["rows"][1]["tuned"][0]

    kept = AutoModelForCausalLM.from_pretrained(output / "models" / "1-gpt2-rotary")
    assert posswap.describe(kept).new == posswap.Rotary() and kept.config.max_position_embeddings == 128

    before = {path: path.stat().st_mtime_ns for path in (output / "rows").iterdir()}
    assert len(before) == 6
    (output / "rows" / "1-rotary.json").unlink()
    again = compare(config, output, resume=True, progress=False)
    after = {path: path.stat().st_mtime_ns for path in (output / "rows").iterdir()}
    assert {path.name for path in before if before[path] != after[path]} == {"1-rotary.json"}
    for ours, theirs in zip(figures_of(again["models"][1]["rows"][2]), figures_of(gpt2["rows"][2]), strict=True):
        if ours[1] != "seconds":
            assert ours[:3] == pytest.approx(theirs[:3])


def test_output_folders_are_never_mixed(config, tmp_path):
    """A folder with a comparison, or with anything else, is not written into."""
    output = tmp_path / "out"
    (output / "rows").mkdir(parents=True)
    (output / "rows" / "0-original.json").write_text("{}")
    with pytest.raises(posswap.PosswapError, match="--resume"):
        compare(config, output, progress=False)
    with pytest.raises(posswap.PosswapError, match="another configuration"):
        compare(config, output, resume=True, progress=False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(posswap.PosswapError, match="give a folder"):
        compare(config, tmp_path / "file", progress=False)


def test_scheme_names_are_checked_before_anything_runs():
    """A typo in one scheme is found at once."""
    with pytest.raises(posswap.PosswapError, match="did you mean 'rotary'"):
        CompareConfig(schemes=("sinusoidal", "rotray"))


def test_perplexity_and_kl_against_the_model(make_model, make_swapped, tokens):
    """Perplexity is exp of transformers' own loss; KL is zero on itself and that of the definition otherwise."""
    model, other = make_model("gpt2"), make_swapped("gpt2", "rotary")
    assert perplexity(model, tokens) == pytest.approx(model(input_ids=tokens, labels=tokens).loss.exp().item(), rel=1e-4)
    assert kl_divergence(model, model, tokens) == pytest.approx(0, abs=1e-6)
    p, q = (m(input_ids=tokens).logits.double().log_softmax(-1) for m in (model, other))
    assert kl_divergence(other, model, tokens) == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-4)


def test_cosine_of_pooled_states(make_model, make_swapped, tokens):
    """One for the model itself, less for a swapped one."""
    model = make_model("bert")
    states = pooled_states(model, tokens)
    assert pooled_cosine(model, tokens, states) == pytest.approx(1, abs=1e-5)
    assert pooled_cosine(make_swapped("bert", "rotary"), tokens, states) < 0.99


def test_word_order_pairs_hold_the_same_words():
    """Each pair differs in two neighbouring words and in nothing else."""
    texts, labels = word_order_examples([SENTENCES.replace(". ", f" {i}. ").title() for i in range(20)], 30)
    assert labels == [0, 1] * 15
    for intact, swapped in zip(texts[0::2], texts[1::2], strict=True):
        a, b = intact.split(), swapped.split()
        changed = [i for i in range(len(a)) if a[i] != b[i]]
        assert sorted(a) == sorted(b) and len(changed) == 2 and changed[1] == changed[0] + 1


def test_readme_tables_are_what_the_results_file_says():
    """The generated blocks of README.md equal what is generated now, and the result file names what made it."""
    recipe = runpy.run_path(str(ROOT / "recipes" / "update_readme.py"))
    results = json.loads(recipe["RESULTS"].read_text())
    readme = (ROOT / "README.md").read_text()
    assert recipe["render"](readme, results) == readme
    assert {"command", "versions", "hardware", "config"} <= results.keys()
    assert all(markdown_table(model) in readme for model in results["models"])


def test_readme_python_example_runs(tmp_path, monkeypatch, bert_tokenizer):
    """The README's example runs as printed, with a tiny BERT standing in for the download."""
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    from transformers import BertConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    tiny = BertModel(BertConfig(**sizes, initializer_range=0.3))
    tiny.save_pretrained(tmp_path / "bert-base-uncased")
    bert_tokenizer.save_pretrained(tmp_path / "bert-base-uncased")
    (tmp_path / "some.txt").write_text(SENTENCES * 200)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert type(names["model"]) is BertModel and posswap.describe(names["again"]).new == posswap.Rotary()
