"""The second stage of a pruning run: every variant of every layer is made and trained, layer by layer.

The hidden states of all batches at a layer are in a cache; its variants are trained on them, and the teacher's layer
turns them into those at the next layer. Every variant has a step of its own on disk, so the same command continues
where an earlier one ended, with another memory, other groups or other rounds.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from outsize.base.log import log
from outsize.methods.bypass.builder import Student, build_student
from outsize.methods.bypass.train import LayerTraining, Progress, Trainee
from outsize.methods.bypass.variants import Variant
from outsize.optim.flat import FlatModule
from outsize.optim.rule import Scratch
from outsize.run.prune_batches import Given
from outsize.run.prune_hidden import KeptHidden, num_distill_batches
from outsize.run.prune_importance import StoredImportance, channels_on
from outsize.run.prune_library import BEST, LATEST, STATE, Description, Library, Stored
from outsize.run.prune_measure import learns
from outsize.run.prune_plan import PrunePlan
from outsize.run.prune_setup import PruneSetup
from outsize.run.prune_walk import Walk


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """A layer whose variants were trained."""

    round: int
    layer: int
    trained: tuple[Description, ...]
    seconds: float
    tokens: int
    """That each variant was trained on."""
    flops: float
    """2 × weights × tokens of the teacher, 6 × of the variants."""


class PruneStages:
    def __init__(
        self,
        setup: PruneSetup,
        plan: PrunePlan,
        scratch: Scratch,
        *,
        say: Callable[[LayerReport], None] = lambda report: None,
        should_stop: Callable[[], bool] = lambda: False,
    ):
        self._setup, self._plan, self._scratch, self._device = setup, plan, scratch, setup.device
        self._say, self._should_stop = say, should_stop
        folder = Path(setup.config.output_dir)
        self.library, self._importance = Library(folder), StoredImportance(setup, folder)
        self._cache_folder = Path(setup.prune.cache_dir) if plan.in_file and setup.prune.cache_dir else None
        self._eval_every = _steps_of(setup.config.eval_steps or 0.1, setup.num_steps)
        self._kept = KeptHidden(setup, num_distill_batches(setup.config)) if plan.kept_bytes else None
        self._save_every = _steps_of(setup.config.save_steps, setup.num_steps) if setup.config.save_steps else None

    def run(self) -> bool:
        """Whether everything is finished: False if it was stopped."""
        with self._on_device():
            self._importance.measure(self._cache_folder)
            self._importance.rank()
            return all(self._round(number, batches) for number, batches in enumerate(self._plan.rounds))

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        self._device.limit(self._plan.budget_bytes)
        self._device.open(id(self), self._plan.budget_bytes, self._setup.fixed_bytes)
        self._device.watching(True)
        try:
            yield
        finally:
            self._device.watching(False)
            self._device.close(id(self))

    def pending(self, layer: int, end: int) -> list[Variant]:
        """Variants of a layer that have not been trained for `end` steps."""
        return [variant for variant in self._setup.variants.get(layer, ()) if self._is_pending(layer, variant, end)]

    def _is_pending(self, layer: int, variant: Variant, end: int) -> bool:
        entry = self.library.entry(layer, variant.name)
        if entry is not None and not self.continues(entry, variant):
            self.library.drop_states(layer, variant.name)
            return False
        newest = self._newest(layer, variant.name)
        return newest is None or newest.description.steps < end or end == self._setup.num_steps

    def continues(self, entry: Stored, variant: Variant) -> bool:
        """Whether a finished variant is trained further, because the budget has grown."""
        found = entry.description
        return variant.is_trained and not found.stopped and found.steps < self._setup.num_steps and entry.has(STATE)

    def _newest(self, layer: int, variant: str) -> Stored | None:
        """What a variant continues from."""
        found = [self.library.state(layer, variant), self.library.entry(layer, variant)]
        states = [stored for stored in found if stored is not None and stored.has(STATE)]
        return max(states, key=lambda stored: stored.description.steps, default=None)

    # Rounds and layers.

    def _round(self, number: int, batches: range) -> bool:
        setup = self._setup
        end = batches.stop // setup.spec.gradient_accumulation_steps
        work = {layer: found for layer in sorted(setup.variants) if (found := self.pending(layer, end))}
        kept = self._kept
        if not work:
            if kept is None or not kept.is_begun:
                return True
            batches = range(kept.num_batches)  # those of validation are not needed either
        if kept is not None:
            kept.begin()
        specs = [setup.hidden_at(setup.train, k) for k in batches]
        if setup.validation is not None and work:
            specs += [setup.hidden_at(setup.validation, k) for k in range(setup.num_validation)]

        def given(place: int) -> Given:
            if place < len(batches):
                return setup.train(batches.start + place)
            assert setup.validation is not None
            return setup.validation(place - len(batches))

        walk = Walk(setup, specs, given, self._cache_folder)
        count = len(setup.stack.layers) if kept is not None else max(work) + 1
        try:
            for layer in range(count):
                writes = layer < count - 1 or kept is not None
                if layer not in work:
                    walk.skip(layer)
                elif not self._layer(number, batches, walk, layer, work[layer], writes=writes):
                    return False
            if kept is not None:
                kept.keep(walk)
        finally:
            walk.close()
        return True

    def _layer(
        self, number: int, batches: range, walk: Walk, layer: int, variants: Sequence[Variant], *, writes: bool
    ) -> bool:
        started, done = time.perf_counter(), []
        students: dict[str, Student] = {}

        def make(module: nn.Module) -> None:
            importance = self._importance.of(layer)
            with self._setup.parts_with_weights(layer) as parts:
                students.update({variant.name: build_student(parts, variant, importance) for variant in variants})

        with walk.layer(layer, make) as module:
            training = self._training(batches, walk, layer, module)
            for variant in variants:
                if not variant.is_trained:
                    done.append(self._finish_untrained(layer, variant, students.pop(variant.name)))
            groups = self._groups(layer, [variant for variant in variants if variant.is_trained])
            for group in groups:
                trainees = [self._trainee(layer, variant, students.pop(variant.name)) for variant in group]
                is_last = group is groups[-1]
                if not self._group(training, layer, trainees, writes=writes and is_last):
                    return False
                done += [self._store(layer, trainee) for trainee in trainees]
                del trainees
            if writes and not groups:
                training.train((), after_step=lambda steps: False, writes=True)
        self._say(self._report(number, layer, batches, done, time.perf_counter() - started))
        return True

    def _groups(self, layer: int, variants: Sequence[Variant]) -> list[list[Variant]]:
        planned = self._plan.groups.get(layer, ())
        groups = [[variant for variant in variants if variant.name in names] for names in planned]
        return [group for group in groups if group]

    def _training(self, batches: range, walk: Walk, layer: int, module: nn.Module) -> LayerTraining:
        setup = self._setup
        return LayerTraining(
            device=self._device,
            layer=module,
            subblocks=setup.parts[layer].subblocks,
            cache=walk.cache,
            batch_at=lambda place: walk.batch_at(place, layer),
            learn=learns(setup.variants[layer]),
            loss=setup.loss,
            accumulate=setup.spec.gradient_accumulation_steps,
            lr_of=setup.lr_of,
            first_batch=batches.start,
            num_batches=len(batches),
            num_validation=setup.num_validation,
            log_every=setup.config.logging_steps,
            channels=channels_on(setup),
        )

    def _group(self, training: LayerTraining, layer: int, trainees: list[Trainee], *, writes: bool) -> bool:
        def after_step(steps: int) -> bool:
            active = [trainee for trainee in trainees if trainee.progress.step == steps]
            if steps % self._eval_every == 0 or steps == self._setup.num_steps:
                self._validate(training, active)
            must_stop = self._should_stop()
            if must_stop or (self._save_every and steps % self._save_every == 0):
                for trainee in active:
                    self._save(layer, trainee)
            return must_stop

        self._validate(training, [trainee for trainee in trainees if not trainee.progress.step])
        return training.train(trainees, after_step=after_step, writes=writes)

    def _validate(self, training: LayerTraining, trainees: list[Trainee]) -> None:
        if not trainees or not training.num_validation:
            return
        for trainee, loss in zip(trainees, training.evaluate(trainees), strict=True):
            progress = trainee.progress
            if progress.validation and progress.validation[-1][0] == progress.step:
                continue
            progress.validation.append((progress.step, loss))
            if progress.best == progress.validation[-1] and self._setup.spec.keep != "latest":
                with self._device.on_host():
                    trainee.best = {
                        name: tensor.detach().to("cpu", copy=True)
                        for name, tensor in trainee.student.layer_tensors().items()
                    }

    # One variant.

    def _trainee(self, layer: int, variant: Variant, student: Student) -> Trainee:
        """A variant at its newest state, or at its beginning."""
        flat = FlatModule(student, self._setup.optimizer, self._device, self._scratch)
        stored, progress, best = self._newest(layer, variant.name), Progress(), dict[str, Tensor]()
        if stored is not None:
            with self._device.on_host():
                flat.load(stored.tensors(STATE))
                best = stored.tensors(BEST) if stored.has(BEST) else {}
            progress = _progress(stored.description)
        passes = self._setup.spec.gradient_accumulation_steps
        trainee = Trainee(variant, student, flat, progress, device=self._device, accumulate=passes)
        trainee.best = best
        return trainee

    def _store(self, layer: int, trainee: Trainee) -> Description:
        """At the end of a round: what the next one continues from, or the finished variant."""
        if trainee.progress.step < self._setup.num_steps and not trainee.progress.stopped:
            return self._save(layer, trainee)
        latest = trainee.student.layer_tensors()
        description = self._describe(layer, trainee.variant, latest, trainee.progress)
        keep, files = self._setup.spec.keep, {}
        if keep != "latest":
            files[BEST] = trainee.best or latest
        if keep != "best":
            files[LATEST] = latest
        if self._setup.prune.keep_optimizer:
            files[STATE] = trainee.flat.state()
        self.library.finish(description, files)
        if trainee.progress.stopped:
            log.warning(
                "%s of layer %d was stopped at %s; the others are trained on", trainee.variant.name, layer,
                trainee.progress.stopped,
            )  # fmt: skip
        return description

    def _save(self, layer: int, trainee: Trainee) -> Description:
        latest = trainee.student.layer_tensors()
        description = self._describe(layer, trainee.variant, latest, trainee.progress)
        self.library.save_state(description, trainee.flat.state(), trainee.best)
        return description

    def _finish_untrained(self, layer: int, variant: Variant, student: Student) -> Description:
        tensors = student.layer_tensors()
        description = self._describe(layer, variant, tensors, Progress())
        self.library.finish(description, {LATEST: tensors} if tensors else {})
        return description

    def _describe(self, layer: int, variant: Variant, tensors: dict[str, Tensor], progress: Progress) -> Description:
        best = progress.best
        return Description(
            layer=layer,
            layer_name=self._setup.stack.layers[layer].name,
            variant=variant.name,
            learn=variant.learn,
            changes=tuple(asdict(change) for change in variant.changes),
            spec=self._setup.spec.fingerprint,
            steps=progress.step,
            tokens=progress.tokens,
            numel=sum(tensor.numel() for tensor in tensors.values()),
            losses=tuple(progress.losses),
            validation=tuple(progress.validation),
            best_step=None if best is None else best[0],
            skipped=progress.skipped,
            stopped=progress.stopped,
        )

    def _report(self, number: int, layer: int, batches: range, done: list[Description], seconds: float) -> LayerReport:
        tokens = sum(self._setup.train.tokens(k) for k in batches)
        teacher = sum(param.numel() for param in self._setup.stack.layers[layer].module.parameters())
        trained = sum(description.numel for description in done if description.steps)
        return LayerReport(
            round=number,
            layer=layer,
            trained=tuple(done),
            seconds=seconds,
            tokens=tokens,
            flops=float(tokens * (2 * teacher + 6 * trained)),
        )


def _progress(description: Description) -> Progress:
    return Progress(
        step=description.steps,
        tokens=description.tokens,
        losses=list(description.losses),
        validation=list(description.validation),
        skipped=description.skipped,
        stopped=description.stopped,
    )


def _steps_of(given: float, steps: int) -> int:
    """Steps of a setting that is a number of steps, or a share of all."""
    return int(given) if given >= 1 else math.ceil(given * steps)
