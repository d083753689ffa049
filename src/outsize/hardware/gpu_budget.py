"""GPU memory as the user counts it, and what of it a plan may use."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuBudget:
    """What is told to people is of the first kind, what plans are made with of the second: a number that an answer
    names must do when it is asked for.
    """

    total_bytes: int
    """`gpu_memory`, with everything that the process has on the card."""
    fixed_bytes: int = 0
    """Of that, what is no plan's however much it is: context, kernels, workspaces."""
    share: float = 0.0
    """Of that, what the allocator loses."""

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.fixed_bytes - int(self.total_bytes * self.share)

    def total_for(self, usable_bytes: int) -> int:
        """The least to ask for that leaves so much room."""
        asked = math.floor(
            (usable_bytes + self.fixed_bytes - 1) / (1 - self.share)
        )  # the loss is rounded down, by less than a byte
        while asked - self.fixed_bytes - int(asked * self.share) < usable_bytes:
            asked += 1
        return asked
