"""Calls a model with a batch, and computes the loss from its outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import READS_OUTSIDE_FORWARD, ConfigError, ModelUnsupported
from outsize.compat import node_number
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


def require_usable_loss(model: nn.Module, loss: Any, inside: range) -> None:
    """Refuse what `loss=` returns if training cannot differentiate it. `inside`: the numbers of the autograd nodes that
    the model's training forward made, empty if there was none.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = type(loss).__name__
        if isinstance(loss, Tensor):
            what = f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without grad")
        raise ConfigError(
            f"loss= returns {what}, and a plan needs the tensor whose backward is run. Return one number with grad, or "
            "None for a model that only runs forward."
        )
    if not inside:
        raise ConfigError(
            "loss= does not call the model with grad, so there is nothing to plan. Call the model that it is given."
        )
    names = {id(param): name for name, param in model.named_parameters()}
    todo, seen = [loss.grad_fn], {loss.grad_fn}
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions if node is not None else ():
            if following is None or following in seen:
                continue
            name = names.get(id(getattr(following, "variable", None)))
            if name is not None and node_number(node) not in inside:
                raise ModelUnsupported(
                    f"{name}: loss= reads this weight outside of the model's forward. {READS_OUTSIDE_FORWARD}"
                )
            if name is None:
                seen.add(following)
                todo.append(following)
