"""Scores of every variant inside the whole model, and of assembled models, after the library of a pruning run."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.base.cache_folder import write_whole
from outsize.base.errors import BadFile
from outsize.base.records import fingerprint
from outsize.methods.bypass.builder import build_student
from outsize.methods.bypass.score import Candidate, Reference, Scores, Streamed, compare, replaced, score
from outsize.methods.bypass.students import Student
from outsize.methods.bypass.variants import Variant
from outsize.model.build import build_model
from outsize.model.stack import LayerStack
from outsize.run.prune_importance import StoredImportance, channels_on
from outsize.run.prune_library import BEST, LATEST, Library
from outsize.run.prune_reduced import Reduced
from outsize.run.prune_setup import PruneSetup
from outsize.run.prune_walk import put
from outsize.run.teacher import Teacher

SCORES_FILE = "scores.json"


@dataclass(frozen=True, slots=True)
class Pick:
    """A variant of a layer, with the weights of the library or as it was before training."""

    layer: int
    variant: Variant
    is_raw: bool = False

    @property
    def name(self) -> str:
        return f"{self.layer:03d}/{self.variant.name}" + ("/raw" if self.is_raw else "")


class Variants:
    """Makes modules of variants."""

    def __init__(self, setup: PruneSetup, library: Library, importance: StoredImportance):
        self.setup, self.library, self._importance = setup, library, importance

    def student(self, pick: Pick) -> Student:
        """In host memory. The teacher's layer has its weights there."""
        setup = self.setup
        with setup.device.on_host():
            student = build_student(setup.parts[pick.layer], pick.variant, self._importance.of(pick.layer))
            stored = None if pick.is_raw else self.library.entry(pick.layer, pick.variant.name)
            if stored is not None and pick.variant.is_trained:
                saved = stored.tensors(BEST if stored.has(BEST) else LATEST)
                with torch.no_grad():
                    for name, tensor in student.layer_tensors().items():
                        tensor.copy_(saved[name])
        return student.eval()

    def modules(self, pick: Pick, student: Student) -> dict[str, nn.Module]:
        """What takes the place of the teacher's modules, by path in the layer."""
        if pick.variant.learn == "block":
            return dict(student.module.named_children())
        subblock = self.setup.parts[pick.layer].subblocks[pick.variant.learn]  # type: ignore[index]
        found = {subblock.module: student.module}
        if student.norm is not None:
            assert subblock.norm is not None
            found[subblock.norm] = student.norm
        return found


def base_picks(setup: PruneSetup) -> tuple[Pick, ...]:
    """With `hidden_size`: of each sub-block that is trained, the variant that only has fewer residual channels. All of
    them together are the model in which others are scored.
    """
    if setup.reduced is None:
        return ()
    return tuple(Pick(layer, variant) for layer in sorted(setup.variants) for variant in setup.whole(layer))


def reduced_of(setup: PruneSetup) -> Reduced:
    assert setup.reduced is not None
    return setup.reduced


class Scoring:
    """Scores on held-out rows, or without validation data on the first rows of training."""

    def __init__(self, variants: Variants, tokens: int, host_bytes: int | None):
        self._variants, self._setup, self._host_bytes = variants, variants.setup, host_bytes
        setup = self._setup
        self._source = setup.validation or setup.train
        available = setup.num_validation if setup.validation is not None else setup.num_batches
        self._batches, total = 0, 0
        while self._batches < available and total < tokens:
            total += self._source.tokens(self._batches)
            self._batches += 1
        self.tokens, self.is_held_out = total, setup.validation is not None

    def of(
        self, models: Mapping[str, Sequence[Pick]], progress: Callable[[int, int], None]
    ) -> tuple[Scores, dict[str, Scores]]:
        """Of the teacher, and of each model, which is the teacher with some variants; with `hidden_size`, the reduced
        model with some variants.
        """
        setup, modules = self._setup, dict[Pick, dict[str, nn.Module]]()
        picks = {pick for model in models.values() for pick in model}

        @contextmanager
        def loaded(layer: int) -> Iterator[None]:
            teacher, params = setup.teacher, list(setup.stack.layers[layer].module.parameters())
            teacher.load(params)
            try:
                here = [pick for pick in picks if pick.layer == layer]
                made = {pick: self._variants.student(pick) for pick in here}
                teacher.place(params)
                for pick, student in made.items():
                    student.to(setup.device.torch_device)
                    modules[pick] = self._variants.modules(pick, student)
                yield
            finally:
                for pick in list(modules):
                    del modules[pick]
                teacher.release(params)

        def applied(layer: int, some: Sequence[Pick]) -> Any:
            found = {path: module for pick in some for path, module in modules[pick].items()}
            return replaced(setup.stack.layers[layer].module, found)

        def candidate(name: str, model: Sequence[Pick]) -> Candidate:
            by_layer: dict[int, list[Pick]] = {}
            for pick in model:
                by_layer.setdefault(pick.layer, []).append(pick)
            return Candidate(name, {layer: partial(applied, layer, some) for layer, some in by_layer.items()})

        candidates = [candidate(name, model) for name, model in models.items()]
        batches = [partial(self._arguments, k) for k in range(self._batches)]
        return score(
            setup.stack,
            batches,
            candidates,
            loaded=loaded,
            outside=_streamed(setup.teacher, setup.stack).outside,
            host_bytes=self._host_bytes,
            progress=progress,
            reference=None if setup.unreduced is None else self._reference(),
        )

    def _reference(self) -> Reference:
        teacher = self._setup.unreduced or self._setup
        return Reference(_streamed(teacher.teacher, teacher.stack), channels_on(teacher))

    def of_folder(self, folder: Path) -> Scores:
        """Of the model in a folder."""
        setup, model = self._setup, self._setup.stack.model
        attention = model.config._attn_implementation  # type: ignore[union-attr]
        other = Teacher(build_model(str(folder), dtype=model.dtype, attn_implementation=attention), setup.device)  # type: ignore[arg-type]
        try:
            stack = LayerStack(other.model, setup.prune.blocks, materialized=other.materialized)
            batches = [partial(self._arguments, k) for k in range(self._batches)]
            return compare(self._reference(), _streamed(other, stack), batches)
        finally:
            other.close()

    def _arguments(self, k: int) -> dict[str, Any]:
        given = self._source(k)
        labels = {} if given.labels is None else {"labels": given.labels}
        return {name: put(self._setup.device, value) for name, value in {**given.arguments, **labels}.items()}


def _streamed(teacher: Teacher, stack: LayerStack) -> Streamed:
    inside = {id(param) for layer in stack.layers for param in layer.module.parameters()}
    return Streamed(
        stack,
        lambda layer: teacher.materialized(list(stack.layers[layer].module.parameters())),
        lambda: teacher.materialized([param for param in stack.model.parameters() if id(param) not in inside]),
    )


class StoredScores:
    """Scores of single variants, in `scores.json`. A variant that was trained further is scored again."""

    def __init__(self, variants: Variants, scoring: Scoring, folder: Path):
        self._variants, self._scoring, self._path = variants, scoring, folder / SCORES_FILE
        setup = variants.setup
        of = {"spec": setup.spec.fingerprint, "tokens": scoring.tokens, "held_out": scoring.is_held_out}
        self._base = base_picks(setup)
        if self._base:
            of["base"] = {"channels": reduced_of(setup).hash, "steps": [self._key(pick) for pick in self._base]}
        self._of = fingerprint(of)

    def measure(self, picks: Sequence[Pick], progress: Callable[[int, int], None]) -> tuple[Scores, dict[str, Scores]]:
        """The teacher's, and by name of pick."""
        data = self._read()
        missing = {self._key(pick): pick for pick in picks if self._key(pick) not in data}
        if missing or "teacher" not in data:
            models: dict[tuple[Pick, ...], list[str]] = {}
            for key, pick in missing.items():
                models.setdefault(self._model(pick), []).append(key)
            teacher, found = self._scoring.of({keys[0]: model for model, keys in models.items()}, progress)
            data["teacher"] = asdict(teacher)
            data |= {key: asdict(found[keys[0]]) for keys in models.values() for key in keys}
            write_whole(self._path, json.dumps({"of": self._of, "scores": data}, indent=1))
        return Scores(**data["teacher"]), {pick.name: Scores(**data[self._key(pick)]) for pick in picks}

    def _model(self, pick: Pick) -> tuple[Pick, ...]:
        """The teacher with this variant; with `hidden_size`, the reduced model with it and, elsewhere, with the
        variants that are not pruned.
        """
        others = (each for each in self._base if (each.layer, each.variant.learn) != (pick.layer, pick.variant.learn))
        return tuple(sorted((pick, *others), key=lambda each: each.name))

    def _key(self, pick: Pick) -> str:
        if pick.is_raw:
            return pick.name
        stored = self._variants.library.entry(pick.layer, pick.variant.name)
        return f"{pick.name} {stored.description.steps if stored is not None else 0}"

    def _read(self) -> dict[str, Any]:
        if not self._path.exists():
            return {}
        try:
            data = json.loads(self._path.read_text())
            return dict(data["scores"]) if data["of"] == self._of else {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadFile(f"{self._path} is damaged ({error}). Remove it; the same command makes it again.") from None
