"""Pairs of parameters: a test that has a plan and another parameter runs under the plans by turns, so that each value
of the other is run once and each plan half of the time. `make test-all` runs the product.
"""

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        indices = getattr(getattr(item, "callspec", None), "indices", {})
        if item.path.parent.name == "foreign" and "plan" in indices and len(indices) > 1 and sum(indices.values()) % 2:
            item.add_marker(pytest.mark.full)
