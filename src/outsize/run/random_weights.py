"""A model of random weights, made where they are to live: nothing is drawn twice, and a model of 70 B parameters takes as long as copying it.

Speed and memory do not depend on the values, so all matrices are cut out of one random buffer, each from a place of its own.
"""

import zlib

import torch
from torch import Tensor, nn

from outsize.model.build import trainable_class
from outsize.model.weights import hollow
from outsize.run.shapes import shape_config

_LENGTH = 2**24 - 3
"""Of the buffer. A prime, so that no two rows of a matrix are the same cut."""
_DEVIATION = 0.02


def random_model(shape: str, *, seq: int, seed: int = 0) -> tuple[nn.Module, "RandomWeights"]:
    """A hollow bf16 model (its buffers are real) and the values of its parameters."""
    from accelerate import init_empty_weights

    config = shape_config(shape, seq=seq)
    with init_empty_weights(include_buffers=False):
        model = trainable_class(config)._from_config(config, dtype=torch.bfloat16).train()
    model.tie_weights()  # on its way to meta every tied parameter became two
    return hollow(model), RandomWeights(seed)


def random_batches(vocab_size: int, rows: int, tokens: int, *, number: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randint(0, vocab_size, (rows, tokens), generator=generator) for _ in range(number))
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


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
