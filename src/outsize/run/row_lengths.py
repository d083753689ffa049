"""Lengths of the rows that a run's data produce. The plan is for the longest."""

from collections.abc import Sequence
from typing import Any

from outsize.config.run import RunConfig
from outsize.data.packing import PackedRows
from outsize.data.rows import Rows


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


def tokens_per_row(rows: Rows | PackedRows) -> float:
    """Of the average row, without padding."""
    documents = rows.documents if isinstance(rows, PackedRows) else rows
    return documents.num_tokens / len(rows)
