"""The batches of a distillation after pruning: batch k is that of the local training, so that the teacher's hidden
states that it has left on disk are those of batch k.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import BadFile
from outsize.base.log import log
from outsize.device.device import Device
from outsize.run.content_hash import rows_hash
from outsize.run.inputs import PLACE, BatchOrder, OrderedRows
from outsize.run.teacher_hidden import DATA, THREADS, TeacherHidden

TEACHER_BATCH = "teacher_batch"
"""The key of a batch's number in a batch whose hidden states are known; None in one to plan for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillBatches:
    order: BatchOrder
    num_batches: int
    hidden: TeacherHidden | None
    """Of the teacher, for each batch; None: the teacher runs."""

    def of(self, rows: Any, *, is_on_gpu: bool) -> "DistillBatches":
        """Without the hidden states if they are not those of these rows, or not with this number of CPU threads."""
        if self.hidden is None:
            return self
        threads = None if is_on_gpu else torch.get_num_threads()
        if why := self.hidden.difference({DATA: rows_hash(rows), THREADS: threads}):
            log.warning("the teacher runs, and its hidden states in %s are not used: %s", self.hidden.folder, why)
            return replace(self, hidden=None)
        return self

    def rows(self, rows: Any) -> OrderedRows:
        return OrderedRows(rows, self.order, self.num_batches)

    def collator(self, collator: Any) -> "OrderedCollator":
        return OrderedCollator(collator, self.order.rows_per_batch, self.hidden)

    def batch_to_plan_for(self, batch_of: Callable[[int], dict[str, Any]]) -> Callable[[int], dict[str, Any]]:
        return batch_of if self.hidden is None else lambda rows: {**batch_of(rows), TEACHER_BATCH: None}


@dataclass(frozen=True, slots=True)
class OrderedCollator:
    """Adds its number to a batch of `OrderedRows` if the teacher's hidden states are known. Batches of evaluation have
    none.
    """

    collator: Any
    rows_per_batch: int
    hidden: TeacherHidden | None

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        places = [row[PLACE] for row in rows if PLACE in row]
        batch: dict[str, Any] = self.collator([{key: row[key] for key in row if key != PLACE} for row in rows])
        if self.hidden is None or not places:
            return batch
        k = places[0] // self.rows_per_batch
        assert places == list(range(k * self.rows_per_batch, (k + 1) * self.rows_per_batch)), "batches are whole"
        if (then := self.hidden.record.shapes[k][:2]) != (now := tuple(batch["input_ids"].shape)):
            raise BadFile(
                f"{self.hidden.folder}: batch {k} is of {then[0]} rows of {then[1]} tokens, and that of the data of "
                f"{now[0]} of {now[1]}. Remove the folder; the same command then runs the teacher."
            )
        return {**batch, TEACHER_BATCH: k}


class HiddenReader:
    """Reads batches of hidden states, each while the one before is in use."""

    def __init__(self, hidden: TeacherHidden, device: Device):
        self._hidden, self._device = hidden, device
        self._thread = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[Tensor]] | None = None

    @property
    def host_bytes(self) -> int:
        """Of a batch that is copied to the device, one that is read, and one that is no longer needed."""
        return 3 * max(map(math.prod, self._hidden.record.shapes)) * self._hidden.dtype.itemsize

    def on_device(self, k: int | None, shape: torch.Size) -> Tensor:
        """`k`: None for a batch to plan for. `shape`: of the token ids. Planning also changes the shapes of batches,
        and does not use their values.
        """
        hidden, device = self._hidden, self._device
        if k is None or hidden.record.shapes[k][:2] != tuple(shape):
            return torch.zeros((*shape, hidden.hidden_size), dtype=hidden.dtype, device=device.torch_device)
        found = (self._ahead[1] if self._ahead is not None and self._ahead[0] == k else self._begin(k)).result()
        self._ahead = (k + 1, self._begin(k + 1)) if k + 1 < len(hidden.record.shapes) else None
        return device.put(found)

    def _begin(self, k: int) -> Future[Tensor]:
        return self._thread.submit(self._hidden.read, k, pinned=self._device.is_gpu)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
