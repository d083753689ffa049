"""The first thing on the GPU: Triton, torch and C make the same bits of the same values. Run there with `make test-gpu
PYTHON=python3`.
"""

import pytest
import torch
from ranges import HYPERS, RULES, Range, adversarial, assert_same, kernels, step, step_rule

from outsize.layout.norm import num_segments
from outsize.optim.adamw import RULE
from outsize.optim.native import kernel
from outsize.optim.norm import GradientNorm, segment_sums
from outsize.optim.rule import gpu_kernel

pytestmark = pytest.mark.gpu
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(weight, grad) for weight in (BF16, FP32) for grad in (BF16, FP32)]


def on_card(state: Range) -> Range:
    return state.each(lambda t: t.to("cuda", copy=True))


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
def test_four_million_adversarial_values_give_the_same_bits_in_triton_torch_and_c(
    weight: torch.dtype, grad: torch.dtype
) -> None:
    start = adversarial(2**22, weight=weight, grad=grad)
    for name, hyper in HYPERS.items():
        for clip in (1.0, 0.37109375):
            by_triton, by_torch, by_c = on_card(start), on_card(start), start.each(torch.clone)
            with kernels("best"):
                assert kernel() is not None and gpu_kernel() is not None
                step(by_triton, hyper, clip)
                step(by_c, hyper, clip)
            with kernels("torch"):
                step(by_torch, hyper, clip, piece=2**20)
            assert_same(by_triton, by_torch, f"Triton and torch, {name}, clip {clip}")
            assert_same(by_triton, by_c, f"Triton and C, {name}, clip {clip}")
    finite = by_triton.weight.isfinite().float().mean()
    assert 0.2 < finite < 1, "the values are neither all broken nor all tame"


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_the_same_bits_in_triton_c_and_torch(
    name: str, weight: torch.dtype, grad: torch.dtype
) -> None:
    start = adversarial(1_000_003, weight=weight, grad=grad)
    by_triton, by_torch, by_c = on_card(start), on_card(start), start.each(torch.clone)
    with kernels("best"):
        assert kernel() is not None and gpu_kernel() is not None
        step_rule(name, by_triton, 0.37109375)
        step_rule(name, by_c, 0.37109375)
    with kernels("torch"):
        step_rule(name, by_torch, 0.37109375)
    assert_same(by_triton, by_torch, f"Triton and torch, {name}")
    assert_same(by_triton, by_c, f"Triton and C, {name}")


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
def test_many_steps_of_tame_values_give_the_same_bits(weight: torch.dtype, grad: torch.dtype) -> None:
    torch.manual_seed(0)
    n = 1_000_003
    host = Range(
        torch.randn(n).to(weight),
        torch.zeros(n, dtype=torch.int16) if weight == BF16 else None,
        torch.zeros(n),
        torch.zeros(n),
        torch.empty(0),
    )
    card = on_card(host)
    with kernels("best"):
        for t in range(1, 6):
            gradient = (torch.randn(n) * 0.01).to(grad)
            hyper = RULE.numbers(dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), t)
            step(Range(host.weight, host.lo, host.m, host.v, gradient), hyper, 0.7109375)
            step(Range(card.weight, card.lo, card.m, card.v, gradient.cuda()), hyper, 0.7109375)
    assert_same(card, host)


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 1023, 1024, 1025, 100_001])
def test_odd_lengths_and_unaligned_starts_touch_their_range_only(
    weight: torch.dtype, grad: torch.dtype, numel: int
) -> None:
    start = adversarial(numel + 64, weight=weight, grad=grad, seed=numel)
    with kernels("best"):
        for offset in (0, 1, 4, 8, 13):
            card, host = on_card(start), start.each(torch.clone)
            for state in (card, host):
                step(state.each(lambda t, at=offset: t[at : at + numel]), HYPERS["usual"], 0.37109375)
            assert_same(card, host, f"from {offset}")


def test_a_factor_in_device_memory_is_read_there_without_waiting_and_without_allocating() -> None:
    start = adversarial(100_001, weight=BF16, grad=BF16)
    by_tensor, by_number = on_card(start), on_card(start)
    clip = torch.tensor(0.37109375, device="cuda")
    with kernels("best"):
        triton = gpu_kernel()
        assert triton is not None
        step(on_card(start), HYPERS["usual"], clip)  # compiled
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            state = by_tensor
            triton.update("adamw", state.weight, state.lo, (state.m, state.v), state.grad, HYPERS["usual"], clip)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        step(by_number, HYPERS["usual"], 0.37109375)
    assert_same(by_tensor, by_number)


def test_one_compilation_serves_every_length_and_every_step() -> None:
    with kernels("best"):
        triton = gpu_kernel()
        assert triton is not None
        made = set()
        for numel in (1, 2, 16, 17, 1024, 4096):
            for hyper in HYPERS.values():
                for clip in (1.0, 0.5, 0.0):
                    state = on_card(adversarial(numel, weight=BF16, grad=BF16))
                    made.add(
                        id(triton.update("adamw", state.weight, state.lo, (state.m, state.v), state.grad, hyper, clip))
                    )
        assert len(made) == 1


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
def test_the_compiled_code_neither_fuses_nor_flushes_nor_approximates(weight: torch.dtype, grad: torch.dtype) -> None:
    state = on_card(adversarial(4096, weight=weight, grad=grad))
    with kernels("best"):
        triton = gpu_kernel()
        assert triton is not None
        ptx = triton.update("adamw", state.weight, state.lo, (state.m, state.v), state.grad, HYPERS["usual"], 1.0).asm[
            "ptx"
        ]
    for word in ("fma", ".ftz", ".approx", ".full", "mul.f32", "add.f32", "sub.f32"):
        assert word not in ptx, word
    for word in ("div.rn.f32", "sqrt.rn.f32", "mul.rn.f32", "ld.global.v4", "st.global.v4"):
        assert word in ptx, word


def test_a_range_of_more_than_two_billion_elements() -> None:
    numel = 2**31 + 5000
    if torch.cuda.mem_get_info()[0] < 16 * numel:
        pytest.skip("needs 32 GiB of GPU memory")
    ends = adversarial(10_000, weight=BF16, grad=BF16)
    card = ends.each(lambda t: torch.zeros(numel, dtype=t.dtype, device="cuda"))
    for place in (slice(0, 10_000), slice(numel - 10_000, numel)):
        for part, value in zip(
            card.each(lambda t, place=place: t[place]).state().values(), ends.state().values(), strict=True
        ):
            part.copy_(value)
        card.grad[place].copy_(ends.grad)
    with kernels("best"):
        step(card, HYPERS["usual"], 0.5)
        step(ends, HYPERS["usual"], 0.5)
    for place in (slice(0, 10_000), slice(numel - 10_000, numel)):
        assert_same(card.each(lambda t, place=place: t[place]), ends)
    assert not card.weight[10_000 : numel - 10_000].any()


@pytest.mark.parametrize("grad", [BF16, FP32], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 511, 512, 4095, 4096, 4097, 8192, 8193, 12_289, 1_000_003])
def test_the_sums_of_squares_are_the_same_in_triton_torch_and_c(numel: int, grad: torch.dtype) -> None:
    tame = (torch.randn(numel + 8) * 0.01).to(grad)
    for values in (tame, adversarial(numel + 8, weight=FP32, grad=grad, seed=numel).grad):
        for offset in (0, 1, 8):
            host = values[offset : offset + numel]
            card = values.cuda()[offset : offset + numel]
            by_c = torch.full((num_segments(numel),), -1.0)
            by_triton, by_torch = torch.full((2, num_segments(numel) + 2), -1.0, device="cuda")
            scratch = torch.empty(2 * 4096, device="cuda")
            with kernels("best"):
                assert kernel() is not None and gpu_kernel() is not None
                segment_sums(host, by_c, torch.empty(4096))
                segment_sums(card, by_triton[1:-1], scratch)
            with kernels("torch"):
                segment_sums(card, by_torch[1:-1], scratch)
            torch.testing.assert_close(by_triton, by_torch, rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(by_triton[1:-1].cpu(), by_c, rtol=0, atol=0, equal_nan=True)
            assert by_triton[0] == by_triton[-1] == -1.0, "it wrote beyond the sums"


def test_the_norm_on_the_gpu_is_the_one_on_the_host_and_waits_for_nothing() -> None:
    grads = {str(i): torch.randn(numel).to(dtype) for i, (numel, dtype) in enumerate([(70_001, BF16), (5, FP32)] * 20)}
    numels = {name: grad.numel() for name, grad in grads.items()}
    host, card = GradientNorm(numels, None), GradientNorm(numels, torch.empty(2**22, dtype=torch.uint8, device="cuda"))
    on_card = {name: grad.cuda() for name, grad in grads.items()}
    with kernels("best"):
        for name, grad in grads.items():
            host.measure(name, grad)
            card.measure(name, on_card[name])
        expected = host.measure_total(without=["3"])
        card.measure_total(without=["3"])  # compiled
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for name in grads:
                card.measure(name, on_card[name])
            found = card.measure_total(without=["3"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("grad", [BF16, FP32], ids=str)
def test_the_compiled_sums_neither_fuse_nor_flush(grad: torch.dtype) -> None:
    with kernels("best"):
        triton = gpu_kernel()
        assert triton is not None
        made = triton.segment_sums(torch.randn(8192, device="cuda").to(grad), torch.empty(2, device="cuda"))
    for word in ("fma", ".ftz", ".approx", "mul.f32", "add.f32"):
        assert word not in made.asm["ptx"], word
    assert "mul.rn.f32" in made.asm["ptx"] and "ld.global.v4" in made.asm["ptx"]
