"""GpuBudget.total_for is the smallest total with that many usable bytes."""

from hypothesis import given
from hypothesis import strategies as st

from outsize.hardware.gpu_budget import GpuBudget


@given(st.integers(0, 2**40), st.integers(0, 2**32), st.floats(0.0, 0.5))
def test_a_byte_less_than_the_total_is_too_little(usable: int, fixed: int, share: float) -> None:
    total = GpuBudget(total_bytes=0, fixed_bytes=fixed, share=share).total_for(usable)
    assert GpuBudget(total_bytes=total, fixed_bytes=fixed, share=share).usable_bytes >= usable
    assert GpuBudget(total_bytes=total - 1, fixed_bytes=fixed, share=share).usable_bytes < usable


def test_without_overhead_both_are_the_same() -> None:
    assert GpuBudget(total_bytes=7).usable_bytes == 7 == GpuBudget(total_bytes=1).total_for(7)
