"""Merges the traces of several batches: a plan that fits the merged trace fits each batch. No torch.

The memory of a step is a ledger (planner/memory.py): a level that rises and falls from phase to phase. Rises are taken
from the batch that raises it most, falls from the batch that lowers it least. So the level of the merged trace is never
below that of any batch.
"""

from dataclasses import replace

from outsize.model.graph import BlockGraph
from outsize.model.work import Holders, SharedTensor, Work
from outsize.profile.trace import ModelTrace

_MAXIMA = (
    *("forward_seconds", "backward_seconds", "forward_peak_bytes", "forward_delta_bytes", "backward_peak_bytes"),
    *("sent_bytes", "forward_launch_seconds", "backward_launch_seconds", "forward_syncs_host", "backward_syncs_host"),
)


def merged(one: ModelTrace, other: ModelTrace) -> ModelTrace | None:
    """A trace that covers both, with the name of the first. None if the model runs other blocks with the second."""
    if one.graph != other.graph:
        return None
    calls = tuple(_works(one, other, call) for call in range(len(one.calls)))
    keys = tuple(dict.fromkeys((*one.profile_keys, *other.profile_keys)))
    return replace(
        one,
        calls=calls,
        shared=_shared(one.shared, other.shared),
        held_bytes=max(one.held_bytes, other.held_bytes),
        tile_tokens=max(one.tile_tokens, other.tile_tokens),
        tiled=tuple(dict.fromkeys((*one.tiled, *other.tiled))),
        profile_keys=keys,
        extrapolated_from=one.extrapolated_from or other.extrapolated_from,
    )


def _shared(one: tuple[SharedTensor, ...], other: tuple[SharedTensor, ...]) -> tuple[SharedTensor, ...]:
    """The shared tensors of both traces, each for as long as it lives in either trace."""
    a, b = ({(t.call, t.role, t.number, t.allocated_in): t for t in tensors} for tensors in (one, other))
    found = [_longer(a[key], b[key]) for key in a if key in b]
    # A tensor of only one of them counts as allocated and never freed. What unused graphs save is short-lived.
    found += [
        t if t.only_under else replace(t, freed_in=-1, held_by=(), freed_early_in=())
        for key, t in (a | b).items()
        if t.allocated_in >= 0 and (key not in a or key not in b)
    ]
    return tuple(sorted(found, key=lambda t: (t.call, t.role, t.number)))


def _longer(a: SharedTensor, b: SharedTensor) -> SharedTensor:
    # If the Work of a block includes the allocation, it has the larger of the two, and only the smaller is sure to be
    # freed.
    num_bytes = max(a.num_bytes, b.num_bytes) if a.allocated_in >= 0 else min(a.num_bytes, b.num_bytes)
    freed_in = -1 if min(a.freed_in, b.freed_in) < 0 else max(a.freed_in, b.freed_in)
    held, sent = (_either(x, y) for x, y in ((a.held_by, b.held_by), (a.sent_by, b.sent_by)))
    early = tuple(x for x in a.freed_early_in if x in b.freed_early_in)
    return replace(
        a,
        num_bytes=num_bytes,
        freed_in=freed_in,
        held_by=held if freed_in >= 0 else (),
        freed_early_in=early,
        sent_by=sent,
    )


def _either(a: Holders, b: Holders) -> Holders:
    one, other = dict(a), dict(b)
    return tuple(
        (call, tuple(dict.fromkeys((*one.get(call, ()), *other.get(call, ()))))) for call in sorted(one | other)
    )


def projected(trace: ModelTrace, graph: BlockGraph, onto: ModelTrace, wider: BlockGraph) -> ModelTrace | None:
    """The trace of a batch that skips some blocks of the wider graph, as a trace of that graph. None if it runs other
    blocks, or runs them in another way.

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
    if graph.side_outputs and not wider.side_outputs:
        return None
    if {(place[v], name) for v, name in graph.without_grad} - set(wider.without_grad):
        return None
    works = {place[call]: known for call, known in enumerate(trace.calls)}
    to = {-1: -1, **dict(enumerate(place)), len(place): len(wider.calls)}

    def moved(holders: Holders) -> Holders:
        return tuple((to[call], under) for call, under in holders)

    shared = tuple(
        replace(
            t,
            call=to[t.call],
            allocated_in=to[t.allocated_in],
            freed_in=to[t.freed_in],
            held_by=moved(t.held_by),
            freed_early_in=moved(t.freed_early_in),
            sent_by=moved(t.sent_by),
        )
        for t in trace.shared
    )
    calls = tuple(works.get(call, onto.calls[call]) for call in range(len(wider.calls)))
    return replace(trace, graph=onto.graph, calls=calls, shared=shared)


def with_reserve(trace: ModelTrace, num_bytes: int) -> ModelTrace:
    """Add bytes from the beginning of the first block's forward to the end of its backward."""
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
    """The Work of strategies that both have. A region without a Work after a strategy has that of `keep`."""
    a, b = one.calls[call], other.calls[call]
    regions = (a.keys() | b.keys()) - {*one.strategies(call), *other.strategies(call)}
    found = {s: _work(a[s], b[s]) for s in one.strategies(call) if s in b}
    return found | {s: _work(a.get(s) or a["keep"], b.get(s) or b["keep"]) for s in sorted(regions)}


def _work(a: Work, b: Work) -> Work:
    maxima = {name: max(getattr(a, name), getattr(b, name)) for name in _MAXIMA}
    released = min(a.released_bytes, b.released_bytes)
    # Bytes of a call that remain after its backward, which comes after all of its forward.
    remaining = max(w.forward_delta_bytes - w.released_bytes + w.backward_delta_bytes for w in (a, b))
    backward_delta = remaining - (maxima["forward_delta_bytes"] - released)
    return replace(a, **maxima, released_bytes=released, backward_delta_bytes=backward_delta)
