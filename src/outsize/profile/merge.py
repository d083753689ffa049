"""One trace for several batches: whatever plan fits it holds for each of them. No torch.

The memory of a step is a ledger (planner/memory.py): a level that rises and falls from phase to phase. What raises it
is taken from the batch that raises it most, what lowers it from the batch that lowers it least, so the level of the
merged trace is at every moment at least that of each batch.
"""

from dataclasses import replace

from outsize.model.graph import BlockGraph
from outsize.model.work import Holders, Shared, Work
from outsize.profile.trace import ModelTrace

_MOST = (
    "forward_seconds",
    "backward_seconds",
    "forward_peak_bytes",
    "forward_delta_bytes",
    "backward_peak_bytes",
    "sent_bytes",
    "forward_launch_seconds",
    "backward_launch_seconds",
    "forward_syncs_host",
    "backward_syncs_host",
)


def merged(one: ModelTrace, other: ModelTrace) -> ModelTrace | None:
    """The trace that covers both; it is named after the first. None where the model takes another way through its
    blocks with either.
    """
    if one.graph != other.graph:
        return None
    calls = tuple(_works(one, other, call) for call in range(len(one.calls)))
    keys = tuple(dict.fromkeys((*one.profile_keys, *other.profile_keys)))
    shared = _shared(one.shared, other.shared)
    return replace(one, calls=calls, shared=shared, held_bytes=max(one.held_bytes, other.held_bytes), profile_keys=keys)


def _shared(one: tuple[Shared, ...], other: tuple[Shared, ...]) -> tuple[Shared, ...]:
    """Each tensor as long as it lives in either, or for ever."""
    a, b = ({(t.call, t.role, t.number, t.born): t for t in tensors} for tensors in (one, other))
    found = [_longer(a[key], b[key]) for key in a if key in b]
    # Of one that only one of them has, the birth counts and the death does not; but what a graph saves and nothing uses
    # is there for a short time.
    found += [
        t if t.under else replace(t, dies_at=-1, held_by=(), early_in=())
        for key, t in (a | b).items()
        if key not in a or key not in b
        if t.born >= 0
    ]
    return tuple(sorted(found, key=lambda t: (t.call, t.role, t.number)))


def _longer(a: Shared, b: Shared) -> Shared:
    # Where its birth is in the Work of a block, which has the larger of two, the smaller one dies for certain.
    num_bytes = max(a.num_bytes, b.num_bytes) if a.born >= 0 else min(a.num_bytes, b.num_bytes)
    dies_at = -1 if min(a.dies_at, b.dies_at) < 0 else max(a.dies_at, b.dies_at)
    held, sent = (_either(x, y) for x, y in ((a.held_by, b.held_by), (a.sent_by, b.sent_by)))
    early = tuple(x for x in a.early_in if x in b.early_in)
    return replace(
        a, num_bytes=num_bytes, dies_at=dies_at, held_by=held if dies_at >= 0 else (), early_in=early, sent_by=sent
    )


def _either(a: Holders, b: Holders) -> Holders:
    one, other = dict(a), dict(b)
    return tuple(
        (call, tuple(dict.fromkeys((*one.get(call, ()), *other.get(call, ()))))) for call in sorted(one | other)
    )


def projected(trace: ModelTrace, graph: BlockGraph, onto: ModelTrace, wider: BlockGraph) -> ModelTrace | None:
    """The trace of a batch that leaves out some of the wider graph's blocks, as one of that graph. None where it runs
    others, or runs them otherwise.

    The engine runs such a batch under the wider plan (an optional tower, a layer that a flag turns off).
    """
    if graph.params != wider.params or graph.buffer_bytes != wider.buffer_bytes:
        return None
    place: list[int] = []
    for call in range(len(graph.calls)):
        start = place[-1] + 1 if place else 0
        found = next((v for v in range(start, len(wider.calls)) if wider.call_name(v) == graph.call_name(call)), None)
        if found is None or wider.has_backward[found] != graph.has_backward[call]:
            return None
        place.append(found)
    if (graph.detours and not wider.detours) or {(place[v], name) for v, name in graph.without_grad} - set(
        wider.without_grad
    ):
        return None
    works = {place[call]: known for call, known in enumerate(trace.calls)}
    to = {-1: -1, **dict(enumerate(place)), len(place): len(wider.calls)}
    shared = tuple(
        replace(
            t,
            call=to[t.call],
            born=to[t.born],
            dies_at=to[t.dies_at],
            held_by=tuple((to[v], s) for v, s in t.held_by),
            early_in=tuple((to[v], s) for v, s in t.early_in),
            sent_by=tuple((to[v], s) for v, s in t.sent_by),
        )
        for t in trace.shared
    )
    calls = tuple(works.get(call, onto.calls[call]) for call in range(len(wider.calls)))
    return replace(trace, graph=onto.graph, calls=calls, shared=shared)


def with_reserve(trace: ModelTrace, num_bytes: int) -> ModelTrace:
    """So many bytes more, from the beginning of the first block's forward to the end of its backward."""
    if not num_bytes:
        return trace
    first = {
        s: replace(
            w,
            forward_peak_bytes=w.forward_peak_bytes + num_bytes,
            forward_delta_bytes=w.forward_delta_bytes + num_bytes,
            backward_delta_bytes=w.backward_delta_bytes - num_bytes,
        )
        for s, w in trace.calls[0].items()
    }
    return replace(trace, calls=(first, *trace.calls[1:]))


def _works(one: ModelTrace, other: ModelTrace, call: int) -> dict[str, Work]:
    """By strategies that both know. The work of a region after a strategy is that after `keep` where it is not
    named.
    """
    a, b = one.calls[call], other.calls[call]
    regions = (a.keys() | b.keys()) - {*one.strategies(call), *other.strategies(call)}
    found = {s: _work(a[s], b[s]) for s in one.strategies(call) if s in b}
    return found | {s: _work(a.get(s) or a["keep"], b.get(s) or b["keep"]) for s in sorted(regions)}


def _work(a: Work, b: Work) -> Work:
    most = {name: max(getattr(a, name), getattr(b, name)) for name in _MOST}
    released = min(a.released_bytes, b.released_bytes)
    # What is left of a call after its backward, which comes after all of its forward.
    left = max(w.forward_delta_bytes - w.released_bytes + w.backward_delta_bytes for w in (a, b))
    return replace(
        a, **most, released_bytes=released, backward_delta_bytes=left - (most["forward_delta_bytes"] - released)
    )
