"""Lower bounds of a step's time: its busiest lane and its longest chain of dependencies.

Transfers and updates count at the machine's rates, without launch overhead; forward and backward as profiled. Host
memory bandwidth is part of the update rate.
"""

from dataclasses import dataclass

from outsize.hardware.spec import HardwareSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The work of one optimizer step, all its micro-batches together."""

    compute_seconds: float
    """Forward and backward, recompute included."""
    hiding_seconds: float
    """The part that updates can overlap with: the first micro-batch's forward, which needs them one by one, and the
    last backward with updates in backward.
    """
    h2d_bytes: float
    d2h_bytes: float
    host_params: float
    """Parameters updated on the host."""
    gpu_params: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    seconds: float
    bottleneck: str
    """Name of the largest bound."""
    bounds: dict[str, float]
    """All bounds, in seconds."""


def limit(demand: Demand, spec: HardwareSpec) -> Limit:
    gpu_updates = demand.gpu_params / spec.gpu_adam_params_per_second
    host_updates = demand.host_params / spec.host_adam_params_per_second
    compute = demand.compute_seconds + gpu_updates
    unhidden = max(0.0, host_updates - demand.hiding_seconds - gpu_updates)
    bounds = {
        "compute": compute,
        "copies to the GPU": demand.h2d_bytes / spec.h2d_bytes_per_second,
        "copies to the host": demand.d2h_bytes / spec.d2h_bytes_per_second,
        "host updates": host_updates,
        "host updates that nothing hides": compute + unhidden,
    }
    seconds = max(bounds.values())
    # A chain that equals its lane, up to the last bit, is named as the lane.
    bottleneck = next(name for name, bound in bounds.items() if bound >= seconds * (1 - 1e-9))
    return Limit(seconds=seconds, bottleneck=bottleneck, bounds=bounds)
