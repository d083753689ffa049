"""4-bit quantization: the bytes of `bitsandbytes.functional.quantize_4bit` on the CPU, at a hundred times its speed.

Blocks of 64 weights have one scale, their largest absolute value (`absmax`). A weight divided by it is rounded to one
of 16 values: its code is that of the highest threshold below it, and thresholds lie midway between the values. With
double quantization the scales less their mean (`nested_offset`) are quantized too, to 8 bits in blocks of 256, whose
scales are `nested_absmax`.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.quant.installed import bitsandbytes
from outsize.quant.native import kernel

BLOCK = 64
NESTED_BLOCK = 256
_PIECE = 2**18
"""Weights that torch quantizes at once. Its temporary tensors stay in a processor's cache."""
_SMALLEST = 1e-38


class Scales(NamedTuple):
    absmax: Tensor
    """fp32; with double quantization their uint8 codes."""
    nested_absmax: Tensor | None
    nested_offset: Tensor | None


class Table(NamedTuple):
    thresholds: Tensor
    """15, in fp32."""
    codes: Tensor
    """The 16 codes in the order of their values."""


@cache
def table(quant_type: str) -> Table:
    values = bitsandbytes().functional.get_4bit_type(quant_type, device="cpu")
    order = torch.argsort(values, stable=True)
    return Table((values[order[:-1]] + values[order[1:]]) / 2, order.to(torch.uint8))


def quantize_4bit(weight: Tensor, packed: Tensor, quant_type: str, *, double: bool) -> Scales:
    """Write the codes of a contiguous CPU tensor (bf16, fp16 or fp32) to `packed`, two per byte. A weight that is NaN
    or infinite makes the scale of its block so.
    """
    absmax = torch.empty(math.ceil(weight.numel() / BLOCK))
    found = kernel()
    quantize = quantize_in_torch if found is None else found.quantize
    quantize(weight, packed, absmax, *table(quant_type))
    if not double:
        return Scales(absmax, None, None)
    offset = absmax.mean()
    codes, state = bitsandbytes().functional.quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
    return Scales(codes, state.absmax, offset)


def quantize_in_torch(weight: Tensor, packed: Tensor, absmax: Tensor, thresholds: Tensor, codes: Tensor) -> None:
    flat, bytes_of = weight.view(-1), packed.view(-1)
    for at in range(0, flat.numel(), _PIECE):
        values = flat[at : at + _PIECE].float()
        scales = absmax[at // BLOCK : (at + _PIECE) // BLOCK]
        whole = values.numel() - values.numel() % BLOCK
        scaled = values.new_zeros(values.numel() + values.numel() % 2)
        blocks = values[:whole].view(-1, BLOCK)
        torch.amax(blocks.abs(), 1, out=scales[: len(blocks)])
        torch.mul(blocks, 1 / scales[: len(blocks), None].clamp(min=_SMALLEST), out=scaled[:whole].view(-1, BLOCK))
        if whole < values.numel():  # the last block is shorter
            scales[-1:] = values[whole:].abs().amax().clamp(min=_SMALLEST)
            torch.div(values[whole:], scales[-1], out=scaled[whole : values.numel()])
        below = torch.zeros(scaled.numel(), dtype=torch.uint8)
        for threshold in thresholds:
            below += scaled <= threshold
        found = codes[(len(thresholds) - below).int()]
        bytes_of[at // 2 : (at + _PIECE) // 2] = found[::2] << 4 | found[1::2]
