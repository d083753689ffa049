"""A step's limit, by hand: a machine of round numbers, and each bound in turn the largest."""

import dataclasses

import pytest

from benchmarks.limits import Demand, limit
from outsize.hardware.catalog import lookup

SPEC = dataclasses.replace(
    lookup("1GiB"),
    h2d_bytes_per_second=10.0,
    d2h_bytes_per_second=5.0,
    host_adam_params_per_second=2.0,
    gpu_adam_params_per_second=100.0,
    launch_seconds=9.0,
)
DEMAND = Demand(
    compute_seconds=3.0, hiding_seconds=3.0, h2d_bytes=20.0, d2h_bytes=5.0, host_params=4.0, gpu_params=50.0
)


def test_every_lane_has_its_seconds_and_launches_count_nothing() -> None:
    bounds = limit(DEMAND, SPEC).bounds
    assert bounds.pop("host updates that nothing hides") == 3.5, "all of the step hides them"
    assert bounds == {"compute": 3.5, "copies to the GPU": 2.0, "copies to the host": 1.0, "host updates": 2.0}


@pytest.mark.parametrize(
    ("change", "seconds", "bottleneck"),
    [
        ({}, 3.5, "compute"),
        ({"h2d_bytes": 60.0}, 6.0, "copies to the GPU"),
        ({"d2h_bytes": 60.0}, 12.0, "copies to the host"),
        ({"host_params": 20.0}, 10.0, "host updates"),
        # After the step: 2 s of updates, of which the next forward (1 s) and the GPU's own updates (0.5 s) hide 1.5 s.
        ({"hiding_seconds": 1.0}, 4.0, "host updates that nothing hides"),
        ({"hiding_seconds": 1.0, "host_params": 3.0}, 3.5, "compute"),
        ({"hiding_seconds": 1.0, "host_params": 20.0}, 12.0, "host updates that nothing hides"),
        # Two micro-batches: only the first one's forward hides updates.
        ({"hiding_seconds": 1.0, "host_params": 20.0, "compute_seconds": 6.0}, 15.0, "host updates that nothing hides"),
    ],
)
def test_the_largest_bound_is_the_limit(change: dict, seconds: float, bottleneck: str) -> None:
    found = limit(dataclasses.replace(DEMAND, **change), SPEC)
    assert (found.seconds, found.bottleneck) == (pytest.approx(seconds), bottleneck)
