"""Fitting a swapped model to its original: layer by layer, options that are settled by text, and distillation."""
