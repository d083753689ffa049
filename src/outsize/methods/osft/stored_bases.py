"""Bases on disk: one file per weight and rank, named by the hash of both and by the hash of the bases.

Bases differ between machines, so a run that resumes elsewhere needs the files it began with.
"""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.base.cache_folder import cache_folder
from outsize.base.errors import BadFile, ModelUnsupported
from outsize.base.log import log
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.methods.osft.bases import Bases, split
from outsize.methods.osft.shape import SplitShape
from outsize.model.weights import require_finite
from outsize.progress import counted

_FORMAT = 1
_DIGITS = 24
_PART_BYTES = 4 * 2**20
_ABANDONED_SECONDS = 600
"""A temporary file of another process is abandoned after so long without a write."""


class BasesId(NamedTuple):
    """Identifies the bases of a weight."""

    weight: str
    """Hash of the weight, its split and how it is decomposed."""
    bases: str
    """Hash of the bases."""


def bases_folder() -> Path | None:
    """Where bases are kept if no folder is named. None without a cache."""
    folder = cache_folder()
    return None if folder is None else folder / "osft"


def load_or_split(
    weights: Iterable[tuple[str, SplitShape, Tensor]],
    *,
    svd: bool = False,
    folder: Path | None = None,
    total: int | None = None,
    device: torch.device | None = None,
) -> Iterator[tuple[Bases, BasesId]]:
    """The bases of each weight, one after another: read from `folder`, or computed and written there. The name is for
    messages.

    Bases that were read are on the CPU, others on `device`, where they are computed (default: the weight's).
    """
    for name, shape, weight in counted(weights, "splitting weights", total=total):
        require_finite(name, weight, ModelUnsupported)
        key = weight_hash(shape, weight, svd=svd)
        stored = None if folder is None else load_bases(folder, shape, weight.dtype, key)
        if stored is not None:
            yield stored
            continue
        on_device = weight.detach() if device is None else weight.detach().to(device)
        bases = split(
            on_device, shape.frozen_rank, is_transposed=shape.is_transposed, decomposition="svd" if svd else "eigh"
        )
        found = BasesId(key, bases_hash(bases))
        if folder is not None:
            _save(folder, bases, found)
        yield bases, found


def weight_hash(shape: SplitShape, weight: Tensor, *, svd: bool) -> str:
    settings = (_FORMAT, shape.rows, shape.columns, shape.frozen_rank, shape.is_mirrored, str(weight.dtype), svd)
    return _hash(str(settings), [weight])


def bases_hash(bases: Bases) -> str:
    return _hash("", bases.tensors().values())


def load_bases(
    folder: Path, shape: SplitShape, dtype: torch.dtype, key: str, bases: str = "*"
) -> tuple[Bases, BasesId] | None:
    """Read the bases of a weight: those with the hash `bases`, or any. None if the folder does not hold them."""
    for path in sorted(folder.glob(f"{key}-{bases}.safetensors")):
        try:
            with TensorFile(path) as file:
                tensors = {name: file.read(name) for name in file.entries}
            found = Bases(shape, **tensors)
            if found.free.shape != shape.free or found.frozen.shape != shape.frozen or found.free.dtype != dtype:
                raise BadFile(f"{path} holds bases of another weight. Delete it.")
            if bases_hash(found) != path.stem.removeprefix(f"{key}-"):
                raise BadFile(f"{path} is damaged: its content has another hash than its name. Delete it.")
        except (BadFile, TypeError) as error:
            log.warning("%s cannot be used, so the weight is split again: %s", path, error)
            continue
        return found, BasesId(key, path.stem.removeprefix(f"{key}-"))
    return None


def _save(folder: Path, bases: Bases, found: BasesId) -> None:
    path = folder / f"{found.weight}-{found.bases}.safetensors"
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    tensors = bases.tensors()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        for old in folder.glob(f"{found.weight}-*.tmp"):  # of a process that was killed
            if time.time() - old.stat().st_mtime > _ABANDONED_SECONDS:
                old.unlink()
        with TensorFile.create(temporary, {name: TensorSpec.of(t) for name, t in tensors.items()}, {}) as file:
            for name, tensor in tensors.items():
                file.write(name, tensor)
        temporary.replace(path)
    except OSError as error:
        log.warning("%s: the bases of a weight cannot be written (%s), so later runs compute them again", path, error)
        with suppress(OSError):
            temporary.unlink()


def _hash(text: str, tensors: Iterable[Tensor]) -> str:
    """Parts of tensors are hashed by several threads, then their hashes."""
    digest = hashlib.sha256(text.encode())
    for tensor in tensors:
        parts = tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).split(_PART_BYTES)
        for part in _threads().map(lambda part: hashlib.sha256(part.numpy().data).digest(), parts):
            digest.update(part)
    return digest.hexdigest()[:_DIGITS]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="outsize-hash")
