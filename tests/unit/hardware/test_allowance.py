"""What an answer tells people to ask for is the least that leaves the room."""

from hypothesis import given
from hypothesis import strategies as st

from outsize.hardware.allowance import Allowance


@given(st.integers(0, 2**40), st.integers(0, 2**32), st.floats(0.0, 0.5))
def test_what_is_asked_for_leaves_the_room_and_a_byte_less_does_not(room: int, fixed: int, share: float) -> None:
    asked = Allowance(asked_bytes=0, fixed_bytes=fixed, share=share).asked_for(room)
    assert Allowance(asked_bytes=asked, fixed_bytes=fixed, share=share).room_bytes >= room
    assert Allowance(asked_bytes=asked - 1, fixed_bytes=fixed, share=share).room_bytes < room


def test_without_overhead_both_are_the_same() -> None:
    assert Allowance(asked_bytes=7).room_bytes == 7 == Allowance(asked_bytes=1).asked_for(7)
