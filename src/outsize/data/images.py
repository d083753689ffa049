"""The images of conversations: where messages and columns hold them, and the files that they become.

Every image is a file on disk, so that rows in memory are small: contents of a row and downloads are written to the
cache folder once. Batches read the files.
"""

import base64
import binascii
import hashlib
import io
import re
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from outsize.base.cache_folder import cache_folder
from outsize.base.errors import ConfigError, DataError
from outsize.data.files import Record, json_type, need

PLACEHOLDER = "<image>"
IMAGE_COLUMNS = ("images", "image")
_PARTS = ("image", "image_url")
_KEYS = ("bytes", "path", "url", "image", "image_url", "base64")
"""Keys of an image part that may hold the image, first to last."""
_SECONDS = 30
_ATTEMPTS = 2
_ORIENTATION = 0x0112
_HASHED_BYTES = 1 << 16

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ImageFile:
    path: str
    size: tuple[int, int]
    """Width and height as shown, after the orientation that the file asks for."""
    digest: str
    """Of the file's length and its first 64 KiB."""


# --- finding


def has_images(record: Record) -> bool:
    """Whether a column, or a part of a message in any column, is an image."""
    messages = (message for value in record.fields.values() if isinstance(value, list) for message in value)
    contents = (message.get("content", message.get("value")) for message in messages if isinstance(message, dict))
    return bool(_column(record)) or any(
        isinstance(part, dict) and part.get("type") in _PARTS
        for content in contents
        if isinstance(content, list)
        for part in content
    )


def _column(record: Record) -> list[Any]:
    found: Any = next((record.fields[name] for name in IMAGE_COLUMNS if record.fields.get(name) is not None), [])
    return list(found) if isinstance(found, (list, tuple)) else [found]


def image_parts(record: Record, messages: Sequence[Message]) -> tuple[list[Message], list[Any]]:
    """The messages with a part `{"type": "image"}` per image, and what the data have for each image, in this order.

    A part without an image of its own takes the next of the column `images`, as does `<image>` in a text. If there is
    neither, all images of the column come before the first message of the user, as in TRL.
    """
    column, found, used = _column(record), list[Any](), 0
    made: list[Message] = []
    for message in messages:
        content = message.get("content")
        if column and isinstance(content, str) and PLACEHOLDER in content:
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            made.append(message)
            continue
        parts: list[Any] = []
        for given in content:
            part = {key: value for key, value in given.items() if value is not None} if isinstance(given, dict) else {}
            if part.get("type") in _PARTS:
                parts.append({"type": "image"})
                own = any(key in part for key in _KEYS)
                found.append(part if own else _at(column, part.get("index", used), record))
                used += not own
            elif column and PLACEHOLDER in str(part.get("text", "")):
                first, *others = re.split(rf"\n?{PLACEHOLDER}\n?", part["text"])
                parts += _text(first)
                for text in others:
                    parts += [{"type": "image"}, *_text(text)]
                    found.append(_at(column, used, record))
                    used += 1
            else:
                parts.append(part or given)
        made.append({**message, "content": parts})
    if column and not found:
        asked = next((n for n, message in enumerate(made) if message["role"] == "user"), 0)
        text = made[asked].get("content")
        texts = _text(text) if isinstance(text, str) else list(text or ())
        made[asked] = {**made[asked], "content": [*({"type": "image"} for _ in column), *texts]}
        found, used = column, len(column)
    if used < len(column):
        raise DataError(
            f"{record.place}: {len(column)} images, but the messages have {used} places for them ({PLACEHOLDER}, or "
            "parts of type image). Correct the record."
        )
    return made, found


def _text(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}] if text else []


def _at(column: list[Any], index: Any, record: Record) -> Any:
    if isinstance(index, int) and 0 <= index < len(column):
        return column[index]
    number = index + 1 if isinstance(index, int) else index
    raise DataError(
        f"{record.place}: the messages have a place for image {number}, but the row has {len(column)} images. Correct "
        "the record."
    )


# --- files


def image_file(given: Any, folder: Path, place: str) -> ImageFile:
    """The file of an image: a path, URL, data URI, its bytes, or an object with one of them. Relative paths start in
    `folder`.
    """
    given = _source(given, place)
    if isinstance(given, bytes):
        path = _kept(given, lambda: given, place)
    elif not isinstance(given, str) or not given:
        raise DataError(f"{place}: an image is {json_type(given)}, not a path, a URL or bytes. Correct the record.")
    elif given.startswith(("http://", "https://")):
        path = _kept(given, lambda: _downloaded(given, place), place)
    else:
        path = folder / Path(given.removeprefix("file://")).expanduser()
        if not path.is_file():
            raise DataError(
                f"{place}: there is no image {path}. Correct the path; it is relative to the folder of the data."
            )
    return _opened(path, place)


def _source(given: Any, place: str) -> Any:
    """A path, a URL or bytes."""
    if isinstance(given, dict):
        key = next((key for key in _KEYS if given.get(key) is not None), None)
        return _decoded(given[key], place) if key == "base64" else _source(given[key], place) if key else None
    if isinstance(given, str) and (match := re.match(r"data:image[^,]*;base64,", given)):
        return _decoded(given[match.end() :], place)
    if hasattr(given, "save") and hasattr(given, "mode"):  # an image of Pillow, as `datasets` decodes it
        encoded = io.BytesIO()
        _shown(given).save(encoded, "PNG")
        return encoded.getvalue()
    return given


def _decoded(text: Any, place: str) -> bytes:
    try:
        return base64.b64decode(text)
    except (binascii.Error, ValueError, TypeError) as error:
        raise DataError(f"{place}: an image is not valid base64 ({error}). Correct the record.") from None


def _downloaded(url: str, place: str) -> bytes:
    request = urllib.request.Request(url, headers={"User-Agent": "outsize"})
    for attempt in range(_ATTEMPTS):
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return bytes(answer.read())
        except (OSError, ValueError, HTTPException) as error:
            is_final = isinstance(error, (urllib.error.HTTPError, ValueError)) or attempt == _ATTEMPTS - 1
            if is_final:
                raise DataError(
                    f"{place}: {url} cannot be downloaded ({error}). Correct the URL, or remove the record."
                ) from None
    raise AssertionError("the last attempt returns or raises")


def _kept(key: str | bytes, content: Callable[[], bytes], place: str) -> Path:
    """The image's file in the cache folder; written if it is not there. `key`: its URL or content."""
    path = _folder() / hashlib.sha256(key.encode() if isinstance(key, str) else key).hexdigest()
    if not path.is_file():
        whole = content()
        pillow = _pillow()
        try:
            pillow.open(io.BytesIO(whole)).close()
        except Exception as error:  # Pillow has no common error type
            raise _damaged(key if isinstance(key, str) else f"of {len(key)} bytes", place, error) from None
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(whole)
            Path(file.name).replace(path)
        except OSError as error:
            raise ConfigError(
                f"{path.parent}: no image can be written there ({error.strerror}). Set OUTSIZE_CACHE to another folder."
            ) from None
    return path


@cache
def _temporary() -> Any:
    return tempfile.TemporaryDirectory(prefix="outsize-images-")


def _folder() -> Path:
    """Below the cache folder. Without a cache: a folder for this process."""
    kept = cache_folder()
    folder = kept / "images" if kept is not None else Path(_temporary().name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: the folder for images cannot be made ({error.strerror}). Set OUTSIZE_CACHE to another folder."
        ) from None
    return folder


# --- reading


def _pillow() -> Any:
    return need("PIL.Image", to_read="images", extra="vision")


def _opened(path: Path, place: str) -> ImageFile:
    """Reads the head of the file only."""
    pillow = _pillow()
    try:
        with path.open("rb") as file:
            digest = hashlib.blake2b(file.read(_HASHED_BYTES), digest_size=16).hexdigest()
            with pillow.open(file) as image:
                width, height = image.size
                # Pillow decodes a whole PNG to look for an orientation behind its pixels.
                looks = image.format != "PNG" or "exif" in image.info
                is_turned = looks and image.getexif().get(_ORIENTATION, 1) >= 5
        size = (height, width) if is_turned else (width, height)
        return ImageFile(str(path), size, f"{path.stat().st_size} {digest}")
    except Exception as error:  # Pillow has no common error type
        raise _damaged(path, place, error) from None


def load_image(path: str, place: str) -> Any:
    """The image in RGB, as transformers loads it."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            return _shown(image)
    except Exception as error:  # Pillow has no common error type
        raise _damaged(path, place, error) from None


def _shown(image: Any) -> Any:
    return need("PIL.ImageOps", to_read="images", extra="vision").exif_transpose(image).convert("RGB")


def _damaged(path: Any, place: str, error: Exception) -> DataError:
    return DataError(f"{place}: the image {path} cannot be read ({error}). Write it again, or remove the record.")
