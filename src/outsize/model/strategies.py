"""The activation strategies: what happens to a layer's activations between forward and backward. No torch.

Profiler, runtime, pins, configuration and plan table derive from `STRATEGIES`; the planner's candidates name each
strategy (planner/candidates.py). The function that runs a layer under a strategy is in activation/strategies.py.
"""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["keep", "recompute", "offload", "swap"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    name: Strategy
    sends: Literal["", "input", "saved"] = ""
    """The tensors that are copied to the host in forward and back in backward: none, the layer's input, or all that
    autograd saves."""
    recomputes: bool = False
    """The layer's forward runs again in backward."""
    pin: str = ""
    """The field of `Pins` that fixes how many layers use it. "": none, since all other layers use it."""


STRATEGIES: tuple[StrategyRecord, ...] = (
    StrategyRecord(name="keep"),
    StrategyRecord(name="recompute", recomputes=True, pin="n_checkpoint"),
    StrategyRecord(name="offload", sends="input", recomputes=True, pin="n_offload"),
    StrategyRecord(name="swap", sends="saved", pin="n_swap"),
)
"""In the order of preference: a later one is chosen only where it is faster or saves more GPU memory. Where a plan uses
several, the later ones get the first layers, whose copies have the most time to return."""

STRATEGY: dict[Strategy, StrategyRecord] = {record.name: record for record in STRATEGIES}
