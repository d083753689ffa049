"""The gradient norm, from elementwise operations alone: the same bits on every device, under every layout.

The squares of a parameter's gradient are taken in fp32 and summed by halving (`s[:half] + s[half:]`, as if padded with
zeros) in segments of SEGMENT_NUMEL elements, in the order of its memory. The sums of all segments, in the optimizer's
order, are summed by halving in fp64. The C kernel (native.c), the Triton kernel and outsize.reference do the same.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from outsize.layout.norm import SEGMENT_NUMEL, half_below, norm_parts, num_segments
from outsize.optim.native import kernel
from outsize.optim.rule import gpu_kernel


def segment_sums(grad: Tensor, sums: Tensor, scratch: Tensor) -> None:
    """Write the sum of squares of each segment of a flat gradient to `sums`. Allocates nothing.

    `grad` is bf16 or fp32, `sums` and `scratch` are fp32, all on one device. `scratch` holds one segment, or `grad` if
    that is smaller; only the torch form uses it.
    """
    assert grad.dim() == 1 and grad.is_contiguous() and grad.dtype in (torch.bfloat16, torch.float32)
    assert sums.numel() == num_segments(grad.numel()) and sums.dtype == scratch.dtype == torch.float32
    if grad.device.type == "cpu" and (native := kernel()) is not None:
        native.segment_sums(grad, sums)
    elif grad.is_cuda and (triton := gpu_kernel()) is not None:
        triton.segment_sums(grad, sums)
    else:
        _in_torch(grad, sums, scratch)


def _in_torch(grad: Tensor, sums: Tensor, scratch: Tensor) -> None:
    whole = grad.numel() // SEGMENT_NUMEL
    step = max(1, scratch.numel() // SEGMENT_NUMEL)
    pieces = [(first, min(step, whole - first), SEGMENT_NUMEL) for first in range(0, whole, step)]
    if rest := grad.numel() - whole * SEGMENT_NUMEL:
        pieces.append((whole, 1, rest))
    for first, count, length in pieces:
        start = first * SEGMENT_NUMEL
        squares = scratch[: count * length].view(count, length)
        squares.copy_(grad[start : start + count * length].view(count, length)).mul_(squares)
        while length > 1:
            half = half_below(length)
            squares[:, : length - half].add_(squares[:, half:length])
            length = half
        sums[first : first + count].copy_(squares[:, 0])


class GradientNorm:
    """Segment sums of the gradients of some parameters, and their norm."""

    def __init__(self, numels: Mapping[str, int], buffer: Tensor | None):
        """`numels`: elements of each parameter, in the optimizer's order. `buffer`: uint8, all `norm_parts`."""
        halves, sums, scratch = norm_parts(numels.values())
        buffer = torch.zeros(halves + sums + scratch, dtype=torch.uint8) if buffer is None else buffer
        self._halves = buffer[:halves].view(torch.float64)
        self.total = self._halves[0]
        """The norm that the last `measure_total` computed."""
        self.sums = buffer[halves : halves + sums].view(torch.float32)
        self._scratch = buffer[halves + sums : halves + sums + scratch].view(torch.float32)
        self.slices: dict[str, slice] = {}
        end = 0
        for name, numel in numels.items():
            self.slices[name] = slice(end, end := end + num_segments(numel))
        # Made once: `measure` runs for every parameter in backward, where each microsecond of Python counts.
        self._sums_of = {name: self.sums[part] for name, part in self.slices.items()}
        sizes = [self._halves.numel() >> i for i in range(1, self._halves.numel().bit_length())]
        self._halvings = [(self._halves[:size], self._halves[size : 2 * size]) for size in sizes]

    def measure(self, name: str, grad: Tensor) -> None:
        """Take the segment sums of a gradient, whose elements are dense in memory. It must not require grad."""
        segment_sums(grad.as_strided((grad.numel(),), (1,)), self._sums_of[name], self._scratch)

    @torch.no_grad()
    def measure_total(self, without: Iterable[str]) -> Tensor:
        """The norm of all gradients, as a float64 scalar on their device. Parameters in `without` have none."""
        for name in without:
            self.sums[self.slices[name]].zero_()
        half = self._halves.numel()
        first, second = self.sums[:half], self.sums[half:]
        self._halves.zero_()[: first.numel()].copy_(first)
        self._halves[: second.numel()].add_(second)
        for left, right in self._halvings:
            left.add_(right)
        # torch's root on the CPU is not correctly rounded.
        return self.total.sqrt_() if self.total.is_cuda else self.total.fill_(math.sqrt(float(self.total)))


def not_finite(sums: Tensor, slices: Mapping[str, slice]) -> list[str]:
    """Parameters whose gradient is not finite, from segment sums on the host."""
    if math.isfinite(float(sums.sum())):  # no square is negative. In one pass: this is asked once a step
        return []
    finite = torch.isfinite(sums)
    return [name for name, part in slices.items() if not bool(finite[part].all())]
