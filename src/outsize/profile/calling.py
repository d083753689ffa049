"""How a model is called with a batch, and what it is differentiated from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported, tell
from outsize.model.batch import Call, arguments_of, as_call
from outsize.model.tensors import all_with_grad, named_tensors

Loss = Callable[[nn.Module, Any], Tensor | None]
"""Makes the loss of a batch. None: the model only runs forward, and there is nothing to differentiate."""


def call_model(model: nn.Module, batch: Any) -> Any:
    made = as_call(model, batch)
    return model(*made.args, **made.kwargs)


def loss_of(outputs: Any) -> Tensor:
    """The model's own loss, or the sum of what can be differentiated where the loss is computed outside."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    step_config = all_with_grad(outputs)
    if not step_config:
        found = "no output of the model requires grad"
        raise ModelUnsupported(
            tell(
                "the model has something to train",
                found,
                "Set requires_grad on what shall be trained, or give a batch with labels",
            )
        )
    return torch.stack([t.float().sum() for t in step_config]).sum()


def batch_shapes(batch: Any) -> dict[str, tuple[int, ...]]:
    """By path: `input_ids`, `features.input_ids`; positional inputs by their number."""
    arguments = arguments_of(batch, ()) if isinstance(batch, Call) else (batch,) if isinstance(batch, Tensor) else batch
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(arguments)}
