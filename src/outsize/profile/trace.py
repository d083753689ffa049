"""ModelTrace: what was measured of a model at one batch shape. No torch: the planner reads it anywhere."""

from dataclasses import dataclass

from outsize.hardware.spec import Residue
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
