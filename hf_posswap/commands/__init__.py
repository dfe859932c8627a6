"""What the larger commands of `hf-posswap` start."""
