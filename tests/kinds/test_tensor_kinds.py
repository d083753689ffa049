"""Parameters and buffers that are no plain tensors are refused by name, before anything of torch fails on them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import outsize
from outsize.base.errors import ModelUnsupported


class Scaled(Tensor):
    """As a quantized weight: values and a scale, each in a tensor of its own."""

    values: Tensor
    scale: float

    @staticmethod
    def __new__(cls, values: Tensor, scale: float = 1.0) -> "Scaled":
        made = Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        made.values, made.scale = values, scale
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Scaled(args[0].values, args[0].scale)
        return function(*tree_map(_plain, args), **tree_map(_plain, kwargs or {}))


def _plain(value: Any) -> Any:
    return value.values * value.scale if isinstance(value, Scaled) else value


class View(nn.Parameter):
    """A subclass with memory of its own, such as bitsandbytes' Params4bit."""


def _wrapped_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(Scaled(linear.weight.detach()), requires_grad=False)


def _trained_wrapped_parameter(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(Scaled(linear.weight.detach()))


def _wrapped_buffer(linear: nn.Linear) -> None:
    linear.register_buffer("table", Scaled(torch.ones(8)))


def _nested_buffer(linear: nn.Linear) -> None:
    linear.register_buffer("table", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def _jagged_buffer(linear: nn.Linear) -> None:
    linear.register_buffer(
        "table", torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)
    )


def _nested_parameter(linear: nn.Linear) -> None:
    linear.table = nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))


def _lazy_parameter(linear: nn.Linear) -> None:
    linear.other = nn.LazyLinear(8)


WRAPPED = "is a Scaled, a tensor subclass that keeps its values in other tensors (as quantized weights and DTensor do)"
NESTED = "is a nested tensor, which a plan cannot place. Keep its values in one dense tensor and its lengths in another"


def _model(change: Callable[[nn.Linear], None]) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    change(layers[1][0])  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(8, 8), *layers)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cpu", "sim:16MiB"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_wrapped_parameter, f"2.0.weight {WRAPPED}"),
        (_trained_wrapped_parameter, f"2.0.weight {WRAPPED}"),
        (_wrapped_buffer, f"2.0.table {WRAPPED}"),
        (_nested_buffer, f"2.0.table {NESTED}"),
        (_jagged_buffer, f"2.0.table {NESTED}"),
        (_nested_parameter, f"2.0.table {NESTED}"),
        (_lazy_parameter, "2.0.other.weight has no shape yet (a lazy module). Run the model's forward once"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_tensor_without_memory_of_its_own_is_refused_by_name(
    change: Callable[[nn.Linear], None], text: str, device: str
) -> None:
    with pytest.raises(ModelUnsupported, match=re.escape(text)):
        outsize.prepare(_model(change), (torch.ones(4, 8),), device=device)


def test_a_parameter_of_a_subclass_with_memory_is_trained() -> None:
    def change(linear: nn.Linear) -> None:
        linear.weight = View(linear.weight.detach().clone())

    model = _model(change)
    before = model[2][0].weight.detach().clone()  # type: ignore[index]
    engine = outsize.prepare(model, (torch.ones(4, 8),), device="sim:16MiB")
    model(torch.ones(4, 8)).square().sum().backward()
    engine.optimizer.step()
    engine.detach()
    assert not torch.equal(model[2][0].weight.detach(), before)  # type: ignore[index]
