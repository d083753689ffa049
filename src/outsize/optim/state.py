"""The tensors of an optimizer's state in the buffer that holds them."""

import torch
from torch import Tensor

from outsize.layout.optimizer import ChunkUpdate


def split_state(buffer: Tensor, update: ChunkUpdate) -> tuple[list[Tensor], Tensor | None]:
    """The fp32 state tensors, flat, and the lower halves of the masters (None: the weights are their own)."""
    n, count = update.numel, len(update.state)
    state = [buffer[4 * n * i : 4 * n * (i + 1)].view(torch.float32) for i in range(count)]
    return state, buffer[4 * n * count :].view(torch.int16) if update.is_split else None
