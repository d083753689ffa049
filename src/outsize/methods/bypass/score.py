"""Scores of candidates: how far the whole model moves from the teacher if some of its sub-blocks are replaced.

To choose variants, each candidate replaces one sub-block; an assembled model is a candidate that replaces many. One
pass over the teacher's layers scores all candidates. At each layer, candidates whose first replacement is there join
the hidden states that wait on the host, and every candidate so far runs through the layer as a call of its own: the
shapes are those of a whole model, and so are the bits. The weights of a layer are read once per pass.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from outsize.model.stack import LayerStack, run, valid_tokens

IGNORED = -100
_TOP = 10


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


class _Sums:
    """Sums of one model's comparison with the teacher."""

    def __init__(self) -> None:
        self.values = dict.fromkeys((field.name for field in fields(Scores)), 0.0)
        self.tokens = self.labels = 0

    def add(self, hidden: Tensor, logits: Tensor, teacher: Tensor, expected: Tensor, batch: Mapping[str, Any]) -> None:
        mask = valid_tokens(batch)
        rows = torch.ones(hidden.shape[:-1], dtype=torch.bool) if mask is None else mask.cpu()
        rows = rows.to(hidden.device)
        own, theirs = (each[rows].float().log_softmax(-1) for each in (logits, expected))
        count = min(_TOP, own.shape[-1])
        tops, wanted = own.topk(count).indices, theirs.topk(count).indices
        found = {
            "kl": (theirs.exp() * (theirs - own)).sum(),
            "cosine": cosine_similarity(hidden[rows].float(), teacher[rows].float(), dim=-1).sum(),
            "top1": (tops[:, 0] == wanted[:, 0]).sum(),
            "top10": (tops.unsqueeze(-1) == wanted.unsqueeze(-2)).sum() / count,
        }
        for name, value in found.items():
            self.values[name] += value.item()
        self.tokens += int(rows.sum())
        labels = batch.get("labels")
        if labels is not None:
            shifted = labels[:, 1:].to(logits.device)
            flat = logits[:, :-1].float().flatten(0, 1)
            loss = cross_entropy(flat, shifted.flatten(), ignore_index=IGNORED, reduction="sum")
            self.values["loss"] += loss.item()
            self.labels += int((shifted != IGNORED).sum())

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
) -> tuple[Scores, dict[str, Scores]]:
    """The teacher's own scores, and those of each candidate by name.

    Args:
        batches: each makes the arguments of the model's forward on the device, labels included.
        loaded: while it is entered, the layer of this number and its replacements have their weights on the device.
        outside: while it is entered, everything outside of the layers has its weights there.
        host_bytes: for hidden states that wait. If all do not fit, there are several passes. Default: no limit.
        progress: called with the number of layers done and their total.
    """
    waiting = sum(stack.capture(batch()).hidden.nbytes for batch in batches)
    per_pass = len(candidates) if host_bytes is None else max(1, host_bytes // max(waiting, 1) - 1)
    ordered = sorted(candidates, key=lambda each: (each.first, each.name))
    groups = [ordered[start : start + per_pass] for start in range(0, len(ordered), per_pass)] or [[]]
    teacher, found = Scores(0, 0, 0, 0, 0), {}
    for index, group in enumerate(groups):
        report = lambda layer, index=index: progress(index * len(stack.layers) + layer, len(groups) * len(stack.layers))
        hidden = _pass(stack, batches, group, loaded, report)
        with outside():
            teacher, some = _compare(stack, batches, hidden)
        found.update(some)
    return teacher, found


_TEACHER = ""


def _pass(
    stack: LayerStack,
    batches: Sequence[Callable[[], Mapping[str, Any]]],
    group: Sequence[Candidate],
    loaded: Callable[[int], AbstractContextManager[None]],
    report: Callable[[int], None],
) -> dict[str, list[Tensor]]:
    """The last layer's outputs on the host: by candidate, per batch."""
    waiting = {_TEACHER: [stack.capture(batch()).hidden.cpu() for batch in batches]}
    for index, layer in enumerate(stack.layers):
        changed = {candidate.name: candidate.layers[index] for candidate in group if index in candidate.layers}
        begin = [candidate.name for candidate in group if candidate.first == index]
        waiting |= {name: list(waiting[_TEACHER]) for name in begin}
        with loaded(index):
            for place, batch in enumerate(batches):
                captured = stack.capture(batch())
                for name, hidden in waiting.items():
                    with changed.get(name, nullcontext)():
                        given = hidden[place].to(captured.hidden.device)
                        hidden[place] = run(layer.module, captured.calls[index], given).cpu()
        report(index + 1)
    return waiting


def _compare(
    stack: LayerStack, batches: Sequence[Callable[[], Mapping[str, Any]]], waiting: Mapping[str, Sequence[Tensor]]
) -> tuple[Scores, dict[str, Scores]]:
    sums = {name: _Sums() for name in waiting}
    for place, make in enumerate(batches):
        batch = make()
        device = next(value.device for value in batch.values() if isinstance(value, Tensor))
        teacher = waiting[_TEACHER][place].to(device)
        expected = stack.output(batch, teacher).logits
        for name, hidden in waiting.items():
            own = hidden[place].to(device)
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


@torch.no_grad()
def compare(teacher: Streamed, other: Streamed, batches: Sequence[Callable[[], Mapping[str, Any]]]) -> Scores:
    """The scores of another model, whose hidden size may differ; then its cosine is 0."""
    hidden = [_pass(model.stack, batches, (), model.loaded, lambda done: None)[_TEACHER] for model in (teacher, other)]
    sums = _Sums()
    with teacher.outside(), other.outside():
        for place, make in enumerate(batches):
            batch = make()
            device = next(value.device for value in batch.values() if isinstance(value, Tensor))
            theirs, own = (each[place].to(device) for each in hidden)
            expected, logits = teacher.stack.output(batch, theirs).logits, other.stack.output(batch, own).logits
            sums.add(own, logits, theirs if theirs.shape == own.shape else torch.zeros_like(own), expected, batch)
    return sums.means()
