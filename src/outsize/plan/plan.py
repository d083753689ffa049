"""Plan: the decision, its step_config, and what it promises. A frozen record without torch; planner and runtime meet
only here.

*StepConfig* are given (how the user trains), the *decision* is chosen (what lives where), the *work* is measured, the
*estimate* is what walking the schedule gave. A plan file holds all four, so a run can be repeated and its promise be
checked.
"""

from dataclasses import dataclass
from typing import Literal

from outsize.hardware.spec import ProcessOverhead
from outsize.layout.optimizer import ADAMW, OptimizerLayout
from outsize.model.strategies import Strategy
from outsize.model.work import SharedTensor, Work

Home = Literal["gpu", "host"]
UpdateMode = Literal["after_step", "in_backward"]
FORMAT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """Where a chunk's bytes live between uses."""

    weights: Home
    optimizer: Home
    """Of frozen chunks: the same as `weights`, and nothing lives there."""

    def __str__(self) -> str:
        return f"{self.weights}/{self.optimizer}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepConfig:
    """How the run trains. Hints about memory; any loop stays correct under them."""

    update: UpdateMode = "after_step"
    accumulate: int = 1
    """Backward passes per step that the plan's time and memory are for."""
    fp32_grads: bool = False
    optimizer: OptimizerLayout = ADAMW

    @property
    def hold_gradients(self) -> bool:
        """Whether gradients outlive the backward pass that made them."""
        return self.update == "after_step" or self.accumulate > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    homes: tuple[Homes, ...]
    """Per chunk."""
    strategies: tuple[Strategy, ...]
    """Per call; regions keep."""
    depth: int
    """How many streamed calls ahead weights are loaded; slots follow from it."""
    host_update_interval: int = 1
    """With updates in backward: every so many of the chunks that are updated on the host, in the order their gradients
    land, are updated while the backward runs. The gradients of the others wait on the host; their updates follow the
    last gradient, in forward order, and go on under the next forward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    step_seconds: float
    gpu_bytes: int
    """High-water on the device over the run."""
    host_bytes: int
    gpu_parts: dict[str, int]
    """What is allocated for the whole run, by kind; the rest of `gpu_bytes` is activations."""
    host_parts: dict[str, int]
    busy_seconds: dict[str, float]
    """Per lane, in one step."""
    peak_at: str
    """The action during which the device is fullest."""
    launch_bound_seconds: float = 0.0
    """Of the compute lane's, that it waits for the thread which tells it what to compute."""


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
    """Per call, under its strategy."""
    held_bytes: int
    gpu_budget_bytes: int
    host_budget_bytes: int
    estimate: Estimate
    provenance: str
    """Where the numbers come from."""
    search: str
    """How it was found, in words."""
    shared: tuple[SharedTensor, ...] = ()
    """What layers share among their inputs, as measured."""
    loss_chunk: int = 0
    """Tokens at once of a loss in chunks; 0: the model's own loss."""
    loss: str = ""
    """How it is made, in words: in chunks of tokens, or from full logits and why. Empty: it was not told, and is made
    from full logits.
    """
    process_overhead: ProcessOverhead = ProcessOverhead()
    """What the model's run takes beside the estimate, as the trial run found it."""
    profile_keys: tuple[str, ...] = ()
    """The cached profiles that it is made of. A run that contradicts the plan deletes them."""
