"""GPU memory as the user counts it, and what of it a plan may use."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowance:
    """What is told to people is of the first kind, what plans are made with of the second: a number that an answer names must do when it is asked for."""

    asked_bytes: int
    """`gpu_memory`, with everything that the process has on the card."""
    fixed_bytes: int = 0
    """Of that, what is no plan's however much it is: context, kernels, workspaces."""
    share: float = 0.0
    """Of that, what the allocator loses."""

    @property
    def room_bytes(self) -> int:
        return self.asked_bytes - self.fixed_bytes - int(self.asked_bytes * self.share)

    def asked_for(self, room_bytes: int) -> int:
        """The least to ask for that leaves so much room."""
        asked = math.floor((room_bytes + self.fixed_bytes - 1) / (1 - self.share))  # the loss is rounded down, by less than a byte
        while asked - self.fixed_bytes - int(asked * self.share) < room_bytes:
            asked += 1
        return asked
