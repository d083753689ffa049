"""The row lengths at which a profiling run measures in place of a long row. No torch."""

from collections.abc import Sequence
from typing import Any

LONG_TOKENS = 2**15
"""Longer rows are profiled at shorter lengths, whether they fit or not: time and memory of a profiling run grow with
the square of the length, and with the length."""
_FIRST_TOKENS = 2**14
"""The first length, for very long rows. Below a few thousand tokens, gradients of weights are larger than activations,
and the peak of a block is at another operator than in long rows."""
NUM_LENGTHS = 3
_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
_CHANGING_ROPES = ("dynamic", "longrope")


def lengths_of_change(config: Any, *, rows: int, loss_chunk: int, tile_tokens: int = 0) -> tuple[int, ...]:
    """The row lengths above which a model, or outsize, runs other code than up to them. Profiles of shorter rows stand
    for a longer row if no such length is between them.

    Every feature that depends on the length of rows has its entry here.

    Args:
        config: of a transformers model, or None.
        loss_chunk: tokens per chunk of a chunked loss, over all rows. 0: the loss is not chunked.
        tile_tokens: length of the tiles of activation/tiles.py. 0: no tiles.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = [getattr(text, name, None) for name in _WINDOWS]  # masks of windows exist in longer rows
    rope = getattr(text, "rope_parameters", None) or {}
    for one in (rope, *rope.values()) if isinstance(rope, dict) else ():  # by kind of layer in some models
        if isinstance(one, dict) and one.get("rope_type") in _CHANGING_ROPES:
            own = one.get("original_max_position_embeddings")
            found.append(own or getattr(text, "original_max_position_embeddings", None))
    found += [loss_chunk // rows, 2 * tile_tokens]
    return tuple(sorted({length for length in found if isinstance(length, int) and length > 0}))


def lengths_to_profile(tokens: int, changes: Sequence[int]) -> tuple[int, ...]:
    """Three lengths of rows that stand for `tokens`, each at most twice the one before. Empty if there are none."""
    least = max((length for length in changes if length < tokens), default=0) + 1
    unit = _unit(tokens)
    first = _rounded(max(least, min(tokens // 8, _FIRST_TOKENS)), unit)
    ratio = min(2.0, (tokens / first) ** (1 / NUM_LENGTHS))
    return _distinct([_rounded(first * ratio**i, unit) for i in range(NUM_LENGTHS)], tokens, unit)


def lengths_between(low: int, high: int, count: int) -> tuple[int, ...]:
    """Up to `count` lengths between two, which are not among them: the lower one fits, the higher one does not."""
    unit = _unit(high)
    steps = [low + (high - low) * (i + 1) / (count + 1) for i in range(count)]
    return tuple(length for length in _distinct([_rounded(step, unit) for step in steps], high, unit) if length > low)


def _unit(tokens: int) -> int:
    return 1024 if tokens >= LONG_TOKENS else 8


def _rounded(tokens: float, unit: int) -> int:
    return -(-int(tokens) // unit) * unit


def _distinct(lengths: Sequence[int], below: int, unit: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(length for length in lengths if length <= below - unit))
