"""`outsize doctor`: checks that this machine can train. Ends with a small run whose bits are compared."""

import copy
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import typer

from outsize.base.cache_folder import cache_folder
from outsize.base.units import show_bytes
from outsize.cli.imports import import_problem
from outsize.hardware.host import container_limit

_DOC = """Is this machine ready to train, and if not, why?

Shows versions, GPU and memory, and trains a toy model for two steps on a simulated small GPU,
which must give the same bits as plain PyTorch.

[bold]Examples[/bold]

outsize doctor

outsize doctor && python train.py     [dim]the exit code is 1 when something is broken[/dim]
"""
_LEAST = {"torch": (2, 11), "transformers": (5, 0)}
_SIGNS = {"ok": "[green]ok    [/green]", "note": "[yellow]note  [/yellow]", "broken": "[red]broken[/red]"}


@dataclass(frozen=True, slots=True)
class Finding:
    state: Literal["ok", "note", "broken"]
    text: str


def doctor() -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(soft_wrap=True, highlight=False)
    broken = 0
    for name, look in CHECKS.items():
        try:
            findings = list(look())
        except Exception as error:  # any failure is a finding
            findings = [Finding("broken", import_problem(error) or f"{type(error).__name__}: {error}")]
        for finding in findings:
            console.print(f"{_SIGNS[finding.state]} {name:<12} {escape(finding.text)}")
            broken += finding.state == "broken"
    if broken:
        console.print(f"\n[red]{broken} of these must be fixed before training.[/red]")
        raise typer.Exit(1)
    console.print("\n[green]Ready.[/green]")


doctor.__doc__ = _DOC


def _python() -> Iterator[Finding]:
    yield Finding(
        "ok" if sys.version_info >= (3, 11) else "broken",
        f"{platform.python_version()} ({sys.executable}); 3.11 or newer is needed",
    )


def _libraries() -> Iterator[Finding]:
    import importlib

    from outsize import compat

    for name, least in _LEAST.items():
        version = importlib.import_module(name).__version__
        found = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])
        if found >= least:
            yield Finding("ok", f"{name} {version}")
        else:
            yield Finding("broken", f"{name} {version}; {'.'.join(map(str, least))} or newer is needed")
    compat.check_libraries()


def _gpu() -> Iterator[Finding]:
    """No GPU is not an error: plans and simulated devices need none."""
    import torch

    from outsize.device.choose import choose_device

    device = choose_device()
    if device.is_gpu:
        yield Finding(
            "ok",
            f"{device.spec.name}, {show_bytes(device.spec.gpu_bytes)}, of which {show_bytes(device.free_bytes)} can "
            "be used",
        )
        yield Finding("ok", f"CUDA {torch.version.cuda}; rates {device.spec.provenance}")
    elif torch.version.cuda is None:
        yield Finding(
            "note",
            f"none: this torch ({torch.__version__}) is built without CUDA. Training runs on cpu and sim alone; "
            "`outsize plan` needs no GPU",
        )
    elif not Path("/proc/driver/nvidia").exists() and not Path("/dev/nvidiactl").exists():
        yield Finding(
            "note",
            f"none: torch knows CUDA {torch.version.cuda}, but this system has no NVIDIA driver (in a container: "
            "start it with --gpus all)",
        )
    else:
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = (
            f"CUDA_VISIBLE_DEVICES is {hidden!r}"
            if hidden is not None
            else f"the driver may be too old for CUDA {torch.version.cuda}; see nvidia-smi"
        )
        yield Finding("broken", f"there is an NVIDIA driver, but torch sees no GPU: {why}")


def _probe() -> Iterator[Finding]:
    from outsize.calibration.rates import load_probe
    from outsize.device.choose import choose_device

    device = choose_device()
    if device.is_gpu:
        found = load_probe(device.identity)
        no = "no: plans take the rates above; run `outsize probe`, which takes seconds"
        yield Finding("note", no) if found is None else Finding("ok", f"yes, plans take the rates {found.provenance}")
    else:
        yield Finding("note", "no: plans for this machine assume rates; `outsize probe` measures them")


def _kernels() -> Iterator[Finding]:
    """The C compiler: the kernels of updates need it, Triton's too."""
    from outsize.optim.native import Kernel, find_kernel

    found = find_kernel()
    if isinstance(found, Kernel):
        yield Finding("ok", "updates on the host run in C")
    else:
        advice = "" if found.startswith("OUTSIZE_KERNELS") else ". Install one: apt install gcc"
        yield Finding("note", f"updates run in torch, up to 15 times slower on the host: {found}{advice}")


def _memory() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    yield Finding("ok", f"{show_bytes(memory.total)}, of which {show_bytes(memory.available)} is free")
    limit = container_limit()
    if limit is not None and limit < memory.total:
        yield Finding("note", f"this container may use {show_bytes(limit)} of it: give host_memory below that")


def _cache() -> Iterator[Finding]:
    path = cache_folder()
    if path is None:
        yield Finding("note", "off (OUTSIZE_CACHE is empty): every start profiles the model again")
        return
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not os.access(existing, os.W_OK):
        yield Finding(
            "broken", f"{path} cannot be written. Set OUTSIZE_CACHE to a writable folder, or to an empty string"
        )
    else:
        yield Finding("ok", f"{path}, {len(list((path / 'traces').glob('*.json')))} profiles")


def _self_test() -> Iterator[Finding]:
    """Weights streamed, optimizer state on the host, one layer recomputed."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from outsize.optim.adamw import AdamW
    from outsize.reference import AdamW as Reference
    from outsize.schedule.pins import Pins
    from outsize.setup.prepare import prepare

    with torch.random.fork_rng(devices=[]), _without_cache():
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
        model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False)).to(torch.bfloat16).train()
        plain = copy.deepcopy(model)
        batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (2, 2, 16))]
        reference = Reference(plain.parameters(), lr=1e-2, max_grad_norm=1.0)
        expected = [_step(plain, reference, batch) for batch in batches]
        engine = prepare(
            model,
            batches[0],
            optimizer=AdamW(lr=1e-2, max_grad_norm=1.0),
            device="sim:64MiB",
            host_memory="64MiB",
            chunk_bytes="8KiB",
            pins=Pins(n_persist=0, n_optimizer_gpu=0, n_checkpoint=1),
        )
        try:
            found = [_step(model, engine.optimizer, batch) for batch in batches]
            report = engine.report()
        finally:
            engine.detach()
    wrong = [
        name for (name, a), b in zip(plain.named_parameters(), model.parameters(), strict=True) if not torch.equal(a, b)
    ]
    if found != expected or wrong:
        yield Finding(
            "broken",
            f"the engine and plain PyTorch differ: losses {found} and {expected}, "
            f"weights {', '.join(wrong) or 'equal'}",
        )
    elif report.gpu_peak_bytes != report.planned_gpu_bytes:
        yield Finding(
            "broken", f"the plan predicted {report.planned_gpu_bytes} bytes, the run took {report.gpu_peak_bytes}"
        )
    else:
        yield Finding(
            "ok",
            f"2 steps of a toy model: same bits as plain PyTorch, and {show_bytes(report.gpu_peak_bytes)} of device "
            "memory as planned",
        )


def _step(model, optimizer, batch) -> float:  # type: ignore[no-untyped-def]  # torch types, which this file imports late
    out = model(**batch)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(out.loss.detach())


@contextmanager
def _without_cache() -> Iterator[None]:
    """Another check reports a broken cache."""
    was = os.environ.get("OUTSIZE_CACHE")
    os.environ["OUTSIZE_CACHE"] = ""
    try:
        yield
    finally:
        if was is None:
            del os.environ["OUTSIZE_CACHE"]
        else:
            os.environ["OUTSIZE_CACHE"] = was


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "python": _python,
    "libraries": _libraries,
    "GPU": _gpu,
    "probed": _probe,
    "C compiler": _kernels,
    "host memory": _memory,
    "cache": _cache,
    "self-test": _self_test,
}
