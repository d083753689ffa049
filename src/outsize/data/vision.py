"""Rows and batches of conversations with images, as the model's processor makes them.

A chat template renders one token per image. The processor replaces it by as many as the image has features, which
depends on the image's size. Before training, each size is tried once with a blank image, so that lengths and labels of
all rows are known without reading their pixels. A batch is what the processor makes of the rows' texts and images; its
tokens must be the ones that were expected.
"""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.base.errors import ConfigError, DataError
from outsize.data.files import Record, need
from outsize.data.images import ImageFile, image_file, load_image
from outsize.data.rows import IGNORED, Document, Media, Row
from outsize.data.text import Span, span_documents

_READERS = 8
"""Threads that read the heads of image files, and download."""


@dataclass(kw_only=True, eq=False)
class Vision:
    """A processor, and how images are resized before it."""

    processor: Any
    image_size: tuple[int, ...] = ()
    """Width and height; or one side: images are padded to a square. Empty: as they are."""
    resample: str = "bilinear"
    _adds_special: bool | None = None
    """Whether the tokenizer adds its special tokens to what the chat template renders. None: no text was seen yet."""
    _expanded: dict[tuple[tuple[int, int], ...], tuple[list[str], int]] = field(default_factory=dict)
    """By the sizes of a row's images: what replaces each image token, and the elements of the images in a batch."""

    @property
    def _name(self) -> str:
        return type(self.processor).__name__

    # --- before training

    def files(self, given: Sequence[list[Any]], records: Sequence[Record], folder: Path) -> list[list[ImageFile]]:
        """The image files of each record."""
        with ThreadPoolExecutor(_READERS) as pool:
            pending = [
                [pool.submit(image_file, image, folder, record.place) for image in images]
                for images, record in zip(given, records, strict=True)
            ]
            try:
                return [[one.result() for one in row] for row in pending]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def documents(
        self,
        tokenizer: Any,
        records: Sequence[Record],
        texts: Sequence[str],
        spans: Sequence[Sequence[Span]] | None,
        files: Sequence[Sequence[ImageFile]],
    ) -> list[Document]:
        """One document per record. `spans`: of the rendered texts, where the loss is; None: on all but the images."""
        whole, trained, elements = [], [], []
        for index, (record, text) in enumerate(zip(records, texts, strict=True)):
            self._check_special(tokenizer, text, record.place)
            expanded, holes, moved, count = self._expand(text, [file.size for file in files[index]], record.place)
            shifted = (
                [(0, len(expanded))] if spans is None else [(moved(start), moved(end)) for start, end in spans[index]]
            )
            whole.append(expanded)
            trained.append(_without(shifted, holes))
            elements.append(count)
        documents = span_documents(tokenizer, records, whole, trained, special_tokens=bool(self._adds_special))
        return [
            replace(
                document,
                media=Media(
                    text=text,
                    images=tuple(file.path for file in row),
                    digests=tuple(file.digest for file in row),
                    elements=count,
                ),
            )
            for document, text, row, count in zip(documents, texts, files, elements, strict=True)
        ]

    def _check_special(self, tokenizer: Any, text: str, place: str) -> None:
        """As transformers does it when a processor tokenizes a chat."""
        adds = tokenizer.bos_token is None or not text.startswith(tokenizer.bos_token)
        if self._adds_special not in (None, adds):
            raise DataError(
                f"{place}: the chat template begins some rows with {tokenizer.bos_token} and others without. Use one "
                "chat template for all datasets with images."
            )
        self._adds_special = adds

    def _expand(self, text: str, sizes: Sequence[tuple[int, int]], place: str) -> tuple[str, list[Span], Any, int]:
        """The text as the processor expands it, the spans of the images in it, a function from places in `text` to
        places in it, and the images' elements.
        """
        token = getattr(self.processor, "image_token", None)
        if not isinstance(token, str):
            raise ConfigError(f"processor_type: {self._name} names no image token. Train with OutsizeTrainer.")
        found = [match.span() for match in re.finditer(re.escape(token), text)]
        if len(found) != len(sizes):
            raise DataError(
                f"{place}: the chat template renders {len(found)} image tokens ({token}) for {len(sizes)} images. "
                "Correct the record, or set chat_template_jinja to the template of the model's processor."
            )
        replacements, elements = self._measured(tuple(map(self._resized, sizes))) if sizes else ([], 0)
        edges = [0, *chain.from_iterable(found), len(text)]
        kept = [text[start:end] for start, end in list(pairwise(edges))[::2]]
        expanded, holes = kept[0], []
        for replacement, rest in zip(replacements, kept[1:], strict=True):
            holes.append((len(expanded), len(expanded) + len(replacement)))
            expanded += replacement + rest

        def moved(at: int) -> int:
            before = [n for n, (_, end) in enumerate(found) if end <= at]
            return at + (holes[before[-1]][1] - found[before[-1]][1] if before else 0)

        return expanded, holes, moved, elements

    def _measured(self, sizes: tuple[tuple[int, int], ...]) -> tuple[list[str], int]:
        if sizes not in self._expanded:
            pillow = need("PIL.Image", to_read="images", extra="vision")
            text = self.processor.image_token * len(sizes)
            made = self._call(
                [text], [[pillow.new("RGB", size) for size in sizes]], return_text_replacement_offsets=True
            )
            offsets = made.pop("text_replacement_offsets", None)
            pixels = sum(
                value.numel() for value in made.values() if isinstance(value, Tensor) and value.is_floating_point()
            )
            if offsets:
                found = [one["replacement"] for one in offsets[0]]
            else:  # Llama 3.2 Vision: one token per image
                token = self.processor.tokenizer.convert_tokens_to_ids(self.processor.image_token)
                if int((made["input_ids"] == token).sum()) != len(sizes):
                    raise ConfigError(
                        f"processor_type: {self._name} does not report what it replaces image tokens by, so the loss "
                        "cannot be placed. Train with OutsizeTrainer."
                    )
                found = [self.processor.image_token] * len(sizes)
            self._expanded[sizes] = found, pixels
        return self._expanded[sizes]

    # --- batches

    def batch(self, rows: Sequence[Row], pad_to: int | None) -> dict[str, Any]:
        """What the processor makes of the rows."""
        images = [[self._load(path, row["place"]) for path in row["media"].images] for row in rows]
        padding: dict[str, Any] = (
            {"padding": True} if pad_to is None else {"padding": "max_length", "max_length": pad_to}
        )
        try:
            return self._call([row["media"].text for row in rows], images if any(images) else None, **padding)
        except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
            places = ", ".join(row["place"] for row in rows)
            raise DataError(
                f"{places}: {self._name} cannot make a batch of these rows ({error}). Correct or remove them, or set "
                "micro_batch_size: 1 if each row alone works."
            ) from error

    def _call(self, texts: list[str], images: Any, **options: Any) -> dict[str, Any]:
        return dict(
            self.processor(
                text=texts,
                images=images,
                return_tensors="pt",
                padding_side="right",
                add_special_tokens=bool(self._adds_special),
                **options,
            )
        )

    def _load(self, path: str, place: str) -> Any:
        image = load_image(path, place)
        if not self.image_size:
            return image
        pillow, operations = (need(f"PIL.{name}", to_read="images", extra="vision") for name in ("Image", "ImageOps"))
        method, size = pillow.Resampling[self.resample.upper()], self._resized(image.size)
        return image.resize(size, method) if len(self.image_size) == 2 else operations.pad(image, size, method)

    def _resized(self, size: tuple[int, int]) -> tuple[int, int]:
        return (self.image_size[0], self.image_size[-1]) if self.image_size else size


@dataclass(frozen=True, slots=True)
class VisionCollator:
    """Makes batches with the processor. Pads on the right, to the longest row of the batch or to `pad_to` tokens."""

    vision: Vision
    pad_to: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        batch = self.vision.batch(rows, self.pad_to)
        ids: Tensor = batch["input_ids"]  # (rows, tokens)
        labels = torch.full_like(ids, IGNORED)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            expected = torch.from_numpy(row["input_ids"].astype(np.int64))
            if not torch.equal(ids[index, :length], expected) or int(batch["attention_mask"][index].sum()) != length:
                raise DataError(
                    f"{row['place']}: {type(self.vision.processor).__name__} makes other tokens than expected from the "
                    "row's text and image sizes. Remove the record, or train with OutsizeTrainer."
                )
            labels[index, :length] = torch.from_numpy(row["labels"].astype(np.int64))
        return {**batch, "labels": labels}


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The parts of the spans that are in no hole. Both are in order."""
    left = list(spans)
    for start, end in holes:
        left = [
            part
            for one in left
            for part in ((one[0], min(one[1], start)), (max(one[0], end), one[1]))
            if part[0] < part[1]
        ]
    return left
