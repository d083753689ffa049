"""One trace for several batches: whatever plan fits it holds for each of them. No torch.

The memory of a step is a ledger (planner/memory.py): a level that rises and falls from phase to phase. What raises it is taken from the batch that raises
it most, what lowers it from the batch that lowers it least, so the level of the merged trace is at every moment at least that of each batch.
"""

from dataclasses import replace

from outsize.model.graph import BlockGraph
from outsize.model.work import Shared, Work
from outsize.profile.trace import ModelTrace

_MOST = (
    "forward_seconds", "backward_seconds", "forward_peak_bytes", "forward_delta_bytes", "backward_peak_bytes", "sent_bytes", "forward_issue_seconds",
    "backward_issue_seconds", "forward_waits", "backward_waits", "output_kept_bytes", "input_from",
)  # fmt: skip


def merged(one: ModelTrace, other: ModelTrace) -> ModelTrace | None:
    """The trace that covers both; it is named after the first. None where the model takes another way through its blocks with either."""
    if one.graph != other.graph:
        return None
    visits = tuple(_works(one, other, visit) for visit in range(len(one.visits)))
    left: dict[Shared, list[int]] = {}
    for tensor in other.shared:
        left.setdefault(replace(tensor, num_bytes=0), []).append(tensor.num_bytes)
    # The tensors themselves are in the Work of the blocks that make them. Here is only when they die, and less dies for certain.
    shared = tuple(
        replace(tensor, num_bytes=min(tensor.num_bytes, found.pop(0)))
        for tensor in one.shared
        if (found := left.get(replace(tensor, num_bytes=0)))
    )
    keys = tuple(dict.fromkeys((*one.profile_keys, *other.profile_keys)))
    return replace(one, visits=visits, shared=shared, held_bytes=max(one.held_bytes, other.held_bytes), profile_keys=keys)


def projected(trace: ModelTrace, graph: BlockGraph, onto: ModelTrace, wider: BlockGraph) -> ModelTrace | None:
    """The trace of a batch that leaves out some of the wider graph's blocks, as one of that graph. None where it runs others, or runs them otherwise.

    The engine runs such a batch under the wider plan (an optional tower, a layer that a flag turns off).
    """
    if graph.params != wider.params or graph.buffer_bytes != wider.buffer_bytes:
        return None
    place: list[int] = []
    for visit in range(len(graph.visits)):
        start = place[-1] + 1 if place else 0
        found = next((v for v in range(start, len(wider.visits)) if wider.visit_name(v) == graph.visit_name(visit)), None)
        if found is None or wider.has_backward[found] != graph.has_backward[visit]:
            return None
        place.append(found)
    if (graph.detours and not wider.detours) or {(place[v], name) for v, name in graph.without_grad} - set(wider.without_grad):
        return None
    works = {place[visit]: {s: _moved(work, visit, place) for s, work in known.items()} for visit, known in enumerate(trace.visits)}
    shared = tuple(
        replace(t, visits=tuple(place[v] for v in t.visits), dies_at=place[t.dies_at] if t.dies_at >= 0 else -1, maker=place[t.maker] if t.maker >= 0 else -1)
        for t in trace.shared
    )
    visits = tuple(works.get(visit, onto.visits[visit]) for visit in range(len(wider.visits)))
    return replace(trace, graph=onto.graph, visits=visits, shared=shared)


def _moved(work: Work, visit: int, place: list[int]) -> Work:
    """Places that the work names, in the wider graph."""
    maker = place[visit] - place[visit - work.input_from] if work.input_from else 0
    return replace(work, late_visit=place[work.late_visit] if work.late_visit >= 0 else -1, input_from=maker)


def with_reserve(trace: ModelTrace, num_bytes: int) -> ModelTrace:
    """So many bytes more, from the beginning of the first block's forward to the end of its backward."""
    if not num_bytes:
        return trace
    first = {
        s: replace(
            w, forward_peak_bytes=w.forward_peak_bytes + num_bytes, forward_delta_bytes=w.forward_delta_bytes + num_bytes,
            backward_delta_bytes=w.backward_delta_bytes - num_bytes,
        ) for s, w in trace.visits[0].items()
    }  # fmt: skip
    return replace(trace, visits=(first, *trace.visits[1:]))


def _works(one: ModelTrace, other: ModelTrace, visit: int) -> dict[str, Work]:
    """By strategies that both know. The work of a region after a strategy is that after `keep` where it is not named."""
    a, b = one.visits[visit], other.visits[visit]
    regions = (a.keys() | b.keys()) - {*one.strategies(visit), *other.strategies(visit)}
    found = {s: _work(a[s], b[s]) for s in one.strategies(visit) if s in b}
    return found | {s: _work(a.get(s) or a["keep"], b.get(s) or b["keep"]) for s in sorted(regions)}


def _work(a: Work, b: Work) -> Work:
    most = {name: max(getattr(a, name), getattr(b, name)) for name in _MOST}
    released = min(a.released_bytes, b.released_bytes)
    # What is left of a visit after its backward, which comes after all of its forward.
    left = max(w.forward_delta_bytes - w.released_bytes + w.backward_delta_bytes for w in (a, b))
    late = min(a.late_bytes, b.late_bytes) if a.late_visit == b.late_visit else 0
    return replace(
        a, **most, released_bytes=released, backward_delta_bytes=left - (most["forward_delta_bytes"] - released), late_bytes=late,
        late_visit=a.late_visit if late else -1, input_kept_bytes=min(a.input_kept_bytes, b.input_kept_bytes),
    )  # fmt: skip
