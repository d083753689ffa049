"""The C kernel: compiled once, missed with one sentence, and equal to torch's to the bit on every kind of range. (test_adamw.py runs under both.)"""

from pathlib import Path

import pytest
import torch

from outsize.optim.adamw import Hyper, Scratch, update
from outsize.optim.native import kernel


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTSIZE_KERNELS", raising=False)
    kernel.cache_clear()


def test_it_is_compiled_into_the_cache_folder_and_found_there_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    assert kernel() is not None
    (made,) = (tmp_path / "native").iterdir()
    when = made.stat().st_mtime_ns
    kernel.cache_clear()
    assert kernel() is not None and made.stat().st_mtime_ns == when


def test_without_a_compiler_torch_does_it_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    w, m, v = torch.ones(8), torch.zeros(8), torch.zeros(8)
    hyper = Hyper.at(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0, step=1)
    for _ in range(2):
        update(w, None, m, v, torch.ones(8), hyper=hyper, clip=1.0, scratch=Scratch(torch.empty(Scratch.num_bytes(8), dtype=torch.uint8)))
    assert float(w[0]) < 0.9 and sum("C kernel" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grad", [torch.bfloat16, torch.float32])
def test_random_bits_give_the_same_bits_as_torch_over_many_pieces(
    weight: torch.dtype, grad: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200,000 random bit patterns: denormals, infinities, NaN and all. Several pieces and a ragged end."""
    rng = torch.Generator().manual_seed(5)
    n = 200_003

    def bits(dtype: torch.dtype) -> torch.Tensor:
        whole = torch.randint(-(2**31), 2**31, (n,), generator=rng, dtype=torch.int64).to(torch.int32)
        return whole.view(torch.float32) if dtype == torch.float32 else (whole >> 16).to(torch.int16).view(torch.bfloat16)

    start = [bits(weight), torch.randint(-(2**15), 2**15, (n,), generator=rng, dtype=torch.int16), bits(torch.float32), bits(torch.float32).abs()]
    gradient = bits(grad)
    results = []
    for kernels in ("native", "torch"):
        monkeypatch.setenv("OUTSIZE_KERNELS", kernels)
        kernel.cache_clear()
        w, lo, m, v = (t.clone() for t in start)
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            scratch = Scratch(torch.empty(Scratch.num_bytes(5000), dtype=torch.uint8))
            hyper = Hyper.at(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=4)
            update(w, lo if weight == torch.bfloat16 else None, m, v, gradient, hyper=hyper, clip=0.37, scratch=scratch)
        finally:
            torch.set_num_threads(before)
        results.append((w, lo, m, v))
    for mine, other in zip(*results, strict=True):
        nan = torch.zeros(n, dtype=torch.bool) if mine.dtype == torch.int16 else mine.isnan()
        assert torch.equal(nan, torch.zeros(n, dtype=torch.bool) if other.dtype == torch.int16 else other.isnan())
        ints = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.int16: torch.int16}[mine.dtype]
        assert torch.equal(mine.view(ints)[~nan], other.view(ints)[~nan])
