"""What an answer tells people to ask for is the least that leaves the room."""

from hypothesis import given
from hypothesis import strategies as st

from outsize.hardware.gpu_budget import GpuBudget


@given(st.integers(0, 2**40), st.integers(0, 2**32), st.floats(0.0, 0.5))
def test_what_is_asked_for_leaves_the_room_and_a_byte_less_does_not(room: int, fixed: int, share: float) -> None:
    asked = GpuBudget(total_bytes=0, fixed_bytes=fixed, share=share).total_for(room)
    assert GpuBudget(total_bytes=asked, fixed_bytes=fixed, share=share).usable_bytes >= room
    assert GpuBudget(total_bytes=asked - 1, fixed_bytes=fixed, share=share).usable_bytes < room


def test_without_overhead_both_are_the_same() -> None:
    assert GpuBudget(total_bytes=7).usable_bytes == 7 == GpuBudget(total_bytes=1).total_for(7)
