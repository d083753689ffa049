"""A batch of the user's at another size: what a plan is made for, and what is tried where that is too large to try."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import ConfigError, tell
from outsize.base.units import is_count


def as_dict(batch: Any) -> Any:
    """BatchEncoding and other mappings as the dict that `model(**batch)` makes of them. Anything else as it is."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def grown(batch: Any, max_shape: tuple[int, int] | None) -> Any:
    """The batch at its largest: rows and tokens repeated up to `max_shape`; with a mask, one that masks something, since that is dearer."""
    if max_shape is None:
        return batch
    if not isinstance(max_shape, (tuple, list)) or len(max_shape) != 2 or not all(map(is_count, max_shape)):
        raise ConfigError(tell("max_shape is the rows and the tokens of the largest batch", f"it is {max_shape!r}", "Give two whole numbers from 1"))
    if not isinstance(batch, dict):
        return batch
    lead = _lead(batch)
    if lead is None:
        return batch
    old = lead.shape[:2]
    if _has_images(batch):
        return _grown_with_images(batch, old, max_shape)

    def grow(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        sizes = [max(max_shape[0], old[0]) if value.shape[0] == old[0] else value.shape[0]]
        if value.dim() >= 2:
            sizes.append(max(max_shape[1], old[1]) if value.shape[1] == old[1] else value.shape[1])
        for dim, wanted in enumerate(sizes):
            repeats = -(-wanted // value.shape[dim])
            value = torch.cat([value] * repeats, dim).narrow(dim, 0, wanted)
        return value.contiguous()

    made = {name: grow(value) for name, value in batch.items()}
    return _masked(made) if max(max_shape[0], old[0]) > 1 else made


def _grown_with_images(batch: dict[str, Any], old: "torch.Size", max_shape: tuple[int, int]) -> dict[str, Any]:
    """Whole rows are repeated with their images, and text is added behind them: tokens that stand for images must be as many as the images have."""
    times = -(-max_shape[0] // old[0])
    extra = max(0, max_shape[1] - old[1])
    labels = batch.get("labels")
    is_text = (labels != -100).nonzero() if isinstance(labels, Tensor) and labels.shape[:2] == old else None
    row, column = (int(i) for i in is_text[-1][:2]) if is_text is not None and len(is_text) else (0, old[1] - 1)

    def grow(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if extra and value.shape[:2] == old:
            text = value[row : row + 1, column : column + 1].expand(old[0], extra, *value.shape[2:])
            value = torch.cat([value, text], 1)
        return torch.cat([value] * times) if times > 1 else value

    return {name: grow(value) for name, value in batch.items()}


class Images:
    """The latest batch with images that was planned for. A plan that grows for longer text without any is made for both: else the two would be planned for by
    turns, for ever."""

    def __init__(self) -> None:
        self._latest: dict[str, Any] | None = None

    def keep(self, batch: Any) -> None:
        """A copy, on the CPU: what a loop lets go of shall be gone."""
        if isinstance(batch, dict) and _has_images(batch):
            self._latest = {name: value.detach().cpu().clone() if isinstance(value, Tensor) else value for name, value in batch.items()}

    def added_to(self, batch: Any) -> dict[str, Any] | None:
        """That batch at this one's rows and tokens; None where this one has images itself, or there were none."""
        lead, old = (_lead(b) if isinstance(b, dict) else None for b in (batch, self._latest))
        if lead is None or old is None or _has_images(batch):
            return None
        made = grown(self._latest, (max(lead.shape[0], old.shape[0]), max(lead.shape[1], old.shape[1])))
        return dict(made)


def require_something(batch: Any) -> None:
    """Models break off in many ways at a batch of nothing, none of which says so."""
    tensors = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, (tuple, list)) else [("batch", batch)]
    shapes = {name: tuple(value.shape) for name, value in tensors if isinstance(value, Tensor)}
    empty = [f"{name} is {' × '.join(map(str, shape))}" for name, shape in shapes.items() if 0 in shape]
    if empty or not shapes:
        found = "; ".join(empty) or "it holds no tensors"
        raise ConfigError(tell("a batch to plan for has rows and tokens", found, "Give one real batch; look at the dataset and the collator"))


def num_rows(batch: Any) -> int | None:
    """None where a batch does not say."""
    lead = _lead(batch) if isinstance(batch, dict) else None
    return lead.shape[0] if lead is not None else None


def with_rows(batch: Any, rows: int) -> dict[str, Any] | None:
    """The first rows of a batch; None where it is not rows alone. What had a mask that masks something still has one: models take another way by it."""
    old = num_rows(batch)
    values = [value for value in batch.values() if isinstance(value, Tensor) and value.dim()] if isinstance(batch, dict) else []
    if old is None or _has_images(batch) or any(value.shape[0] != old for value in values):
        return None
    cut = {name: value[:rows].clone() if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()}
    return cut if _is_full(batch.get("attention_mask")) else _masked(cut)


def _lead(batch: dict[str, Any]) -> Tensor | None:
    """The tensor whose first two dimensions are the batch's: its text, if it has some."""
    found = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() >= 2}
    return found["input_ids"] if "input_ids" in found else next(iter(found.values()), None)


def _has_images(batch: dict[str, Any]) -> bool:
    return any(name.startswith("pixel_values") and isinstance(value, Tensor) for name, value in batch.items())


def _is_full(mask: Any) -> bool:
    return not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all())


def _masked(batch: dict[str, Any]) -> dict[str, Any]:
    """With a mask that masks something, where there is one: that is dearer. The batch is ours."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
        mask[-1, -1] = 0
    return batch
