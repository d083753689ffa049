"""The buffer of the gradient norm: sums of squares, one for each segment of each parameter. Does not import torch."""

from collections.abc import Collection

SEGMENT_NUMEL = 4096
"""Elements whose squares are one sum in fp32, counted from the parameter's first element."""
_SCRATCH_NUMEL = 64 * SEGMENT_NUMEL
"""The torch form squares this many elements at a time."""


def num_segments(numel: int) -> int:
    return -(-numel // SEGMENT_NUMEL)


def half_below(count: int) -> int:
    """Half of the smallest power of two that is at least `count`: where a list is cut to be summed by halving."""
    return 1 << (count - 1).bit_length() >> 1 if count else 0


def norm_parts(numels: Collection[int]) -> tuple[int, int, int]:
    """Bytes of the fp64 halves of the segments' sums, of the sums themselves, and of the torch form's scratch."""
    segments = sum(map(num_segments, numels))
    return 8 * max(half_below(segments), 1), 4 * segments, 4 * min(max(numels, default=0), _SCRATCH_NUMEL)
