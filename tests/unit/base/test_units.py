"""Sizes: what is written parses back, and what cannot be a size says why."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import ConfigError
from outsize.base.units import exact_bytes, parse_bytes, show_bytes, show_duration, show_enough, show_seconds


@given(st.integers(1, 2**60))
def test_the_exact_form_parses_back_to_the_same_number(num_bytes: int) -> None:
    assert parse_bytes(exact_bytes(num_bytes)) == num_bytes


@given(st.integers(1, 2**60))
def test_what_is_said_to_be_enough_is(num_bytes: int) -> None:
    """`7.01 GiB would do` was refused: it had been rounded down."""
    enough = parse_bytes(show_enough(num_bytes))
    assert num_bytes <= enough <= num_bytes * 1.011


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("123456B", 123456),
        ("64MiB", 64 * 2**20),
        ("24GiB", 24 * 2**30),
        ("1.5KiB", 1536),
        ("2 TiB", 2**41),
        (" 8gib ", 2**33),
        (77, 77),
        ("0.5GiB", 2**29),
    ],
)
def test_sizes_are_read_as_people_write_them(written: str | int, num_bytes: int) -> None:
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize(
    "written", ["", "GiB", "24", "24 G", "-1GiB", "1e3MiB", "1,5GiB", "0GiB", "0.1B", 0, -5, 2.5, None, True, ["1GiB"]]
)
def test_what_is_no_size_is_refused_with_the_name_of_the_setting(written: object) -> None:
    with pytest.raises(ConfigError, match="gpu_memory") as caught:
        parse_bytes(written, name="gpu_memory")  # type: ignore[arg-type]
    assert repr(written) in str(caught.value)


def test_gigabytes_are_refused_because_they_mean_two_things() -> None:
    with pytest.raises(ConfigError, match="use GiB"):
        parse_bytes("24GB")


def test_the_exact_form_uses_the_largest_unit_that_divides() -> None:
    assert [exact_bytes(n) for n in (1, 1023, 1024, 1536, 3 * 2**20, 2**40)] == [
        "1B",
        "1023B",
        "1KiB",
        "1536B",
        "3MiB",
        "1TiB",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (21.4 * 2**30, "21.4 GiB"),
        (139 * 2**30, "139 GiB"),
        (3.25 * 2**40, "3.25 TiB"),
    ],
)
def test_shown_sizes_have_three_digits(num_bytes: float, shown: str) -> None:
    assert show_bytes(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0, "0 s"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4.2e-5, "42 µs"), (3e-9, "3 ns")]
)
def test_shown_seconds_pick_a_readable_unit(seconds: float, shown: str) -> None:
    assert show_seconds(seconds) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0 s"), (119.4, "119 s"), (119.6, "2 min"), (3569, "59 min"), (3571, "1 h 0 min"), (7500, "2 h 5 min"),
     (86_399, "1 d 0 h"), (273_600, "3 d 4 h")],
)  # fmt: skip
def test_shown_durations_need_no_arithmetic(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


def test_nothing_is_enough_for_nothing() -> None:
    """A host budget of 0 may do without pins, and the message says so."""
    assert show_enough(0) == "0 B"
