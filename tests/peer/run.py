"""transformers' own model tests, on swapped classes next to the stock ones.

    python tests/peer/run.py                     # every family, every scheme: `make test-peer`
    python tests/peer/run.py bert=rotary gpt2=relative

They come from the source archive of the installed transformers, which pip fetches once, and run as they are. What fails for a
swapped class and not for its stock class, or the other way round, must be in `KNOWN`; what is there must still differ.
"""

import importlib
import importlib.metadata
import subprocess
import sys
import types
import unittest
import warnings
from pathlib import Path

import torch
from transformers import logging

from hf_posswap.architectures import ARCHITECTURES
from hf_posswap.checkpoint import CONFIG_CLASSES, SWAPPED_CLASSES
from hf_posswap.scheme_entry import config_entry
from hf_posswap.schemes import parse_scheme

KEPT = Path(__file__).parents[2] / "runs" / "peer"
SCHEMES = ("learned", "sinusoidal", "relative:clip=4", "rotary", "self-extend", "alibi", "buckets", "none", "mixed")
SIZES = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 66,
    "intermediate_size": 37, "pad_token_id": 1, "bos_token_id": 97, "eos_token_id": 97,
}  # fmt: skip
SPECIAL = ("ForPreTraining", "DoubleHeads")  # need inputs that only the tests of their own family know
KNOWN = {  # name of the test: why it fails for swapped classes
    "test_torch_save_load": "it takes the largest number of every tensor, and the guard that stock classes refuse is empty",
    "test_model_weights_reload_no_missing_tied_weights": "it loads a file without weights: lost positions are an error",
}
PADDED = "it takes another padding id, behind which the table begins: a config that contradicts itself is an error"
KNOWN_OF = {  # the same for some families
    ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "esm"): {"test_model_forward_default_config_values": PADDED},
    ("esm",): {
        "test_reverse_loading_mapping": "only stock fails: a pattern of its conversion matches nothing",
        "test_inputs_embeds_matches_input_ids": "only stock fails: it counts positions differently, which distances do not see",
    },
}


def common_tests() -> types.ModuleType:
    """Fetch and import tests/test_modeling_common.py; what the archive lacks of its imports is an empty class."""
    version = importlib.metadata.version("transformers")
    folder = KEPT / f"transformers-{version}" / "tests"
    if not folder.is_dir():
        how = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--quiet", "--dest", KEPT]
        subprocess.run([sys.executable, "-m", "pip", "download", *how, f"transformers=={version}"], check=True)
        archive, tests = f"transformers-{version}.tar.gz", f"transformers-{version}/tests"
        subprocess.run(["tar", "-xzf", archive, tests], cwd=KEPT, check=True)  # tarfile is safe from Python 3.11.4 on only
    package = types.ModuleType("peer")
    package.__path__ = [str(folder)]
    sys.modules["peer"] = package
    for name, missing in (("exporters.test_export", "ExportTesterMixin"), ("generation.test_utils", "GenerationTesterMixin")):
        sys.modules[f"peer.{name}"] = types.ModuleType(name)
        setattr(sys.modules[f"peer.{name}"], missing, type(missing, (), {}))
    module = importlib.import_module("peer.test_modeling_common")
    listed = module.get_values
    module.get_values = lambda mapping: [prefix + name for name in listed(mapping) for prefix in ("", "Posswap")]
    return module


class Tester:
    """What transformers' tests ask for a config, inputs and sizes."""

    batch_size, seq_length, num_choices, is_training = 3, 7, 4, True
    hidden_size, num_hidden_layers, num_attention_heads = SIZES["hidden_size"], 2, SIZES["num_attention_heads"]

    def __init__(self, family: str, scheme: str | None):
        self.architecture, self.scheme = ARCHITECTURES[family], scheme

    def prepare_config_and_inputs_for_common(self):
        kind = self.architecture.config_class if self.scheme is None else CONFIG_CLASSES[self.architecture.model_type]
        config = kind(**SIZES)
        if self.scheme is not None:
            positions = self.architecture.longest_input(config)
            config.position_scheme = config_entry(parse_scheme(self.scheme), positions, positions)
        tokens = torch.randint(2, SIZES["vocab_size"] - 3, (self.batch_size, self.seq_length))
        return config, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def outcomes(module: types.ModuleType, family: str, scheme: str | None) -> tuple[int, dict[str, str]]:
    """Run all common tests on all classes of a family, stock or swapped; return how many, and what each failed one said."""
    stock = [c for c in SWAPPED_CLASSES if c.config_class is ARCHITECTURES[family].config_class]
    stock = [c for c in stock if not any(word in c.__name__ for word in SPECIAL)]
    classes = tuple(stock if scheme is None else (SWAPPED_CLASSES[c] for c in stock))

    def set_up(self):
        self.model_tester = Tester(family, scheme)

    body = {"all_model_classes": classes, "setUp": set_up}
    case = type(f"{family}-{scheme}", (module.ModelTesterMixin, unittest.TestCase), body)
    found = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(found)
    failed = [(getattr(test, "test_case", test), said) for test, said in found.failures + found.errors]  # of parts: the whole
    return found.testsRun, {getattr(test, "_testMethodName", str(test)): said.splitlines()[-1][:300] for test, said in failed}


def main(wanted: list[str]) -> int:
    """Print what differs and is not known, or is known and does not differ; return how many."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    module, differing, wrong = common_tests(), set(), 0
    known = {name: [*ARCHITECTURES] for name in KNOWN} | {n: fs for fs, names in KNOWN_OF.items() for n in names}
    pairs = [(family, scheme) for family in ARCHITECTURES for scheme in SCHEMES]
    pairs.remove(("albert", "mixed"))  # its layers share one scheme
    pairs = [one.split("=", 1) for one in wanted] or pairs
    for family in dict.fromkeys(family for family, _ in pairs):
        _, stock = outcomes(module, family, None)
        for scheme in [scheme for one, scheme in pairs if one == family]:
            count, swapped = outcomes(module, family, scheme)
            print(f"{family} {scheme}: {count} tests; {len(stock)} fail for stock, too")
            differing |= stock.keys() ^ swapped.keys()
            for name in sorted(stock.keys() ^ swapped.keys()):
                if family not in known.get(name, ()):
                    wrong += 1
                    print(f"  {name} differs: {swapped.get(name, 'only the stock class fails')}")
    for name in sorted((KNOWN if wanted else known).keys() - differing):
        wrong += 1
        print(f"  {name} is known to differ and does not any more: take it off the list")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
