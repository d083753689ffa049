"""The bar shows itself on stderr when there is something to wait for."""

import pytest

from outsize import progress
from outsize.progress import counted


def test_what_is_done_at_once_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


def test_what_takes_long_is_shown_with_its_count_on_stderr(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    assert list(counted(range(3), "counting")) == [0, 1, 2]
    out, err = capsys.readouterr()
    assert "counting" in err and not out


def test_where_the_number_is_known_it_is_shown_beside_the_count(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(counted("abc", "moving", total=3)) == ["a", "b", "c"]
    assert "3/3" in capsys.readouterr().err
