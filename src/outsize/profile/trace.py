"""ModelTrace: what was measured of a model at one batch shape. No torch: the planner reads it anywhere."""

from dataclasses import dataclass, replace

from outsize.hardware.spec import Residue
from outsize.model.graph import BlockGraph
from outsize.model.work import Shared, Strategy, Work


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    graph: str
    """Fingerprint of the BlockGraph it belongs to."""
    inputs: dict[str, tuple[int, ...]]
    """Shapes of the batch it was taken with."""
    visits: tuple[dict[str, Work], ...]
    """Per visit: Work by strategy. Regions know `keep` alone."""
    held_bytes: int
    """Outputs of the model: a loop holds them until its next forward returns."""
    provenance: str
    shared: tuple[Shared, ...] = ()
    residue: Residue = Residue()
    """Of the trial run. A plan that is made from a trace in the cache meets all of it in its first step."""

    def work(self, visit: int, strategy: Strategy) -> Work:
        return self.visits[visit][strategy]

    def strategies(self, visit: int) -> tuple[str, ...]:
        return tuple(self.visits[visit])


def added_in_place(trace: ModelTrace, graph: BlockGraph) -> ModelTrace:
    """A trace that was counted under a dispatch mode, as it is on a card without one: there, gradients of a weight with several uses are added up in place.

    Under a mode the sum is a tensor of its own, made at the end of each use's backward but the first that comes; nothing else as large is made after it.
    """
    visits = [dict(works) for works in trace.visits]
    for param in graph.params:
        for visit in [v for v in graph.users[param.name] if graph.has_backward[v]][:-1] if param.trainable else []:
            for strategy, work in visits[visit].items():
                peak = max(work.backward_peak_bytes - param.nbytes, work.backward_delta_bytes)
                visits[visit][strategy] = replace(work, backward_peak_bytes=peak)
    return replace(trace, visits=tuple(visits))
