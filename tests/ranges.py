"""Flat ranges for the update kernels: values made to break them, and a comparison to the bit."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.optim import adamw, lion, sgd
from outsize.optim.adamw import RULE
from outsize.optim.native import find_kernel
from outsize.optim.rule import Numbers, Scratch, find_gpu_kernel, update

HYPERS = {
    "usual": RULE.numbers(dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), 4),
    "first step": RULE.numbers(dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01), 1),
    "millionth step": RULE.numbers(dict(lr=1e-5, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1), 10**6),
    "no decay": RULE.numbers(dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0), 2),
    "no eps": RULE.numbers(dict(lr=1e-3, betas=(0.9, 0.95), eps=0.0, weight_decay=0.1), 7),
    "no memory": RULE.numbers(dict(lr=10.0, betas=(0.0, 0.0), eps=1e-38, weight_decay=0.05), 1),
}
_GROUP = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, momentum=0.9, nesterov=True)
RULES = {rule.name: (rule, rule.numbers(_GROUP, 4)) for rule in (adamw.RULE, lion.RULE, sgd.RULE, sgd.MOMENTUM_RULE)}
EDGES = (
    0,
    0x80000000,
    1,
    0x80000001,
    0x7FFFFF,
    0x807FFFFF,
    0x800000,
    0x80800000,
    0x3F800000,
    0xBF800000,
    0x3F7FFFFF,
    0x3F800001,
    0x3F808000,
    0x7F7FFFFF,
    0xFF7FFFFF,
    0x7F7F8000,
    0x7F7F7FFF,
    0x7F800000,
    0xFF800000,
    0x7F800001,
    0x7FC00000,
    0x7FC00001,
    0x7FFFFFFF,
    0x7FFF8000,
    0xFF800001,
    0xFFC00000,
    0xFFFF8000,
    0xFFFFFFFF,
)
"""Zeros, denormals, ones, the largest, infinities, NaN of several payloads."""


@dataclass(frozen=True, slots=True)
class Range:
    weight: Tensor
    lo: Tensor | None
    m: Tensor
    v: Tensor
    grad: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "Range":
        return Range(
            change(self.weight),
            None if self.lo is None else change(self.lo),
            change(self.m),
            change(self.v),
            change(self.grad),
        )

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight, **({} if self.lo is None else {"lo": self.lo}), "m": self.m, "v": self.v}


def adversarial(numel: int, *, weight: torch.dtype, grad: torch.dtype, seed: int = 0) -> Range:
    """A quarter of all bit patterns, a quarter as in training, a quarter of every exponent, the rest denormals and
    edges; each tensor in its own order.
    """
    rng = torch.Generator().manual_seed(seed)

    def any_bits(below: int = 2**32) -> Tensor:
        return as_fp32(torch.randint(below, (numel,), generator=rng))

    def fp32() -> Tensor:
        edges = as_fp32(torch.tensor(EDGES))[torch.randint(len(EDGES), (numel,), generator=rng)]
        kinds = [
            any_bits(),
            torch.randn(numel, generator=rng) * 0.02,
            torch.randn(numel, generator=rng) * any_bits(0x7F000000),
        ]
        kinds += [torch.where(torch.rand(numel, generator=rng) < 0.5, any_bits(2**23), edges)]
        return torch.stack(kinds).gather(0, torch.randint(4, (1, numel), generator=rng))[0]

    def half() -> Tensor:
        """All 65536 patterns, over and over, in some order."""
        return torch.arange(numel, dtype=torch.int32)[torch.randperm(numel, generator=rng)].to(torch.int16)

    def of(dtype: torch.dtype) -> Tensor:
        if dtype == torch.float32:
            return fp32()
        return torch.where(torch.rand(numel, generator=rng) < 0.5, half(), fp32().bfloat16().view(torch.int16)).view(
            torch.bfloat16
        )

    gradient = half().view(torch.bfloat16) if grad == torch.bfloat16 else fp32()
    v = fp32()
    v = torch.where(torch.rand(numel, generator=rng) < 0.95, v.abs(), v)  # a negative one makes a NaN in every kernel
    return Range(of(weight), half() if weight == torch.bfloat16 else None, fp32(), v, gradient)


def as_fp32(words: Tensor) -> Tensor:
    """fp32 values with the given bits; `words` are int64 in [0, 2**32)."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).view(torch.float32)


@contextmanager
def kernels(which: str) -> Iterator[None]:
    """`torch`, or `best`: C on the host, Triton on the GPU."""
    before = os.environ.get("OUTSIZE_KERNELS")
    os.environ["OUTSIZE_KERNELS"] = "" if which == "best" else which
    find_kernel.cache_clear()
    find_gpu_kernel.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("OUTSIZE_KERNELS")
        if before is not None:
            os.environ["OUTSIZE_KERNELS"] = before
        find_kernel.cache_clear()
        find_gpu_kernel.cache_clear()


def step(state: Range, hyper: Numbers, clip: float | Tensor, *, piece: int = 10_007) -> None:
    """One update where the range lies. Pieces (of torch's kernel) with a ragged end."""
    buffer = torch.empty(RULE.layout.scratch_bytes(piece), dtype=torch.uint8, device=state.weight.device)
    update(
        RULE, state.weight, state.lo, (state.m, state.v), state.grad, numbers=hyper, clip=clip, scratch=Scratch(buffer)
    )


def step_rule(name: str, state: Range, clip: float | Tensor) -> None:
    """One update by this rule. State that the rule does not have stays as it is."""
    rule, numbers = RULES[name]
    buffer = torch.empty(rule.layout.scratch_bytes(10_007), dtype=torch.uint8, device=state.weight.device)
    moments = (state.m, state.v)[: len(rule.layout.state)]
    update(rule, state.weight, state.lo, moments, state.grad, numbers=numbers, clip=clip, scratch=Scratch(buffer))


def num_different(a: Tensor, b: Tensor) -> int:
    """Elements with other bits. NaNs compare as NaN, since their payload is no one's promise; but a split master has
    one NaN only.
    """
    assert a.dtype == b.dtype and a.shape == b.shape
    ints = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int16: torch.int16}[a.dtype]
    same = a.view(ints) == b.view(ints)
    if a.dtype == torch.float32:
        same |= a.isnan() & b.isnan()
    return int((~same).sum())


def assert_same(a: Range, b: Range, said: str = "") -> None:
    b = b.each(lambda t: t.to(a.weight.device))
    wrong = {name: num_different(mine, b.state()[name]) for name, mine in a.state().items()}
    assert not any(wrong.values()), f"{said}: elements that differ {wrong} of {a.weight.numel()}"
