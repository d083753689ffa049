"""Identity by content: hashes of a model's files and of rows, equal wherever the files lie."""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from outsize.base.cache_folder import cache_folder, write_whole
from outsize.base.log import log
from outsize.data.packing import PackedRows
from outsize.data.rows import Rows
from outsize.model.weights import weight_files

_FILE = "file_hashes.json"
_THREADS = 8
_MOST_FILES = 4096
"""Files whose hashes are kept; the oldest are dropped."""


def model_hash(folder: Path) -> str:
    """Of the config and the weight files. A file is read again only if its size or time has changed."""
    names = {"config.json": folder / "config.json", **{path.name: path for path in weight_files(folder)}}
    known = _known()
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as threads:  # hashing lets other threads run
        found = threads.map(lambda item: (*item, _found(item[1], known)), sorted(names.items()))
        for name, path, row in found:
            digest.update(f"{name}\0{row[2]}\n".encode())
            known.pop(str(path.resolve()), None)
            known[str(path.resolve())] = row  # at the end: used last
    _remember(known)
    return digest.hexdigest()[:32]


def _found(path: Path, known: Mapping[str, Any]) -> list[Any]:
    """Size, time and hash of a file."""
    real = path.resolve()
    facts = real.stat()
    state = [facts.st_size, facts.st_mtime_ns]
    found = known.get(str(real))
    if isinstance(found, list) and found[:2] == state:
        return found
    with real.open("rb") as file:
        return [*state, hashlib.file_digest(file, "sha256").hexdigest()]


def _known() -> dict[str, Any]:
    folder = cache_folder()
    try:
        found = json.loads((folder / _FILE).read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(known: dict[str, Any]) -> None:
    folder = cache_folder()
    if folder is None:
        return
    try:
        write_whole(folder / _FILE, json.dumps(dict(list(known.items())[-_MOST_FILES:]), indent=1))
    except OSError as error:
        log.warning("%s cannot be written (%s): the model's files are read again next time", folder, error.strerror)


def rows_hash(rows: Rows | PackedRows) -> str:
    """Of the tokens of all rows in order, and of which documents a packed row has. Labels are not used."""
    digest = hashlib.blake2b(digest_size=16)
    documents = rows.documents if isinstance(rows, PackedRows) else rows
    digest.update(np.ascontiguousarray(documents.lengths).data)
    for start, end in documents.bounds:
        digest.update(documents.ids[start:end].data)
    if isinstance(rows, PackedRows):
        for row in rows.rows:
            digest.update(np.append(row, -1).data)
    return digest.hexdigest()
