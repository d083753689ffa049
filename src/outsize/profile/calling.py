"""Calls a model with a batch, and computes the loss from its outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.model.batch import ModelCall, arguments_of, as_call
from outsize.model.tensors import all_with_grad, named_tensors

Loss = Callable[[nn.Module, Any], Tensor | None]
"""Computes the loss of a batch. If it returns None, the model runs forward only."""


def call_model(model: nn.Module, batch: Any) -> Any:
    made = as_call(model, batch)
    return model(*made.args, **made.kwargs)


def loss_of(outputs: Any) -> Tensor:
    """The model's own loss, or the sum of its outputs with grad if the loss is computed outside of it."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    tensors = all_with_grad(outputs)
    if not tensors:
        raise ModelUnsupported(
            "There is nothing to train: no output of the model requires grad. Set requires_grad on the parameters to "
            "train, or pass a batch with labels."
        )
    return torch.stack([t.float().sum() for t in tensors]).sum()


def batch_shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """Shapes by path: `input_ids`, `features.input_ids`; positional inputs by their number."""
    arguments = (
        arguments_of(batch, ()) if isinstance(batch, ModelCall) else (batch,) if isinstance(batch, Tensor) else batch
    )
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(arguments)}
