"""Finds the number of tokens of the longest row of a tokenized dataset, for the plan."""

from typing import Any

_ROWS = (
    ("input_ids",),
    ("prompt_ids", "chosen_ids"),
    ("prompt_ids", "rejected_ids"),
    ("chosen_ids",),
    ("rejected_ids",),
    ("prompt_ids", "completion_ids"),
    ("prompt_ids", "KL_completion_ids"),
)
"""Columns of TRL's datasets that make up a row of tokens together."""


def longest_row(dataset: Any) -> int | None:
    """Reads the lengths in the table of a `datasets.Dataset`, which is fast; rows that its index leaves out count too.
    None for other datasets, and for other columns.
    """
    table, columns = getattr(dataset, "data", None), getattr(dataset, "column_names", None)
    if not hasattr(table, "column") or not isinstance(columns, list) or dataset.format["type"] == "custom":
        return None
    from pyarrow import compute

    found = [0]
    for names in _ROWS:
        if set(names) <= set(columns):
            try:
                lengths = [compute.list_value_length(table.column(name)) for name in names]
            except NotImplementedError:  # the column has no lists
                return None
            found.append(compute.max(lengths[0] if len(lengths) == 1 else compute.add(*lengths)).as_py() or 0)
    return max(found) or None
