"""What a checkpoint can be refused for."""

__all__ = ["CheckpointError"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, or holds something else than was asked for. Raised on all ranks,
    with every rank's reason; nothing was changed, unless the message says so."""
