"""Scores of candidates: how far the whole model moves from the teacher if some of its sub-blocks are replaced.

To choose variants, each candidate replaces one sub-block; an assembled model is a candidate that replaces many. One
pass over the teacher's layers scores all candidates. At each layer, candidates whose first replacement is there join
the hidden states that wait on the host, and every candidate so far runs through the layer as a call of its own: the
shapes are those of a whole model, and so are the bits. The weights of a layer are read once per pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, nll_loss

from outsize.device.choose import device_of
from outsize.model.stack import LayerStack, run, valid_tokens
from outsize.transfer.batch_cache import BatchCache, BatchSpec

IGNORED = -100
_TOP = 10
_MOST_ELEMENTS = 2**27
"""Of probabilities at once: 512 MiB each."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over the tokens of all batches; `loss` over those with a label."""

    kl: float
    """KL(teacher ‖ model) of the probabilities of the next token."""
    loss: float
    cosine: float
    """Similarity of the last layer's output to the teacher's."""
    top1: float
    """Share of tokens for which both find the same next token most probable."""
    top10: float
    """Share of the teacher's ten most probable tokens that are among the model's."""


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    layers: Mapping[int, Callable[[], AbstractContextManager[None]]]
    """By number of the layer: while it is entered, the teacher's layer has the replacements."""

    @property
    def first(self) -> int:
        return min(self.layers)


@contextmanager
def replaced(layer: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Within it, the layer has these modules at these paths."""
    before = {path: layer.get_submodule(path) for path in modules}
    try:
        for path, module in modules.items():
            layer.set_submodule(path, module)
        yield
    finally:
        for path, module in before.items():
            layer.set_submodule(path, module)


def _tokens_at_once(logits: Tensor) -> int:
    return max(1, _MOST_ELEMENTS // logits.shape[-1])


class _Sums:
    """Sums of one model's comparison with the teacher."""

    def __init__(self) -> None:
        self.values = dict.fromkeys((field.name for field in fields(Scores)), 0.0)
        self.tokens = self.labels = 0

    def add(self, hidden: Tensor, logits: Tensor, teacher: Tensor, expected: Tensor, batch: Mapping[str, Any]) -> None:
        """Some tokens at a time, since probabilities are fp32. Waits for the device once."""
        mask, labels = valid_tokens(batch), batch.get("labels")
        valid = torch.ones(hidden.shape[:-1], dtype=torch.bool) if mask is None else mask
        wanted = torch.full(hidden.shape[:-1], IGNORED, device=None if labels is None else labels.device)
        if labels is not None:
            wanted[:, :-1] = labels[:, 1:]
        tensors = [each.flatten(0, 1) for each in (hidden, logits, teacher, expected)]
        tensors += [each.to(hidden.device).flatten() for each in (valid, wanted)]
        parts = zip(*(each.split(_tokens_at_once(logits)) for each in tensors), strict=True)
        found = torch.stack([self._sums(*part) for part in parts]).sum(0).tolist()
        for name, value in zip(self.values, found, strict=False):
            self.values[name] += value
        self.tokens += int(found[-2])
        self.labels += int(found[-1])

    def _sums(
        self, hidden: Tensor, logits: Tensor, teacher: Tensor, expected: Tensor, valid: Tensor, wanted: Tensor
    ) -> Tensor:
        """Of the fields of `Scores` in their order, then the numbers of tokens and of labels, in fp64."""
        own, theirs = (each.float().log_softmax(-1) for each in (logits, expected))
        count = min(_TOP, own.shape[-1])
        tops, best = own.topk(count).indices, theirs.topk(count).indices
        by_token = {
            "kl": (theirs.exp() * (theirs - own)).sum(-1),
            "cosine": cosine_similarity(hidden.float(), teacher.float(), dim=-1),
            "top1": tops[:, 0] == best[:, 0],
            "top10": (tops.unsqueeze(-1) == best.unsqueeze(-2)).sum((-1, -2)) / count,
        }
        sums = {name: value.double().masked_fill(~valid, 0).sum() for name, value in by_token.items()}
        sums["loss"] = nll_loss(own, wanted, ignore_index=IGNORED, reduction="sum").double()
        counts = [each.sum().double() for each in (valid, wanted != IGNORED)]
        return torch.stack([*(sums[name] for name in self.values), *counts])

    def means(self) -> Scores:
        divisors = {name: self.labels if name == "loss" else self.tokens for name in self.values}
        return Scores(**{name: value / max(divisors[name], 1) for name, value in self.values.items()})


@torch.no_grad()
def score(
    stack: LayerStack,
    batches: Sequence[Callable[[], Mapping[str, Any]]],
    candidates: Sequence[Candidate],
    *,
    loaded: Callable[[int], AbstractContextManager[None]],
    outside: Callable[[], AbstractContextManager[None]] = nullcontext,
    host_bytes: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    reference: "Reference | None" = None,
) -> tuple[Scores, dict[str, Scores]]:
    """The teacher's own scores, and those of each candidate by name.

    Args:
        batches: each makes the arguments of the model's forward on the device, labels included.
        loaded: while it is entered, the layer of this number and its replacements have their weights on the device.
        outside: while it is entered, everything outside of the layers has its weights there.
        host_bytes: for hidden states that wait. If all do not fit, there are several passes. Default: no limit.
        progress: called with the number of layers done and their total.
        reference: the teacher, if `stack` is a model with fewer residual channels. Candidates then replace all that is
            in its place.
    """
    waiting = sum(spec.num_bytes for spec in _specs(stack, batches))
    per_pass = len(candidates) if host_bytes is None else max(1, host_bytes // max(waiting, 1) - 1)
    ordered = sorted(candidates, key=lambda each: (each.first, each.name))
    groups = [ordered[start : start + per_pass] for start in range(0, len(ordered), per_pass)] or [[]]
    teacher, found = Scores(0, 0, 0, 0, 0), {}
    theirs = None if reference is None else _pass(reference.model.stack, batches, (), reference.model.loaded, _silent)
    for index, group in enumerate(groups):
        report = lambda layer, index=index: progress(index * len(stack.layers) + layer, len(groups) * len(stack.layers))
        hidden = _pass(stack, batches, group, loaded, report)
        with outside(), closing(hidden), nullcontext() if reference is None else reference.model.outside():
            teacher, some = _compare(stack, batches, hidden, reference, theirs)
        found.update(some)
    if theirs is not None:
        theirs.close()
    return teacher, found


def _silent(layer: int) -> None:
    """No progress is shown."""


_TEACHER = ""


def _specs(stack: LayerStack, batches: Sequence[Callable[[], Mapping[str, Any]]]) -> list[BatchSpec]:
    """Of the hidden states of the batches."""
    found = (stack.capture(batch()).hidden for batch in batches)
    return [BatchSpec(tuple(hidden.shape), hidden.dtype) for hidden in found]


class _Waiting:
    """Hidden states in host memory, of some models and all batches. Copies run beside the layers."""

    def __init__(self, names: Sequence[str], specs: Sequence[BatchSpec], device: torch.device):
        self.names = tuple(names)
        self._first = {name: number * len(specs) for number, name in enumerate(self.names)}
        self._cache = BatchCache(device_of(device), [*specs] * len(self.names))

    def read(self, name: str, place: int, then: str | None = None) -> Tensor:
        """Valid until the next `read`. `then`: the model whose hidden states of this batch are read next."""
        return self._cache.read(self._first[name] + place, None if then is None else self._first[then] + place)

    def write(self, name: str, place: int, hidden: Tensor) -> None:
        self._cache.write(self._first[name] + place, hidden)

    def finish(self) -> None:
        self._cache.finish()

    def close(self) -> None:
        self._cache.close()


def _pass(
    stack: LayerStack,
    batches: Sequence[Callable[[], Mapping[str, Any]]],
    group: Sequence[Candidate],
    loaded: Callable[[int], AbstractContextManager[None]],
    report: Callable[[int], None],
) -> _Waiting:
    """The last layer's outputs, of the teacher and of the candidates."""
    device = stack.capture(batches[0]()).hidden.device
    waiting = _Waiting([_TEACHER, *(candidate.name for candidate in group)], _specs(stack, batches), device)
    for place, batch in enumerate(batches):
        waiting.write(_TEACHER, place, stack.capture(batch()).hidden)
    waiting.finish()
    for index, layer in enumerate(stack.layers):
        changed = {candidate.name: candidate.layers[index] for candidate in group if index in candidate.layers}
        # Those that begin here read the teacher's hidden states, so the teacher comes last.
        reads = {each.name: _TEACHER if each.first == index else each.name for each in group if each.first <= index}
        running = [*reads.items(), (_TEACHER, _TEACHER)]
        with loaded(index):
            for place, batch in enumerate(batches):
                captured = stack.capture(batch())
                following = [source for _, source in running[1:]] + [None]
                for (name, source), then in zip(running, following, strict=True):
                    hidden = waiting.read(source, place, then)
                    with changed.get(name, nullcontext)():
                        waiting.write(name, place, run(layer.module, captured.calls[index], hidden))
            waiting.finish()
        report(index + 1)
    return waiting


def _compare(
    stack: LayerStack,
    batches: Sequence[Callable[[], Mapping[str, Any]]],
    waiting: _Waiting,
    reference: "Reference | None",
    theirs: _Waiting | None,
) -> tuple[Scores, dict[str, Scores]]:
    sums = {name: _Sums() for name in waiting.names}
    of_teacher = stack if reference is None else reference.model.stack
    for place, make in enumerate(batches):
        batch = make()
        teacher = (theirs or waiting).read(_TEACHER, place).clone()
        expected = of_teacher.output(batch, teacher).logits
        names = waiting.names
        if reference is not None:
            sums[_TEACHER].add(teacher, expected, teacher, expected, batch)
            names, teacher = names[1:], reference.comparable(teacher)
        for name, then in zip(names, [*names[1:], None], strict=True):
            own = waiting.read(name, place, then)
            sums[name].add(own, stack.output(batch, own).logits, teacher, expected, batch)
    return sums[_TEACHER].means(), {name: each.means() for name, each in sums.items() if name != _TEACHER}


@dataclass(frozen=True, slots=True)
class Streamed:
    """A model whose layers are loaded one after another."""

    stack: LayerStack
    loaded: Callable[[int], AbstractContextManager[None]]
    """While it is entered, the layer of this number has its weights on the device."""
    outside: Callable[[], AbstractContextManager[None]] = nullcontext
    """The same for everything outside of the layers."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The teacher that models with fewer residual channels are compared with."""

    model: Streamed
    channels: Tensor | None
    """Its residual channels that they have, on the device; None: all."""

    def comparable(self, hidden: Tensor) -> Tensor:
        return hidden if self.channels is None else hidden.index_select(-1, self.channels)


@torch.no_grad()
def compare(reference: Reference, other: Streamed, batches: Sequence[Callable[[], Mapping[str, Any]]]) -> Scores:
    """The scores of another model."""
    teacher = reference.model
    hidden = [_pass(model.stack, batches, (), model.loaded, _silent) for model in (teacher, other)]
    sums = _Sums()
    with teacher.outside(), other.outside(), closing(hidden[0]), closing(hidden[1]):
        for place, make in enumerate(batches):
            batch = make()
            theirs, own = (each.read(_TEACHER, place) for each in hidden)
            expected, logits = teacher.stack.output(batch, theirs).logits, other.stack.output(batch, own).logits
            sums.add(own, logits, reference.comparable(theirs), expected, batch)
    return sums.means()
