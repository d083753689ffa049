"""Refuses parameters and buffers that do not hold their values in memory of their own: a plan places bytes."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from outsize.base.errors import ModelUnsupported
from outsize.compat import fake_tensor


def require_plain_tensors(model: nn.Module) -> None:
    """Comes before everything else that looks at the tensors: many of their properties raise errors of torch."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelUnsupported(
                f"{name} has no shape yet (a lazy module). Run the model's forward once, then prepare it."
            )
        if tensor.is_nested:
            raise ModelUnsupported(
                f"{name} is a nested tensor, which a plan cannot place. Keep its values in one dense tensor and its "
                "lengths in another, "
                "and make the nested tensor of them in the forward."
            )
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise ModelUnsupported(
                f"{name}: a {kind} tensor cannot be placed by a plan. Keep its values in a dense parameter and make "
                "the sparse tensor of them "
                "in the forward, as PEFT's SHiRA does."
            )
        if _is_wrapper(tensor):
            raise ModelUnsupported(
                f"{name} is a {type(tensor).__name__}, a tensor subclass that keeps its values in other tensors (as "
                "quantized weights and DTensor do), and a "
                "plan places only tensors with memory of their own. Use the unquantized model, or replace it by a "
                "plain tensor."
            )


def _is_wrapper(tensor: Tensor) -> bool:
    """Made with `_make_wrapper_subclass`: its storage has no memory, and refuses to say where it is."""
    if type(tensor) in (Tensor, nn.Parameter) or isinstance(tensor, fake_tensor.FakeTensor):
        return False
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return True
    return False
