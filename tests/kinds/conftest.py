"""Each test profiles its own models: what a profile sees of odd models is what these tests are about."""

import pytest


@pytest.fixture(autouse=True)
def _without_shared_profiles(_profiles_of_this_test: None) -> None:
    pass
