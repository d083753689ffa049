"""fp32 masters in two halves: `hi`, a bf16 value that is the weight itself, and `lo`, the lower 16 bits.

`hi` is the master rounded to bf16 with ties away from zero, h = (bits + 0x8000) >> 16, and lo = bits - (h << 16): a
bijection on all fp32 values (tools/split_exhaustive.c checks all of them). Nearest-even is not: its ties need 17
bits. So `.to(bfloat16)` of a master is used nowhere. NaN keeps no payload: hi = 0x7FC0, lo = 0.

`split` and `join` allocate their results; `split_into` and `join_into` use the caller's buffers and allocate nothing.
"""

import sys

import torch
from torch import Tensor

NAN_BITS = 0x7FC00000
# The in-place forms address the halves of a word by position.
assert sys.byteorder == "little", "split masters assume that the low half of a word comes first"


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """(hi bf16, lo int16) of an fp32 tensor of any shape."""
    bits = master.view(torch.int32).masked_fill(master.isnan(), NAN_BITS)
    high = (bits + 0x8000) >> 16
    low = bits - (high << 16)
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)


def join(hi: Tensor, lo: Tensor) -> Tensor:
    """The fp32 master of its two halves."""
    return ((hi.view(torch.int16).to(torch.int32) << 16) + lo.to(torch.int32)).view(torch.float32)


def split_into(master: Tensor, *, hi: Tensor, lo: Tensor, mask: Tensor) -> None:
    """Write the halves of `master` (1-D, contiguous) to `hi` and `lo`. Consumes `master`: it holds no fp32 value
    afterwards. `mask` is a bool workspace.
    """
    bits = master.view(torch.int32)
    # NaNs first: one near 0x7FFFFFFF would overflow in the addition, one near 0xFFFFFFFF would become zero.
    torch.ne(master, master, out=mask)
    bits.masked_fill_(mask, NAN_BITS)
    # After the addition the upper half is h and the lower half is lo + 0x8000 modulo 2**16, which differs from lo in
    # its top bit.
    bits.add_(0x8000)
    bits.bitwise_xor_(0x8000)
    halves = master.view(torch.int16)  # (2 * numel,): low, high, low, high, ...
    hi.view(torch.int16).copy_(halves[1::2])
    lo.copy_(halves[0::2])


def join_into(hi: Tensor, lo: Tensor, *, out: Tensor) -> None:
    """Write the master to `out` (fp32, 1-D, contiguous): the steps of `split_into` in reverse."""
    halves = out.view(torch.int16)
    halves[1::2].copy_(hi.view(torch.int16))
    halves[0::2].copy_(lo)
    bits = out.view(torch.int32)
    bits.bitwise_xor_(0x8000)
    bits.sub_(0x8000)
