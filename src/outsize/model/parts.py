"""The parts of a model's weights: its parameters, and the tensors that quantization attaches to them.

A quantized weight is several tensors. Some are parameters; others are Python attributes of a parameter or its module,
and `named_parameters()` lacks them. Each has its name in files:

- bitsandbytes, 4 bits: `….weight` has packed bytes; `….weight.absmax`, `….weight.nested_absmax` and
  `….weight.nested_offset` are in `weight.quant_state`.
- bitsandbytes, 8 bits: `….SCB` is an attribute of the weight, and after the first forward of `module.state`.
- Tensor subclasses that consist of other tensors (torchao): the inner tensors, `….weight.qdata`.
- fp8 with `….weight_scale_inv` (transformers): ordinary parameters.

Lookup tables (`quant_state.code`) are no parts but constants: all weights share one copy on the device.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outsize.compat import fake_tensor, is_traceable_wrapper_subclass


class Part(NamedTuple):
    name: str
    tensor: Tensor
    """A parameter, or a plain tensor."""
    holder: Any
    """The object that has the tensor as an attribute. None for a parameter."""
    attribute: str
    num_weights: int
    """The number of weights of the model that it stores: two per byte of a 4-bit weight, none for a scale."""


def named_parts(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The tensors in which the module's weights are stored, as `named_parameters` lists plain ones."""
    for part in parts(module, remove_duplicate=remove_duplicate):
        yield part.name, part.tensor


def parts(module: nn.Module, *, remove_duplicate: bool = True) -> Iterator[Part]:
    """Each parameter that has memory of its own, followed by what is attached to it."""
    seen: set[int] = set()
    for name, param in module.named_parameters(remove_duplicate=remove_duplicate):
        for part in _of_parameter(module, name, param):
            if not remove_duplicate or id(part.tensor) not in seen:
                seen.add(id(part.tensor))
                yield part


def parts_by_parameter(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Part]]]:
    for name, param in module.named_parameters():
        yield name, param, list(_of_parameter(module, name, param))


def wrappers(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[Part]]]:
    """Parameters that consist of other tensors, and so have no memory of their own, with their parts."""
    for name, param in module.named_parameters():
        if is_traceable_wrapper_subclass(param):
            yield name, param, list(_of_parameter(module, name, param))


def rewrapped(wrapper: Tensor, replace: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor of the wrapper's class over other tensors, each in the place of one of its parts."""
    own_class: Any = getattr(type(wrapper), "own_class", type(wrapper))
    attributes, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {}
    for attribute in attributes:
        part = getattr(wrapper, attribute)
        inner[attribute] = rewrapped(part, replace) if is_traceable_wrapper_subclass(part) else replace(part)
    return own_class.__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())


def own_parts(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parts of a module's own parameters, without those of its children, by their names in the module."""
    for name, param in module._parameters.items():
        if param is not None:
            yield from ((part.name, part.tensor) for part in _of_parameter(module, name, param))


def _of_parameter(module: nn.Module, name: str, param: nn.Parameter) -> Iterator[Part]:
    if is_traceable_wrapper_subclass(param):
        yield from _inner_tensors(name, param, param.numel())
        return
    state = quant_state_of(param)
    scale = name.endswith("_scale_inv")
    yield Part(name, param, None, "", math.prod(state.shape) if state is not None else 0 if scale else param.numel())
    if state is not None:
        yield Part(f"{name}.absmax", state.absmax, state, "absmax", 0)
        if state.nested:
            yield Part(f"{name}.nested_absmax", state.state2.absmax, state.state2, "absmax", 0)
            yield Part(f"{name}.nested_offset", state.offset, state, "offset", 0)
    elif hasattr(param, "SCB"):
        path, _, _ = name.rpartition(".")
        for holder in (param, getattr(module.get_submodule(path), "state", None)):
            if isinstance(found := getattr(holder, "SCB", None), Tensor):
                yield Part(f"{path}.SCB".lstrip("."), found, holder, "SCB", 0)
                break


def quant_state_of(param: Tensor) -> Any:
    """What bitsandbytes knows of a 4-bit weight; None for other parameters."""
    state = getattr(param, "quant_state", None)
    return state if hasattr(state, "absmax") else None


def _inner_tensors(name: str, wrapper: Tensor, num_weights: int) -> Iterator[Part]:
    """The first inner tensor has the weights, the others have scales. DTensor lists its mesh, too."""
    attributes, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        inner = getattr(wrapper, attribute)
        if not isinstance(inner, Tensor):
            continue
        if is_traceable_wrapper_subclass(inner):
            yield from _inner_tensors(f"{name}.{attribute}", inner, num_weights)
        else:
            yield Part(f"{name}.{attribute}", inner, wrapper, attribute, num_weights)
        num_weights = 0


def attachments(module: nn.Module) -> Iterator[tuple[str, Any, str, Any]]:
    """Where the parts that are no parameters hang: the name of each, its holder, the attribute there and its value."""
    for _, param, found in parts_by_parameter(module):
        for part in found:
            if part.holder is not None:
                yield part.name, part.holder, part.attribute, part.tensor
        if (state := quant_state_of(param)) is not None:
            yield found[0].name, param, "quant_state", state
            yield found[0].name, state, "state2", state.state2


_REPACKS = "support_avx512bf16_for_cpu"


def turn_repacking_off(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """On the CPU in eval mode, bitsandbytes replaces 4-bit weights by a repacked form, with rounded scales. Turns this
    off, and returns the modules in which it was on with the former value, for `turn_repacking_on`.
    """
    found = [(module, value) for module in model.modules() if (value := vars(module).get(_REPACKS))]
    for module, _ in found:
        setattr(module, _REPACKS, False)
    return found


def turn_repacking_on(modules: list[tuple[nn.Module, Any]]) -> None:
    for module, value in modules:
        setattr(module, _REPACKS, value)


def describe(module: nn.Module) -> list[Any]:
    """All that the cost of using the weights depends on: shapes, dtypes, and how they are quantized."""
    facts: list[Any] = [
        [name, list(part.shape), str(part.dtype), part.requires_grad]
        for name, part in named_parts(module, remove_duplicate=False)
    ]
    for name, param in module.named_parameters(remove_duplicate=False):
        if (kind := _class_of(param)) is not nn.Parameter:
            state = quant_state_of(param)
            kept = {} if state is None else vars(state)
            plain = [f"{k}={v}" for k, v in kept.items() if isinstance(v, (bool, int, str, tuple, torch.dtype))]
            facts.append([name, kind.__qualname__, *plain])
    return facts


SHAPE_OF = "_outsize_shape_of"
"""The attribute of a fake tensor that has the class of the parameter whose place it takes."""


def _class_of(param: nn.Parameter) -> type:
    plain = nn.Parameter if isinstance(param, fake_tensor.FakeTensor) else type(param)
    return getattr(param, SHAPE_OF, plain)


class LookupTable(NamedTuple):
    holder: Any
    tensor: Tensor

    def replace(self, tensor: Tensor) -> None:
        self.holder.code = tensor


def lookup_tables(module: nn.Module) -> Iterator[LookupTable]:
    """The values that the codes of quantized weights and scales stand for."""
    for param in module.parameters():
        state = quant_state_of(param)
        for holder in (state, getattr(state, "state2", None)):
            if isinstance(code := getattr(holder, "code", None), Tensor):
                yield LookupTable(holder, code)


def distinct_tables(module: nn.Module) -> list[Tensor]:
    """One lookup table for each set of values: files hold a copy for every weight."""
    return list({_values(table.tensor): table.tensor for table in lookup_tables(module)}.values())


def share_tables(module: nn.Module, keep: Callable[[Tensor], Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Let all weights use one copy of each lookup table, made by `keep`. Returns the copies, and a function that
    restores the tables as they were.
    """
    given = list(lookup_tables(module))
    copies: dict[Any, Tensor] = {}
    for table in given:
        key = _values(table.tensor)
        if key not in copies:
            copies[key] = keep(table.tensor)
        table.replace(copies[key])

    def restore() -> None:
        for table in given:
            table.replace(table.tensor)

    return list(copies.values()), restore


def _values(table: Tensor) -> Any:
    """Equal for equal tables. Fake tensors have no values: tables of one shape count as equal."""
    has_values = not isinstance(table, fake_tensor.FakeTensor)
    return tuple(table.shape), table.dtype, tuple(table.flatten().tolist()) if has_values else ()
