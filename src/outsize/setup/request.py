"""The settings of a plan, as one record for `outsize.prepare`, `outsize.plan`, the Trainer and the command line."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outsize.base.errors import ConfigError
from outsize.base.units import is_count
from outsize.device.device import Device
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.model.strategies import TILE_TOKENS
from outsize.model.weights import Weights
from outsize.optim.method import MethodSpec
from outsize.optim.names import default_spec
from outsize.optim.spec import OptimizerSpec
from outsize.profile.calling import Loss
from outsize.schedule.pins import Pins
from outsize.schedule.plan import Plan, StepConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Settings that every plan has. The docstring of `outsize.prepare` describes them."""

    optimizer: OptimizerSpec = field(default_factory=default_spec)
    method: MethodSpec | None = None
    gpu_memory: str | int | None = None
    host_memory: str | int | None = None
    accumulate: int | None = None
    """None: 1, or the number that a batch size implies."""
    pins: Pins | None = None
    chunk_bytes: str | int = DEFAULT_CHUNK_BYTES
    chunked_loss: bool | None = None
    tile_tokens: int = TILE_TOKENS

    def __post_init__(self) -> None:
        if not is_count(self.tile_tokens, least=0):
            raise ConfigError(
                f"tile_tokens {self.tile_tokens!r} is no number of tokens. Set a whole number, or 0 for no tiles."
            )

    @property
    def step_config(self) -> StepConfig:
        optimizer, passes = self.optimizer, 1 if self.accumulate is None else self.accumulate
        return optimizer.step_config(passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareRequest(PlanRequest):
    """Settings of a plan for a model and a device that are present."""

    device: str | Device | None = None
    blocks: Sequence[str] | None = None
    max_shape: tuple[int, int] | None = None
    plan: Plan | str | Path | None = None
    weights: str | Path | Weights | None = None
    loss: Loss | None = None
