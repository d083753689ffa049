"""Finds the stacks of a model in its module tree: containers whose elements run one after another and are large enough
to be a block each.

A container is an nn.ModuleList or nn.Sequential. There is no table of model families:
- An nn.ModuleList outside of other containers is a stack. A list inside a layer (T5's sub-layers, a layer's experts)
  belongs to that layer.
- An nn.Sequential is a stack if a class of modules with several weighted parts repeats in it (the blocks of a ViT, of a
  stage of a ResNet), or if it is a long chain of single modules with much of the model's weights (VGG, a plain MLP). A
  small MLP is none.
- Modules that cannot be called (a ModuleList or ModuleDict in a list) are replaced by the modules in them.
- If one element has much of the model's weights, and most of those in containers in which modules repeat, it is a
  stage: the elements of its containers are the layers. The profiling run checks that these feed one another
  (profile/tracer.py): experts do not, and belong to one layer.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

Named = tuple[str, nn.Module]

_STAGE_SHARE = 1 / 4
"""An element with more than this share of the model's weights is searched for stages."""
_CHAIN_SHARE = 1 / 10
_CHAIN_LENGTH = 3
"""A chain of single modules with a smaller share of the weights, or fewer modules, is not split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    path: str
    elements: list[Named]
    """The elements with their paths in the model."""
    outer: "Stack | None" = None
    """The stack of stages, if this stack is part of one of its stages. If the elements do not feed one another, the
    stages are the layers.
    """


def find_stacks(model: nn.Module, *, in_sequentials: bool = True) -> list[Stack]:
    """The stacks in the order of the tree. `in_sequentials`: also those in an nn.Sequential that is in no list.

    A Sequential with elements that are in a layer of another stack, or have one in them, is none:
    `nn.Sequential(*self.layers)` beside the ModuleList.
    """
    found = list(_Search(model, in_sequentials).inside(model, ""))
    taken: set[int] = set()
    """Layers."""
    parts: set[int] = set()
    """And all that is in them."""
    stacks = []
    for stack in sorted(found, key=lambda stack: not isinstance(model.get_submodule(stack.path), nn.ModuleList)):
        modules = [module for _, module in stack.elements]
        is_taken = any(id(module) in parts or any(id(part) in taken for part in module.modules()) for module in modules)
        if is_taken and not isinstance(model.get_submodule(stack.path), nn.ModuleList):
            continue
        stacks.append(stack)
        taken |= {id(module) for module in modules}
        parts |= {id(part) for module in modules for part in module.modules()}
    return [stack for stack in found if stack in stacks]


def is_container(module: nn.Module) -> bool:
    """A list with weights of its own (a ParametrizationList) is a module like any other."""
    own = (*module._parameters.values(), *module._buffers.values())
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and all(tensor is None for tensor in own)


class _Search:
    def __init__(self, model: nn.Module, in_sequentials: bool):
        self._model, self._total, self._in_sequentials = model, _num_weights(model), in_sequentials
        self._seen: set[int] = set()

    def inside(self, module: nn.Module, path: str) -> Iterator[Stack]:
        """Stacks in a module that is no layer."""
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        is_list = isinstance(module, nn.ModuleList)
        if is_container(module) and not (module is self._model and is_list) and (is_list or self._in_sequentials):
            yield from self._in_container(module, path)
        else:
            for name, child in module.named_children():
                yield from self.inside(child, _join(path, name))

    def _in_container(self, container: nn.Module, path: str) -> Iterator[Stack]:
        is_list = isinstance(container, nn.ModuleList)
        elements = _elements(container, path)
        if not any(_has_weights(module) for _, module in elements):
            return
        if not is_list:
            if _repeats(elements):
                places = [i for i, (_, module) in enumerate(elements) if is_composite(module)]
                elements = elements[places[0] : places[-1] + 1]
            elif not self._is_long_chain(container, elements):
                for name, module in elements:
                    yield from self.inside(module, name)
                return
        whole = Stack(path=path, elements=elements)
        inner = self._stages(elements, needs_most=is_list)
        if not inner:
            yield whole
        elif not is_list and all(base == "" for base in inner):
            # A Sequential of Sequentials is one.
            flat = [
                part for name, module in elements for part in (_parts_of_stage(module, name, "") or [(name, module)])
            ]
            yield Stack(
                path=path,
                elements=flat,
                outer=whole if any(not _runs_in_order(module) for _, module in elements) else None,
            )
        else:
            yield from _by_stage(whole, inner, needs_most=is_list)

    def _is_long_chain(self, container: nn.Module, elements: list[Named]) -> bool:
        """Whether it is a long chain of modules without stacks in them."""
        containers = [part for _, module in elements for part in module.modules() if is_container(part)]
        if any(isinstance(part, nn.ModuleList) or _repeats(_elements(part, "")) for part in containers):
            return False
        num_matrices = sum(any(param.dim() > 1 for param in module.parameters()) for _, module in elements)
        return num_matrices >= _CHAIN_LENGTH and _num_weights(container) >= _CHAIN_SHARE * self._total

    def _stages(self, elements: list[Named], *, needs_most: bool) -> list[str]:
        """The paths, in an element, of the containers that make it a stage. `needs_most`: only if most of its weights
        are there.
        """
        largest = max((module for _, module in elements), key=_num_weights)
        if _num_weights(largest) <= _STAGE_SHARE * self._total:
            return []
        paths = dict.fromkeys(
            path
            for _, module in elements
            for path, part in module.named_modules()
            if is_container(part) and _repeats(_elements(part, ""))
        )
        outermost = [
            path
            for path in paths
            if not any(other != path and (other == "" or path.startswith(f"{other}.")) for other in paths)
        ]
        return outermost if not needs_most or _has_most(largest, outermost) else []


def _has_most(module: nn.Module, paths: list[str]) -> bool:
    """Whether most of a module's weights are in these containers."""
    return 2 * sum(
        _num_weights(part) for path in paths for _, part in _parts_of_stage(module, "", path)
    ) >= _num_weights(module)


def _by_stage(whole: Stack, inner: list[str], *, needs_most: bool) -> Iterator[Stack]:
    """A stack per container in a stage. Elements that are no stages stay layers."""
    rest = []
    for name, module in whole.elements:
        is_stage = not needs_most or _has_most(module, inner)
        parts = [(base, elements) for base in inner if is_stage and (elements := _parts_of_stage(module, name, base))]
        yield from (Stack(path=_join(name, base), elements=elements, outer=whole) for base, elements in parts)
        rest += [] if parts else [(name, module)]
    if rest:
        yield Stack(path=whole.path, elements=rest, outer=whole)


def _parts_of_stage(module: nn.Module, name: str, base: str) -> list[Named]:
    """The elements of the container `base` in a stage. Empty if there is none, or it has single modules only (a norm
    and a convolution).
    """
    try:
        container = module.get_submodule(base)
    except AttributeError:
        return []
    elements = _elements(container, _join(name, base)) if is_container(container) else []
    return elements if any(is_composite(element) for _, element in elements) else []


def _elements(container: nn.Module, path: str) -> list[Named]:
    """The elements of a container: of a Sequential those with weights, each once; of a ModuleList all. An element that
    cannot be called is replaced by the modules in it.
    """
    found: list[Named] = []
    for name, child in container._modules.items():
        if child is None:
            continue
        if _cannot_be_called(child):
            found += _elements(child, _join(path, name))
        elif isinstance(container, nn.ModuleList) or (
            _has_weights(child) and all(child is not module for _, module in found)
        ):
            found.append((_join(path, name), child))
    return found


def _cannot_be_called(module: nn.Module) -> bool:
    return (
        isinstance(module, (nn.ModuleList, nn.ModuleDict))
        and type(module).forward is nn.Module.forward
        and "forward" not in vars(module)
    )


def _runs_in_order(module: nn.Module) -> bool:
    return not isinstance(module, nn.Sequential) or type(module).forward is nn.Sequential.forward


def _repeats(elements: list[Named]) -> bool:
    """Whether several modules are of one class with several weighted parts."""
    return max(Counter(type(module) for _, module in elements if is_composite(module)).values(), default=0) > 1


def is_composite(module: nn.Module) -> bool:
    parts = (part for part in module.modules() if any(param is not None for param in part._parameters.values()))
    return next(parts, None) is not None and next(parts, None) is not None


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _num_weights(module: nn.Module) -> int:
    return sum(math.prod(param.shape) for param in module.parameters())


def _join(path: str, name: str) -> str:
    return ".".join(part for part in (path, name) if part)
