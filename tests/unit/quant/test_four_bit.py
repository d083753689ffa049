"""The bytes of 4-bit quantization are those of bitsandbytes on the CPU, in C and in torch."""

import pytest
import torch
from torch import Tensor

from outsize.quant.four_bit import NESTED_BLOCK, quantize_4bit, quantize_in_torch, table
from outsize.quant.native import find_kernel, kernel

functional = pytest.importorskip("bitsandbytes").functional

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TYPES = ("nf4", "fp4")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def near_thresholds(quant_type: str) -> Tensor:
    """Blocks with absmax 1 of all thresholds, values and their neighbours in fp32."""
    thresholds = table(quant_type).thresholds
    values = torch.cat([thresholds, functional.get_4bit_type(quant_type, device="cpu")])
    up, down = (values.nextafter(torch.tensor(end)) for end in (2.0, -2.0))
    found = torch.cat([values, up, down, -values])
    found = torch.cat([found, torch.zeros(-len(found) % 63)]).view(-1, 63)
    return torch.cat([torch.ones(len(found), 1), found], 1).flatten()


KINDS = {
    "random": torch.randn(64 * 1000, generator=generator()) * 0.02,
    "uniform": torch.rand(64 * 1000, generator=generator()) - 0.5,
    "zeros": torch.zeros(640),
    "negative zeros": -torch.zeros(640),
    "constant": torch.cat([torch.full((64,), value) for value in (1.0, -1.0, 0.1, -3e-5, 1e4)]),
    "huge": torch.randn(6400, generator=generator()) * 1e37,
    "largest": torch.finfo(torch.float32).max * (2 * torch.rand(6400, generator=generator()) - 1),
    "small": torch.randn(6400, generator=generator()) * 1e-37,
    "denormal": torch.randn(6400, generator=generator()) * 1e-40,
    "fp16 denormal": torch.randn(6400, generator=generator()) * 3e-7,
    "mixed sizes": torch.randn(6400, generator=generator()) * 10.0 ** torch.randint(-40, 38, (6400,), generator=generator()),
    "one of each block": torch.eye(64).flatten(),
    **{f"thresholds of {name}": near_thresholds(name) for name in TYPES},
    **{f"{size} weights": torch.randn(size, generator=generator(size)) for size in (1, 2, 63, 64, 65, 127, 641, 65_537)},
    "zeros in the rest": torch.zeros(65),
    "large rest": torch.cat([torch.ones(64), torch.full((7,), 3e38)]),
}  # fmt: skip


def all_fp16() -> Tensor:
    """Every number that fp16 has."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    return every[every.isfinite()][torch.randperm(2**16 - 2**11, generator=generator())]


@pytest.fixture(params=["C", "torch"], autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_KERNELS", "torch" if request.param == "torch" else "")
    find_kernel.cache_clear()
    request.addfinalizer(find_kernel.cache_clear)
    if request.param == "C" and kernel() is None:
        pytest.skip("no C compiler")


def assert_bytes(weight: Tensor, quant_type: str, *, double: bool) -> None:
    want, state = functional.quantize_4bit(weight, quant_type=quant_type, compress_statistics=double)
    packed = torch.full(want.shape, 0xAA, dtype=torch.uint8)
    found = quantize_4bit(weight, packed, quant_type, double=double)
    assert torch.equal(packed, want)
    pairs = [(found.absmax, state.absmax)]
    if double:
        assert state.state2.blocksize == NESTED_BLOCK
        pairs += [(found.nested_absmax, state.state2.absmax), (found.nested_offset, state.offset)]
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8))


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("quant_type", TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_bytes_are_those_of_bitsandbytes(dtype: torch.dtype, quant_type: str, double: bool) -> None:
    for values in KINDS.values():
        weight = values.to(dtype)
        assert_bytes(weight[weight.isfinite()], quant_type, double=double)
    assert_bytes(all_fp16().to(dtype), quant_type, double=double)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_codes_of_other_values_are_those_of_bitsandbytes_and_show_in_the_scale(
    value: float, dtype: torch.dtype
) -> None:
    weight = torch.randn(64 * 4 + 5, generator=generator()).to(dtype)
    weight[[70, 258]] = value
    for quant_type in TYPES:
        want, state = functional.quantize_4bit(weight, quant_type=quant_type)
        packed = torch.empty_like(want)
        found = quantize_4bit(weight, packed, quant_type, double=False)
        assert torch.equal(packed, want)
        assert found.absmax.isfinite().tolist() == [True, False, True, True, False]
        assert torch.equal(found.absmax.nan_to_num(), state.absmax.nan_to_num())


def test_torch_works_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.quant.four_bit._PIECE", 640)
    weight = torch.randn(64 * 95 + 7, generator=generator())
    want, state = functional.quantize_4bit(weight, quant_type="nf4")
    packed, absmax = torch.empty_like(want), torch.empty_like(state.absmax)
    quantize_in_torch(weight, packed, absmax, *table("nf4"))
    assert torch.equal(packed, want) and torch.equal(absmax, state.absmax)


@pytest.mark.parametrize("form", ["C"], indirect=True)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bytes_do_not_depend_on_threads(threads: int) -> None:
    found = kernel()
    assert found is not None
    weight = torch.randn(700_001, generator=generator()).bfloat16()
    want, state = functional.quantize_4bit(weight, quant_type="nf4")
    packed, absmax = torch.empty_like(want), torch.empty_like(state.absmax)
    found.quantize(weight, packed, absmax, *table("nf4"), threads=threads)
    assert torch.equal(packed, want) and torch.equal(absmax, state.absmax)


@pytest.mark.parametrize("form", ["C"], indirect=True)
def test_denormals_are_kept_even_if_the_caller_flushes_them() -> None:
    found = kernel()
    assert found is not None
    weight = KINDS["denormal"]
    want, state = functional.quantize_4bit(weight, quant_type="nf4")
    packed, absmax = torch.empty_like(want), torch.empty_like(state.absmax)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot")
    try:
        found.quantize(weight, packed, absmax, *table("nf4"))
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(packed, want) and torch.equal(absmax, state.absmax)
