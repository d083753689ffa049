"""DTensors on their way off the device: the local tensor is sent, and the same DTensor is made of what comes back."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from outsize.transfer.offloaded_tensors import PackedTensor

_MODULE = "torch.distributed.tensor"


@dataclass(frozen=True, slots=True)
class PackedShard:
    local: PackedTensor
    whole: Callable[[Tensor], Tensor]
    """Makes the DTensor of its local tensor."""


def split_shard(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    """The local tensor of a DTensor, and a function that makes the same DTensor of it. None for other tensors."""
    module = sys.modules.get(_MODULE)
    if type(tensor) is Tensor or module is None or not isinstance(tensor, module.DTensor):
        return None
    local = tensor.detach().to_local()
    local = local.wait() if hasattr(local, "wait") else local  # its collective may be in flight
    return local, partial(
        module.DTensor.from_local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
        run_check=False,
    )
