"""Functions of tensors alone: relative and banded attention, and closed forms of warm starts and fits."""
