"""Profiles a batch within the memory of its plan, with fewer rows if the batch does not fit.

Profiling keeps activations that a plan would offload or recompute, so it may need more memory than the plan.
"""

import gc
from collections.abc import Callable
from typing import Any

from outsize.base.errors import DeviceOutOfMemory
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.model.graph import BlockGraph
from outsize.profile.scale import Point, scaled
from outsize.profile.trace import ModelTrace
from outsize.setup.batches import num_rows, take_rows

Found = tuple[BlockGraph, ModelTrace]


def profile_within_budget(trace: Callable[[Any], Found], batch: Any, *, device: Device, budget_bytes: int) -> Found:
    """Trace a batch; if memory runs out, extrapolate linearly from two traces of fewer rows.

    If two are not possible (one or two rows, or a batch that is not rows alone), profiling may use the whole device.
    Raises DeviceOutOfMemory if that is not enough. The caller resets the device's limit.
    """
    device.limit(budget_bytes)
    found, ran_out = _of_fewer_rows(trace, batch)
    if found is None and budget_bytes < device.spec.gpu_bytes:
        log.info(
            "the profiling run does not fit %s: it may use more of the device, the plan may not",
            show_bytes(budget_bytes),
        )
        device.limit(device.spec.gpu_bytes)
        found = trace(batch)
    if found is None:
        raise DeviceOutOfMemory(ran_out)
    return found


def _of_fewer_rows(trace: Callable[[Any], Found], batch: Any) -> tuple[Found | None, str]:
    """The batch's trace if it fits, else scaled from its two largest halvings that fit; and why it did not fit."""
    ran_out = ""
    rows = size = num_rows(batch) or 1
    part = batch
    taken: list[tuple[BlockGraph, Point]] = []
    while part is not None and len(taken) < 2:
        try:
            graph, found = trace(part)
            if size == rows:
                return (graph, found), ""
            taken.append((graph, Point(rows=size, trace=found)))
        except DeviceOutOfMemory as error:
            ran_out = ran_out or str(error)
        gc.collect()  # frees the failed run's activations, which the exception's frames held
        size //= 2
        part = take_rows(batch, size) if size else None
    if len(taken) < 2:
        return None, ran_out
    (graph, larger), (_, smaller) = taken
    made = scaled(larger, smaller, rows)
    if made is None:
        return None, ran_out
    log.warning(
        "the profiling run of %d rows does not fit the device: its numbers are scaled from %d and %d rows",
        rows,
        larger.rows,
        smaller.rows,
    )
    return (graph, made), ""
