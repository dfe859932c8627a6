"""Functions of tensors alone: relative attention in its forms, and the closed forms of warm starts and fits."""
