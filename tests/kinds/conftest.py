"""Each test profiles its own model: what a profile sees of odd models is what these tests are about."""

import pytest


@pytest.fixture(autouse=True)
def _without_shared_profiles(_profiles_anew: None) -> None:
    pass
