"""The teacher's last hidden states on disk. Distillation reads them in place of running the teacher's layers.

    teacher-hidden/made_from.json      what their bits depend on, and the shape of each batch
    teacher-hidden/hidden.bin          batch after batch

The folder is complete or absent (checkpoint/folder.py). run/prune_hidden.py decides what is in it.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import BadFile, OutsizeError
from outsize.base.records import dumps, from_json
from outsize.checkpoint.folder import StagedDir, os_errors_as_save_failed, read_manifest

FOLDER, RECORD, HIDDEN = "teacher-hidden", "made_from.json", "hidden.bin"
DATA, THREADS = "data", "cpu_threads"
_REMEDY = f"Restore it, or remove {FOLDER}: the same command then runs the teacher."
_CHANGED = {"teacher": "the teacher has changed", DATA: "the rows of the data have changed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    made_from: dict[str, Any]
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    """Of each batch: rows, tokens, hidden size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherHidden:
    """The hidden states of a complete folder."""

    folder: Path
    record: Record
    starts: tuple[int, ...] = field(repr=False)
    """First byte of each batch."""

    @classmethod
    def open(cls, folder: Path) -> "TeacherHidden":
        """Raises BadFile with the reason if the folder is not complete."""
        path = folder / RECORD
        try:
            read_manifest(folder)
            record = from_json(Record, json.loads(path.read_text(encoding="utf-8")), where=str(path))
            sizes = [math.prod(shape) * getattr(torch, record.dtype).itemsize for shape in record.shapes]
        except (OSError, ValueError, AttributeError, OutsizeError) as error:
            raise BadFile(f"{folder} is damaged: {str(error).partition('. ')[0]}. {_REMEDY}") from None
        starts = tuple(accumulate(sizes, initial=0))
        if (found := (folder / HIDDEN).stat().st_size) != starts[-1]:
            raise BadFile(f"{folder} is damaged: {HIDDEN} has {found} bytes instead of {starts[-1]}. {_REMEDY}")
        return cls(folder=folder, record=record, starts=starts)

    def difference(self, now: Mapping[str, Any]) -> str:
        """The first thing that differs from what they were made from. `now`: some of it, by name."""
        for name, value in now.items():
            if (then := self.record.made_from.get(name)) != value:
                return _CHANGED.get(name, f"{name} was {then} and is {value}")
        return ""

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.record.dtype)
        return found

    @property
    def hidden_size(self) -> int:
        return self.record.shapes[0][-1]

    def read(self, k: int, *, pinned: bool = False) -> Tensor:
        """Those of batch `k`, in host memory. `pinned`: for a copy that nothing waits for."""
        found = torch.empty(self.record.shapes[k], dtype=self.dtype, pin_memory=pinned)
        view = memoryview(found.view(-1).view(torch.uint8).numpy().data)
        path = self.folder / HIDDEN
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(self.starts[k])
                done = 0
                while done < len(view) and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise BadFile(f"{path} cannot be read ({error.strerror}). {_REMEDY}") from None
        if done < len(view):
            raise BadFile(f"{path} ends in batch {k}. {_REMEDY}")
        return found


def write_hidden(place: Path, made_from: dict[str, Any], batches: Iterable[Tensor], num_bytes: int) -> None:
    """Write the folder. `made_from`: see `Record`. `batches`: in host memory. `num_bytes`: about as many. Raises
    SaveFailed.
    """
    staged = StagedDir.of(place, replace=True)
    try:
        staged.require_space(num_bytes)
        shapes, dtypes = [], set[torch.dtype]()
        with os_errors_as_save_failed(place), (staged.path / HIDDEN).open("wb", buffering=0) as file:
            for hidden in batches:
                _write_all(file.fileno(), hidden.contiguous())
                shapes.append(tuple(hidden.shape))
                dtypes.add(hidden.dtype)
        (dtype,) = dtypes
        record = Record(made_from=made_from, dtype=str(dtype).removeprefix("torch."), shapes=tuple(shapes))
        (staged.path / RECORD).write_text(dumps(record), encoding="utf-8")
        staged.publish({"kind": "hidden states"})
    except BaseException:
        staged.discard()
        raise


def _write_all(file: int, tensor: Tensor) -> None:
    view, done = memoryview(tensor.view(-1).view(torch.uint8).numpy().data), 0
    while done < len(view):
        done += os.write(file, view[done:])
