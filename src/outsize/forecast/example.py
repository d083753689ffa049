"""A batch as a model of transformers takes it: full rows without padding, and images where the model sees.

Images take part as a processor gives them. There are five forms: flat patches with a grid for each picture, of any size
(the Qwen-VL families, GLM-4V); tiles, beside the text (Llama 3.2 Vision); pictures of any size (Pixtral, Mistral 3), or
cut into crops (Llava-NeXT), with their sizes; and pictures of the one size that the vision tower is made for (Llava,
PaliGemma, Gemma 3, InternVL: where a processor cuts them, each piece is an image here). How many tokens stand for one
is the model's own affair: it is asked. What has another form is refused by name.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.model.tensors import tensors_in

_INSTEAD = (
    "Plan it where it runs: outsize.prepare(model, batch) measures with a real batch, and engine.plan is the plan."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """Pictures in a row of a batch."""

    per_row: int | None = None
    """None: one, where the model sees."""
    pixels: int = 1024
    """Height and width, where the model takes any."""

    def __post_init__(self) -> None:
        given = (("images", 0 if self.per_row is None else self.per_row, 0), ("image_size", self.pixels, 1))
        wrong = [
            f"{name} is {value!r}"
            for name, value, least in given
            if isinstance(value, bool) or not isinstance(value, int) or value < least
        ]
        if wrong:
            raise ConfigError(
                f"{'; '.join(wrong)}. Set images to a whole number from 0, and image_size to pixels from 1."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    batch: dict[str, Tensor]
    text: str
    """What was assumed of images, for the plan; empty for models without them."""


def batch_for(kind: Any, rows: int, tokens: int) -> dict[str, Tensor]:
    """Text alone."""
    ids = torch.ones(rows, tokens, dtype=torch.int64)
    return {
        "input_ids": ids,
        "labels": torch.zeros(rows, dtype=torch.int64)
        if kind.__name__.endswith("ForSequenceClassification")
        else ids.clone(),
    }


def example_batch(
    kind: Any, config: Any, *, rows: int, tokens: int, images: Images, model: Callable[[], Any]
) -> Example:
    """`model`: makes it, if its vision tower must be asked."""
    batch = batch_for(kind, rows, tokens)
    vision = getattr(config, "vision_config", None)
    takes = inspect.signature(kind.forward).parameters
    num = images.per_row
    if vision is None and num and "pixel_values" not in takes:
        raise ConfigError(
            f"images is {num}, but {kind.__name__} takes text alone. Leave images out, or set a vision model."
        )
    if num == 0 or (vision is None and num is None):
        return Example(batch=batch, text="" if vision is None else "rows without images")
    num = num or 1
    token: Any = getattr(config, "image_token_id", None)
    known = vision is not None and token is not None
    form = (
        _form(kind, config, vision, takes, rows=rows, tokens=tokens, num=num, pixels=images.pixels) if known else None
    )
    if form is None:
        raise ModelUnsupported(
            f"{kind.__name__} takes images in a form that outsize's own example batch does not have (patches, tiles, "
            f"crops or pictures). {_INSTEAD}"
        )
    length = form.tokens or _asked(model(), form.inputs) // (rows * num)
    around = _around(config) if form.is_framed else ()
    if num * (length + len(around)) >= tokens:
        raise ConfigError(
            f"sequence_len {tokens} has no space for the images of a row and text: {num} of {form.size} take "
            f"{num * length} of {tokens} tokens. Raise sequence_len, or lower images or image_size."
        )
    ids = batch["input_ids"]
    for image in range(num):
        start = 1 + image * (length + len(around))
        ids[:, start : start + length] = token
        if around:
            ids[:, start - 1], ids[:, start + length] = around
    batch |= form.inputs
    if "mm_token_type_ids" in takes:
        batch["mm_token_type_ids"] = (ids == token).int()
    if (
        form.is_framed and "position_ids" in takes
    ):  # in three dimensions: how they are computed is not always possible on shapes alone
        batch["position_ids"] = torch.arange(tokens).expand(3, rows, tokens).contiguous()
    if "token_type_ids" in takes:
        batch["token_type_ids"] = (ids == token).long()
    many = "1 image" if num == 1 else f"{num} images"
    each = "1 token" if length == 1 else f"{length} tokens"
    return Example(batch=batch, text=f"{many} of {form.size} in every row ({each} each)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    inputs: dict[str, Tensor]
    size: str
    tokens: int | None = None
    """Of one image. None: the model knows."""
    is_framed: bool = False
    """By a token before and one after each image."""


def _form(
    kind: Any, config: Any, vision: Any, takes: Any, *, rows: int, tokens: int, num: int, pixels: int
) -> _Form | None:
    edge = getattr(vision, "image_size", None)
    edge = edge[0] if isinstance(edge, (list, tuple)) and len({*edge}) == 1 else edge
    # With a mask of pixels go crops, of which the image's size and the processor decide the number, and models that
    # look for empty ones (Idefics, SmolVLM).
    if "pixel_values" not in takes or "pixel_attention_mask" in takes:
        return None
    if "image_grid_thw" in takes:
        return _patches(vision, rows * num, pixels)
    if "aspect_ratio_ids" in takes:
        return _tiles(vision, rows, tokens, num)
    if not isinstance(edge, int):
        return None
    if vision.model_type == "pixtral":
        return _sized(config, vision, rows * num, pixels)
    crops = getattr(config, "image_grid_pinpoints", None)
    if crops and "image_sizes" in takes:
        return _crops(kind, crops, edge, rows * num, pixels)
    return _Form(inputs={"pixel_values": torch.zeros(rows * num, 3, edge, edge)}, size=f"{edge}×{edge} pixels")


def _patches(vision: Any, num: int, pixels: int) -> _Form | None:
    if not all(
        isinstance(getattr(vision, name, None), int)
        for name in ("spatial_merge_size", "temporal_patch_size", "patch_size")
    ):
        return None
    merge = vision.spatial_merge_size
    side = max(1, round(pixels / (vision.patch_size * merge))) * merge  # in patches
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    patches = torch.zeros(num * side * side, channels * vision.temporal_patch_size * vision.patch_size**2)
    grid = torch.tensor([[1, side, side]] * num)
    edge = side * vision.patch_size
    return _Form(
        inputs={"pixel_values": patches, "image_grid_thw": grid},
        size=f"{edge}×{edge} pixels",
        tokens=(side // merge) ** 2,
        is_framed=True,
    )


def _tiles(vision: Any, rows: int, tokens: int, images: int) -> _Form:
    """As many as there can be, since smaller images are filled up to that. The text sees them in layers of their own,
    and one token stands for an image.
    """
    edge, tiles = vision.image_size, vision.max_num_tiles
    known = torch.ones(rows, images, tiles, dtype=torch.int64)
    inputs = {
        "pixel_values": torch.zeros(rows, images, tiles, 3, edge, edge),
        "aspect_ratio_ids": known[..., 0].clone(),
        "aspect_ratio_mask": known,
        "cross_attention_mask": torch.ones(rows, tokens, images, tiles, dtype=torch.int64),
    }
    return _Form(inputs=inputs, size=f"{tiles} tiles of {edge}×{edge} pixels", tokens=1)


def _sized(config: Any, vision: Any, num: int, pixels: int) -> _Form:
    """At most as large as the tower's own size, in whole patches, or such as are merged."""
    step = vision.patch_size * getattr(config, "spatial_merge_size", 1)
    edge = -(-min(pixels, vision.image_size) // step) * step
    return _Form(
        inputs={"pixel_values": torch.zeros(num, 3, edge, edge), "image_sizes": torch.tensor([[edge, edge]] * num)},
        size=f"{edge}×{edge} pixels",
    )


def _crops(kind: Any, crops: Any, edge: int, num: int, pixels: int) -> _Form | None:
    """A picture of that size as a whole and in crops, of which transformers knows the number."""
    number_of = getattr(inspect.getmodule(kind), "image_size_to_num_patches", None)
    if number_of is None:
        return None
    many = number_of(image_size=(pixels, pixels), grid_pinpoints=crops, patch_size=edge)
    inputs = {
        "pixel_values": torch.zeros(num, many, 3, edge, edge),
        "image_sizes": torch.tensor([[pixels, pixels]] * num),
    }
    return _Form(inputs=inputs, size=f"{pixels}×{pixels} pixels, in {many} crops of {edge}×{edge}")


def _around(config: Any) -> tuple[int, ...]:
    """The tokens before and after an image, where a config names them."""
    for prefix in ("vision", "image"):
        found = tuple(
            id for end in ("start", "end") if (id := getattr(config, f"{prefix}_{end}_token_id", None)) is not None
        )
        if len(found) == 2:
            return found
    return ()


def _asked(model: Any, inputs: dict[str, Tensor]) -> int:
    """How many features the model makes of these images for its text to see."""
    wrong = f"{type(model).__name__} does not take images as outsize's own example batch has them"
    sees = model if hasattr(model, "get_image_features") else model.base_model
    try:
        with torch.no_grad():
            made = sees.get_image_features(**inputs)
    except (RuntimeError, IndexError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ModelUnsupported(f"{wrong}: {error}. {_INSTEAD}") from error
    count = sum(feature.numel() // feature.shape[-1] for feature in tensors_in(getattr(made, "pooler_output", made)))
    if not count:
        raise ModelUnsupported(f"{wrong}: the number of image features is unknown. {_INSTEAD}")
    return count
