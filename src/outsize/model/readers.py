"""Which modules read parameters. A fused LoRA layer or MLP reads those of its parts without calling them."""

from collections.abc import Iterator

from torch import nn

from outsize.lora.fuse import is_fused


def readers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that read parameters, in the order of `modules()`. Parts of fused modules are not among
    them.
    """
    seen: set[nn.Module] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        if parameters_read_by(module):
            yield module
        if not is_fused(module):
            todo += reversed([*module.children()])


def parameters_read_by(module: nn.Module) -> list[nn.Parameter]:
    if is_fused(module):
        return [*module.parameters()]
    return [param for param in module._parameters.values() if param is not None]
