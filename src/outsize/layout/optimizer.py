"""What an optimizer keeps and needs, in bytes. Without torch: the planner counts these bytes, the runtime allocates
them.
"""

from dataclasses import dataclass

from outsize.layout.chunks import Chunk

PIECE_NUMEL = 2**20
"""An update walks its range in pieces of this many elements, so its workspace does not grow with the chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerLayout:
    """The state of an elementwise optimizer: tensors with one value for each element of a parameter."""

    name: str
    state: tuple[str, ...]
    """Names of the fp32 state tensors. A bf16 weight has also the lower half of its master, `lo`, in 2 bytes."""
    traffic_bytes: int
    """Of memory that an update of one bf16 parameter reads and writes, with a bf16 gradient."""
    scratch_bytes_per_element: int

    @property
    def traffic(self) -> float:
        """Relative to the default optimizer's."""
        return self.traffic_bytes / ADAMW.traffic_bytes

    def state_bytes(self, chunk: Chunk) -> int:
        return chunk.numel * (4 * len(self.state) + 2 * chunk.is_split) if chunk.trainable else 0

    def scratch_bytes(self, largest_numel: int) -> int:
        """Workspace for updates of ranges of at most `largest_numel` elements."""
        return self.scratch_bytes_per_element * min(largest_numel, PIECE_NUMEL)


ADAMW = OptimizerLayout(name="AdamW", state=("exp_avg", "exp_avg_sq"), traffic_bytes=26, scratch_bytes_per_element=12)
"""The default. Update rates of machines are those of its kernels; another optimizer's follow from its traffic."""
