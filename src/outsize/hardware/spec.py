"""HardwareSpec: the sizes and rates of one machine. All rates are per second, all sizes in bytes."""

from dataclasses import dataclass

ALLOCATOR_SHARE = 0.02
"""Share of GPU memory kept free for the caching allocator's rounding and fragmentation. Of 21 runs on an H200, 20 lost
0.2 to 1.6 %, one 2.3 %.
"""
CONTEXT_BYTES = 600 * 2**20
"""GPU memory of a CUDA process before it allocates anything, with library workspaces. Estimated; `prepare` and `outsize
probe` measure it.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessOverhead:
    """Memory that a process needs beside its tensors. Plans do not include it."""

    code_bytes: int = 0
    """Loaded kernels, outside of the allocator."""
    workspace_bytes: int = 0
    """Allocated and kept by libraries."""
    host_bytes: int = 0
    """Host memory of the process: Python, libraries, the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpec:
    name: str
    gpu_bytes: int
    host_bytes: int
    flops: float
    """bf16 FLOP/s of large matrix products under a long load, not the datasheet's."""
    gpu_bytes_per_second: float
    """Reached by operators on activations; a plain copy is faster."""
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float
    host_bytes_per_second: float
    """DRAM bandwidth in updates."""
    host_adam_params_per_second: float
    gpu_adam_params_per_second: float
    launch_seconds: float
    """Fixed cost of one copy or one update."""
    provenance: str
    """`measured` or `estimated`, and from what."""
    context_bytes: int = CONTEXT_BYTES
    """GPU memory of an empty CUDA process; 0 on a simulated GPU."""
    allocator_share: float = ALLOCATOR_SHARE
    op_launch_seconds: float = 25e-6
    """CPU time to launch an operator, with the model's Python between two operators. It depends on the CPU, not on the
    GPU. Fitted to layers on the H200 machine; `outsize probe` measures it."""
    launch_slowdown: float = 1.0
    """Factor by which launches take longer while the host updates."""
    sustained_clock_ratio: float = 1.0
    """Factor by which a short profiling run computes faster than a long run, whose clocks drop under load. Profiled
    seconds are multiplied by it.
    """
