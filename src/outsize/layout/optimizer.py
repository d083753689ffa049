"""OptimizerLayout: the bytes of optimizer state and workspace. The planner sums these bytes, the runtime allocates
them. Does not import torch.
"""

from dataclasses import dataclass

from outsize.layout.chunks import Chunk

PIECE_NUMEL = 2**20
"""An update processes its range in pieces of this many elements, so its workspace does not grow with the chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerLayout:
    """The state of an elementwise optimizer: tensors with one value for each element of a parameter."""

    name: str
    state: tuple[str, ...]
    """Names of the fp32 state tensors. A bf16 weight also has `lo`, the lower half of its fp32 master, in 2 bytes."""
    traffic_bytes: int
    """Bytes that the update of one bf16 element reads and writes, with a bf16 gradient."""
    scratch_bytes_per_element: int

    @property
    def traffic(self) -> float:
        """Memory traffic relative to the default optimizer."""
        return self.traffic_bytes / ADAMW.traffic_bytes

    def state_bytes(self, chunk: Chunk) -> int:
        return chunk.numel * (4 * len(self.state) + 2 * chunk.is_split) if chunk.trainable else 0

    def scratch_bytes(self, largest_numel: int) -> int:
        """Workspace for updates of ranges of at most `largest_numel` elements."""
        return self.scratch_bytes_per_element * min(largest_numel, PIECE_NUMEL)


ADAMW = OptimizerLayout(name="AdamW", state=("exp_avg", "exp_avg_sq"), traffic_bytes=26, scratch_bytes_per_element=12)
"""The default. Calibrated update rates are for its kernels; rates of other optimizers are scaled by their traffic."""
