"""ParameterStore: what saving and loading need of the object that holds a model's weights and optimizer state.

`runtime/store.py` implements it. Checkpoints are keyed by parameter name and do not depend on chunks, plans or devices;
chunk numbers only say which tensors are updated together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from outsize.device.device import Device


class ParameterStore(Protocol):
    """Parameters and their optimizer state, by parameter name. No transfer is in flight while it is used."""

    @property
    def params(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def device(self) -> Device: ...

    def read(self, name: str) -> Tensor:
        """A view of the value."""

    def load(self, name: str, read_into: Callable[[Tensor], None]) -> None:
        """Read a new value into every copy. It becomes the master weight too."""

    def state_views(self, name: str) -> Mapping[str, Tensor]:
        """Views of the optimizer state of a trained parameter."""

    def fill(self, views: list[Tensor], read_into: Callable[[Tensor], None]) -> None:
        """Read one tensor into views on any device; `read_into` fills a CPU tensor."""

    def chunk_of(self, name: str) -> int: ...

    def host_chunks(self) -> set[int]:
        """Chunks whose weights and state are in host memory: a thread may write them while the device computes."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model between two steps, with everything that a checkpoint holds of it."""

    model: nn.Module
    store: ParameterStore
    steps: dict[str, int]
    """Updates made so far, for every trained parameter."""
    groups: list[dict[str, Any]]
    """The optimizer's `param_groups`."""
    loss_chunk: int
    """Tokens per chunk of the loss; 0: full logits."""

    @property
    def is_adapted(self) -> bool:
        return is_adapted(self.model)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers that belong to the model's state dict, each under its first name. A PEFT model's belong to its
        base."""
        kept = () if self.is_adapted else self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    @property
    def saved_names(self) -> set[str]:
        """Parameters and buffers that a checkpoint must hold. A PEFT model's frozen parameters belong to its base."""
        return set(self.steps) if self.is_adapted else self.store.params.keys() | self.buffers.keys()


def is_adapted(model: nn.Module) -> bool:
    """Whether it is a PEFT model, or a transformers model with PEFT inside: saved as an adapter, in PEFT's own form."""
    return (hasattr(model, "peft_config") and hasattr(model, "get_base_model")) or getattr(
        model, "_hf_peft_config_loaded", False
    )
