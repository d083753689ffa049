"""All figures of OSFT that need a GPU, in one command of at most nine minutes: `$OUT/osft.json` and `$OUT/osft.md`.

    ../shared/bench/make_site.sh                                  # once, where there is a network: carry/
    PYTHONPATH=src python3 -m benchmarks.osft --out $OUT          # on the GPU machine, with carry/
    PYTHONPATH=src python3 -m benchmarks.osft --out $OUT --parts 3b,peers-3b     # what a first call had no time for
    PYTHONPATH=src python3 -m benchmarks.osft --out /tmp/found --tiny            # starts everything, without a GPU

A part is a process that measures one case after another, and has its peers behind it. Results are written after every
case; parts that would not end in time are not started. Peers are measured by carry/bench/peers_osft.py. Random weights;
where `same_layers` is set, all layers have the first one's, so that few weights are decomposed.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks import parts
from benchmarks.osft_targets import markdown
from benchmarks.parts import Part, Suite, gib


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    rows: int
    osft: float | None = None
    others: Literal["train", "freeze"] = "freeze"
    gpu_memory: str | None = None
    clip: float | None = None
    same_layers: bool = True
    steps: int = 10


CASES = {
    "1b-4k-osft": Case(model="llama-1b", rows=4, osft=0.5, same_layers=False),
    "1b-4k-osft-cached": Case(model="llama-1b", rows=4, osft=0.5, same_layers=False),
    "1b-4k": Case(model="llama-1b", rows=4),
    "1b-4k-osft-tenth": Case(model="llama-1b", rows=4, osft=0.1),
    # As mini_trainer: embeddings and norms train, too.
    "1b-4k-osft-others": Case(model="llama-1b", rows=4, osft=0.5, others="train"),
    "1b-32k-osft": Case(model="llama-1b", rows=32, osft=0.5, steps=6),
    "1b-32k": Case(model="llama-1b", rows=32, steps=6),
    "1b-12-osft": Case(model="llama-1b", rows=4, osft=0.5, gpu_memory="12GiB"),
    "3b-4k-osft": Case(model="llama-3b", rows=4, osft=0.5),
    "3b-4k": Case(model="llama-3b", rows=4),
    "3b-32k-osft": Case(model="llama-3b", rows=32, osft=0.5, steps=5),
    "3b-32k": Case(model="llama-3b", rows=32, steps=5),
    "8b-24-osft": Case(model="llama-8b", rows=8, osft=0.5, gpu_memory="24GiB", clip=1.0, steps=6),
    "8b-24": Case(model="llama-8b", rows=8, gpu_memory="24GiB", clip=1.0, steps=6),
}


PARTS = {
    "1b": Part(cases=tuple(name for name in CASES if name.startswith(("1b-4k", "1b-32k"))), seconds=110),
    "peers-1b": Part(peers=(("1b-4k", "llama1b", 4, "bf16"), ("1b-32k", "llama1b", 32, "bf16")), seconds=100),
    "3b": Part(cases=tuple(name for name in CASES if name.startswith("3b")), seconds=90),
    # One case a process: its peak of host memory is the case's.
    "8b": Part(cases=("8b-24-osft",), seconds=80),
    "8b-full": Part(cases=("8b-24",), seconds=60),
    "1b-12": Part(cases=("1b-12-osft",), seconds=30),
    "peers-1b-fp32": Part(peers=(("1b-4k", "llama1b", 4, "mixed"),), seconds=50),
    "peers-3b": Part(peers=(("3b-4k", "llama3b", 4, "bf16"), ("3b-32k", "llama3b", 32, "bf16")), seconds=120),
}


def main() -> None:
    parts.main(SUITE)


def peer_commands(part: Part, left: float, tiny: bool) -> Iterator[tuple[str, list[str]]]:
    """`part.peers`: name, model, rows, dtypes."""
    for name, model, rows, dtype in part.peers:
        size = ["--models", "tiny", "--bs", "2", "--seq", "64", "--steps", "3", "--device", "cpu"]
        if not tiny:
            size = ["--models", model, "--bs", str(rows), "--seq", "1024", "--steps", "8"]
        each = max(40.0, 0.5 * part.seconds)  # more than it takes: peers_osft.py skips what might not end in time
        total = max(10.0, min(left, 2 * each + 20))
        cases = ["--cases", "peft_osf,mini_trainer", "--limit", f"{each:.0f}", "--total", f"{total:.0f}"]
        yield f"{name} {dtype}", ["all", *size, "--dtypes", dtype, "--svd", "fake", *cases]


def measure(names: list[str], to: Path, *, tiny: bool) -> None:
    parts.measure(SUITE, names, to, tiny=tiny)


def measure_case(name: str, tiny: bool) -> dict[str, Any]:
    from benchmarks.measure import complete, run_bench

    case = CASES[name]
    bench = complete(
        model="tiny" if tiny else case.model,
        device=None if not tiny else "sim:1GiB",
        micro_batch=case.rows,
        seq=16 if tiny else 1024,
        steps=2 if tiny else case.steps,
        warm_up=1 if tiny else 3,
        update="after_step",
        clip=case.clip,
        gpu_memory=None if tiny else case.gpu_memory,
        osft=case.osft,
    )
    bench = dataclasses.replace(bench, osft_others=case.others)
    with timed_bases() as bases:
        result = run_bench(bench, say=print, same_layers=case.same_layers)
    return {**row(result), **bases}


def row(result: Any) -> dict[str, Any]:
    memory, plan = result.memory, result.plan
    return {
        "model": result.bench.model,
        "device": result.machine.device,
        "torch": result.machine.versions["torch"],
        "tokens": result.bench.tokens,
        "osft": result.bench.osft,
        "step_s": result.speed.median_step_seconds,
        "planned_step_s": plan.step_seconds,
        "tokens_per_s": result.speed.tokens_per_second,
        "gpu_peak_gib": gib(memory.gpu_peak_bytes),
        "planned_gpu_peak_gib": gib(plan.gpu_bytes),
        "gpu_reserved_gib": gib(memory.gpu_reserved_bytes),
        "host_gib": gib(memory.host_peak_bytes),
        "planned_host_gib": gib(plan.host_process_bytes),
        "prepare_s": result.start_up.prepare_seconds,
        "first_step_s": result.start_up.first_step_seconds,
        "plan": plan.summary,
        "losses_finite": result.losses_finite,
        "within_budget": result.within_budget,
    }


@contextlib.contextmanager
def timed_bases() -> Iterator[dict[str, float]]:
    """Seconds of all bases of a prepared model, and of their decompositions alone (the rest is hashes and files)."""
    import torch

    from outsize.methods.osft import stored_bases
    from outsize.methods.osft.drift import DriftTraining

    found: dict[str, float] = {}
    plain = {"bases_s": (DriftTraining, "compute"), "decompose_s": (stored_bases, "split")}

    def timed(key: str, function: Any) -> Any:
        def run(*args: Any, **settings: Any) -> Any:
            started = time.perf_counter()
            value = function(*args, **settings)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found[key] = found.get(key, 0.0) + time.perf_counter() - started
            return value

        return run

    with contextlib.ExitStack() as stack:
        for key, (owner, name) in plain.items():
            before = getattr(owner, name)
            setattr(owner, name, timed(key, before))
            stack.callback(setattr, owner, name, before)
        yield found


SUITE = Suite(
    name="osft",
    about=__doc__,
    parts=PARTS,
    measure=measure_case,
    peers_file="peers_osft.py",
    peer_commands=peer_commands,
    markdown=markdown,
)

if __name__ == "__main__":
    main()
