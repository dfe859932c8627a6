"""`hf-posswap compare` (hf_posswap/commands/compare.py), which also takes the names of recipes in this folder.

    python recipes/compare.py downstream_classification --scheme original --scheme rotary --start cold --start fit \\
        --output runs/cola -- --config recipes/configs/cola.yaml
"""

import sys
from pathlib import Path

from hf_posswap.commands.compare import compare
from hf_posswap.terminal import run_program

if __name__ == "__main__":
    # Only the first argument is taken as a recipe's name; elsewhere, the same word may be an option's value.
    named = Path(__file__).parent / f"{sys.argv[1]}.py" if len(sys.argv) > 1 else Path()
    if named.is_file():
        sys.argv[1] = str(named)
    run_program("compare", compare)
