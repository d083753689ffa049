"""Trains the variants of one layer, batch after batch.

The teacher's layer runs once per batch, without grad. Each variant then runs forward and backward alone on what the
teacher's layer got, and is compared with what it gave. So no variant's bits depend on another, and only one variant's
activations exist at a time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import NonFiniteGradient
from outsize.device.device import Device
from outsize.methods.bypass.builder import Student
from outsize.methods.bypass.losses import Loss
from outsize.methods.bypass.subblocks import Kind, Learn, SubBlock, SubBlockRun, record
from outsize.methods.bypass.variants import Variant
from outsize.model.stack import LayerCall, run
from outsize.optim.flat import FlatModule
from outsize.transfer.batch_cache import BatchCache


@dataclass(frozen=True, slots=True)
class Batch:
    call: LayerCall
    """Of the layer."""
    valid: Tensor | None
    """(rows, tokens), True where a token is no padding; None if all are."""
    tokens: int
    """Without padding."""


@dataclass(kw_only=True, slots=True)
class Progress:
    """What is known of a variant's training, beside its tensors. All counts are of what is done."""

    step: int = 0
    """Optimizer steps: the number of the next one."""
    tokens: int = 0
    losses: list[tuple[int, float]] = field(default_factory=list)
    """(steps, mean loss of the last one), as logged."""
    validation: list[tuple[int, float]] = field(default_factory=list)
    """(steps, validation loss)."""
    skipped: int = 0
    """Steps with a gradient that was not finite."""
    stopped: str = ""
    """Why the variant is not trained further, if it was stopped."""

    @property
    def best(self) -> tuple[int, float] | None:
        """(steps, validation loss) of the best evaluation; of equal ones the first."""
        finite = [(loss, step) for step, loss in self.validation if math.isfinite(loss)]
        return (lambda found: (found[1], found[0]))(min(finite)) if finite else None


class Trainee:
    """A variant that is trained."""

    def __init__(
        self,
        variant: Variant,
        student: Student,
        flat: FlatModule,
        progress: Progress,
        *,
        device: Device,
        accumulate: int,
    ):
        self.variant, self.student, self.flat, self.progress = variant, student, flat, progress
        self.best: dict[str, Tensor] = {}
        """The layer's tensors at the best evaluation, in host memory."""
        self._values = device.empty(Trainee.value_bytes(accumulate)).view(torch.float32)
        """Losses of the batches since the last step."""
        self._num_values = 0

    @staticmethod
    def value_bytes(accumulate: int) -> int:
        """On the device, beside the flat module."""
        return 4 * accumulate

    def is_trained_at(self, step: int) -> bool:
        return self.progress.step == step and not self.progress.stopped

    def backward(self, run: SubBlockRun, valid: Tensor | None, loss: Loss) -> None:
        value = loss(self.student(run), run.target, valid)
        (value / self._values.numel()).backward()
        self._values[self._num_values].copy_(value.detach())
        self._num_values += 1

    def take_values(self) -> Tensor:
        """The losses since the last step, until the next one."""
        self._num_values = 0
        return self._values

    def step(self, lr: float, norm: float, tokens: int) -> None:
        """`norm`: of the gradients, from `flat.measure`."""
        progress = self.progress
        try:
            stepped = self.flat.apply(norm, lr)
        except NonFiniteGradient as error:
            self.flat.discard()
            progress.stopped = f"step {progress.step + 1}: {str(error).partition('. ')[0]}"
            return
        progress.skipped += not stepped.is_applied
        progress.step += 1
        progress.tokens += tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTraining:
    """One layer of the teacher on the device, and the hidden states at it.

    Batches of the run are numbered from 0; those of a round have the first places in the cache, and validation
    batches the last ones.
    """

    device: Device
    layer: nn.Module
    subblocks: Mapping[Kind, SubBlock]
    cache: BatchCache
    batch_at: Callable[[int], Batch]
    """By place in the cache."""
    learn: frozenset[Learn]
    """What the layer's variants need of the teacher's forward."""
    loss: Loss
    accumulate: int
    lr_of: Callable[[int], float]
    first_batch: int
    """The run's number of the batch at place 0."""
    num_batches: int
    """Of the run, in this round."""
    num_validation: int
    log_every: int = 1
    channels: Tensor | None = None
    """Residual channels that the variants have, on the device. None: all."""

    @property
    def steps(self) -> range:
        return range(self.first_batch // self.accumulate, (self.first_batch + self.num_batches) // self.accumulate)

    def train(self, trainees: Sequence[Trainee], *, after_step: Callable[[int], bool], writes: bool) -> bool:
        """Train each variant from its next step to the end of the round. `after_step(number of steps done)` may
        evaluate and save; training ends early, with False, if it returns True.

        `writes`: replace the cache's hidden states by the layer's outputs.
        """
        for step in self.steps:
            active = [trainee for trainee in trainees if trainee.is_trained_at(step)]
            if not active and not writes:
                continue
            tokens = 0
            first = (step - self.steps.start) * self.accumulate
            for place in range(first, first + self.accumulate):
                tokens += self.run_batch(place, active, writes=writes)
            if not active:
                continue
            self.step(active, step, tokens)
            if after_step(step + 1):
                return False
        if writes:
            for place in self._validation:
                self.run_batch(place, (), writes=True)
            self.cache.finish()
        return True

    def run_batch(self, place: int, active: Sequence[Trainee], *, writes: bool) -> int:
        """The teacher's layer, and the forward and backward of each variant. Returns the number of tokens."""
        last = self.num_batches + self.num_validation - 1
        hidden = self.cache.read(place, min(place + 1, last))
        batch = self.batch_at(place)
        if active:
            output, runs = record(self.layer, self.subblocks, self.learn, batch.call, hidden)
            for trainee in active:
                given = runs[trainee.variant.learn].of_channels(self.channels)
                trainee.backward(given, batch.valid, self.loss)
        else:
            with torch.no_grad():
                output = run(self.layer, batch.call, hidden)
        if writes:
            self.cache.write(place, output)
        return batch.tokens

    def step(self, active: Sequence[Trainee], step: int, tokens: int) -> None:
        """The update number `step`, of `tokens` tokens, of each variant."""
        # Losses and norms of all variants come in one copy: the device is waited for once a step.
        found = [torch.cat([trainee.take_values().double(), trainee.flat.measure().view(1)]) for trainee in active]
        fetched = self.device.fetch(torch.stack(found))()
        for trainee, norm in zip(active, fetched[:, -1].tolist(), strict=True):
            trainee.step(self.lr_of(step), norm, tokens)
        for trainee, mean in zip(active, fetched[:, :-1].mean(1).tolist(), strict=True):
            progress = trainee.progress
            if progress.step == step + 1 and (progress.step % self.log_every == 0 or step + 1 == self.steps.stop):
                progress.losses.append((step + 1, mean))

    @property
    def _validation(self) -> range:
        return range(self.num_batches, self.num_batches + self.num_validation)

    @torch.no_grad()
    def evaluate(self, trainees: Sequence[Trainee]) -> list[float]:
        """The mean loss of each variant over the validation batches."""
        sums: list[Any] = [0.0] * len(trainees)
        for place in self._validation:
            hidden = self.cache.read(place, min(place + 1, self._validation.stop - 1))
            batch = self.batch_at(place)
            _, runs = record(self.layer, self.subblocks, self.learn, batch.call, hidden)
            for number, trainee in enumerate(trainees):
                given = runs[trainee.variant.learn].of_channels(self.channels)
                sums[number] = sums[number] + self.loss(trainee.student(given), given.target, batch.valid).double()
        found = self.device.fetch(torch.stack(sums))()
        return [float(value) / self.num_validation for value in found]
