"""The models of the benchmarks: those of `outsize bench`, and vision models with images in every row."""

import re
from typing import TYPE_CHECKING, Any

from outsize.run.shapes import SHAPES as TEXT_SHAPES
from outsize.run.shapes import require_one_of, rope, shape_config, sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from benchmarks.bench_record import Bench
    from outsize.model.weights import Weights

_VISION: dict[str, Any] = dict(
    depth=32, hidden_size=1280, intermediate_size=3420, num_heads=16, patch_size=14, spatial_merge_size=2
)
_VISION |= dict(temporal_patch_size=2, window_size=112, fullatt_block_indexes=[7, 15, 23, 31])
_TOKENS = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653)


def _qwen25_vl(text: dict[str, Any], *, vocab_size: int, tied: bool) -> dict[str, Any]:
    tie, vision = {"tie_word_embeddings": tied}, _VISION | {"out_hidden_size": text["hidden_size"]}
    text = text | tie | rope(1000000.0, mrope_section=[16, 24, 24]) | dict(vocab_size=vocab_size, rms_norm_eps=1e-6)
    text |= dict(max_position_embeddings=128000, use_cache=False)
    return dict(model_type="qwen2_5_vl", text_config=text, vision_config=vision) | tie | _TOKENS


SHAPES: dict[str, dict[str, Any]] = TEXT_SHAPES | {
    "qwen2.5-vl-3b": _qwen25_vl(sizes(2048, 11008, 36, 16, 2), vocab_size=151936, tied=True),
    "qwen2.5-vl-7b": _qwen25_vl(sizes(3584, 18944, 28, 28, 4), vocab_size=152064, tied=False),
}


def named_config(name: str, *, seq: int = 0) -> Any:
    """The transformers config of a shape, with at least `seq` positions."""
    return shape_config(SHAPES[require_one_of(SHAPES, name, "shape")], seq=seq)


def random_shape(name: str, *, seq: int, same_layers: bool = False) -> "tuple[nn.Module, Weights]":
    """`same_layers`: every layer has the first one's weights."""
    from outsize.run.random_weights import random_model

    model, weights = random_model(named_config(name, seq=seq))
    return model, SameLayers(weights) if same_layers else weights


class SameLayers:
    """Weights of which every layer has the first one's: OSFT then decomposes those of one layer."""

    def __init__(self, weights: "Weights"):
        self._weights = weights

    def read_into(self, name: str, tensor: "Tensor") -> None:
        self._weights.read_into(re.sub(r"\blayers\.\d+\.", "layers.0.", name), tensor)

    def close(self) -> None:
        self._weights.close()


def random_batches(model: Any, bench: "Bench", *, number: int = 4) -> "list[dict[str, Tensor]]":
    """Full rows of random text. For vision models, random images and the tokens that stand for them."""
    import torch

    from outsize.forecast.example import Images, example_batch
    from outsize.run.random_weights import random_text

    rows, tokens = bench.micro_batch, bench.seq
    images = Images(per_row=bench.images, pixels=bench.image_size)
    example = example_batch(type(model), model.config, rows=rows, tokens=tokens, images=images, model=lambda: model)
    texts = random_text(model.config, rows, tokens, number=number)
    if "pixel_values" not in example.batch:
        return texts
    special = [getattr(model.config, f"{key}_token_id") for key in ("image", "vision_start", "vision_end")]
    is_special = torch.isin(example.batch["input_ids"], torch.tensor(special))
    generator = torch.Generator().manual_seed(0)
    batches = []
    for text in texts:
        ids = torch.where(is_special, example.batch["input_ids"], text["input_ids"])
        pixels = torch.randn(example.batch["pixel_values"].shape, generator=generator)
        labels = ids.masked_fill(is_special, -100)
        batches.append({**example.batch, "pixel_values": pixels, "input_ids": ids, "labels": labels})
    return batches
