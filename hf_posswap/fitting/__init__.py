"""Fitting a swapped model to its original: layer by layer, choosing options, distillation."""
