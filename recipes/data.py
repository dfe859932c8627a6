"""Where the public data of our results come from, and whether what you have is the same, byte for byte.

    python recipes/data.py          # each set: its source, its licence, how our files were made from it
    python recipes/data.py data/    # compare data/cola/train.csv and so on with the files that were measured on

No recipe needs these files: all take any path. A result names the SHA-256 of what it read (`inputs` in result.json).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hf_posswap.errors import DataError
from hf_posswap.provenance import input_hashes
from hf_posswap.terminal import run_program


@dataclass(frozen=True)
class DataSet:
    """A public data set: where it is, under which licence, and how the files were made, by name with their SHA-256."""

    source: str  # GitHub repository @ commit, and the files in it
    licence: str
    made: str
    files: dict[str, str]


SETS = {
    "cola": DataSet(
        "nyu-mll/CoLA-baselines @ dd095d3646ed05a315280aaa8ed4ec84ba435b3e, acceptability_corpus/cola_public/raw/*.tsv",
        "none; sentences from published works, for research",
        "CSV with columns sentence, label, source; train: in_domain_train; dev: in_domain_dev, then out_of_domain_dev",
        {
            "train.csv": "dbec4db3a5d5de4ba510f1938ed56cef21e478da8f8599bdb72e50132cdb36de",
            "dev.csv": "95014b03f73455092a615dc15c724947c007268e520d869ed91943f7e3db24ec",
        },
    ),
    "gutenberg": DataSet(
        "GITenberg/War-and-Peace_2600 @ fa22ab90f00f627e83d14acabe32d91602d2365d, 2600-0.txt; "
        "GITenberg/Moby-Dick--Or-The-Whale_2701 @ bdf1948e6cd00963730971e5624e764a35f238c3, 2701-0.txt",
        "public domain in the US",
        "without Project Gutenberg's header and footer; LF line ends",
        {
            "moby_dick_pg2701.txt": "1f3210c254b197f36a48d2872293e1984524ca881016e1788d3861ea30f1b098",
            "war_and_peace_pg2600.txt": "3867383a978096726eeaa2a77890cd3a51e48cae7271d652c576eba31b1c278c",
        },
    ),
    "movie_reviews": DataSet(
        "nltk/nltk_data @ 5db857e6f7df11eabb5e5665836db9ec8df07e28, packages/corpora/movie_reviews.zip (Pang and Lee 2004)",
        "CC BY 4.0",
        "CSV with columns id, label, text; train: cv000 to cv799, dev: cv800 to cv899, test: the rest; "
        "each shuffled with random.Random(0)",
        {
            "train.csv.gz": "af95fa23cc7388279b605c1abdb6d1dfc93b175ecdbaa43230196b19f90110ba",
            "dev.csv.gz": "fcc52952c1e65fefeaf9d7e89f00e715134b35d6be57518472c4e32243c5a11e",
            "test.csv.gz": "755a2cae60ce8b7c2e6a068593e71b52c1e11853a169787060e3aa3a3fdf0b01",
        },
    ),
    "sst2": DataSet(
        "awake020/pytorch_Bert_sst2 @ ce2ab1719d32182e6233b24b2de246bd32814fde, SST-2/{train,dev}.tsv (Socher et al. 2013)",
        "none stated; for research",
        "CSV with columns sentence, label (1 is positive); LF line ends",
        {
            "train.csv": "ebb3fb1d103fd91559c77104571aab46910f1b27bfdbff223d7d019bea30d638",
            "dev.csv": "98c98bd7d4caecbc964125e11481bd042d6609e7e9ae1015714d5ce272f4821c",
        },
    ),
    "stsb": DataSet(
        "aivilmo/textual-similarity @ 3fe0911a2e267b1cd7b2602c095c402ebadf4271, stsbenchmark/sts-{train,dev,test}.csv",
        "scores CC BY-SA 4.0; sentences under several licences, see LICENSE.txt there",
        "CSV with columns sentence1, sentence2, label (0 to 5), genre",
        {
            "dev.csv": "e18dcc762257f103c4873ae3837b6ab6d9bf4c7c3510f0f62b0bce6827c20245",
            "test.csv": "73fa6eca41da6ab7f0200eb26166e95d7aa36e20d3bc304ec07871dcb7909054",
        },
    ),
    "tinyshakespeare": DataSet(
        "karpathy/char-rnn @ 6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e, data/tinyshakespeare/input.txt",
        "public domain",
        "unchanged",
        {"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    ),
    "wikitext2": DataSet(
        "pytorch/examples @ 77f55b912142e11fcfdf5b530231fb9c52f181e8, word_language_model/data/wikitext-2/{valid,test}.txt",
        "CC BY-SA",
        "unchanged; valid.txt is fitted on, test.txt measured on",
        {
            "valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
            "test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
        },
    ),
}


def data(folder: Annotated[Path | None, typer.Argument(help="A folder with cola/train.csv and so on, to check.")] = None):
    """Say where the data of the results come from, or check what is in a folder."""
    if folder is None:
        for name, one in SETS.items():
            print(f"{name}: {', '.join(one.files)}\n  from {one.source}\n  licence: {one.licence}\n  {one.made}")
        return
    states = check(folder)
    for file, state in states.items():
        print(f"{file}: {state}")
    if "another" in states.values():
        raise DataError(f"files in {folder} differ from those measured on: make them again, see `python recipes/data.py`")
    if set(states.values()) == {"missing"}:
        raise DataError(f"{folder} has none of the files: it should have {next(iter(states))} and so on")


def check(folder: Path) -> dict[str, str]:
    """Return, for each file, whether it is "the same", "another" or "missing"."""
    states = {}
    for name, one in SETS.items():
        for file, expected in one.files.items():
            found = input_hashes({"file": str(folder / name / file)})
            same = "the same" if found and found["file"][file] == expected else "another"
            states[f"{name}/{file}"] = same if found else "missing"
    return states


if __name__ == "__main__":
    run_program("data", data)
