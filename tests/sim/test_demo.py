"""`make train`, three steps of it: the budget it sets itself, the promise of its plan, and that it can be repeated."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from examples import demo


@pytest.mark.usefixtures("_profiles_anew")
def test_the_demo_keeps_its_budget(tmp_path: Path) -> None:
    screen = io.StringIO()
    outcome = demo.main(3, folder=tmp_path / "a", sample_bytes=4, console=Console(file=screen, width=104))
    # The plan is for rows that need padding, which the text's do not.
    assert (
        0.99 * outcome.planned_bytes
        < outcome.peak_bytes
        <= outcome.planned_bytes
        <= outcome.budget_bytes
        <= 0.4 * outcome.plain_bytes
    )
    assert outcome.kept
    assert math.isclose(outcome.losses[0], math.log(256), rel_tol=0.05) and outcome.losses[2] < outcome.losses[0]
    shown = screen.getvalue()
    assert all(
        word in shown
        for word in ("the plan", "model.layers", "tokens/s", "what it writes", demo.PROMPT, "budget", "plain run")
    )


@pytest.mark.full
def test_the_demo_says_the_same_twice(tmp_path: Path) -> None:
    outcome, again = (
        demo.main(3, folder=tmp_path / name, sample_bytes=4, console=Console(file=io.StringIO())) for name in ("a", "b")
    )
    assert (again.losses, again.sample) == (outcome.losses, outcome.sample)


def test_the_text_is_plain_and_large_enough() -> None:
    text = demo.read_text()
    assert 60_000 < len(text) < 150_000 and text.isascii()
    assert text.startswith("RUTH 1"), "the heading that names the source is not learned"
