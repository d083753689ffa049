"""How fast the engine trains as it stands, on the device at hand (`make bench`). Numbers are measured, and written with all that made them.

    python benchmarks/engine.py --shape llama-7b --gpu-memory 24GiB --micro-batch 4 --seq 2048

Without a GPU a tiny shape runs on `sim`: that says nothing about speed (its clock is imaginary), only that the benchmark runs and the plan holds.
Weights are random and so is the text, so losses mean nothing; speed and memory do not depend on either.
"""

import argparse
import datetime
import itertools
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import outsize
from outsize.base.records import fingerprint
from outsize.base.units import show_bytes, show_seconds
from outsize.device.choose import choose_device
from outsize.plan.render import render, summary
from outsize.runtime.engine import Engine

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, vocab_size=1024),
    "llama-1b": dict(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "llama-3b": dict(
        hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24, num_key_value_heads=8, vocab_size=128256,
        tie_word_embeddings=True,
    ),
    "llama-7b": dict(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32, vocab_size=32000),
}  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def options() -> argparse.Namespace:
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b" if has_gpu else "tiny")
    parser.add_argument("--device", default="cuda" if has_gpu else "sim:8MiB", help="cuda, or sim:<size or catalog name>")
    parser.add_argument("--gpu-memory", default=None, help="such as 24GiB; default: what is free")
    parser.add_argument("--host-memory", default=None)
    parser.add_argument("--micro-batch", type=int, default=4 if has_gpu else 2)
    parser.add_argument("--seq", type=int, default=2048 if has_gpu else 64)
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before those")
    parser.add_argument("--update", choices=("after_step", "in_backward"), default="after_step", help="after_step clips the gradient norm at 1.0")
    parser.add_argument("--out", type=Path, default=None, help="default: benchmarks/results/engine-<shape>.json, on sim none")
    return parser.parse_args()


def build(shape: str, *, on_gpu: bool) -> LlamaForCausalLM:
    """bf16 weights on the CPU. Drawn on the GPU, parameter by parameter: the CPU would take minutes for billions of them."""
    how = dict(use_cache=False, max_position_embeddings=131072)
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPES[shape], **how), dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    # Rotary tables are buffers, which `to_empty` leaves empty; they depend on nothing that a one-layer twin has not.
    twin = LlamaForCausalLM(LlamaConfig(**{**SHAPES[shape], "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}, **how))
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        mine.data = theirs.data.clone()
    where = torch.device("cuda" if on_gpu else "cpu")
    generator = torch.Generator(where).manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:  # norms
                param.fill_(1.0)
            else:
                param.copy_(torch.randn(param.shape, device=where, generator=generator, dtype=torch.bfloat16).mul_(0.02))
    if on_gpu:
        torch.cuda.empty_cache()
    return model.train()


def run(args: argparse.Namespace) -> dict[str, Any]:
    on_gpu = args.device.startswith("cuda")
    marks = [time.perf_counter()]
    model = build(args.shape, on_gpu=on_gpu)
    marks.append(time.perf_counter())
    generator = torch.Generator().manual_seed(0)
    size = (args.micro_batch, args.seq)
    batches = [{"input_ids": ids, "labels": ids} for ids in (torch.randint(0, model.config.vocab_size, size, generator=generator) for _ in range(4))]
    spec = outsize.AdamW(lr=1e-5, update=args.update, max_grad_norm=1.0 if args.update == "after_step" else None)
    memory = dict(gpu_memory=args.gpu_memory, host_memory=args.host_memory)
    engine = outsize.prepare(model, batches[0], optimizer=spec, device=args.device, **memory, **({} if on_gpu else {"chunk_bytes": "256KiB"}))
    marks.append(time.perf_counter())
    try:
        print(render(engine.plan, engine.graph, engine.layout), flush=True)
        ends, losses = train(engine, batches, args.warm_up + args.steps)
        return record(args, engine, ends, losses, build_seconds=marks[1] - marks[0], prepare_seconds=marks[2] - marks[1])
    finally:
        engine.detach()


def train(engine: Engine, batches: list[dict[str, torch.Tensor]], steps: int) -> tuple[list[float], list[float]]:
    """When each step ended, by the device's clock, and its loss. Reading the loss waits for the forward, not for the updates that follow it."""
    ends, losses = [engine.report().seconds], []
    for step in range(steps):
        out = engine.model(**batches[step % len(batches)])
        with engine.last_backward():
            out.loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(float(out.loss.detach()))
        if step == steps - 1:
            engine.drain()
        ends.append(engine.report().seconds)
    return ends, losses


def record(args: argparse.Namespace, engine: Engine, ends: list[float], losses: list[float], **seconds: float) -> dict[str, Any]:
    plan, device = engine.plan, engine.device
    steps = [after - before for before, after in itertools.pairwise(ends)]
    median = statistics.median(steps[args.warm_up :])
    is_cuda = device.kind == "cuda"
    return {
        "benchmark": "engine", "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "hardware": {
            "device": device.spec.name if is_cuda else f"{args.device} (imaginary: its clock is the planner's)",
            "gpu_bytes": device.spec.gpu_bytes, "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(),
            "host_bytes": psutil.virtual_memory().total, "threads": torch.get_num_threads(),
        },
        "versions": {
            "outsize": outsize.__version__, "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
        },
        "shape": args.shape, "num_params": engine.graph.num_params, "micro_batch": args.micro_batch, "seq": args.seq, "update": args.update,
        "gpu_memory": args.gpu_memory, "plan": {
            "fingerprint": fingerprint(plan), "summary": summary(plan), "step_seconds": plan.estimate.step_seconds, "gpu_bytes": plan.estimate.gpu_bytes,
            "gpu_budget_bytes": plan.gpu_budget_bytes, "host_bytes": plan.estimate.host_bytes, "provenance": plan.provenance, "search": plan.search,
        },
        "start_up_seconds": seconds, "step_seconds": steps, "num_warm_up": args.warm_up, "median_step_seconds": median,
        "tokens_per_second": args.micro_batch * args.seq / median, "peak_allocated_bytes": device.peak_bytes,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if is_cuda else None,
        "host_rss_bytes": psutil.Process().memory_info().rss, "host_peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses_finite": all(loss - loss == 0.0 for loss in losses),
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    plan, planned = found["plan"], found["plan"]["step_seconds"]
    reserved = f", reserved {show_bytes(found['peak_reserved_bytes'])}" if found["peak_reserved_bytes"] is not None else ""
    print(f"\n{found['shape']}, {found['num_params'] / 1e9:.3g} B parameters, {found['micro_batch']} × {found['seq']} tokens, on {found['hardware']['device']}")
    print(f"speed     {found['tokens_per_second']:,.0f} tokens/s; {show_seconds(found['median_step_seconds'])} a step (planned {show_seconds(planned)})")
    print(f"GPU peak  allocated {show_bytes(found['peak_allocated_bytes'])} (planned {show_bytes(plan['gpu_bytes'])}){reserved}")
    rss, most = show_bytes(found["host_rss_bytes"]), show_bytes(found["host_peak_rss_bytes"])
    print(f"host RSS  {rss}, at most {most} (of which the plan's homes {show_bytes(plan['host_bytes'])})")
    print("start-up  " + ", ".join(f"{name.removesuffix('_seconds')} {show_seconds(value)}" for name, value in found["start_up_seconds"].items()))


def main() -> None:
    args = options()
    if not args.device.startswith("cuda"):
        print("No GPU is used: a tiny model on a simulated one. Speed below is the simulator's clock and says nothing about any machine.\n")
    choose_device(args.device)  # an unknown name is told before a model is built
    found = run(args)
    show(found)
    path = args.out or (RESULTS / f"engine-{args.shape}.json" if args.device.startswith("cuda") else None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(f"written   {path}")
    if not found["losses_finite"] or found["peak_allocated_bytes"] > found["plan"]["gpu_budget_bytes"]:
        sys.exit("a loss is not finite, or the budget was exceeded")


if __name__ == "__main__":
    main()
