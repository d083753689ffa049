"""How fast a step can be at all: no faster than its busiest lane, nor than its longest chain of dependencies.

Transfers and updates count at the machine's rates, without what starting them costs; forward and backward as they were
measured. Host memory has no line of its
own: what it gives is in the rate of the updates.
"""

from dataclasses import dataclass

from outsize.hardware.spec import HardwareSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What one optimizer step asks of a machine, all its micro-batches together."""

    compute_seconds: float
    """Forward and backward, recompute included."""
    hiding_seconds: float
    """Of those, under which updates can run: the first micro-batch's forward, which needs them one by one, and the last
    backward, if they come in it.
    """
    h2d_bytes: float
    d2h_bytes: float
    host_params: float
    """Parameters that the host updates."""
    gpu_params: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    seconds: float
    bottleneck: str
    """What cannot be faster."""
    bounds: dict[str, float]
    """All that were looked at, in seconds."""


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
    # Where the chain is nothing but a lane, the lane is named; the two may differ in their last bit.
    bottleneck = next(name for name, bound in bounds.items() if bound >= seconds * (1 - 1e-9))
    return Limit(seconds=seconds, bottleneck=bottleneck, bounds=bounds)
