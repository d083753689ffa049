"""Linear maps of torch and transformers, which keep their weights in different orders."""

from torch import Tensor, nn


def is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D keeps (inputs, outputs)."""
    return type(module).__name__ == "Conv1D"


def matrix(module: nn.Module) -> Tensor:
    """The weight as (outputs, inputs)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.T if is_transposed(module) else weight
