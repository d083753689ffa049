"""ModelTrace: what was measured of a model at one batch shape. No torch: the planner reads it anywhere."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outsize.hardware.spec import ProcessOverhead
from outsize.model.graph import BlockGraph
from outsize.model.strategies import Strategy
from outsize.model.work import SharedTensor, Work


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    graph: str
    """Fingerprint of the BlockGraph it belongs to."""
    inputs: dict[str, tuple[int, ...]]
    """Shapes of the batch."""
    calls: tuple[dict[str, Work], ...]
    """By call: Work by strategy. Regions have only `keep`, and a Work `after <strategy>` for every strategy of the
    layer before them under which their bytes differ from those after `keep`."""
    held_bytes: int
    """Outputs of the model, which a training loop holds until its next forward returns."""
    provenance: str
    shared: tuple[SharedTensor, ...] = ()
    counts_launches: bool = False
    """Launch times were counted by operators, not measured."""
    process_overhead: ProcessOverhead = ProcessOverhead()
    """Process overhead of the profiling run. With a cached trace, it arises only in the first step."""
    notes: tuple[str, ...] = ()
    """Notes for the user: which blocks cannot be recomputed, and why. Each is logged once per
    prepare.
    """
    tile_tokens: int = 0
    """Length of the tiles of `tiled`. 0: no module was run over tiles."""
    tiled: tuple[str, ...] = ()
    """Modules that run over tiles of long rows (activation/tiles.py), by name."""
    attention: str = ""
    """The attention kernels that ran, as text. Empty if unknown: on a device that is only simulated, or by hand."""
    profile_keys: tuple[str, ...] = ()
    """The entries of the profile cache that it is made of (base/cache_folder.py)."""
    extrapolated_from: tuple[int, ...] = ()
    """Lengths of the rows that were profiled in place of longer ones (profile/extrapolate.py)."""

    def work(self, call: int, strategy: Strategy) -> Work:
        return self.calls[call][strategy]

    def works(self, strategies: Sequence[Strategy]) -> tuple[Work, ...]:
        """The Work of every call under its strategy."""
        before = ("keep", *strategies)
        return tuple(known.get(after(before[call])) or known[strategies[call]] for call, known in enumerate(self.calls))

    def strategies(self, call: int) -> tuple[str, ...]:
        return tuple(name for name in self.calls[call] if not name.startswith(after("")))


def after(strategy: str) -> str:
    """The name of a region's Work if the layer before it has this strategy."""
    return f"after {strategy}"


def added_in_place(trace: ModelTrace, graph: BlockGraph) -> ModelTrace:
    """Correct a trace that was counted under a dispatch mode: without one, gradients of a weight with several uses are
    summed in place.

    Under a mode the sum is a new tensor. It is allocated at the end of each use's backward except the first in backward
    order, and nothing as large is allocated after it.
    """
    largest: dict[int, int] = {}
    for param in graph.params:
        for call in graph.backward_users[param.name][:-1] if param.trainable else []:
            largest[call] = max(largest.get(call, 0), param.nbytes)  # sums are made one after the other
    calls = [
        {
            s: replace(w, backward_peak_bytes=max(w.backward_peak_bytes - largest.get(call, 0), w.backward_delta_bytes))
            for s, w in works.items()
        }
        for call, works in enumerate(trace.calls)
    ]
    return replace(trace, calls=tuple(calls))
