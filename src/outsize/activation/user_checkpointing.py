"""Detects layers that the model's own code checkpoints: they run again in backward, which no plan has."""

from outsize.compat import current_graph_task


def is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread."""
    return current_graph_task() >= 0


def rerun_in_backward(name: str) -> str:
    """The text of the error. `name` is a layer's, or "The model"."""
    return (
        f"{name} is called again in backward: it was called inside torch.utils.checkpoint, but outsize decides itself "
        "which layers are recomputed. Turn this checkpointing off, or call it directly. Checkpointing parts of a layer "
        "inside its forward is supported."
    )
