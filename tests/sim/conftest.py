"""What whole runs on a simulated device share."""

import pytest


@pytest.fixture(autouse=True)
def _no_cached_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trace is taken in the test that uses it, and nothing is left in the user's home."""
    monkeypatch.setenv("OUTSIZE_CACHE", "")
