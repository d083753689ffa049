"""Two timed passes become one account of what computes, what issues, and where the issuing thread waits. How it is on a
GPU: tests/gpu/test_trial.py.
"""

import pytest

from outsize.device.cpu import CpuDevice
from outsize.profile.phases import HOST_SYNC_SECONDS, ForwardPhase, Phase, Phases


def timed(ahead: bool, forward: tuple[float, float], backward: tuple[float, float]) -> Phases:
    """Seconds, and seconds of issuing."""
    phases = Phases(None, CpuDevice(), ahead=ahead)
    phases.forward = [ForwardPhase(seconds=forward[0], launch_seconds=forward[1])]
    phases.backward = {0: Phase(seconds=backward[0], launch_seconds=backward[1])}
    return phases


def test_a_thread_that_takes_longer_ahead_of_the_device_than_beside_it_waits_for_it() -> None:
    ahead = timed(True, forward=(0.010, 0.030), backward=(0.020, 0.004))
    ahead.take_minimum(timed(False, forward=(0.012, 0.009), backward=(0.021, 0.004 - 0.9 * HOST_SYNC_SECONDS)))
    assert ahead.forward[0].syncs_host and not ahead.backward[0].syncs_host


def test_a_thread_that_was_held_up_and_is_ahead_still_did_not_wait() -> None:
    ahead = timed(True, forward=(0.010, 0.030), backward=(0.020, 0.004))
    ahead.forward[0].ran_ahead = True
    ahead.take_minimum(timed(False, forward=(0.012, 0.009), backward=(0.021, 0.004)))
    assert not ahead.forward[0].syncs_host


def test_a_hiccup_of_either_pass_counts_for_nothing() -> None:
    for hiccup in (0, 1):
        passes = [
            timed(ahead, forward=(0.010 + (i == hiccup), 0.004 + (i == hiccup)), backward=(0.020, 0.008))
            for i, ahead in enumerate((True, False))
        ]
        passes[0].take_minimum(passes[1])
        assert (passes[0].forward[0].seconds, passes[0].forward[0].launch_seconds) == pytest.approx((0.010, 0.004))


def test_what_sinks_with_the_clocks_is_computing_and_not_issuing() -> None:
    phases = timed(True, forward=(0.010, 0.004), backward=(0.020, 0.008))
    phases.scale_seconds(1.5)
    assert (phases.backward[0].seconds, phases.backward[0].launch_seconds) == pytest.approx((0.030, 0.008))
