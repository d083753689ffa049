"""The bar shows itself on stderr when there is something to wait for."""

import re

import pytest
import zoo
from rich.console import Console
from rich.progress import Progress

from outsize import progress
from outsize.progress import Bar, counted
from outsize.setup.prepare import preview


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a terminal, and everything takes long."""
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(progress, "_REDRAW_SECONDS", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")


def test_what_is_done_at_once_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("timing")
def test_what_takes_long_is_shown_with_its_count_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted(range(3), "counting")) == [0, 1, 2]
    out, err = capsys.readouterr()
    assert "counting" in err and not out


@pytest.mark.usefixtures("timing")
def test_where_the_number_is_known_it_is_shown_beside_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(counted("abc", "moving", total=3)) == ["a", "b", "c"]
    assert "3/3" in capsys.readouterr().err


@pytest.mark.usefixtures("timing")
def test_a_number_may_become_known_on_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar("looking") as bar:
        bar.advance()
        assert "1/" not in capsys.readouterr().err
        bar.total = 2
        bar.advance()
    assert "2/2" in capsys.readouterr().err


@pytest.mark.usefixtures("timing")
def test_within_a_bar_that_is_shown_there_is_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in counted("ab", "outer", total=2):
        assert list(counted("abc", "inner", total=3)) == ["a", "b", "c"]
    assert list(counted("abc", "after", total=3)) == ["a", "b", "c"]
    shown = capsys.readouterr().err
    assert "2/2" in shown and "after" in shown and "inner" not in shown


@pytest.mark.usefixtures("timing")
def test_a_bar_that_an_error_ends_makes_way_for_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), Bar("broken") as bar:
        bar.advance()
        1 / 0  # noqa: B018
    assert list(counted("abc", "next")) == ["a", "b", "c"]
    assert "next" in capsys.readouterr().err


def test_without_a_terminal_nothing_is_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", -1.0)
    assert list(counted(range(3), "counting")) == [0, 1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("timing")
def test_what_is_printed_to_a_file_meanwhile_stays_out_of_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for i in counted(range(3), "counting"):
        print("row", i)
    out, err = capsys.readouterr()
    assert out == "row 0\nrow 1\nrow 2\n" and "row" not in err


@pytest.mark.usefixtures("timing")
def test_beside_another_bar_of_richs_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(console=Console(stderr=True), transient=True) as training:
        training.add_task("training")
        assert list(counted(range(3), "counting")) == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "training" in shown and "counting" not in shown


@pytest.mark.usefixtures("timing")
@pytest.mark.parametrize("device", ["sim:1GiB", "cpu"])
def test_looking_at_a_model_is_shown_block_by_block_to_the_last(
    device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of this one the first pass leaves out layers that the others run."""
    preview(zoo.make("qwen3-vl"), zoo.batch("qwen3-vl"), device=device)
    counts = re.findall(r"(\d+)/(\d+)", capsys.readouterr().err)
    assert len(counts) > 10 and counts[-1][0] == counts[-1][1]
