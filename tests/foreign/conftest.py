"""Pairs of parameters: a test that has a plan and another parameter runs under the plans by turns, so that each value
of the other is run once and each plan half of the time. `make test-all` runs the product.
"""

from typing import Any

import foreign_plans
import pytest

_PLANS = ("streamed", "mixed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    others: dict[Any, list[list[str]]] = {}
    for item in items:
        callspec: Any = getattr(item, "callspec", None)
        if callspec is None or foreign_plans.EVERY_PLAN.mark not in item.iter_markers("parametrize"):
            continue
        if len(callspec.params) > 1 and callspec.params["plan"] in _PLANS:
            plan = callspec.params["plan"]
            other = [word for word in callspec.id.split("-") if word != plan]
            known = others.setdefault((item.path, item.originalname), [])  # type: ignore[attr-defined]
            if other not in known:
                known.append(other)
            if (known.index(other) + _PLANS.index(plan)) % 2:
                item.add_marker(pytest.mark.full)
