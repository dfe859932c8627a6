"""The report of a fit: what it won back, as tables and as a file beside the saved model."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from hf_posswap.errors import CheckpointError
from hf_posswap.fitting.layerwise import LayerFit
from hf_posswap.measure.damage import Damage
from hf_posswap.measure.reading import Reading
from hf_posswap.provenance import provenance, weight_hashes, without_home, write_json
from hf_posswap.sharing.delta import saved_hashes
from hf_posswap.terminal import as_text, number_table

FIT_FILE = "posswap_fit.json"

_MEASURES = {
    "KL": "how far predictions are from the original's, in nats a token",
    "1 - cosine": "1 - cosine of mean-pooled states with the original's",
}
_NEAR = 0.05  # damage, in either measure, from which on the verdict asks for more; a rule of thumb


@dataclass(frozen=True)
class FitReport:
    """The result of a fit, measured on text that it was not fitted on; `print` shows it as tables.

    Damage is measured on text of at most the original's window, `reading` on longer text.
    """

    before: Damage
    after: Damage
    layers: tuple[LayerFit, ...]
    seconds: float
    tokens: int  # fitted on
    tokens_held_out: int  # measured on
    text: str  # "given", "written by the model", "random tokens", or other words
    longest: int  # sequence fitted on, in tokens; longer inputs were not measured
    trained_positions: int  # the original's longest input
    position_scheme: dict  # as the model's config has it
    sha256: str  # of the fitted weights: `delta.weights_hash`
    part: str = "select"  # of the text measured on: "report" is used for nothing else, "select" also decided what to keep
    window: int | None = None  # tokens that the original read at once; None if it read every sequence whole
    head: dict[str, str] = field(default_factory=dict, repr=False)  # `delta.head_hashes`: KL is measured through the head
    reading: Reading | None = None  # of text longer than the window, next to the original's
    error: float | None = None  # of the last layer, on text of all lengths, if some is longer than the window

    @property
    def score(self) -> float:
        """The distance from the original, to compare fits on one text; smaller is better."""
        return self.after.total if self.error is None else self.error

    def __str__(self) -> str:
        tables = [part for table in self._tables() for part in (table, "")]
        return as_text(*tables, *self._notes(), self._verdict(), width=100)

    def _tables(self) -> list[Table]:
        """Return the damage, the reading of long text, and the layers."""
        rows = [(self.before.measure, self.before.total, self.after.total)]
        for name in ("length", "position"):
            before, after = (getattr(one, f"by_{name}") for one in (self.before, self.after))
            rows += [(f"  {name} {key}", before[key], after[key]) for key in before if len(before) <= 8]
        tables = [number_table(("damage", "before", "after"), rows, 4)]
        if read := self.reading:
            losses = read.measure == "loss"
            kinds = {f"original, window of {read.window}": read.original} if losses else {}
            kinds |= {"before": read.before, "after": read.after}
            rows = [(key, *(kind[key] for kind in kinds.values())) for key in read.before]
            heads = (f"{read.measure} at {'positions' if losses else 'lengths up to'}", *kinds)
            tables.append(number_table(heads, rows, 4))
        rows = []
        by_layer = zip(self.before.by_layer, self.after.by_layer, strict=True)
        for fit, states in zip(self.layers, by_layer, strict=bool(self.layers)):  # none: there was nothing to fit
            solved = "" if fit.solved is None else f"{fit.solved:.4f}" + " (not kept)" * (not fit.kept)
            after = f"{fit.after:.4f}" + " (no steps)" * (not fit.reconstructed)
            rows.append((str(fit.layer), fit.before, solved, after, *states))
        heads = ("layer", "error before", "closed form", "after steps", "states before", "states after")
        return [*tables, number_table(heads, rows, 4, first="right")]

    def _notes(self) -> list[str]:
        """Return what the figures are, and on what text they were measured."""
        told = "which decided nothing" if self.part == "report" else "which also told what to keep"
        words = [
            f"damage: {_MEASURES[self.before.measure]}; 0 is the original. error: of a layer's output, after the layers before "
            "it were fitted; states: of the whole model, after the layer; both relative to the original's variance.",
            f"fitted on {self.tokens:,} tokens, {self.text}, in {self.seconds:.0f} s; measured on {self.tokens_held_out:,} "
            f"others, {told}",
        ]
        if self.window:
            words.append(
                f"the first table is of the first {self.window} tokens of each text; in the second, texts are read whole, by "
                "the original through a window that slides by a quarter"
            )
        if self.longest < self.trained_positions:
            words.append(
                f"no sequence was longer than {self.longest} tokens, and the original reads {self.trained_positions}: give "
                "longer ones too if the model is to read them"
            )
        return words

    def _verdict(self) -> str:
        """Return a sentence on what the figures mean and what to do next."""
        before, after = self.before.total, self.after.total
        if not self.layers:
            return "the swap had lost nothing, and nothing was fitted"
        if after == before:
            return "nothing was won, and the fit was undone: give more text, or a lower learning_rate"
        if after > before:
            decided = "the last layer's error on all lengths" if self.window else "the text to select by"
            grew = f"{decided} told to keep the fit, though the damage in the first table grew"
            return f"{grew}: give more text and steps, and see on your own task whether the swap alone is better"
        won = f"the fit won back {1 - after / before:.0%} of what the swap had lost"
        if after < _NEAR:
            return f"{won}, and little is left: save the model, or train it as you would the original"
        more = f"more text (fitted on {self.tokens:,} tokens) and more steps win more"
        return f"{won}; {more}, and so may training the whole model"

    def save(self, folder: str | Path, *, command: str | None = None) -> None:
        """Write `FIT_FILE` next to the saved model, for its card: the report, hashes of the weights, versions and hardware.

        Args:
            folder: Where the fitted model was saved.
            command: The command line that made the model, if any.

        Raises:
            CheckpointError: The folder has no weights, or not the fitted ones.
        """
        hashes = weight_hashes(Path(folder))
        if not hashes:
            raise CheckpointError(f"there is no model in {folder}: save the fitted model there first")
        sha256, head = saved_hashes(Path(folder))
        if sha256 != self.sha256:
            what = f"{folder} holds other weights than those that this report is of"
            raise CheckpointError(f"{what}: save model and report right after the fit; a model trained since is another")
        other = [name for name, value in head.items() if self.head.get(name) != value]
        if other and self.after.measure == "KL":
            raise CheckpointError(f"{folder} holds another head ({other[0]}) than this report is of: save the model as fitted")
        report = {name: value for name, value in asdict(self).items() if name != "head"} | {
            "made": provenance() | {"command": command and without_home(command)}
        }
        write_json(Path(folder) / FIT_FILE, {"format": 1, "weights": hashes, "report": report})
