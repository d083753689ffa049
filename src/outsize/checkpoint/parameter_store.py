"""ParameterStore: the interface through which saving and loading reach weights and optimizer state.

`runtime/store.py` implements it. Checkpoints are keyed by parameter name and do not depend on chunks, plans or devices;
chunk numbers only say which tensors are updated together. Tensors are given as ranges (ranges.py).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from outsize.checkpoint.constants import ConstantStore
from outsize.checkpoint.ranges import Ranges
from outsize.device.device import Device


class ParameterStore(Protocol):
    """Parameters and their optimizer state, by parameter name. Used while no transfer is in flight."""

    @property
    def params(self) -> Mapping[str, Tensor]:
        """Parameters, and the tensors that quantization attaches to them (model/parts.py)."""
        ...

    @property
    def device(self) -> Device: ...

    def ranges(self, name: str) -> Ranges:
        """The memory of a parameter's value."""

    def state_ranges(self, name: str) -> Mapping[str, Ranges]:
        """The memory of a trained parameter's optimizer state."""

    def value(self, name: str) -> Tensor:
        """A parameter's whole value, for reading."""

    def master(self, name: str) -> Tensor:
        """A parameter's value on the CPU; of a bf16 weight, its exact fp32 master."""

    def load(self, names: Iterable[str], read: Callable[[str, Ranges], None]) -> None:
        """Replace values: `read` fills the ranges of one parameter. The new values become the master weights too."""

    def chunk_of(self, name: str) -> int: ...

    def host_chunks(self) -> set[int]:
        """Chunks whose weights and state are in host memory: a thread may write them while the device computes."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model between two steps, with everything that a checkpoint saves."""

    model: nn.Module
    store: ParameterStore
    steps: dict[str, int]
    """Number of updates of each trained parameter."""
    groups: list[dict[str, Any]]
    """The optimizer's `param_groups`."""
    loss_chunk: int
    """Tokens per chunk of the loss; 0: full logits."""
    constants: ConstantStore | None = None
    """Of weights that are trained in coordinates, if there are any."""

    def master(self, name: str) -> Tensor:
        """The exact fp32 value of a parameter that is bf16 or fp32, on the CPU."""
        if self.constants is not None and name in self.constants.names:
            return self.constants.master(name)
        return self.store.master(name)

    @property
    def is_adapted(self) -> bool:
        return is_adapted(self.model)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers of the model's state dict, each under its first name. None for a PEFT model: its base has them."""
        kept = () if self.is_adapted else self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    @property
    def saved_names(self) -> set[str]:
        """Parameters and buffers that a checkpoint must hold. For a PEFT model, only the trained parameters."""
        return set(self.steps) if self.is_adapted else self.store.params.keys() | self.buffers.keys()


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a PEFT model, or a transformers model with a PEFT adapter. PEFT then defines the saved files."""
    return (hasattr(model, "peft_config") and hasattr(model, "get_base_model")) or getattr(
        model, "_hf_peft_config_loaded", False
    )
