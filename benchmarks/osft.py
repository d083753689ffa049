"""All figures of OSFT that need a GPU, in one command of at most nine minutes: `$OUT/osft.json` and `$OUT/osft.md`.

    ../shared/bench/make_site.sh                                  # once, where there is a network: carry/
    PYTHONPATH=src python3 -m benchmarks.osft --out $OUT          # on the GPU machine, with carry/
    PYTHONPATH=src python3 -m benchmarks.osft --out $OUT --parts 3b,peers-3b     # what a first call had no time for
    PYTHONPATH=src python3 -m benchmarks.osft --out /tmp/found --tiny            # starts everything, without a GPU

A part is a process that measures one case after another, and has its peers behind it. Results are written after every
case; parts that would not end in time are not started. Peers are measured by carry/bench/peers_osft.py. Random weights;
where `same_layers` is set, all layers have the first one's, so that few weights are decomposed.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.osft_targets import markdown

ROOT = Path(__file__).resolve().parent.parent
GiB = 2**30


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


@dataclass(frozen=True, kw_only=True)
class Part:
    cases: tuple[str, ...] = ()
    peers: tuple[tuple[str, str, int, str], ...] = ()
    """Name, model, rows, dtypes."""
    seconds: int
    """About how long it takes on an H200: it is not started with less time left."""


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--limit", type=float, default=540, help="seconds in all")
    parser.add_argument("--peers-file", type=Path, default=ROOT / "carry" / "bench" / "peers_osft.py")
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a simulated GPU: whether everything starts"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.measure:
        measure(args.measure.split(","), args.out / "part.json", tiny=args.tiny)
        return
    names = [name for name in args.parts.split(",") if name]
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"{', '.join(unknown)}: parts are {', '.join(PARTS)}")
    # One cache for all parts, and none before: the first case computes its bases, and the second reads them.
    with tempfile.TemporaryDirectory() as cache:
        run = Run(args, cache)
        for name in names:
            run.part(name, PARTS[name])
    print("\n" + markdown(run.found), flush=True)
    print(f"{time.monotonic() - run.started:.0f} s; written to {args.out}", flush=True)


class Run:
    def __init__(self, args: argparse.Namespace, cache: str):
        self.args, self.cache, self.started = args, cache, time.monotonic()
        about = f"`{' '.join(['python -m benchmarks.osft', *sys.argv[1:]])}`, {time.strftime('%Y-%m-%d %H:%M')} UTC."
        if args.tiny:
            about += " **A tiny model on a simulated GPU: no figure says anything about a machine.**"
        self.found: dict[str, Any] = {"about": about, "is_tiny": args.tiny, "cases": {}, "peers": {}, "parts": {}}

    @property
    def left(self) -> float:
        return self.args.limit - (time.monotonic() - self.started)

    def part(self, name: str, part: Part) -> None:
        started, entry = time.monotonic(), self.found["parts"].setdefault(name, {})
        if self.left < (10 if self.args.tiny else part.seconds):
            problem = f"not started: it takes about {part.seconds} s, {max(0.0, self.left):.0f} s are left"
            entry["problem"] = f"{problem}. Measure it with --parts {name}"
        elif part.peers and not self.args.peers_file.exists():
            where = f"{self.args.peers_file} is not there"
            entry["problem"] = f"not started: {where}. Run ../shared/bench/make_site.sh, and carry carry/ along"
        else:
            problem = self.ours(part) if part.cases else self.peers(part)
            entry["seconds"] = time.monotonic() - started
            if problem:
                entry["problem"] = problem
        print(f"{time.monotonic() - self.started:6.0f} s  {name}: {entry}", flush=True)
        self.write()

    def ours(self, part: Part) -> str:
        """Returns what went wrong, or nothing."""
        written = self.args.out / "part.json"
        written.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.osft", "--out", str(self.args.out), "--measure"]
        code, lines = self.run([*command, ",".join(part.cases), *(["--tiny"] if self.args.tiny else [])])
        found = json.loads(written.read_text()) if written.exists() else {}
        self.found["cases"] |= found
        written.unlink(missing_ok=True)
        missing = [name for name in part.cases if name not in found]
        return f"{', '.join(missing)}: exit code {code}: {' | '.join(lines[-3:])[-600:]}" if missing else ""

    def peers(self, part: Part) -> str:
        problems = []
        for name, model, rows, dtype in part.peers:
            size = ["--model", "tiny", "--bs", "2", "--seq", "64", "--steps", "3", "--device", "cpu"]
            if not self.args.tiny:
                size = ["--model", model, "--bs", str(rows), "--seq", "1024", "--steps", "8"]
            models = ["--models" if word == "--model" else word for word in size]
            each = max(40.0, 0.5 * part.seconds)  # more than it takes: peers_osft.py skips what might not end in time
            total = max(10.0, min(self.left, 2 * each + 20))
            command = [sys.executable, str(self.args.peers_file), "all", *models, "--dtypes", dtype, "--svd", "fake"]
            command += ["--cases", "peft_osf,mini_trainer", "--limit", f"{each:.0f}", "--total", f"{total:.0f}"]
            _, lines = self.run(command)
            for line in lines:
                if line.startswith("RESULT "):
                    found = json.loads(line.removeprefix("RESULT "))
                    self.found["peers"][f"{name} {dtype} {found['case']}"] = found
                elif line.startswith(("FAILED", "SKIPPED")):
                    problems.append(line[:400])
        return " | ".join(problems)

    def run(self, command: list[str]) -> tuple[int, list[str]]:
        """Exit code and output. What is not done in time is killed, with what it started."""
        environment = {**os.environ, "OUTSIZE_CACHE": self.cache, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=max(1.0, self.left))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
        return process.returncode, [line for line in text.splitlines() if line.strip()]

    def write(self) -> None:
        (self.args.out / "osft.json").write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        (self.args.out / "osft.md").write_text(markdown(self.found))


# One process, which measures the cases of a part.


def measure(names: list[str], to: Path, *, tiny: bool) -> None:
    from benchmarks.measure import complete, run_bench
    from outsize.run.quiet import quiet

    quiet()
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
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
        try:
            with timed_bases() as bases:
                result = run_bench(bench, say=print, same_layers=case.same_layers)
        except Exception as error:  # the next case may be measured
            found[name] = {"problem": f"{type(error).__name__}: {error}"[:600]}
        else:
            found[name] = {**row(result, is_first=number == 0), **bases}
        print(f"{name}: {found[name]}", flush=True)
        to.write_text(json.dumps(found))
        gc.collect()


def row(result: Any, *, is_first: bool) -> dict[str, Any]:
    """Host memory is the process's peak, so it is the first case's alone."""
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
        "gpu_peak_gib": _gib(memory.gpu_peak_bytes),
        "planned_gpu_peak_gib": _gib(plan.gpu_bytes),
        "gpu_reserved_gib": _gib(memory.gpu_reserved_bytes),
        "host_gib": _gib(memory.host_peak_bytes) if is_first else None,
        "planned_host_gib": _gib(plan.host_process_bytes) if is_first else None,
        "prepare_s": result.start_up.prepare_seconds,
        "first_step_s": result.start_up.first_step_seconds,
        "plan": plan.summary,
        "losses_finite": result.losses_finite,
        "within_budget": result.within_budget,
    }


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GiB


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


if __name__ == "__main__":
    main()
