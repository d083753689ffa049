"""Records of a benchmark's settings and results, as `benchmarks.bench --json` writes them. No torch."""

import statistics
from dataclasses import dataclass
from typing import Literal

from benchmarks.limits import Limit
from outsize.schedule.plan import UpdateMode


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """One run."""

    model: str
    device: str
    micro_batch: int
    seq: int
    steps: int
    """That are timed."""
    warm_up: int
    """Steps before those."""
    accumulate: int
    update: UpdateMode
    clip: float | None
    gpu_memory: str | None
    host_memory: str | None
    plan: str | None
    """A file."""
    images: int | None = None
    """Of a row, for models that see; None: 1 for those."""
    image_size: int = 1024
    osft: float | None = None
    """Share of free directions, with OSFT."""
    osft_others: Literal["train", "freeze", "norms"] = "freeze"
    """What happens to other parameters with OSFT."""

    @property
    def tokens(self) -> int:
        """Of one optimizer step."""
        return self.micro_batch * self.seq * self.accumulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    tokens_per_second: float
    """Over the window."""
    window_seconds: float
    step_seconds: tuple[float, ...]
    """See run/timing.py."""
    median_step_seconds: float

    @staticmethod
    def of(tokens: int, steps: int, window_seconds: float, step_seconds: tuple[float, ...]) -> "Speed":
        return Speed(
            tokens_per_second=tokens * steps / window_seconds if window_seconds else 0.0,
            window_seconds=window_seconds,
            step_seconds=step_seconds,
            median_step_seconds=statistics.median(step_seconds),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    gpu_peak_bytes: int | None
    """Allocated, after the profiling run; None where device and host are one."""
    gpu_reserved_bytes: int | None
    """By the allocator; None without one."""
    gpu_trial_bytes: int | None
    """Peak of the profiling run."""
    host_peak_bytes: int
    """Of the process (VmHWM)."""
    host_bytes_per_param: float
    host_before_bytes: int
    """Before a model was built: Python and the libraries."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartUp:
    build_seconds: float
    prepare_seconds: float
    first_step_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The plan and its predictions."""

    fingerprint: str
    summary: str
    step_seconds: float
    gpu_bytes: int
    gpu_reserved_bytes: int
    """With library workspaces and allocator fragmentation."""
    gpu_budget_bytes: int
    host_bytes: int
    host_process_bytes: int
    """With Python, libraries and the driver."""
    provenance: str
    search: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Of steps after the timed ones, whose every action was timed."""

    num_steps: int
    busy_seconds: dict[str, float]
    """Per lane and step."""
    shares: dict[str, float]
    """Of the time between steps (median)."""
    bottleneck: str
    """The busiest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    device: str
    gpu_bytes: int
    cpu: str
    cores: int
    threads: int
    host_bytes: int
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The same shape in a plain loop."""

    speed: Speed | None
    gpu_peak_bytes: int | None
    gpu_reserved_bytes: int | None
    host_peak_bytes: int
    problem: str
    """Why there is no speed; else empty."""
    ratio: float | None = None
    """Our tokens/s over its own; None where they cannot be compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    bench: Bench
    date: str
    command: str
    machine: Machine
    num_params: int
    is_simulated: bool
    """Its clock is the simulator's."""
    speed: Speed
    memory: Memory
    start_up: StartUp
    plan: Prediction
    lanes: Lanes
    limit: Limit
    limit_ratio: float
    """Median step over the limit."""
    losses_finite: bool
    within_budget: bool
    baselines: dict[str, Baseline]
    """By name: `plain`, `checkpointed`."""
