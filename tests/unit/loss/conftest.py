"""`prepare` itself: its profiling runs are made, not read from the cache that other tests share."""

import pytest


@pytest.fixture(autouse=True)
def _without_shared_profiles(_profiles_anew: None) -> None:
    pass
