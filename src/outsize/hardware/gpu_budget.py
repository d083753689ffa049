"""GpuBudget: total GPU memory as the user specifies it, and the part that a plan may use."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBudget:
    """Users specify total GPU memory; plans use what is left after the CUDA context and allocator overhead. Messages
    print totals, so a printed number can be passed back as `gpu_memory`.
    """

    total_bytes: int
    """`gpu_memory`: everything that the process has on the GPU."""
    fixed_bytes: int = 0
    """Overhead of a fixed size: CUDA context, kernels, workspaces."""
    share: float = 0.0
    """Overhead of the allocator, as a share of the total."""

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.fixed_bytes - int(self.total_bytes * self.share)

    def total_for(self, usable_bytes: int) -> int:
        """The smallest total with this many usable bytes."""
        # The allocator's share is rounded down, by less than a byte.
        total = math.floor((usable_bytes + self.fixed_bytes - 1) / (1 - self.share))
        while total - self.fixed_bytes - int(total * self.share) < usable_bytes:
            total += 1
        return total
