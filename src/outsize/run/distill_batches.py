"""The batches of a distillation after pruning: batch k is that of the local training, so that the teacher's hidden
states that it has left on disk are those of batch k.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from outsize.base.errors import BadFile
from outsize.base.log import log
from outsize.loss.distillation import TEACHER_HIDDEN
from outsize.run.content_hash import rows_hash
from outsize.run.inputs import PLACE, BatchOrder, OrderedRows
from outsize.run.teacher_hidden import DATA, THREADS, TeacherHidden


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
        """With hidden states, if batches have them."""
        hidden = self.hidden
        if hidden is None:
            return batch_of

        def with_hidden(rows: int) -> dict[str, Any]:
            batch = batch_of(rows)
            shape = (*batch["input_ids"].shape, hidden.hidden_size)
            return {**batch, TEACHER_HIDDEN: torch.zeros(shape, dtype=hidden.dtype)}

        return with_hidden


@dataclass(frozen=True, slots=True)
class OrderedCollator:
    """Adds the teacher's hidden states to batches of `OrderedRows`. Other batches, of evaluation, have none."""

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
        hidden = self.hidden.read(k)
        if hidden.shape[:2] != (shape := batch["input_ids"].shape):
            raise BadFile(
                f"{self.hidden.folder}: batch {k} is of {tuple(hidden.shape[:2])} rows and tokens, and that of the "
                f"data of {tuple(shape)}. Remove the folder; the same command then runs the teacher."
            )
        return {**batch, TEACHER_HIDDEN: hidden}
