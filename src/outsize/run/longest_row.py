"""The longest row that a run's data can produce, which its plan is for."""

from collections.abc import Sequence
from typing import Any

from outsize.config.run import RunConfig


def longest_row(config: RunConfig, parts: Sequence[Any]) -> int:
    """Tokens of the longest row that the data can produce. Evaluation rows count: the plan covers their forwards."""
    if config.sample_packing or config.pad_to_sequence_len:
        return config.sequence_len
    return max(int(rows.lengths.max()) for rows in parts)


def rows_text(longest: int, sequence_len: int) -> str:
    """What the plan assumes about rows, if it is not `sequence_len`."""
    if longest == sequence_len:
        return ""
    return f"planned for {longest} tokens, the longest row of the data; sequence_len is {sequence_len}"
