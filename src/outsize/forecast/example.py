"""Example batches for a plan from a config alone: full rows without padding, with images for vision models.

Images have the form that the model's processor makes. Five forms are supported: flat patches with a grid per image
(Qwen-VL, GLM-4V); tiles beside the text (Llama 3.2 Vision); images of any size (Pixtral, Mistral 3); images cut into
crops (Llava-NeXT); images of the vision tower's fixed size (Llava, PaliGemma, Gemma 3, InternVL; where the processor
cuts images, each piece counts as one). The model computes how many tokens an image has. Other forms are refused.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.base.units import is_count
from outsize.model.tensors import tensors_in

_INSTEAD = (
    "Plan it where it runs: outsize.prepare(model, batch) measures with a real batch, and engine.plan is the plan."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of a row."""

    per_row: int | None = None
    """None: one for vision models."""
    pixels: int = 1024
    """Height and width, for models that take any size."""

    def __post_init__(self) -> None:
        given = (("images", 0 if self.per_row is None else self.per_row, 0), ("image_size", self.pixels, 1))
        wrong = [f"{name} is {value!r}" for name, value, least in given if not is_count(value, least=least)]
        if wrong:
            raise ConfigError(
                f"{'; '.join(wrong)}. Set images to a whole number from 0, and image_size to pixels from 1."
            )


class Example(NamedTuple):
    batch: dict[str, Tensor]
    text: str
    """What the plan assumes about images; empty for text models."""


class _Form(NamedTuple):
    inputs: dict[str, Tensor]
    size: str
    tokens: int | None = None
    """Per image. None: the model computes it."""
    is_framed: bool = False
    """A token precedes each image and one follows it."""


def batch_for(kind: Any, rows: int, tokens: int) -> dict[str, Tensor]:
    """A batch of text alone."""
    ids = torch.ones(rows, tokens, dtype=torch.int64)
    is_classifier = kind.__name__.endswith("ForSequenceClassification")
    return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.int64) if is_classifier else ids.clone()}


def example_batch(
    kind: Any, config: Any, *, rows: int, tokens: int, images: Images, model: Callable[[], Any]
) -> Example:
    """`model`: builds the model, if it must compute the number of image tokens."""
    batch = batch_for(kind, rows, tokens)
    ids = batch["input_ids"]
    vision = getattr(config, "vision_config", None)
    takes = inspect.signature(kind.forward).parameters
    num = images.per_row
    if vision is None and num and "pixel_values" not in takes:
        raise ConfigError(
            f"images is {num}, but {kind.__name__} takes text alone. Leave images out, or set a vision model."
        )
    if num == 0 or (vision is None and num is None):
        return Example(batch, "" if vision is None else "rows without images")
    num = num or 1
    token: Any = getattr(config, "image_token_id", None)
    form = None
    if vision is not None and token is not None:
        form = _form(kind, config, vision, takes, rows=rows, tokens=tokens, num=num, pixels=images.pixels)
    if form is None:
        raise ModelUnsupported(
            f"{kind.__name__} takes images in a form that outsize's own example batch does not have (patches, tiles, "
            f"crops or pictures). {_INSTEAD}"
        )
    length = form.tokens or _count_features(model(), form.inputs) // (rows * num)
    frame = _frame_tokens(config) if form.is_framed else ()
    if num * (length + len(frame)) >= tokens:
        raise ConfigError(
            f"sequence_len {tokens} has no space for the images of a row and text: {num} of {form.size} take "
            f"{num * length} of {tokens} tokens. Raise sequence_len, or lower images or image_size."
        )
    for image in range(num):
        start = 1 + image * (length + len(frame))
        ids[:, start : start + length] = token
        if frame:
            ids[:, start - 1], ids[:, start + length] = frame
    batch |= form.inputs
    if "mm_token_type_ids" in takes:
        batch["mm_token_type_ids"] = (ids == token).int()
    batch = with_positions(kind, batch)
    if "token_type_ids" in takes:
        batch["token_type_ids"] = (ids == token).long()
    many = "1 image" if num == 1 else f"{num} images"
    each = "1 token" if length == 1 else f"{length} tokens"
    return Example(batch, f"{many} of {form.size} in every row ({each} each)")


def with_positions(kind: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with 3D positions, if its images are patches: models cannot always compute them on fake tensors."""
    if "image_grid_thw" not in batch or "position_ids" not in inspect.signature(kind.forward).parameters:
        return batch
    rows, tokens = batch["input_ids"].shape
    return {**batch, "position_ids": torch.arange(tokens).expand(3, rows, tokens).contiguous()}


def _form(
    kind: Any, config: Any, vision: Any, takes: Any, *, rows: int, tokens: int, num: int, pixels: int
) -> _Form | None:
    edge: Any = getattr(vision, "image_size", None)
    edge = edge[0] if isinstance(edge, (list, tuple)) and len({*edge}) == 1 else edge
    # With a pixel mask, only the processor knows the number of crops, and models skip empty ones (Idefics, SmolVLM).
    if "pixel_values" not in takes or "pixel_attention_mask" in takes:
        return None
    if "image_grid_thw" in takes:
        return _patches(vision, rows * num, pixels)
    if "aspect_ratio_ids" in takes:  # the text sees tiles in layers of their own; one token stands for an image
        tiles = torch.ones(rows, num, vision.max_num_tiles, dtype=torch.int64)  # smaller images are padded to all tiles
        inputs = {
            "pixel_values": torch.zeros(*tiles.shape, 3, edge, edge),
            "aspect_ratio_ids": tiles[..., 0].clone(),
            "aspect_ratio_mask": tiles,
            "cross_attention_mask": torch.ones(rows, tokens, *tiles.shape[1:], dtype=torch.int64),
        }
        return _Form(inputs, f"{vision.max_num_tiles} tiles of {edge}×{edge} pixels", tokens=1)
    if not isinstance(edge, int):
        return None
    num *= rows
    crops = getattr(config, "image_grid_pinpoints", None)
    if vision.model_type == "pixtral":  # at most the tower's size, in whole (merged) patches
        step = vision.patch_size * getattr(config, "spatial_merge_size", 1)
        edge = -(-min(pixels, vision.image_size) // step) * step
        sized = {"pixel_values": torch.zeros(num, 3, edge, edge), "image_sizes": torch.tensor([[edge, edge]] * num)}
        return _Form(sized, f"{edge}×{edge} pixels")
    if crops and "image_sizes" in takes:  # the whole image and crops of it
        count_crops = getattr(inspect.getmodule(kind), "image_size_to_num_patches", None)
        if count_crops is None:
            return None
        count = count_crops(image_size=(pixels, pixels), grid_pinpoints=crops, patch_size=edge)
        values, sizes = torch.zeros(num, count, 3, edge, edge), torch.tensor([[pixels, pixels]] * num)
        cropped = {"pixel_values": values, "image_sizes": sizes}
        return _Form(cropped, f"{pixels}×{pixels} pixels, in {count} crops of {edge}×{edge}")
    return _Form({"pixel_values": torch.zeros(num, 3, edge, edge)}, f"{edge}×{edge} pixels")


def _patches(vision: Any, num: int, pixels: int) -> _Form | None:
    needed = ("spatial_merge_size", "temporal_patch_size", "patch_size")
    if not all(isinstance(getattr(vision, name, None), int) for name in needed):
        return None
    merge, size = vision.spatial_merge_size, vision.patch_size
    side = max(1, round(pixels / (size * merge))) * merge  # in patches
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    patches = torch.zeros(num * side * side, channels * vision.temporal_patch_size * size**2)
    inputs = {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, side, side]] * num)}
    edge = side * size
    return _Form(inputs, f"{edge}×{edge} pixels", tokens=(side // merge) ** 2, is_framed=True)


def _frame_tokens(config: Any) -> tuple[int, ...]:
    """The tokens before and after an image, if the config has them."""
    for prefix in ("vision", "image"):
        found: list[Any] = [getattr(config, f"{prefix}_{end}_token_id", None) for end in ("start", "end")]
        if None not in found:
            return tuple(found)
    return ()


def _count_features(model: Any, inputs: dict[str, Tensor]) -> int:
    """How many image features the model computes from these inputs."""
    wrong = f"{type(model).__name__} does not take images as outsize's own example batch has them"
    owner = model if hasattr(model, "get_image_features") else model.base_model
    try:
        with torch.no_grad():
            made = owner.get_image_features(**inputs)
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"{wrong}: {error}. {_INSTEAD}") from error
    count = sum(feature.numel() // feature.shape[-1] for feature in tensors_in(getattr(made, "pooler_output", made)))
    if not count:
        raise ModelUnsupported(f"{wrong}: the number of image features is unknown. {_INSTEAD}")
    return count
