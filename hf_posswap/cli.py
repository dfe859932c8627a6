"""The command line under its old name; `hf_posswap_cli` starts it without importing transformers."""

from hf_posswap_cli import app, main

__all__ = ["app", "main"]
