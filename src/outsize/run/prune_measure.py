"""Measures what layers and variants need on the device: each variant is trained for a few batches of the largest size.

One layer of each structure is measured, with one variant at a time, so this fits wherever the run fits.
"""

import os
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from outsize.device.device import Device
from outsize.methods.bypass.builder import build_student, student_numels
from outsize.methods.bypass.importance import Importance
from outsize.methods.bypass.train import Batch, LayerTraining, Progress, Trainee
from outsize.methods.bypass.variants import Variant
from outsize.model.stack import StackCalls
from outsize.optim.flat import FlatModule, flat_bytes
from outsize.optim.rule import Scratch
from outsize.run.prune_importance import channels_on, norms_of
from outsize.run.prune_plan import LayerCost, VariantCost
from outsize.run.prune_setup import PruneSetup
from outsize.run.prune_walk import put
from outsize.transfer.batch_cache import BatchCache

_BATCHES = 3
"""From the second one on, the hidden state of the batch before is still on its way to the host."""
_MOST_WRITTEN = 64 * 2**20
"""Bytes, to measure the disk with."""
_STEPS = 3
"""The first one may compile the optimizer."""


@dataclass(frozen=True, slots=True)
class _Measured:
    peak_bytes: int
    seconds: float
    step_seconds: float


def layer_costs(setup: PruneSetup, scratch: Scratch, folder: Path) -> list[LayerCost]:
    """`folder`: where the library will be."""
    with nullcontext() if setup.reduced is None else setup.reduced.measured():
        return _layer_costs(setup, scratch, folder)


def _layer_costs(setup: PruneSetup, scratch: Scratch, folder: Path) -> list[LayerCost]:
    kinds: dict[tuple[str, tuple[Variant, ...]], list[int]] = {}
    for layer, variants in setup.variants.items():
        kinds.setdefault((setup.stack.layers[layer].structure, variants), []).append(layer)
    return [_measure(setup, tuple(layers), scratch, folder) for layers in kinds.values()]


def _write_seconds(folder: Path, num_bytes: int) -> float:
    """Of writing and syncing this much, from a part of it. 0 if nothing can be written."""
    part = min(num_bytes, _MOST_WRITTEN)
    if not part:
        return 0.0
    started = time.perf_counter()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(part))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return (time.perf_counter() - started) * num_bytes / part


def _measure(setup: PruneSetup, layers: tuple[int, ...], scratch: Scratch, folder: Path) -> LayerCost:
    layer, parts, device = layers[0], setup.parts[layers[0]], setup.device
    params = list(parts.layer.parameters())
    marks = [time.perf_counter()]
    setup.teacher.load(params)
    marks.append(time.perf_counter())
    variants = [variant for variant in setup.variants[layer] if variant.is_trained]
    with device.on_host(), setup.parts_with_weights(layer) as own:
        students = [build_student(own, variant) for variant in variants]
        weight_bytes = [sum(tensor.nbytes for tensor in student.layer_tensors().values()) for student in students]
        arguments = dict(setup.widest)
    marks.append(time.perf_counter())
    setup.teacher.place(params)
    marks.append(time.perf_counter())
    load_seconds, make_seconds = marks[1] - marks[0] + marks[3] - marks[2], marks[2] - marks[1]
    make_seconds += 0.0 if device.is_simulated else _write_seconds(folder, sum(weight_bytes))
    try:
        cache = BatchCache(device, [setup.hidden] * _BATCHES)
        run = _Run(setup, layer, cache, arguments)
        run.fill()
        teacher = run.measure(None)
        importance = run.measure_importance() if setup.num_calibration else 0
        found = []
        for variant, weights in zip(variants, weight_bytes, strict=True):
            student = students.pop(0)  # only this one is on the device
            numels = student_numels(own, variant)
            started = time.perf_counter()
            flat = FlatModule(student, setup.optimizer, device, scratch)
            make_seconds += time.perf_counter() - started
            trainee = Trainee(variant, student, flat, Progress(), device=device, accumulate=_BATCHES)
            measured = run.measure(trainee)
            found.append(
                VariantCost(
                    name=variant.name,
                    state_bytes=flat_bytes(numels, setup.optimizer)
                    + sum(buffer.nbytes for buffer in student.buffers())
                    + Trainee.value_bytes(setup.spec.gradient_accumulation_steps),
                    weight_bytes=weights,
                    saved_bytes=sum(tensor.nbytes for tensor in flat.state().values()) + weights,
                    active_bytes=measured.peak_bytes,
                    seconds=max(0.0, measured.seconds - teacher.seconds),
                    step_seconds=measured.step_seconds,
                )
            )
            del flat, trainee, student
        cache.close()
    finally:
        setup.teacher.release(params)
    return LayerCost(
        layers=layers,
        weight_bytes=sum(param.nbytes for param in params),
        teacher_bytes=teacher.peak_bytes,
        importance_bytes=importance,
        teacher_seconds=teacher.seconds,
        variants=tuple(found),
        load_seconds=0.0 if device.is_simulated else load_seconds,
        make_seconds=0.0 if device.is_simulated else make_seconds,
    )


class _Run:
    """The largest batch, again and again, at one layer."""

    def __init__(self, setup: PruneSetup, layer: int, cache: BatchCache, arguments: dict[str, Any]):
        self._setup, self._layer, self._cache, self._arguments = setup, layer, cache, arguments
        self._device: Device = setup.device

    def _calls(self) -> StackCalls:
        return self._setup.stack.capture({name: put(self._device, value) for name, value in self._arguments.items()})

    def _batch(self, place: int) -> Batch:
        valid = torch.ones(self._setup.hidden.shape[:2], dtype=torch.bool) if self._setup.has_padding else None
        return Batch(self._calls().calls[self._layer], put(self._device, valid), 0)

    def fill(self) -> None:
        hidden = self._calls().hidden
        for place in range(_BATCHES):
            self._cache.write(place, hidden)
        self._cache.finish()

    def measure(self, trainee: Trainee | None) -> _Measured:
        setup, device = self._setup, self._device
        training = LayerTraining(
            device=device,
            layer=setup.parts[self._layer].layer,
            subblocks=setup.parts[self._layer].subblocks,
            cache=self._cache,
            batch_at=self._batch,
            learn=learns(setup.variants[self._layer]),
            loss=setup.loss,
            accumulate=_BATCHES,
            lr_of=lambda step: 0.0,
            first_batch=0,
            num_batches=_BATCHES,
            num_validation=0,
            channels=channels_on(setup),
        )
        active = [trainee] if trainee is not None else []
        with device.meter() as meter:
            meter.reset_peak()
            marks = [device.mark()]
            for place in range(_BATCHES):
                training.run_batch(place, active, writes=True)
                marks.append(device.mark())  # nothing waits: a batch is launched while the one before runs
            self._cache.finish()
            peak = meter.peak()
        seconds = [device.between(*pair) for pair in pairwise(marks)]
        steps = []
        for step in range(_STEPS if trainee is not None else 0):
            start = device.mark()
            training.step(active, step, 0)
            steps.append(device.between(start, device.mark()))
        step_seconds = min(steps, default=0.0)
        if device.is_simulated:  # its clock does not count this work
            return _Measured(peak, 0.0, 0.0)
        return _Measured(peak, min(seconds[1:]), step_seconds)

    def measure_importance(self) -> int:
        setup = self._setup
        assert setup.prune.importance != "truncate"
        with self._device.meter() as meter:
            meter.reset_peak()
            importance = Importance(setup.parts[self._layer], setup.prune.importance)
            norms = norms_of(setup, self._layer)
            for place in range(_BATCHES):
                batch = self._batch(place)
                with norms.listening(batch.valid):
                    self._cache.write(place, importance.run(batch.call, self._cache.read(place), batch.valid))
            importance.scores()
            self._cache.finish()
            return meter.peak()


def learns(variants: tuple[Variant, ...]) -> frozenset[Any]:
    """What the variants of a layer are trained on."""
    return frozenset(variant.learn for variant in variants if variant.is_trained)
