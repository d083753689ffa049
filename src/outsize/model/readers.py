"""Which modules read weights. A fused LoRA layer or MLP reads those of its parts without calling them."""

from collections.abc import Iterator

from torch import Tensor, nn

from outsize.lora.fuse import is_fused
from outsize.model.parts import named_parts, own_parts


def readers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that read weights, in the order of `modules()`. Parts of fused modules are not among
    them.
    """
    seen: set[nn.Module] = set()
    todo = [model]
    while todo:
        module = todo.pop()
        if module in seen:
            continue
        seen.add(module)
        if parts_read_by(module):
            yield module
        if not is_fused(module):
            todo += reversed([*module.children()])


def parts_read_by(module: nn.Module) -> list[Tensor]:
    """The parts of the weights (model/parts.py) that the module's own code reads."""
    return [part for _, part in (named_parts(module) if is_fused(module) else own_parts(module))]
