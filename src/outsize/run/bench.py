"""Training steps for `outsize bench` and the repository's benchmarks/."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from outsize.runtime.engine import Engine


def training_step(
    engine: Engine, batches: list[dict[str, Tensor]], accumulate: int = 1
) -> Callable[[], Tensor | float]:
    """A function that trains one optimizer step on the next batches and returns the last loss."""
    on_gpu = engine.device.is_gpu
    if on_gpu:
        # As a loader with pin_memory: a copy from pageable memory would wait for the previous step. Batches kept on the
        # device would be memory that no plan counts.
        batches = [{name: values.pin_memory() for name, values in batch.items()} for batch in batches]
    endless = itertools.cycle(batches)
    in_backward = engine.plan.step_config.update == "in_backward"

    def step() -> Tensor | float:
        for i in range(accumulate):
            out = engine.model(**next(endless))
            with engine.last_backward() if in_backward and i == accumulate - 1 else nullcontext():
                (out.loss if accumulate == 1 else out.loss / accumulate).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        # `sim` counts every byte, so its losses must not stay on the device.
        return out.loss.detach() if on_gpu else float(out.loss.detach())

    return step
