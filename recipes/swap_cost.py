"""What does a swap cost, and what do a fit and a short tuning win back? Figures: see hf_posswap/experiments/swap_cost.py.

    python recipes/swap_cost.py --model stdlib-gpt2 --scheme rotary --start fit --output runs/rotary
    python recipes/compare.py swap_cost --start cold --start swap --start fit --output runs/cost -- --model stdlib-gpt2

The recipe is part of the package because it is the default of `hf-posswap compare`.
"""

from hf_posswap.experiments.recipe import main
from hf_posswap.experiments.swap_cost import SwapCostConfig, run

if __name__ == "__main__":
    main(SwapCostConfig, run)
