"""Counts parity cells and fails a run of the whole suite that ran fewer than it should: a suite that quietly shrinks is
green.

A test that compares a cell with the plain loop takes the fixture `parity_cell` and calls it once per comparison. Counts
travel with the test reports, so those of xdist's workers add up in the one process that prints them. That process must
know this file: the Makefile names tests/parity beside tests.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

MIN_CELLS = 240 + 60 + 404
"""Of `make test`: twelve in the covering array of each of 20 kinds, three mixed plans of each, and all others."""
MIN_CELLS_FULL = MIN_CELLS + 475
"""Of `make test-all`."""

_HERE = Path(__file__).parent
_PROPERTY = "parity_cell"
_count = 0


@pytest.fixture
def parity_cell(record_property: Callable[[str, object], None]) -> Callable[[object], None]:
    """Call it with a cell that was found equal."""
    return lambda cell: record_property(_PROPERTY, str(cell))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    global _count
    if report.when == "call" and report.passed:
        _count += sum(name == _PROPERTY for name, _ in report.user_properties)


def _minimum(config: pytest.Config) -> int | None:
    """How many cells this run must have; None where the user chose tests, or this is a worker."""
    option = config.option
    chosen = (
        option.keyword
        or option.collectonly
        or getattr(option, "lf", False)
        or getattr(option, "deselect", None)
        or hasattr(config, "workerinput")
    )
    paths = [
        (config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args if "::" not in arg
    ]
    if chosen or not any(path == _HERE or path in _HERE.parents for path in paths):
        return None
    return {"not full": MIN_CELLS, "": MIN_CELLS_FULL}.get(option.markexpr)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    minimum = _minimum(session.config)
    if minimum is not None and _count < minimum and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    minimum = _minimum(config)
    if _count or minimum:
        short = minimum is not None and _count < minimum
        wanted = f", at least {minimum} are required" if minimum is not None else ""
        terminalreporter.write_line(f"parity cells equal to the bit: {_count}{wanted}", red=short, green=not short)
