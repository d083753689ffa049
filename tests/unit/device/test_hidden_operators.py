"""What bitsandbytes' operators do inside, where the observer sees their results only."""

from typing import Any

import pytest
import torch

from outsize.device.observer import Observer, hides_memory
from outsize.profile.fake_weights import FakeWeights

bnb = pytest.importorskip("bitsandbytes")

ROWS, INNER, OUTER = 8, 128, 256


def observed(run: Any) -> Observer:
    with Observer() as observer:
        observer.cost_of = lambda flops, moved: 0.0
        result = run()
        assert observer.live_bytes == result.untyped_storage().nbytes()
    return observer


def quantized(double: bool) -> Any:
    weight = torch.randn(OUTER, INNER, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    return bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)


@pytest.mark.parametrize("double", [True, False])
def test_a_4_bit_product_counts_the_weight_that_it_dequantizes(double: bool) -> None:
    packed, state = quantized(double)
    x = torch.randn(ROWS, INNER).to(torch.bfloat16)
    found = observed(lambda: bnb.matmul_4bit(x, packed, state))
    out, scratch = 2 * ROWS * OUTER, 2 * OUTER * INNER + (8 * OUTER * INNER // 64 if double else 0)
    assert found.peak_bytes == out + scratch
    assert found.flops == 2 * ROWS * INNER * OUTER
    read = x.nbytes + packed.nbytes + state.absmax.nbytes
    read += state.state2.absmax.nbytes + state.state2.code.nbytes + 4 if double else 0
    assert found.moved_bytes == read + out + 2 * scratch, "the dequantized weight is written once and read once"


def test_it_is_counted_on_shapes_as_on_values() -> None:
    packed, state = quantized(True)
    x = torch.randn(ROWS, INNER).to(torch.bfloat16)
    wanted = observed(lambda: bnb.matmul_4bit(x, packed, state))
    with FakeWeights() as mode:
        state.absmax, state.offset = mode.from_tensor(state.absmax), mode.from_tensor(state.offset)
        state.state2.absmax, state.state2.code = map(mode.from_tensor, (state.state2.absmax, state.state2.code))
        packed, x = mode.from_tensor(packed), mode.from_tensor(x)
        found = observed(lambda: bnb.matmul_4bit(x, packed, state))
    for name in ("peak_bytes", "flops", "moved_bytes"):
        assert getattr(found, name) == getattr(wanted, name)


def test_memory_inside_an_operator_may_exceed_the_budget() -> None:
    packed, state = quantized(False)
    x = torch.randn(ROWS, INNER).to(torch.bfloat16)

    def refuse(new_bytes: int, live_bytes: int) -> None:
        if live_bytes > 2 * OUTER * INNER:
            raise MemoryError(live_bytes)

    with pytest.raises(MemoryError, match=str(2 * ROWS * OUTER + 2 * OUTER * INNER)), Observer(refuse):
        bnb.matmul_4bit(x, packed, state)


def test_operators_that_hide_memory_are_those_outside_of_torch_and_of_the_table() -> None:
    ops = torch.ops
    known = (ops.aten.mm.default, ops.prim.device.default, ops.bitsandbytes.gemm_4bit.default)
    assert not any(map(hides_memory, (*known, ops.bitsandbytes.dequantize_4bit.default)))
    assert hides_memory(ops.bitsandbytes.quantize_4bit.default)
