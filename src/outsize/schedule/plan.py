"""Plan: what the planner decides and predicts, as a frozen record that the runtime executes. No torch.

The *step_config* is given by the user (how to train). The *decision* is chosen by the search (what lives where). The
*work* is measured. The *estimate* is the simulator's prediction. A plan file holds all four, so a run can be repeated
and its prediction compared with a measurement.
"""

from dataclasses import dataclass, field
from typing import Literal

from outsize.hardware.spec import ProcessOverhead
from outsize.layout.chunks import Chunk
from outsize.layout.coordinates import Coordinates
from outsize.layout.optimizer import ChunkUpdate, OptimizerLayout
from outsize.model.strategies import Strategy
from outsize.model.work import SharedTensor, Work

Home = Literal["gpu", "host"]
UpdateMode = Literal["after_step", "in_backward"]
FORMAT = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Where a chunk's weights and optimizer state live between uses, and where the chunk is updated. A frozen chunk has
    no state and no update; their values are then the same as `weights`.
    """

    weights: Home
    state: Home
    update: Home
    """The update site. State on the GPU is updated there; state on the host there, or on the GPU: it is then streamed,
    copied to the GPU for the update and back after it."""

    @property
    def streams_state(self) -> bool:
        return self.state != self.update

    def __str__(self) -> str:
        return f"{self.weights}/{self.state}{f'/{self.update}' if self.streams_state else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How the run trains, as the plan assumes it. Other loops stay correct; their time and memory differ."""

    optimizer: OptimizerLayout
    update: UpdateMode = "after_step"
    accumulate: int = 1
    """Backward passes per step that the predicted time and memory assume."""
    fp32_grads: bool = False
    coordinates: dict[str, Coordinates] = field(default_factory=dict)
    """By parameter that a method trains in coordinates."""

    def update_of(self, chunk: Chunk) -> ChunkUpdate | None:
        """The update of a chunk. None for a frozen one."""
        return self.optimizer.update_of(chunk, fp32_grads=self.fp32_grads, coordinates=self.coordinates)

    @property
    def hold_gradients(self) -> bool:
        """Whether gradients are kept after the backward pass that computes them."""
        return self.update == "after_step" or self.accumulate > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    homes: tuple[Homes, ...]
    """By chunk."""
    strategies: tuple[Strategy, ...]
    """By call; only layers have another strategy than keep."""
    depth: int
    """Prefetch depth: how many streamed calls ahead weights are loaded. It determines the number of slots."""
    host_update_interval: int = 1
    """With updates in backward, the host updates every n-th of its chunks while the backward runs, in the order in
    which their gradients complete. It keeps the gradients of the others and updates them after the last gradient, in
    forward order, so that these updates overlap with the next forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    step_seconds: float
    gpu_bytes: int
    """Peak on the device over the run."""
    host_bytes: int
    gpu_parts: dict[str, int]
    """Bytes allocated for the whole run, by kind; the rest of `gpu_bytes` is activations."""
    host_parts: dict[str, int]
    busy_seconds: dict[str, float]
    """By lane, in one step."""
    peak_at: str
    """The action at the memory peak."""
    launch_bound_seconds: float = 0.0
    """Part of the compute lane's busy time in which it waits for the CPU thread that launches kernels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    format: int
    graph: str
    """Fingerprint of the BlockGraph."""
    hardware: str
    chunk_bytes: int
    inputs: dict[str, tuple[int, ...]]
    """Batch shapes it was made for."""
    step_config: StepConfig
    decision: Decision
    work: tuple[Work, ...]
    """By call, under its strategy."""
    held_bytes: int
    gpu_budget_bytes: int
    host_budget_bytes: int
    estimate: Estimate
    provenance: str
    """Which numbers were measured or estimated, and where."""
    search: str
    """How the search found it, as text."""
    shared: tuple[SharedTensor, ...] = ()
    """Tensors that several layers hold, as measured."""
    loss_chunk: int = 0
    """Tokens per chunk of a chunked loss; 0 for the model's own loss."""
    loss: str = ""
    """How the loss is computed, as text: in chunks of tokens, or from full logits and why. Empty if unknown; the loss
    is then computed from full logits.
    """
    attention: str = ""
    """The attention kernels in use, as text. Empty if unknown."""
    process_overhead: ProcessOverhead = ProcessOverhead()
    """Process overhead beside the estimate, as measured by the profiling run."""
    tile_tokens: int = 0
    """Length of the tiles over which the modules of `tiled` run (activation/tiles.py). 0: no module does."""
    tiled: tuple[str, ...] = ()
    profile_keys: tuple[str, ...] = ()
    """Cache keys of the profiles that the plan uses. A run that contradicts the plan deletes these profiles."""
    extrapolated_from: tuple[int, ...] = ()
    """Lengths of the rows that were profiled in place of the plan's longer ones. Empty if these were."""
