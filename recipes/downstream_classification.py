"""What does another position scheme cost or gain on a task? Fine-tune on texts with labels or numbers, and measure.

    python recipes/downstream_classification.py                                    # the embedded task: is the order right?
    python recipes/downstream_classification.py --config recipes/configs/cola.yaml --scheme rotary --start fit
    python recipes/downstream_classification.py --train-file train.csv --validation-file dev.csv --metric matthews
    python recipes/downstream_classification.py --model gpt2 --dataset glue/stsb --scheme relative --max-steps 2000
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 -- recipes/downstream_classification.py --seed 1    # on two CPUs

Data: texts or pairs of texts with labels (classification) or numbers (regression), as a Hub data set or a csv, tsv, json, jsonl
or parquet file. Usual column names are found; options name others. Without a validation part, a tenth of the training rows is
held out.

Figures are measured on the validation rows: accuracy, F1 (of the second label, and macro) and Matthews correlation, or
Spearman's and Pearson's correlation, and the loss; with `test_`, on those of --test-file. Texts longer than the model's input
are cut, and result.json says how many.
"""

from dataclasses import dataclass
from pathlib import Path

from hf_posswap.experiments.classification import ClassificationConfig, classify
from hf_posswap.experiments.recipe import main


@dataclass(frozen=True, kw_only=True)
class Config(ClassificationConfig):
    QUESTION = "Does it learn a task?"


def run(config: Config, folder: Path, resume: bool) -> dict:
    return classify(config, folder, resume)


if __name__ == "__main__":
    main(Config, run)
