"""Students: pruned sub-blocks with the norm in front of them, and pruned layers, as modules to train."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from outsize.methods.bypass.subblocks import SubBlock, SubBlockRun
from outsize.model.stack import first_tensor, run


def copied(module: nn.Module) -> nn.Module:
    """A copy with memory of its own. (deepcopy of a tensor copies its whole storage, which may hold a layer.)"""
    tensors = (*module.parameters(), *module.buffers())
    memo: dict[int, Any] = {id(tensor): _cloned(tensor) for tensor in tensors}
    return copy.deepcopy(module, memo)


def _cloned(tensor: Tensor) -> Tensor:
    value = tensor.detach().clone()
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


class Replacement(nn.Module):
    """In place of a sub-block's module: a linear map of its input, or zeros."""

    def __init__(self, weight: Tensor | None, num_outputs: int):
        super().__init__()
        self.linear: nn.Linear | None = None
        if weight is not None:
            self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            self.linear.weight = nn.Parameter(weight)
        self._num_outputs = num_outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        hidden = next(value for value in tensors if value.is_floating_point())
        output = torch.zeros_like(hidden) if self.linear is None else self.linear(hidden)
        return (output, *([None] * (self._num_outputs - 1))) if self._num_outputs else output


class Student(nn.Module):
    """Runs on what the teacher's forward gave the sub-block or layer that it replaces. In eval mode."""

    def __init__(self, module: nn.Module, norm: nn.Module | None, subblock: SubBlock | None):
        """`module`: in place of the sub-block's, or a layer if `subblock` is None."""
        super().__init__()
        self.norm, self.module, self._subblock = norm, module, subblock
        self.eval().requires_grad_(True)

    def forward(self, given: SubBlockRun) -> Tensor:
        """The output that is compared with `given.target`."""
        if self._subblock is None:
            return run(self.module, given.call, given.input).float() - given.input.float()
        hidden = given.input if self.norm is None else first_tensor(self.norm(given.input))
        return run(self.module, given.call, hidden).reshape(given.target.shape)

    def layer_tensors(self) -> dict[str, Tensor]:
        """The parameters and saved buffers, by their names in the layer (`mlp.down_proj.weight`). A linear map is
        `MODULE.linear.weight`.
        """
        if self._subblock is None:
            return dict(self.module.state_dict())
        paths = {"module": self._subblock.module, "norm": self._subblock.norm}
        return {
            f"{paths[part]}.{rest}": tensor
            for part, _, rest, tensor in ((*name.partition("."), tensor) for name, tensor in self.state_dict().items())
        }
