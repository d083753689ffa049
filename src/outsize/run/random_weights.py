"""Models with random weights, written directly to their homes at the speed of a copy.

All matrices are ranges of one random buffer, since speed and memory do not depend on the values.
"""

import zlib
from typing import Any

import torch
from torch import Tensor, nn

from outsize.model.build import trainable_class
from outsize.model.weights import unmaterialize

_LENGTH = 2**24 - 3
"""Elements of the buffer. A prime, so that no two rows of a matrix are the same range."""
_DEVIATION = 0.02


def random_model(config: Any) -> tuple[nn.Module, "RandomWeights"]:
    """An unmaterialized bf16 model (its buffers are real) and the values of its parameters."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = trainable_class(config)._from_config(config, dtype=torch.bfloat16).train()
    model.tie_weights()  # building on meta untied them
    return unmaterialize(model), RandomWeights()


def random_text(config: Any, rows: int, tokens: int, *, number: int = 4) -> list[dict[str, Tensor]]:
    """Batches of full rows of random text tokens (no image tokens)."""
    special = [getattr(config, f"{key}_token_id", None) for key in ("image", "video", "vision_start", "vision_end")]
    # The special tokens of vision models are the last ones of the vocabulary.
    limit = min([config.get_text_config().vocab_size, *(token for token in special if token is not None)])
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(0, limit, (rows, tokens), generator=generator) for _ in range(number)]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in drawn]


class RandomWeights:
    """Values that depend on a parameter's name alone (see `Weights`): the same under every plan."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randn(_LENGTH, generator=generator).mul_(_DEVIATION).to(torch.bfloat16)

    def read_into(self, name: str, tensor: Tensor) -> None:
        if name.endswith("bias"):
            tensor.zero_()
        elif tensor.ndim == 1:  # norms
            tensor.fill_(1.0)
        else:
            self._fill(zlib.crc32(name.encode()) % _LENGTH, tensor)

    def _fill(self, start: int, tensor: Tensor) -> None:
        flat, done = tensor.view(-1), 0
        while done < flat.numel():
            count = min(_LENGTH - start, flat.numel() - done)
            flat[done : done + count].copy_(self._values[start : start + count])
            done, start = done + count, 0

    def close(self) -> None:
        pass
