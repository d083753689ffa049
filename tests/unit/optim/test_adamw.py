"""The in-place kernel equals the reference to the bit, whatever the values, the sizes and the pieces, and allocates
nothing.
"""

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outsize.layout.optimizer import PIECE_NUMEL
from outsize.optim.adamw import RULE
from outsize.optim.clip import clip_factor, round_fp32
from outsize.optim.native import find_kernel, kernel
from outsize.optim.rule import Scratch, update
from outsize.optim.split import join
from outsize.reference import AdamW

OPTIONS: dict[str, Any] = dict(lr=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
ALL_BF16 = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(params=["native", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test here holds for both."""
    monkeypatch.setenv("OUTSIZE_KERNELS", "torch" if request.param == "torch" else "")
    find_kernel.cache_clear()
    assert (kernel() is None) == (request.param == "torch")
    yield
    find_kernel.cache_clear()


def make_scratch(piece: int) -> Scratch:
    return Scratch(torch.empty(RULE.layout.scratch_bytes(piece), dtype=torch.uint8))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit; NaNs compare as NaN, since their payload is no one's promise."""
    assert a.dtype == b.dtype
    if not a.is_floating_point():
        return torch.equal(a, b)
    ints = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.view(ints)[~a.isnan()], b.view(ints)[~b.isnan()])


class Run:
    """One flat range under the kernel and the same range as a parameter under the reference."""

    def __init__(self, weight: Tensor, *, piece: int, m: Tensor | None = None, v: Tensor | None = None) -> None:
        self.weight = weight.clone()
        self.lo = torch.zeros(weight.numel(), dtype=torch.int16) if weight.dtype == torch.bfloat16 else None
        self.m = torch.zeros(weight.numel()) if m is None else m.clone()
        self.v = torch.zeros(weight.numel()) if v is None else v.clone()
        self.scratch = make_scratch(piece)
        self.param = torch.nn.Parameter(weight.clone())
        self.reference = AdamW([self.param], **OPTIONS)
        self.state = self.reference.state[self.param]
        self.state.update(step=0, exp_avg=self.m.clone(), exp_avg_sq=self.v.clone())
        if self.lo is not None:
            self.state["lo"] = self.lo.clone()
        self.steps = 0

    def step(self, grad: Tensor, clip: float = 1.0, *, as_tensor: bool = False) -> None:
        self.steps += 1
        hyper = RULE.numbers(OPTIONS, self.steps)
        update(
            RULE,
            self.weight,
            self.lo,
            (self.m, self.v),
            grad,
            numbers=hyper,
            clip=torch.tensor(clip) if as_tensor else clip,
            scratch=self.scratch,
        )
        # `_update` rather than `step`: adversarial gradients have no finite norm.
        with torch.no_grad():
            self.reference._update(self.param, grad, clip, self.reference.param_groups[0])

    def check(self) -> None:
        assert same(self.weight, self.param.data)
        assert same(self.m, self.state["exp_avg"]) and same(self.v, self.state["exp_avg_sq"])
        if self.lo is not None:
            assert same(self.lo, self.state["lo"])


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_kernel_equals_reference_over_several_steps(
    weight_dtype: torch.dtype, grad_dtype: torch.dtype, as_tensor: bool
) -> None:
    torch.manual_seed(1)
    run = Run(torch.randn(30_011).to(weight_dtype), piece=4096)
    for clip in (1.0, round_fp32(0.3), round_fp32(1e-7), 1.0, round_fp32(0.77)):
        run.step((torch.randn(30_011) * 0.1).to(grad_dtype), clip, as_tensor=as_tensor)
        run.check()
    assert run.lo is None or run.lo.any()


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(3))
def test_kernel_equals_reference_on_adversarial_values(weight_dtype: torch.dtype, seed: int) -> None:
    """Every bf16 gradient (denormals, -0, huge, infinite, NaN) against weights and moments of every exponent, denormal
    ones included.
    """
    generator = torch.Generator().manual_seed(seed)

    def any_bits() -> Tensor:
        return torch.randint(-(2**31), 2**31, (65536,), generator=generator).to(torch.int32).view(torch.float32)

    weight = (
        ALL_BF16[torch.randperm(65536, generator=generator)].to(weight_dtype) if seed else any_bits().to(weight_dtype)
    )
    m = any_bits()
    v = any_bits().abs()
    v[::3] = torch.randint(2**23, (v[::3].numel(),), generator=generator).to(torch.int32).view(torch.float32)
    run = Run(weight, piece=10_000, m=m, v=v)
    for clip in (1.0, round_fp32(1e-3)):
        run.step(ALL_BF16, clip)
        run.check()
    assert run.weight.isfinite().sum() > 10_000  # the case is not all NaN


@pytest.mark.parametrize("size", [1, 7, 8, 127, 1023, 1024, 1025, 2049])
def test_kernel_equals_reference_around_piece_borders(size: int) -> None:
    torch.manual_seed(size)
    run = Run(torch.randn(size).bfloat16(), piece=1024)
    for _ in range(3):
        run.step(torch.randn(size).bfloat16(), round_fp32(0.9))
    run.check()


@pytest.mark.parametrize("size", [PIECE_NUMEL - 1, PIECE_NUMEL + 1])
def test_kernel_equals_reference_around_the_border_of_the_real_piece(size: int) -> None:
    torch.manual_seed(2)
    run = Run(torch.randn(size).bfloat16(), piece=min(size, PIECE_NUMEL))
    run.step(torch.randn(size).bfloat16())
    run.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_piece_size_does_not_change_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    weight, grads = torch.randn(5003).to(dtype), [torch.randn(5003).to(dtype) for _ in range(3)]
    runs = [Run(weight, piece=piece) for piece in (5003, 1, 17, 4096)]
    for run in runs[:1] + runs[2:]:
        for grad in grads:
            run.step(grad)
    for run in runs[2:]:
        assert same(run.weight, runs[0].weight) and same(run.m, runs[0].m) and same(run.v, runs[0].v)
    short = runs[1]  # pieces of one element, on fewer of them
    head = Run(weight[:40], piece=1)
    for grad in grads:
        head.step(grad[:40])
    assert short.scratch.numel == 1 and same(head.weight, runs[0].weight[:40]) and same(head.v, runs[0].v[:40])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_zeros_stay_zero(dtype: torch.dtype) -> None:
    weight, grad = torch.randn(100).to(dtype), torch.randn(100).to(dtype)
    weight[60:], grad[60:] = 0, 0
    run = Run(weight, piece=64)
    for _ in range(4):
        run.step(grad)
    assert not run.weight[60:].any() and not run.m[60:].any() and not run.v[60:].any()
    assert run.lo is None or not run.lo[60:].any()
    assert run.weight[:60].ne(weight[:60]).any()


def test_gradient_is_only_read() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        grad = torch.randn(100, dtype=dtype)
        before = grad.clone()
        Run(torch.randn(100), piece=32).step(grad, 0.5)
        assert torch.equal(grad, before)


class Births(TorchDispatchMode):
    """Counts the bytes of every storage that comes out of an operator and did not go into it."""

    def __init__(self) -> None:
        super().__init__()
        self.born: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known:
                self.born.append((str(func), t.untyped_storage().nbytes()))
        return out


def test_the_birth_counter_sees_a_birth() -> None:
    x = torch.ones(10)
    with Births() as births:
        x.add_(1)
        x[2:5].mul_(2.0)
        assert births.born == []
        x + 1
    assert [nbytes for _, nbytes in births.born] == [40]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_update_allocates_nothing(dtype: torch.dtype, as_tensor: bool) -> None:
    weight, grad, m, v = torch.randn(5000).to(dtype), torch.randn(5000).to(dtype), torch.zeros(5000), torch.zeros(5000)
    lo = torch.zeros(5000, dtype=torch.int16) if dtype == torch.bfloat16 else None
    scratch, clip = make_scratch(1000), torch.tensor(0.5) if as_tensor else 0.5
    with Births() as births:
        update(RULE, weight, lo, (m, v), grad, numbers=RULE.numbers(OPTIONS, 1), clip=clip, scratch=scratch)
    assert births.born == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_update_allocates_nothing_beneath_the_operators_either(dtype: torch.dtype) -> None:
    """An operator with mixed dtypes copies an operand inside, where no dispatch mode sees it; the allocator's profile
    does. Wrapped numbers (8 bytes) pass.
    """
    weight, grad, m, v = torch.randn(5000).to(dtype), torch.randn(5000).to(dtype), torch.zeros(5000), torch.zeros(5000)
    lo = torch.zeros(5000, dtype=torch.int16) if dtype == torch.bfloat16 else None
    scratch = make_scratch(1000)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        update(RULE, weight, lo, (m, v), grad, numbers=RULE.numbers(OPTIONS, 1), clip=0.5, scratch=scratch)
    assert max((event.cpu_memory_usage for event in profile.events()), default=0) <= 64


def test_scratch_bytes_stop_growing_at_a_piece() -> None:
    assert RULE.layout.scratch_bytes(1000) == 12_000
    assert RULE.layout.scratch_bytes(PIECE_NUMEL) == RULE.layout.scratch_bytes(10 * PIECE_NUMEL)
    assert RULE.layout.scratch_bytes(0) == 0
    assert Scratch(torch.empty(RULE.layout.scratch_bytes(777), dtype=torch.uint8)).numel == 777
    assert Scratch(torch.empty(RULE.layout.scratch_bytes(777) + 11, dtype=torch.uint8)).numel == 777


def test_every_scalar_is_an_fp32_value_and_was_rounded_once() -> None:
    hyper = RULE.numbers(dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1), 7)
    assert all(value == float(numpy.float32(value)) for value in hyper)
    _, b2, _, o2, _, _, step, c2 = hyper
    assert o2 == float(numpy.float32(1 - 0.999)) != 1 - b2  # from the double, not from the rounded beta
    assert step == float(numpy.float32(3e-4 / (1 - 0.9**7)))
    assert c2 == float(numpy.float32(1 / math.sqrt(1 - 0.999**7)))


def test_round_fp32_is_to_nearest_even() -> None:
    for value in (0.1, 1 + 2**-24, 1 + 3 * 2**-24, 1e-45, 1e-50, 3.4e38, -0.3):
        assert round_fp32(value) == float(numpy.float32(value))


def test_torch_multiplies_by_a_python_float_in_fp32() -> None:
    """The kernel relies on it: no detour through double, neither for vectors nor for their scalar tails."""
    torch.manual_seed(4)
    for size in (1, 5, 1003):
        x, scalar = torch.randn(size), round_fp32(0.1)
        exact = [Fraction(a) * Fraction(scalar) for a in x.tolist()]
        want = torch.tensor([float(numpy.float32(a) * numpy.float32(scalar)) for a in x.tolist()])
        assert torch.equal(x * scalar, want) and torch.equal(x.clone().mul_(scalar), want)
        assert all(abs(Fraction(w) - e) <= abs(e) / 2**24 for w, e in zip(want.tolist(), exact, strict=True))


def test_root_through_double_is_correctly_rounded() -> None:
    """Every mantissa at both parities of the exponent, thinned by 7; and denormals."""
    for start, end in ((0x3F800000, 0x40800000), (0, 1 << 23)):
        values = torch.arange(start, end, 7, dtype=torch.int32).view(torch.float32)
        assert numpy.array_equal(values.double().sqrt().float().numpy(), numpy.sqrt(values.numpy()))


def test_clip_factor_is_one_below_the_limit_and_scales_above() -> None:
    assert clip_factor(123.0, None) == clip_factor(math.inf, None) == 1.0
    assert clip_factor(0.0, 1.0) == clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == float(numpy.float32(1.0 / (4.0 + 1e-6)))


def test_joined_master_moves_where_bf16_alone_would_stall() -> None:
    """lr 1e-5 on weights near 1: each step is far below half a bf16 step of 2**-8, so without the remainder nothing
    would ever move.
    """
    torch.manual_seed(5)
    size = 2000
    start = (1 + 0.5 * torch.rand(size)).bfloat16()
    options: dict[str, Any] = dict(lr=1e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    weight, lo, m, v = start.clone(), torch.zeros(size, dtype=torch.int16), torch.zeros(size), torch.zeros(size)
    param = torch.nn.Parameter(start.float())
    plain = torch.optim.AdamW([param], **options)
    drift = torch.randn(size)
    for step in range(1, 101):
        grad = (drift + 0.3 * torch.randn(size)).bfloat16()
        update(RULE, weight, lo, (m, v), grad, numbers=RULE.numbers(options, step), clip=1.0, scratch=make_scratch(512))
        param.grad = grad.float()
        plain.step()
    moved, want = (join(weight, lo) - start.float()).abs().sum(), (param.detach() - start.float()).abs().sum()
    assert want > 0 and 0.95 * want <= moved <= 1.05 * want
