"""One trace for several batches: whatever plan fits it holds for each of them. No torch.

The memory of a step is a ledger (planner/memory.py): a level that rises and falls from phase to phase. What raises it is taken from the batch that raises
it most, what lowers it from the batch that lowers it least, so the level of the merged trace is at every moment at least that of each batch.
"""

from dataclasses import replace

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
    return replace(one, visits=visits, shared=shared, held_bytes=max(one.held_bytes, other.held_bytes))


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
