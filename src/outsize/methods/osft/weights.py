"""The trained form of one weight in the stand-alone optimizer: its drift, or its factors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outsize.base.errors import BadFile, EngineMisuse
from outsize.methods.osft.bases import Bases
from outsize.methods.osft.factors import FactorSplit, contract_factors, merge_factors
from outsize.methods.osft.products import contract, merge
from outsize.methods.osft.row_shards import RowShards
from outsize.methods.osft.shape import SplitShape
from outsize.methods.osft.stored_bases import BasesId, load_bases


class SplitWeight(Protocol):
    name: str
    weight: nn.Parameter
    params: dict[str, nn.Parameter]
    """What the optimizer trains in place of the weight, all fp32."""

    @property
    def is_own(self) -> bool:
        """Whether only the optimizer wrote the weight."""

    def require_own(self) -> None:
        """Refuse a weight that others wrote. Of a DTensor, all processes of a group must call it alike."""

    def take(self) -> None:
        """Move the weight's gradient to `params`, adding to what they have."""

    def merge(self) -> None:
        """Write the weight from `params`."""

    def master(self) -> Tensor:
        """The weight in fp32 (of these rows), before it is rounded."""

    def saved(self) -> dict[str, Any]:
        """What `load` needs beside the optimizer's state."""

    def require_loadable(self, saved: dict[str, Any], folder: Path | None) -> None:
        """Refuse what was saved for another weight. `folder`: where bases may be."""

    def load(self, saved: dict[str, Any]) -> None: ...

    def restart(self, new: Any) -> None:
        """Become `new`, which splits the current weight. The params stay the same objects."""


def local_gradient(param: Tensor) -> Tensor | None:
    """The gradient of the local part."""
    grad = param.grad
    if isinstance(grad, DTensor) and isinstance(param, DTensor):
        grad = grad.redistribute(placements=param.placements)
    return None if grad is None else local(grad)


def local(tensor: Tensor) -> Tensor:
    """The tensor without its history; of a DTensor, this process's part. Shares its memory."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


class _OwnWrites:
    """Notices that others wrote a weight, moved or converted it: the optimizer would undo that, as it computes the
    weight from what it trains.
    """

    def __init__(self, name: str, weight: nn.Parameter):
        self._name, self._weight = name, weight
        self.note()

    def note(self) -> None:
        """The present value is the optimizer's own."""
        self._seen = self._present()

    def _present(self) -> tuple[Any, ...]:
        own = local(self._weight)
        return own.data_ptr(), own._version, own.dtype, own.device

    @property
    def are_all(self) -> bool:
        """Whether nobody else wrote."""
        return self._present() == self._seen

    def require_equal(self, value: Callable[[], Tensor]) -> None:
        """`value` computes what the weight should be. Values that a checkpoint brought are accepted: another machine
        may have rounded them otherwise.
        """
        present, own = self._present(), local(self._weight)
        if present[2:] != self._seen[2:]:
            (_, _, was, where), (_, _, dtype, device) = self._seen, present
            raise EngineMisuse(
                f"{self._name} is {dtype} on {device}, but was {was} on {where} when outsize.osft.AdamW was "
                "constructed. Move and convert the model before that."
            )
        expected = value().float()
        atol = 1e-6 * float(expected.abs().amax()) if expected.numel() else 0.0
        if not torch.allclose(own.float(), expected, rtol=4 * torch.finfo(own.dtype).eps, atol=atol):
            raise EngineMisuse(
                f"{self._name}: it was written, but outsize.osft.AdamW computes it from what it trains, and would undo "
                "that. Write weights before the optimizer is constructed, or call its next_task() to begin with the "
                "present ones."
            )
        self._seen = present


class DriftWeight:
    """W0 + Q D P."""

    def __init__(self, name: str, weight: nn.Parameter, bases: Bases, bases_id: BasesId):
        self.name, self.weight, self.base = name, weight, weight.detach().clone()
        self.drift = nn.Parameter(torch.zeros(bases.shape.drift, dtype=torch.float32, device=weight.device))
        self.params = {"drift": self.drift}
        self._set_bases(bases, bases_id)
        self._writes = _OwnWrites(name, weight)

    @property
    def is_own(self) -> bool:
        return self._writes.are_all

    def require_own(self) -> None:
        self._writes.require_equal(self.master)

    def _set_bases(self, bases: Bases, bases_id: BasesId) -> None:
        moved = {name: tensor.to(self.weight.device) for name, tensor in bases.tensors().items()}
        self.bases, self.bases_id = Bases(bases.shape, **moved), bases_id

    def take(self) -> None:
        gradient, self.weight.grad = self.weight.grad, None
        if gradient is None:
            return
        if not self.is_own:
            self.require_own()
        is_first = self.drift.grad is None
        if self.drift.grad is None:
            self.drift.grad = torch.empty_like(self.drift)
        contract(gradient.contiguous(), self.bases, out=self.drift.grad, accumulate=not is_first)

    def merge(self) -> None:
        with torch.no_grad():
            merge(self.base, self.drift.detach(), self.bases, out=self.weight)
        self._writes.note()

    def master(self) -> Tensor:
        out = torch.empty_like(self.base, dtype=torch.float32)
        merge(self.base, self.drift.detach(), self.bases, out=out)
        return out

    def saved(self) -> dict[str, Any]:
        return {"drift": self.drift.detach(), **self.bases_id._asdict()}

    def require_loadable(self, saved: dict[str, Any], folder: Path | None) -> None:
        _require_shapes(self.name, {"drift": self.drift}, saved)
        theirs, mine = BasesId(saved["weight"], saved["bases"]), self.bases_id
        if theirs.weight != mine.weight:
            raise BadFile(
                f"{self.name}: the saved drift is a change of other weights, or of other ranks. Construct the "
                "optimizer with the weights that the run, or its last task, began with, and the same settings."
            )
        if theirs.bases != mine.bases:
            found = folder and load_bases(folder, self.bases.shape, self.base.dtype, *theirs)
            if not found:
                raise BadFile(
                    f"{self.name}: the saved drift has bases of another machine, and {folder or 'the cache'} does not "
                    f"hold {theirs.weight}-{theirs.bases}. Copy the folder of bases from there, and name it as `bases`."
                )
            self._set_bases(*found)

    def load(self, saved: dict[str, Any]) -> None:
        _copy(self.drift, saved["drift"])

    def restart(self, new: "DriftWeight") -> None:
        self.base, self.bases, self.bases_id = new.base, new.bases, new.bases_id
        self.drift.zero_()
        self._writes.note()


class FactoredWeight:
    """residual + U diag(S) V."""

    def __init__(self, name: str, shape: SplitShape, weight: nn.Parameter, split: FactorSplit, shards: RowShards):
        self.name, self.weight, self.shape, self.shards = name, weight, shape, shards
        self.frozen_u, self.frozen_v = split.frozen_u, split.frozen_v
        self.u, self.s, self.v = (nn.Parameter(part) for part in (split.u, split.s, split.v))
        self.params = {"u": self.u, "s": self.s, "v": self.v}
        self.residual = local(weight).float() - self._product()
        self._writes = _OwnWrites(name, weight)

    @property
    def is_own(self) -> bool:
        return self._writes.are_all

    def require_own(self) -> None:
        self._writes.require_equal(self.master)

    def take(self) -> None:
        gradient, self.weight.grad = local_gradient(self.weight), None
        if gradient is None:
            return
        if self.shards.group is None and not self.is_own:
            self.require_own()
        found = contract_factors(gradient, *self._factors(), self.shards)
        for param, part in zip(self.params.values(), found, strict=True):
            param.grad = part if param.grad is None else param.grad.add_(part)

    def merge(self) -> None:
        local(self.weight).copy_(self.master())
        self._writes.note()

    def master(self) -> Tensor:
        return self._product().add_(self.residual)

    def saved(self) -> dict[str, Any]:
        return {name: getattr(self, name).detach() for name in self._SAVED}

    def require_loadable(self, saved: dict[str, Any], folder: Path | None) -> None:
        _require_shapes(self.name, self.saved(), saved)

    def load(self, saved: dict[str, Any]) -> None:
        for name, tensor in self.saved().items():
            _copy(tensor, saved[name])

    def restart(self, new: "FactoredWeight") -> None:
        for name, tensor in self.saved().items():
            _copy(tensor, new.saved()[name])
        self._writes.note()

    _SAVED = ("u", "s", "v", "frozen_u", "frozen_v", "residual")

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.u.detach(), self.s.detach(), self.v.detach()

    def _product(self) -> Tensor:
        return merge_factors(*self._factors(), self.shards)


def _require_shapes(name: str, own: dict[str, Tensor], saved: dict[str, Any]) -> None:
    for part, tensor in own.items():
        found = tuple(saved[part].shape) if part in saved else "no shape"
        if found != tuple(tensor.shape):
            raise BadFile(
                f"{name}: {part} has {found} in the saved state and {tuple(tensor.shape)} here. Use the OSFT settings "
                "and the number of processes that it was saved with."
            )


@torch.no_grad()
def _copy(tensor: Tensor, saved: Tensor) -> None:
    tensor.copy_(saved)
