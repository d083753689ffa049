"""The C kernel: where it comes from, what stands in the compiled code, and its threads. That its bits are torch's is in
test_same_bits.py.
"""

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from ranges import HYPERS, Range, adversarial, assert_same, kernels, step

from outsize.base.errors import ConfigError
from outsize.hardware.host import quota_cores
from outsize.native import library
from outsize.native.build import UPDATES, compile_library, find_compiler
from outsize.native.library import packaged
from outsize.optim import native
from outsize.optim.native import find_kernel, kernel

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTSIZE_KERNELS", raising=False)
    find_kernel.cache_clear()


@pytest.fixture
def unpackaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from source: no library lies beside the code."""
    monkeypatch.setattr(library, "packaged", lambda source: None)


def test_it_is_compiled_into_the_cache_folder_and_found_there_again(
    unpackaged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    assert kernel() is not None
    (made,) = (tmp_path / "native").iterdir()
    when = made.stat().st_mtime_ns
    find_kernel.cache_clear()
    assert kernel() is not None and made.stat().st_mtime_ns == when


def test_without_a_cache_nothing_is_left_on_disk(
    unpackaged: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    assert kernel() is not None
    assert not list((tmp_path / "temporary").iterdir()) and not (tmp_path / "home").exists()


def test_without_a_compiler_torch_is_used_with_one_warning(
    unpackaged: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    state = Range(torch.ones(8), None, torch.zeros(8), torch.zeros(8), torch.ones(8))
    for _ in range(2):
        step(state, HYPERS["usual"], 1.0)
    assert float(state.weight[0]) < 1 and sum("C kernel" in record.getMessage() for record in caplog.records) == 1


def test_a_library_beside_the_code_is_used_if_it_was_made_from_this_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "optim" / UPDATES.name
    shutil.copytree(UPDATES.parent, source.parent, ignore=shutil.ignore_patterns("*.so", "*.py", "__pycache__"))
    shutil.copytree(library.__file__.removesuffix("library.py"), tmp_path / "native")
    assert packaged(source) is None
    (source.parent / "_native.so").write_bytes(b"no library")
    assert packaged(source) is None
    compile_library(find_compiler(), source, source.parent / "_native.cpython-311.so")
    assert packaged(source) is not None
    monkeypatch.setattr(library, "fingerprint", lambda source: "of another source")
    assert packaged(source) is None


@pytest.mark.skipif(
    shutil.which("objdump") is None or platform.machine() != "x86_64",
    reason="needs objdump, and knows the instructions of x86-64",
)
def test_the_compiled_code_fuses_nothing_and_works_on_vectors(tmp_path: Path) -> None:
    compile_library(find_compiler(), UPDATES, tmp_path / "a.so")
    code = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(tmp_path / "a.so")], capture_output=True, text=True, check=True
    ).stdout
    assert not re.findall(r"\bvfn?m(?:add|sub)\w*", code)
    functions = dict(re.findall(r"<(\w+_piece\.(?!resolver)\w+)>:\n(.*?)\n\n", code, re.DOTALL))
    for name, body in functions.items():
        width = "zmm" if "v4" in name else "ymm" if "avx" in name else "xmm"
        for instruction in ("sqrtps", "divps") if name.startswith("adamw") else ("mulps",):
            assert re.search(rf"{instruction}\s+.*%{width}", body), name
    if (
        "gcc"
        in subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, check=True).stdout.lower()
    ):
        assert len([name for name in functions if "avx" in name or "v4" in name]) == 32


# --- threads


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start = adversarial(700_001, weight=BF16, grad=BF16)
    alone, helped = start.each(torch.clone), start.each(torch.clone)
    monkeypatch.setattr(native, "num_threads", lambda: 1)
    step(alone, HYPERS["usual"], 0.5)
    monkeypatch.setattr(native, "num_threads", lambda: threads)
    for _ in range(5):
        helped = start.each(torch.clone)
        step(helped, HYPERS["usual"], 0.5)
        assert_same(alone, helped)


def test_several_callers_at_once_do_not_disturb_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "num_threads", lambda: 3)
    start = adversarial(300_001, weight=BF16, grad=BF16)
    want = start.each(torch.clone)
    step(want, HYPERS["usual"], 0.5)
    states = [start.each(torch.clone) for _ in range(24)]
    with ThreadPoolExecutor(4) as callers:
        list(callers.map(lambda state: step(state, HYPERS["usual"], 0.5), states))
    for state in states:
        assert_same(state, want)


def test_a_forked_child_updates_without_the_helpers_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "num_threads", lambda: 3)
    start = adversarial(300_001, weight=BF16, grad=BF16)
    want, mine = start.each(torch.clone), start.each(torch.clone)
    step(want, HYPERS["usual"], 0.5)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            step(mine, HYPERS["usual"], 0.5)
            code = 0 if torch.equal(mine.weight.view(torch.int16), want.weight.view(torch.int16)) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_helpers_sleep_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP's would spin: cores that the main thread needs."""
    monkeypatch.setattr(native, "num_threads", lambda: 3)
    step(adversarial(300_001, weight=BF16, grad=BF16), HYPERS["usual"], 0.5)
    used = []
    for _ in range(3):
        before = time.process_time()
        time.sleep(0.05)
        used.append(time.process_time() - before)
    assert min(used) < 0.01, used


def test_denormals_are_kept_even_if_the_caller_flushes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "num_threads", lambda: 3)
    start = adversarial(300_001, weight=BF16, grad=BF16)
    want, flushed = start.each(torch.clone), start.each(torch.clone)
    step(want, HYPERS["usual"], 0.5)
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot")
    try:
        step(flushed, HYPERS["usual"], 0.5)
        assert not torch.tensor([1e-40]).mul(1.0).any(), "the caller's setting is as it was"
    finally:
        torch.set_flush_denormal(False)
    assert_same(flushed, want)


def test_threads_are_those_that_torch_the_process_and_the_container_allow_less_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(library, "quota_cores", lambda: 2**16)
    assert library.num_threads() == 10
    monkeypatch.setattr(library, "quota_cores", lambda: 3)
    assert library.num_threads() == 3, "too few to spare any"


@pytest.mark.parametrize(
    "files, cores",
    [
        ({"cpu.max": "max 100000\n"}, 2**16),
        ({"cpu.max": "650000 100000\n"}, 6),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2**16),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({}, 2**16),
    ],
)
def test_the_quota_of_a_container_is_read(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert quota_cores(tmp_path) == cores


def test_outsize_kernels_selects_torch() -> None:
    with kernels("torch"):
        assert kernel() is None


def test_an_unknown_value_of_outsize_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_KERNELS", "tritn")
    find_kernel.cache_clear()
    with pytest.raises(ConfigError, match="OUTSIZE_KERNELS=tritn is unknown"):
        kernel()
    find_kernel.cache_clear()
