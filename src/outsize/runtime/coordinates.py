"""CoordinateTraining: contract and merge of the weights that a method trains in coordinates, and their constants."""

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.base.log import log
from outsize.checkpoint.constants import ConstantHashes
from outsize.checkpoint.ranges import Ranges
from outsize.layout.coordinates import COORDINATES
from outsize.optim.method import Constants, Method
from outsize.progress import counted
from outsize.runtime.store import Store
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B


@dataclass(frozen=True, slots=True)
class KeptConstants:
    """The constants and the initial value of one weight between two plans, on the host."""

    constants: Constants
    base: Tensor
    """Flat, in the order of the parameter's memory."""
    hashes: ConstantHashes | None


class CoordinateTraining:
    def __init__(self, store: Store, method: Method | None, kept: Mapping[str, KeptConstants] | None):
        """`kept`: from the plan before. None: computed from the weights."""
        place = self._place = store.place
        self._store, self._method = store, method
        self.names = [
            piece.name for index in place.updated if place.has_coordinates(index) for piece in place.chunk(index).pieces
        ]
        assert method is not None or not self.names
        self._hashes: dict[str, ConstantHashes] = {}
        if kept is None:
            self.compute()
        else:
            for name in self.names:
                self._restore(name, kept[name])

    # Constants.

    def compute(self, then: Callable[[str], None] = lambda name: None) -> None:
        """Make the present weights the initial ones, and compute their constants. `then` is called after each weight:
        it resets the coordinates. If this is interrupted, every weight still equals its coordinates' merge.
        """
        self._hashes.clear()
        for name in counted(self.names, "Decomposing weights", total=len(self.names)):
            self._compute(name)
            then(name)

    def _home(self, name: str) -> Tensor:
        index = self._store.chunk_of(name)
        return self._store.buffer((B.HOST_CONSTANTS if self._place.streams_constants(index) else B.CONSTANTS, index))

    def _constants(self, name: str, memory: Tensor) -> Constants:
        """A weight's constants in a buffer of its chunk."""
        of_chunk = self._place.constants_of(self._store.chunk_of(name))
        one = self._place.step_config.coordinates[name]
        contract_at, merge_at = of_chunk.contract_at[name], of_chunk.merge_at[name]
        return Constants(
            memory[contract_at : contract_at + one.contract_bytes], memory[merge_at : merge_at + one.merge_bytes]
        )

    def _base(self, name: str, memory: Tensor) -> Tensor:
        """A weight's initial value in a buffer of its chunk, flat."""
        index, piece = self._place.layout.location[name]
        chunk = self._place.chunk(index)
        dtype: torch.dtype = getattr(torch, chunk.dtype)
        flat = memory[self._place.constants_of(index).base_at :][: chunk.nbytes].view(dtype)
        return flat[piece.offset : piece.offset + piece.numel]

    @torch.no_grad()
    def _compute(self, name: str) -> None:
        assert self._method is not None
        memory = self._home(name)
        out, (value, _) = self._constants(name, memory), self._store.ranges(name).parts[0]
        with self._store.device.on_host():
            if not self._is_computed_on_device(name, out):
                self._method.compute(name, self._store.value(name).cpu(), out)
        self._base(name, memory).copy_(value)

    def _is_computed_on_device(self, name: str, out: Constants) -> bool:
        """Compute the constants of a weight on the device, in the memory that the plan leaves for activations. Returns
        False if that is too little."""
        assert self._method is not None
        try:
            self._method.compute(name, self._store.value(name, on_device=True), out)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "ALLOC_FAILED" not in str(error):
                raise
            log.warning("%s is decomposed on the CPU, which is slower: the GPU has too little free memory", name)
            return False
        return True

    @torch.no_grad()
    def _restore(self, name: str, kept: KeptConstants) -> None:
        memory = self._home(name)
        constants = self._constants(name, memory)
        constants.contract.copy_(kept.constants.contract)
        constants.merge.copy_(kept.constants.merge)
        self._base(name, memory).copy_(kept.base)
        if kept.hashes is not None:
            self._hashes[name] = kept.hashes

    def keep(self) -> dict[str, KeptConstants]:
        """The constants for the next plan: those on the host are handed over, those on the device are copied."""
        kept = {}
        for name in self.names:
            memory = self._home(name)
            found = self._constants(name, memory)
            kept[name] = KeptConstants(
                Constants(found.contract.cpu(), found.merge.cpu()),
                self._base(name, memory).cpu(),
                self._hashes.get(name),
            )
        return kept

    # For checkpoints.

    def hashes(self) -> dict[str, ConstantHashes]:
        """Computed when a checkpoint first needs them, by several threads: hashing does not hold Python's lock."""
        missing = [name for name in self.names if name not in self._hashes]
        if not missing:
            return self._hashes
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            self._hashes |= dict(zip(missing, pool.map(self._hash, missing), strict=True))
        return self._hashes

    def _hash(self, name: str) -> ConstantHashes:
        memory = self._home(name)
        found = self._constants(name, memory)
        base = self._base(name, memory).view(torch.uint8)
        return ConstantHashes(_sha256(base), _sha256(found.contract, found.merge))

    @torch.no_grad()
    def master(self, name: str) -> Tensor:
        """The weight in fp32, made on the CPU: its kernels may differ from the GPU's in the last bits."""
        assert self._method is not None
        memory, value = self._home(name), self._store.value(name)
        found = self._constants(name, memory)
        coordinates = self._store.state_ranges(name)[COORDINATES].whole().cpu()
        out = torch.empty(value.shape, dtype=torch.float32)
        scratch = torch.empty(self._place.step_config.coordinates[name].scratch_bytes, dtype=torch.uint8)
        base = self._base(name, memory).cpu().as_strided(value.shape, value.stride())
        constants = Constants(found.contract.cpu(), found.merge.cpu())
        self._method.merge(name, base, coordinates, constants, out=out, scratch=scratch)
        return out

    def forget_hashes(self) -> None:
        self._hashes.clear()

    def constant_ranges(self, name: str) -> dict[str, Ranges]:
        found = self._constants(name, self._home(name))
        return {"contract": Ranges.of(found.contract), "merge": Ranges.of(found.merge)}

    # Work of actions.

    def contract(self, name: str, gradient: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Add the gradient of a weight to that of its coordinates, or write it there."""
        assert self._method is not None
        memory = self._store.buffer(self._place.constants_buffer(self._store.chunk_of(name)))
        with torch.no_grad(), self._store.device.on_host():  # the CPU's products need temporary memory
            self._method.contract(
                name,
                gradient,
                self._constants(name, memory),
                out=out,
                scratch=self._store.gpu[B.SCRATCH, 0],
                accumulate=accumulate,
            )

    def merge(self, index: int) -> Callable[[], None]:
        """The work that makes a chunk's weights from its coordinates."""
        store, place, method = self._store, self._place, self._method
        assert method is not None
        constants = store.buffer(place.constants_buffer(index))
        coordinates = _fp32(store.buffer(place.coordinates_buffer(index)), place.update_of(index).numel)
        weights: Buffer = place.weights_buffer(index)

        def work() -> None:
            for piece in place.chunk(index).pieces:
                out = store.in_buffer(weights, piece.name)
                base = self._base(piece.name, constants).as_strided(out.shape, out.stride())
                drift = place.updated_pieces[piece.name]
                with torch.no_grad(), store.device.on_host():
                    method.merge(
                        piece.name,
                        base,
                        coordinates[drift.offset : drift.offset + drift.numel].view(place.updated_shape(piece.name)),
                        self._constants(piece.name, constants),
                        out=out,
                        scratch=store.gpu[B.SCRATCH, 0],
                    )

        return work


def _fp32(memory: Tensor, numel: int) -> Tensor:
    return memory[: 4 * numel].view(torch.float32)


def _sha256(*parts: Tensor) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.cpu().numpy().data)
    return digest.hexdigest()[:16]
