"""The command line under its old name; it is now `hf_posswap_cli`, which does not wait for transformers."""

from hf_posswap_cli import app, main

__all__ = ["app", "main"]
