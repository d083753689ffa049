"""The activation strategies: what happens to a layer's activations between forward and backward. No torch.

Profiler, planner, runtime, pins, configuration and plan table derive from `STRATEGIES`. The function that runs a layer
under a strategy is in activation/strategies.py.
"""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["keep", "recompute", "recompute+attention", "offload", "offload+attention", "swap"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    name: Strategy
    participle: str
    """For texts: `3 layers swapped`."""
    sends: Literal["", "input", "saved"] = ""
    """The tensors that are copied to the host in forward and back in backward: none, the layer's input, or all that
    autograd saves."""
    recomputes: bool = False
    """The layer's forward runs again in backward."""
    saves_attention_of: Strategy | Literal[""] = ""
    """It is this strategy, except that the outputs of attention are saved too, where the input is: attention kernels do
    not run again. Only for layers that call a known attention operator."""
    pin: str = ""
    """The field of `Pins` that fixes how many layers use it. "": none."""


STRATEGY: dict[Strategy, StrategyRecord] = {
    record.name: record
    for record in (
        StrategyRecord(name="keep", participle="kept"),
        StrategyRecord(name="recompute", participle="recomputed", recomputes=True, pin="n_checkpoint"),
        StrategyRecord(
            name="recompute+attention",
            participle="recomputed without attention",
            recomputes=True,
            saves_attention_of="recompute",
            pin="n_checkpoint_attention",
        ),
        StrategyRecord(name="offload", participle="offloaded", sends="input", recomputes=True, pin="n_offload"),
        StrategyRecord(
            name="offload+attention",
            participle="offloaded with attention",
            sends="input",
            recomputes=True,
            saves_attention_of="offload",
            pin="n_offload_attention",
        ),
        StrategyRecord(name="swap", participle="swapped", sends="saved", pin="n_swap"),
    )
}
"""In the order of preference: a later one is chosen only where it is faster or saves more GPU memory. Where a plan uses
several, the later ones get the first layers, whose copies have the most time to return."""

STRATEGIES = STRATEGY.values()
"""The records in that order: a view, so that a test can add one."""

TILE_TOKENS = 8192
"""Default length of the tiles of activation/tiles.py. The matrix products of one tile keep a GPU busy."""

Mix = tuple[int, ...]
"""How many layers have each strategy of `choices()`, in that order. The other layers keep."""


def choices() -> tuple[StrategyRecord, ...]:
    """All strategies but `keep`, which is the first and that of the layers without another one."""
    return tuple(STRATEGIES)[1:]
