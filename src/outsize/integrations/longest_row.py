"""Finds the number of tokens of the longest row of a tokenized dataset, for the plan."""

from typing import Any


def longest_row(dataset: Any) -> int | None:
    """Reads the lengths of the column `input_ids` in the table of a `datasets.Dataset`, which is fast; rows that its
    index leaves out count too. None for other datasets. Pairs of answers have other columns: the loss of TRL takes
    memory for each token that is not masked, so the longest row is not the largest.
    """
    table: Any = getattr(dataset, "data", None)
    columns = getattr(dataset, "column_names", None)
    if not hasattr(table, "column") or not isinstance(columns, list) or dataset.format["type"] == "custom":
        return None
    if "input_ids" not in columns:
        return None
    from pyarrow import compute

    try:
        return compute.max(compute.list_value_length(table.column("input_ids"))).as_py()
    except NotImplementedError:  # the column has no lists
        return None
