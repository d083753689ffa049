"""Resizes a user's batch: to the size that a plan is for, and to fewer rows for profiling."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import ConfigError
from outsize.base.units import is_count
from outsize.model.batch import Input, Signature, is_image, is_mask, looks_irregular
from outsize.model.tensors import map_tensors, named_tensors


def as_dict(batch: Any) -> Any:
    """Convert BatchEncoding and other mappings to a dict; return anything else unchanged."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def detached(batch: Any) -> Any:
    """A batch whose backward ends at its inputs: a profiling run must not add to the user's gradients."""
    return map_tensors(lambda t: t.detach().requires_grad_() if t.requires_grad else t, batch)


def pad_to_shape(batch: Any, max_shape: tuple[int, int] | None) -> Any:
    """Repeat rows and tokens up to `max_shape`. A mask then masks something, since that costs more."""
    if max_shape is None:
        return batch
    if not isinstance(max_shape, (tuple, list)) or len(max_shape) != 2 or not all(map(is_count, max_shape)):
        raise ConfigError(
            f"max_shape must be the rows and tokens of the largest batch, not {max_shape!r}. Set two whole "
            "numbers from 1."
        )
    lead = _lead(batch)
    if lead is None:
        return batch
    old = lead.shape[:2]
    if isinstance(batch, dict) and _has_images(batch):
        return _pad_with_images(batch, old, max_shape)
    new = max(max_shape[0], old[0]), max(max_shape[1], old[1])

    def size_of(name: str, tensor: Tensor) -> tuple[int, ...]:
        leading = (most if size == was else size for size, was, most in zip(tensor.shape, old, new, strict=False))
        return (*leading, *tensor.shape[2:])

    def irregular(name: str) -> bool:
        return new[0] > 1 and name.rpartition(".")[2] == "attention_mask"

    return _resized(batch, size_of, irregular)


def joined(arguments: dict[str, Any], other: Signature) -> dict[str, Any] | None:
    """A call with every dimension at the larger of its own size and another call's. None if that equals the call, or
    if the two differ too much.
    """
    tensors = dict(named_tensors(arguments))
    sizes: dict[str, tuple[int, ...]] = {}
    changed: dict[tuple[int, int], int] = {}
    """By dimension and size: the new size."""
    for name, tensor in tensors.items():
        if name not in other or not other[name].shape or other[name].is_offsets:
            continue
        if len(other[name].shape) != tensor.dim():
            return None
        if any(other[name].crosses(size, most) for size, most in zip(tensor.shape, other[name].shape, strict=True)):
            return None
        sizes[name] = tuple(map(max, tensor.shape, other[name].shape))
        for dim, (old, new) in enumerate(zip(tensor.shape, sizes[name], strict=True)):
            changed[dim, old] = max(new, changed.get((dim, old), 0))
    if not sizes:
        return None

    def size_of(name: str, tensor: Tensor) -> tuple[int, ...]:
        return sizes.get(name) or tuple(changed.get((dim, size), size) for dim, size in enumerate(tensor.shape))

    def irregular(name: str) -> bool:
        return is_mask(name) and name in other and other[name].is_irregular

    is_same = all(size_of(name, tensor) == tensor.shape for name, tensor in tensors.items())
    if is_same and not any(irregular(name) and not looks_irregular(name, tensor) for name, tensor in tensors.items()):
        return None
    if _has_images(arguments):
        lead = _lead(arguments)
        assert lead is not None
        rows, tokens = next((size[:2] for name, size in sizes.items() if tensors[name] is lead), lead.shape[:2])
        return _pad_with_images(arguments, lead.shape[:2], (rows, tokens))
    made = _resized(arguments, size_of, irregular)
    return dict(made)


def num_elements(inputs: Any) -> int:
    """Number of elements of a batch or a signature."""
    shapes = (
        [one.shape for one in inputs.values()]
        if isinstance(inputs, Mapping) and all(isinstance(v, Input) for v in inputs.values())
        else None
    )
    return sum(map(math.prod, shapes if shapes is not None else [t.shape for _, t in named_tensors(inputs)]))


def _resized(batch: Any, size_of: Callable[[str, Tensor], tuple[int, ...]], irregular: Callable[[str], bool]) -> Any:
    """Repeat values up to the wanted sizes. Full masks that must be irregular mask their last element."""
    names = {id(tensor): name for name, tensor in named_tensors(batch)}

    def resize(tensor: Tensor) -> Tensor:
        name, value = names[id(tensor)], tensor
        if tensor.dim():
            for dim, wanted in enumerate(size_of(name, tensor)):
                if value.shape[dim] and value.shape[dim] != wanted:
                    value = torch.cat([value] * -(-wanted // value.shape[dim]), dim).narrow(dim, 0, wanted)
        if irregular(name) and value.dim() == 2 and not looks_irregular(name, value):
            value = value.clone()
            value[-1, -1] = 0 if value[-1, -1] else 1
        return value.contiguous()

    return map_tensors(resize, batch)


def _pad_with_images(batch: dict[str, Any], old: "torch.Size", max_shape: tuple[int, int]) -> dict[str, Any]:
    """Repeat whole rows with their images, and append text: the number of image tokens must match the images."""
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
    """The latest planned batch with images. A plan for longer text without images covers it too; otherwise a loop
    that alternates between the two would re-plan every time.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Any] | None = None

    def keep(self, batch: Any) -> None:
        """Keep a copy on the CPU, so that the loop's own tensors can be freed."""
        if isinstance(batch, dict) and _has_images(batch):
            self._latest = {
                name: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }

    def added_to(self, batch: Any) -> dict[str, Any] | None:
        """The kept batch at this batch's rows and tokens. None if this one has images, or none is kept."""
        lead, old = (_lead(b) if isinstance(b, dict) else None for b in (batch, self._latest))
        if lead is None or old is None or _has_images(batch):
            return None
        made = pad_to_shape(self._latest, (max(lead.shape[0], old.shape[0]), max(lead.shape[1], old.shape[1])))
        return dict(made)


def require_nonempty(batch: Any) -> None:
    """Refuse an empty batch, on which models fail with unclear errors."""
    shapes = {name or "batch": tuple(value.shape) for name, value in named_tensors(batch)}
    empty = [f"{name} is {' × '.join(map(str, shape))}" for name, shape in shapes.items() if 0 in shape]
    if empty or not shapes:
        found = "; ".join(empty) or "it holds no tensors"
        raise ConfigError(
            f"batch: {found}, and a plan needs rows and tokens. Pass one real batch; check the dataset and the "
            "collator."
        )


def lead_shape(batch: Any) -> tuple[int, int] | None:
    """Rows and tokens, if the batch has such dimensions."""
    lead = _lead(batch)
    return (lead.shape[0], lead.shape[1]) if lead is not None else None


def num_rows(batch: Any) -> int | None:
    lead = _lead(batch) if isinstance(batch, dict) else None
    return lead.shape[0] if lead is not None else None


def take_rows(batch: Any, rows: int) -> dict[str, Any] | None:
    """The first rows of a batch; None if not every tensor has rows. A mask that masks something still does, because
    models run other code for it.
    """
    old = num_rows(batch)
    values = dict(named_tensors(batch))
    if (
        old is None
        or _has_images(batch)
        or any(value.dim() and (name not in batch or value.shape[0] != old) for name, value in values.items())
    ):
        return None
    cut = {
        name: value[:rows].clone() if isinstance(value, Tensor) and value.dim() else value
        for name, value in batch.items()
    }
    return cut if _is_full(batch.get("attention_mask")) else _masked(cut)


def num_tokens(batch: Any) -> int | None:
    """Tokens of a row of token ids."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    return ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else None


def take_tokens(batch: Any, tokens: int) -> dict[str, Any] | None:
    """The first tokens of every row; None if the batch is not rows of token ids. A mask that masks something still
    does, and positions that restart within rows still do.
    """
    old = num_tokens(batch)
    if old is None or _has_images(batch):
        return None
    cut: dict[str, Any] = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() > 1:
            for dim in range(1, value.dim()):
                value = value.narrow(dim, 0, tokens) if value.shape[dim] == old else value
            value = value.clone()
            if looks_irregular(name, batch[name]) and not looks_irregular(name, value):
                value = _irregular(name, value)
        cut[name] = value
    return cut


def _irregular(name: str, value: Tensor) -> Tensor:
    if is_mask(name):
        value.view(-1)[-1] = 0 if value.view(-1)[-1] else 1
        return value
    half = value.shape[-1] // 2
    value[..., half:] = value[..., : value.shape[-1] - half].clone()
    return value


def _lead(batch: Any) -> Tensor | None:
    """The tensor whose first two dimensions are rows and tokens: `input_ids` if there are any."""
    found = {name: value for name, value in named_tensors(batch) if value.dim() >= 2}
    text = (value for name, value in found.items() if name.rpartition(".")[2] == "input_ids")
    return next(text, next(iter(found.values()), None))


def _has_images(batch: dict[str, Any]) -> bool:
    return any(is_image(name) and isinstance(value, Tensor) for name, value in batch.items())


def _is_full(mask: Any) -> bool:
    return not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all())


def _masked(batch: dict[str, Any]) -> dict[str, Any]:
    """Make a full mask mask one element, which costs more. Changes the batch."""
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all()):
        mask[-1, -1] = 0
    return batch
