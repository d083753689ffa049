"""A model of random weights, made where they are to live: nothing is drawn twice, and a model of 70 B parameters takes
as long as copying it.

Speed and memory do not depend on the values, so all matrices are cut out of one random buffer, each from a place of its
own.
"""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from outsize.forecast.example import Images, example_batch
from outsize.model.build import trainable_class
from outsize.model.weights import unmaterialize
from outsize.run.bench_record import Bench
from outsize.run.shapes import shape_config

_LENGTH = 2**24 - 3
"""Of the buffer. A prime, so that no two rows of a matrix are the same cut."""
_DEVIATION = 0.02


def random_model(shape: str, *, seq: int, seed: int = 0) -> tuple[nn.Module, "RandomWeights"]:
    """An unmaterialized bf16 model (its buffers are real) and the values of its parameters."""
    from accelerate import init_empty_weights

    config = shape_config(shape, seq=seq)
    with init_empty_weights(include_buffers=False):
        model = trainable_class(config)._from_config(config, dtype=torch.bfloat16).train()
    model.tie_weights()  # on its way to meta every tied parameter became two
    return unmaterialize(model), RandomWeights(seed)


def random_batches(model: Any, bench: Bench, *, number: int = 4) -> list[dict[str, Tensor]]:
    """Full rows of random text; with images, the text around them is random, and so are they."""
    generator, rows, tokens = torch.Generator().manual_seed(0), bench.micro_batch, bench.seq
    pictures = Images(per_row=bench.images, pixels=bench.image_size)
    example = example_batch(
        type(model), model.config, rows=rows, tokens=tokens, images=pictures, model=lambda: model
    ).batch
    fixed = [
        token
        for key in ("image", "vision_start", "vision_end")
        if (token := getattr(model.config, f"{key}_token_id", None)) is not None
    ]
    is_fixed = torch.isin(example["input_ids"], torch.tensor(fixed))
    # Text must not hold tokens that stand for images: of models that see, those are the last of the vocabulary.
    limit = min([model.config.get_text_config().vocab_size, *fixed])

    def draw() -> dict[str, Tensor]:
        ids = torch.where(is_fixed, example["input_ids"], torch.randint(0, limit, (rows, tokens), generator=generator))
        pixels = {
            name: torch.randn(value.shape, generator=generator)
            for name, value in example.items()
            if name == "pixel_values"
        }
        return {**example, **pixels, "input_ids": ids, "labels": ids.masked_fill(is_fixed, -100)}

    return [draw() for _ in range(number)]


class RandomWeights:
    """Values by name alone (see `Weights`): the same in every plan and every order of reading."""

    def __init__(self, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self._values = torch.randn(_LENGTH, generator=generator).mul_(_DEVIATION).to(torch.bfloat16)

    def read_into(self, name: str, tensor: Tensor) -> None:
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.ndim == 1:  # norms
            tensor.fill_(1.0)
        else:
            self._cut(zlib.crc32(name.encode()) % _LENGTH, tensor)

    def _cut(self, start: int, tensor: Tensor) -> None:
        flat, done = tensor.view(-1), 0
        while done < flat.numel():
            taken = min(_LENGTH - start, flat.numel() - done)
            flat[done : done + taken].copy_(self._values[start : start + taken])
            done, start = done + taken, 0

    def close(self) -> None:
        pass
