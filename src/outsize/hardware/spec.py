"""HardwareSpec: the sizes and rates of one machine. All rates are per second, all sizes in bytes."""

from dataclasses import dataclass

ALLOCATOR_SHARE = 0.02
"""Of a card's memory, kept free for what the caching allocator loses to rounding and fragments: of 21 runs on an H200,
20 lost 0.2 to 1.6 %, one 2.3 %.
"""
CONTEXT_BYTES = 600 * 2**20
"""What a CUDA process holds before it allocates anything, with its libraries' workspaces. Estimated; `prepare` and
`outsize probe` measure it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOverhead:
    """What running a model takes of a machine beside every tensor of it: no plan's, and there all the same."""

    code_bytes: int = 0
    """Kernels that were loaded. The driver has them, not the allocator."""
    workspace_bytes: int = 0
    """That libraries allocate and keep."""
    host_bytes: int = 0
    """Of the process: Python, libraries, the driver's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    name: str
    gpu_bytes: int
    host_bytes: int
    flops: float
    """Of large matrix products in bf16 under a long load, not the datasheet's."""
    gpu_bytes_per_second: float
    """That operators on activations reach, not a plain copy."""
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    host_bytes_per_second: float
    """DRAM bandwidth."""
    host_adam_params_per_second: float
    gpu_adam_params_per_second: float
    launch_seconds: float
    """Fixed cost of one copy or one update."""
    provenance: str
    """`measured` or `estimated`, and from what."""
    context_bytes: int = CONTEXT_BYTES
    """Of a card's memory, what a process takes by itself; 0 where the card is simulated."""
    allocator_share: float = ALLOCATOR_SHARE
    op_launch_seconds: float = 25e-6
    """What the thread that runs the model's Python takes to issue an operator, with all that models do between two: the
    processor's, whatever the card. Fitted to layers on the H200's machine; `outsize probe` measures it."""
    launch_slowdown: float = 1.0
    """How many times as long the thread that issues work takes over it while the host updates."""
    sustained_clock_ratio: float = 1.0
    """How many times as fast a trial run of a moment computes as a long run, whose clocks sink under the load. Measured
    seconds are taken times this.
    """
