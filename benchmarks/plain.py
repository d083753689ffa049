"""The baseline of `benchmarks.bench --compare`: plain PyTorch with bf16 weights, fp32 masters and AdamW on the GPU.

It runs in a separate process, so that memory is measured separately: `python -m benchmarks.plain plain
<settings as JSON> <file for the result>`.
"""

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.bench_record import Baseline, Bench, Speed
from benchmarks.shapes import random_batches, random_shape
from benchmarks.timing import Clock, time_steps
from outsize.base.records import dumps, loads
from outsize.hardware.host import peak_rss_bytes

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("plain", "checkpointed")


def run_baseline(kind: str, bench: Bench) -> Baseline:
    """Run a baseline in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "baseline.json"
        command = [sys.executable, "-m", "benchmarks.plain", kind, dumps(bench), str(out)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if out.exists():
            return loads(Baseline, out.read_text(), where=str(out))
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "it said nothing")
    return Baseline(
        speed=None,
        gpu_peak_bytes=None,
        gpu_reserved_bytes=None,
        host_peak_bytes=0,
        problem=f"exit code {done.returncode}: {last}",
    )


def main(kind: str, settings: str, out: str) -> None:
    bench = loads(Bench, settings)
    problem, speed = "", None
    try:
        speed = train(kind, bench)
    except torch.OutOfMemoryError:
        problem = "out of GPU memory"
    has_gpu = bench.device.startswith("cuda")
    baseline = Baseline(
        speed=speed,
        problem=problem,
        gpu_peak_bytes=torch.accelerator.max_memory_allocated() if has_gpu else None,
        gpu_reserved_bytes=torch.accelerator.max_memory_reserved() if has_gpu else None,
        host_peak_bytes=peak_rss_bytes(),
    )
    Path(out).write_text(dumps(baseline))


def train(kind: str, bench: Bench) -> Speed:
    device = torch.device(bench.device) if bench.device.startswith("cuda") else torch.device("cpu")
    if device.type == "cuda":
        torch.accelerator.set_device_index(device.index or 0)
    model = resident_model(bench, device)
    if kind == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    drawn = random_batches(model, bench)
    batches = itertools.cycle([{name: ids.to(device) for name, ids in batch.items()} for batch in drawn])
    params: list[Tensor] = list(model.parameters())
    masters = [param.detach().float() for param in params]
    gradients = [torch.empty_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=1e-5, fused=True)

    def step() -> Tensor:
        for _ in range(bench.accumulate):
            loss = model(**next(batches)).loss
            (loss / bench.accumulate).backward()
        torch._foreach_copy_(gradients, [param.grad for param in params if param.grad is not None])
        if bench.clip is not None:
            nn.utils.clip_grad_norm_(masters, bench.clip, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        for param in params:
            param.grad = None
        return loss.detach()

    clock = (
        Clock.of_stream(device, torch.accelerator.synchronize) if device.type == "cuda" else Clock.of_host(lambda: None)
    )
    timed = time_steps(step, clock, warm_up=bench.warm_up, steps=bench.steps)
    return Speed.of(bench.tokens, bench.steps, timed.window_seconds, timed.step_seconds)


def resident_model(bench: Bench, device: torch.device) -> nn.Module:
    """The same weights as ours."""
    model, weights = random_shape(bench.model, seq=bench.seq)
    for name, param in model.named_parameters():
        value = torch.empty(param.shape, dtype=param.dtype)
        weights.read_into(name, value)
        param.data = value.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    return model


if __name__ == "__main__":
    main(*sys.argv[1:])
