"""Everything that hf_posswap raises at its users."""


class PosswapError(ValueError):
    """Base of all errors: the message says what was given, what is accepted and what to do.

    When it is raised, the model or the folder in question is as it was before the call; only training has changed weights.
    """


class UnknownSchemeError(PosswapError):
    """A scheme, or an option of one, that does not exist."""


class UnsupportedModelError(PosswapError):
    """A model that cannot be swapped: unknown family, no learned positions, quantized, compiled."""


class SequenceTooLongError(PosswapError):
    """An input reaches past the positions that the model's scheme can hold."""


class CheckpointError(PosswapError):
    """A checkpoint that is corrupted, of a newer format, or would be written over something."""


class DataError(PosswapError):
    """Text or labels that a recipe cannot use."""


class Interrupted(PosswapError):
    """Training was asked to stop, by SIGTERM or Ctrl-C: it has saved a checkpoint, and the message says how to go on."""
