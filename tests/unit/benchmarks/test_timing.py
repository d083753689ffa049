"""A window of steps on a clock that the test winds."""

import torch

from benchmarks.timing import Clock, Timed, time_steps


class Device:
    """Every step takes 3 s, and leaves 2 s of updates that the next step hides or a drain waits for."""

    def __init__(self) -> None:
        self.time, self.pending, self.num_steps, self.drained_at = 0.0, 0.0, 0, []

    def step(self) -> torch.Tensor:
        self.time, self.pending, self.num_steps = self.time + 3.0, 2.0, self.num_steps + 1
        return torch.tensor(float(self.num_steps))

    def drain(self) -> None:
        self.time, self.pending = self.time + self.pending, 0.0
        self.drained_at.append(self.num_steps)

    def timed(self, warm_up: int, steps: int) -> Timed:
        return time_steps(self.step, Clock.of_host(self.drain, lambda: self.time), warm_up=warm_up, steps=steps)


def test_the_window_has_its_steps_and_one_drain_and_the_pace_has_none() -> None:
    device = Device()
    found = device.timed(warm_up=3, steps=4)
    assert found.window_seconds == 4 * 3.0 + 2.0 and found.step_seconds == (3.0, 3.0, 3.0)
    assert found.losses == tuple(map(float, range(1, 8))) and device.drained_at == [1, 3, 7]


def test_one_step_is_its_window() -> None:
    found = Device().timed(warm_up=1, steps=1)
    assert found.window_seconds == 5.0 and found.step_seconds == (5.0,)
