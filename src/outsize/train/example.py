"""A batch as a class of transformers takes it, from its config alone: full rows without padding, and images where the model sees.

Images take part as their processor would give them. There are three forms: pictures of the one size that the vision tower is made for (Llava, PaliGemma,
Gemma 3), flat patches with a grid for each picture, of any size (the Qwen-VL families), and tiles, beside the text (Llama 3.2 Vision). What has another form
is refused by name.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import ConfigError, ModelUnsupported, tell

_INSTEAD = "Plan it where it runs: outsize.prepare(model, batch) measures with a real batch, and engine.plan is the plan"


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Pictures in a row of a batch."""

    per_row: int | None = None
    """None: one, where the model sees."""
    pixels: int = 1024
    """Height and width, where the model takes any."""

    def __post_init__(self) -> None:
        given = (("images", 0 if self.per_row is None else self.per_row, 0), ("image_size", self.pixels, 1))
        wrong = [f"{name} is {value!r}" for name, value, least in given if isinstance(value, bool) or not isinstance(value, int) or value < least]
        if wrong:
            expected = "images is a whole number from 0 and image_size, in pixels, one from 1"
            raise ConfigError(tell(expected, "; ".join(wrong), "Correct it"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    batch: dict[str, Tensor]
    text: str
    """What was assumed of images, for the plan; empty for models without them."""


def batch_for(kind: Any, rows: int, tokens: int) -> dict[str, Tensor]:
    """Text alone."""
    ids = torch.ones(rows, tokens, dtype=torch.int64)
    return {"input_ids": ids, "labels": torch.zeros(rows, dtype=torch.int64) if kind.__name__.endswith("ForSequenceClassification") else ids.clone()}


def example_batch(kind: Any, config: Any, *, rows: int, tokens: int, images: Images) -> Example:
    batch = batch_for(kind, rows, tokens)
    vision = getattr(config, "vision_config", None)
    takes = inspect.signature(kind.forward).parameters
    num = images.per_row
    if vision is None and num and "pixel_values" not in takes:
        do = "Leave --images (images=) out, or name a model that sees"
        raise ConfigError(tell(f"{kind.__name__} takes text alone", f"it was asked to see {num} in every row", do))
    if num == 0 or (vision is None and num is None):
        return Example(batch=batch, text="" if vision is None else "rows without images")
    num = num or 1
    token = getattr(config, "image_token_id", None)
    # With a mask of pixels go crops, of which the image's size and the processor decide the number, and models that look for empty ones (Idefics, SmolVLM).
    if vision is None or token is None or "pixel_values" not in takes or "pixel_attention_mask" in takes:
        found = f"{kind.__name__} takes them in a form that it does not know"
        raise ModelUnsupported(tell("outsize's own example batch has a model's images as pictures, patches or tiles", found, _INSTEAD))
    has_grid = "image_grid_thw" in takes
    if has_grid:
        form = _patches(vision, rows * num, images.pixels)
    elif "aspect_ratio_ids" in takes:
        form = _tiles(vision, rows, tokens, num)
    else:
        form = _pictures(config, vision, rows * num)
    count = num * form.tokens
    frame = 2 if has_grid else 0  # a token before and one after each image
    if count + frame * num >= tokens:
        found = f"{num} of {form.size} take {count} of {tokens} tokens"
        raise ConfigError(tell("the images of a row and some text fit into sequence_len", found, "Raise sequence_len, or lower images or image_size"))
    ids = batch["input_ids"]
    for image in range(num):
        start = 1 + image * (form.tokens + frame)
        ids[:, start : start + form.tokens] = token
        if has_grid:
            ids[:, start - 1], ids[:, start + form.tokens] = config.vision_start_token_id, config.vision_end_token_id
    batch |= form.inputs
    if "mm_token_type_ids" in takes:
        batch["mm_token_type_ids"] = (ids == token).int()
    if has_grid and "position_ids" in takes:  # in three dimensions: how they are computed is not always possible on shapes alone
        batch["position_ids"] = torch.arange(tokens).expand(3, rows, tokens).contiguous()
    if "token_type_ids" in takes:
        batch["token_type_ids"] = (ids == token).long()
    many = "1 image" if num == 1 else f"{num} images"
    length = "1 token" if form.tokens == 1 else f"{form.tokens} tokens"
    return Example(batch=batch, text=f"{many} of {form.size} in every row ({length} each)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    inputs: dict[str, Tensor]
    tokens: int
    """Of one image."""
    size: str


def _patches(vision: Any, num: int, pixels: int) -> _Form:
    merge = vision.spatial_merge_size
    side = max(1, round(pixels / (vision.patch_size * merge))) * merge  # in patches
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    patches = torch.zeros(num * side * side, channels * vision.temporal_patch_size * vision.patch_size**2)
    grid = torch.tensor([[1, side, side]] * num)
    edge = side * vision.patch_size
    return _Form(inputs={"pixel_values": patches, "image_grid_thw": grid}, tokens=(side // merge) ** 2, size=f"{edge}×{edge} pixels")


def _tiles(vision: Any, rows: int, tokens: int, images: int) -> _Form:
    """As many as there can be, since smaller images are filled up to that. The text sees them in layers of their own, and one token stands for an image."""
    edge, tiles = vision.image_size, vision.max_num_tiles
    known = torch.ones(rows, images, tiles, dtype=torch.int64)
    inputs = {
        "pixel_values": torch.zeros(rows, images, tiles, 3, edge, edge), "aspect_ratio_ids": known[..., 0].clone(), "aspect_ratio_mask": known,
        "cross_attention_mask": torch.ones(rows, tokens, images, tiles, dtype=torch.int64),
    }  # fmt: skip
    return _Form(inputs=inputs, tokens=1, size=f"{tiles} tiles of {edge}×{edge} pixels")


def _pictures(config: Any, vision: Any, num: int) -> _Form:
    edge = getattr(vision, "image_size", None)
    patch = getattr(vision, "patch_size", None)
    if not isinstance(edge, int) or not isinstance(patch, int):
        found = f"{type(vision).__name__} names no image_size and patch_size"
        raise ModelUnsupported(tell("a vision tower without a grid of patches is made for one size of images", found, _INSTEAD))
    # How many of a picture's features the text sees is each family's own affair, where it is not all of them.
    told = getattr(config, "mm_tokens_per_image", None)
    tokens = told or (edge // patch) ** 2 + (getattr(config, "vision_feature_select_strategy", None) == "full")
    return _Form(inputs={"pixel_values": torch.zeros(num, 3, edge, edge)}, tokens=tokens, size=f"{edge}×{edge} pixels")
