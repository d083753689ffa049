"""Measures outsize and its alternatives on one GPU in one session: one process per case, one table at the end.

    python3 benchmarks/side_by_side.py --out found.json --cases 3b-24,3b-24-clip,7b-24 --peers --limit 580

outsize runs as `benchmarks.bench`, the peers as in carry/bench/peers.py (written by ../shared/bench/make_site.sh).
Compare ratios within one session; absolute figures differ between machines. Results are written after every process.
Standard library only, because the machine with the GPU has no network.
"""

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OFFLOADING = "offloading"
"""Stands for the fastest of the peers of --offloaders."""


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    gpu_gib: int | None
    """None: all of the card."""
    rows: int = 8
    seq: int = 1024
    clip: float | None = None
    osft: float | None = None
    update: str | None = None
    """None: the default of `benchmarks.bench`."""
    against: str = ""
    """A peer's case (`gc`), `offloading`, or `plain`: our own --compare. Empty: no speed to compare."""
    least_ratio: float | None = None
    """Of tokens/s: the target."""
    most_host: float | None = None
    """Host bytes per parameter: the target."""
    seconds: int
    """About how long ours takes: it is not started with less time left."""


CASES = {
    "3b-24": Case(model="llama-3b", gpu_gib=24, against=OFFLOADING, least_ratio=2.5, seconds=60),
    "3b-24-clip": Case(
        model="llama-3b", gpu_gib=24, clip=1.0, against=OFFLOADING, least_ratio=2.0, seconds=60
    ),  # peers do not clip: the same figure
    "3b-48": Case(model="llama-3b", gpu_gib=48, against="gc", least_ratio=1.0, seconds=60),
    "7b-24": Case(model="llama-7b", gpu_gib=24, against=OFFLOADING, least_ratio=2.0, seconds=100),
    "7b-24-32k": Case(model="llama-7b", gpu_gib=24, rows=32, against="gc", least_ratio=0.95, seconds=130),
    "1b-resident": Case(
        model="llama-1b", gpu_gib=None, update="after-step", against="plain", least_ratio=1.0, seconds=70
    ),
    # As peers_osft.py: compare the 4k-token rows with it, and each with the row beside it without OSFT.
    "1b-4k": Case(model="llama-1b", gpu_gib=None, rows=4, update="after-step", seconds=60),
    "1b-4k-osft": Case(model="llama-1b", gpu_gib=None, rows=4, osft=0.5, update="after-step", seconds=70),
    "1b-4k-osft-tenth": Case(model="llama-1b", gpu_gib=None, rows=4, osft=0.1, update="after-step", seconds=70),
    "1b-32k": Case(model="llama-1b", gpu_gib=None, rows=32, update="after-step", seconds=70),
    "1b-32k-osft": Case(model="llama-1b", gpu_gib=None, rows=32, osft=0.5, update="after-step", seconds=80),
    "1b-12-osft": Case(model="llama-1b", gpu_gib=12, rows=4, osft=0.5, update="after-step", seconds=80),
    "3b-4k": Case(model="llama-3b", gpu_gib=None, rows=4, update="after-step", seconds=70),
    "3b-4k-osft": Case(model="llama-3b", gpu_gib=None, rows=4, osft=0.5, update="after-step", seconds=90),
    "3b-32k": Case(model="llama-3b", gpu_gib=None, rows=32, update="after-step", seconds=80),
    "3b-32k-osft": Case(model="llama-3b", gpu_gib=None, rows=32, osft=0.5, update="after-step", seconds=100),
    "8b-24-osft": Case(model="llama-8b", gpu_gib=24, clip=1.0, osft=0.5, seconds=150),
    "8b-24": Case(model="llama-8b", gpu_gib=24, most_host=12.5, seconds=120),
    "8b-24-clip": Case(model="llama-8b", gpu_gib=24, clip=1.0, most_host=14.5, seconds=120),
}
PEER_SECONDS = {"gc": (30, 5), "nogc": (30, 5), "fsdp2": (30, 17), "ds2": (40, 15), "ds3": (40, 15)}
"""About how long a peer takes: in any case, and for each billion parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--peers", action="store_true", help="run them too")
    parser.add_argument(
        "--offloaders", default="fsdp2", help="peers that offload, of fsdp2, ds2, ds3: the fastest counts"
    )
    parser.add_argument("--peers-file", type=Path, default=ROOT / "carry" / "bench" / "peers.py")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--limit", type=float, default=580, help="seconds in all")
    parser.add_argument("--verbose", action="store_true", help="show what ours prints")
    args = parser.parse_args()
    names = [name for name in args.cases.split(",") if name]
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"{', '.join(unknown)}: cases are {', '.join(CASES)}")
    if args.peers and not args.peers_file.exists():
        parser.error(f"{args.peers_file} is not there: run ../shared/bench/make_site.sh and carry carry/ along")
    run = Run(args)
    for name in names:
        run.case(name, CASES[name])
    print("\n" + table(run.found), flush=True)
    print(f"\n{time.monotonic() - run.started:.0f} s; written to {args.out}", flush=True)


class Run:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.started = time.monotonic()
        self.peers: dict[str, dict[str, Any]] = {}
        """By settings: cases of one shape share them."""
        self.found: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "python": platform.python_version(),
            "cases": {},
        }

    @property
    def left(self) -> float:
        return self.args.limit - (time.monotonic() - self.started)

    def case(self, name: str, case: Case) -> None:
        row: dict[str, Any] = {
            "ours": self.ours(name, case),
            "peers": {},
            "target": {"ratio": case.least_ratio, "host_bytes_per_param": case.most_host},
        }
        self.found["cases"][name] = row
        self.write()
        if self.args.peers:
            for peer in (
                self.args.offloaders.split(",")
                if case.against == OFFLOADING
                else [case.against]
                if case.against in PEER_SECONDS
                else []
            ):
                row["peers"][peer] = self.peer(peer, case)
                self.write()
        row["verdict"] = verdict(case, row)
        self.write()

    def ours(self, name: str, case: Case) -> dict[str, Any]:
        if self.left < case.seconds:
            return self.skipped(name, case.seconds)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [
                sys.executable,
                "-m",
                "benchmarks.bench",
                "--model",
                case.model,
                "--micro-batch",
                str(case.rows),
                "--seq",
                str(case.seq),
                "--steps",
                str(self.args.steps),
                "--warm-up",
                str(self.args.warm_up),
                "--json",
                str(out),
                *(["--gpu-memory", f"{case.gpu_gib}GiB"] if case.gpu_gib else []),
                *(["--clip", str(case.clip)] if case.clip else []),
                *(["--osft", str(case.osft)] if case.osft is not None else []),
                *(["--update", case.update] if case.update else []),
                *(["--compare", "plain"] if case.against == "plain" else []),
            ]
            code, lines, seconds = self.run(f"{name}: ours", command, {"PYTHONPATH": str(ROOT / "src")})
            if self.args.verbose and not code:
                print("\n".join(lines), flush=True)
            # A run that was cut off in its comparison has written its own part.
            found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        if code:
            print("\n".join(f"    {line}" for line in lines[-25:]), flush=True)
            found["problem"] = (
                "out of time" if code == 124 else f"exit code {code}: {lines[-1] if lines else 'it said nothing'}"
            )
        return {**found, "process_seconds": seconds}

    def peer(self, peer: str, case: Case) -> dict[str, Any]:
        shape = case.model.replace("-", "")
        # A resident run has the whole card, whatever ours is held to.
        budget = (case.gpu_gib or 0) if peer in self.args.offloaders.split(",") else 0
        asked = [
            "--model",
            shape,
            "--budget",
            str(budget),
            "--bs",
            str(case.rows),
            "--seq",
            str(case.seq),
            "--steps",
            "6",
        ]
        key = " ".join([peer, *asked])
        if key not in self.peers:
            always, each = PEER_SECONDS[peer]
            expected = always + each * float(case.model.split("-")[1].rstrip("b"))
            if self.left < expected:
                return self.skipped(key, expected)
            site = str(self.args.peers_file.parent.parent / "site")
            env = {"PYTHONPATH": site, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            code, lines, seconds = self.run(key, [sys.executable, str(self.args.peers_file), "case", peer, *asked], env)
            results = [line for line in lines if line.startswith("RESULT ")]
            if results:
                self.peers[key] = {**json.loads(results[-1].removeprefix("RESULT ")), "process_seconds": seconds}
            else:
                print("\n".join(f"    {line}" for line in lines[-8:]), flush=True)
                problem = next(
                    (line for line in reversed(lines) if "rror" in line), lines[-1] if lines else "it said nothing"
                )
                self.peers[key] = {
                    "problem": "out of time" if code == 124 else f"exit code {code}: {problem[-300:]}",
                    "process_seconds": seconds,
                }
        return self.peers[key]

    def run(self, what: str, command: list[str], env: dict[str, str]) -> tuple[int, list[str], float]:
        """Exit code (124: timeout), output, and seconds."""
        print(f"{time.monotonic() - self.started:6.0f} s  {what}", flush=True)
        begin = time.monotonic()
        # A session of its own: what it starts in turn ends with it, and leaves the GPU to the next.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=max(1.0, self.left))
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            code = 124
        return code, [line for line in text.splitlines() if line.strip()], time.monotonic() - begin

    def skipped(self, what: str, needed: float) -> dict[str, Any]:
        problem = f"not started: it takes about {needed:.0f} s and {max(0.0, self.left):.0f} s are left"
        print(f"{time.monotonic() - self.started:6.0f} s  {what}: {problem}", flush=True)
        return {"problem": problem}

    def write(self) -> None:
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        draft = self.args.out.with_suffix(".part")
        draft.write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        draft.replace(self.args.out)


def verdict(case: Case, row: dict[str, Any]) -> dict[str, Any]:
    """Against whom, the ratio, and whether the target is met; None where a figure is missing."""
    ours = row["ours"]
    name, theirs = baseline(case, row)
    speed = ours["speed"]["tokens_per_second"] if "speed" in ours else None
    ratio = speed / theirs if speed and theirs else None
    host = ours["memory"]["host_bytes_per_param"] if "memory" in ours else None
    met = None
    if case.least_ratio is not None and ratio is not None:
        met = ratio >= case.least_ratio
    elif case.most_host is not None and host is not None:
        met = host <= case.most_host
    return {
        "against": name,
        "their_tokens_per_second": theirs,
        "ratio": ratio,
        "host_bytes_per_param": host,
        "met": met,
    }


def baseline(case: Case, row: dict[str, Any]) -> tuple[str, float | None]:
    if case.against == "plain":
        plain = row["ours"].get("baselines", {}).get("plain") or {}
        return "plain loop", plain["speed"]["tokens_per_second"] if plain.get("speed") else None
    speeds = {peer: found["tok_s"] for peer, found in row["peers"].items() if "tok_s" in found}
    best = max(speeds, key=lambda peer: speeds[peer], default=case.against)
    return best, speeds.get(best)


def table(found: dict[str, Any]) -> str:
    cells = [
        (
            "case",
            "tokens/s",
            "s/step",
            "planned",
            "× limit",
            "GPU GiB",
            "host GiB",
            "B/param",
            "against",
            "tokens/s",
            "ratio",
            "target",
            "",
        )
    ]
    for name, row in found["cases"].items():
        ours, end, target = row["ours"], row["verdict"], row["target"]
        if "speed" not in ours:
            cells.append((name, *[""] * 11, ours["problem"][:90]))
            continue
        memory = ours["memory"]
        wanted = ""
        if target["ratio"] is not None:
            wanted = f"≥ {target['ratio']:g}"
        elif target["host_bytes_per_param"] is not None:
            wanted = f"≤ {target['host_bytes_per_param']:g} B"
        cells.append(
            (
                name,
                f"{ours['speed']['tokens_per_second']:,.0f}",
                f"{ours['speed']['median_step_seconds']:.3f}",
                f"{ours['plan']['step_seconds']:.3f}",
                f"{ours['limit_ratio']:.2f}",
                gib(memory["gpu_peak_bytes"]),
                gib(memory["host_peak_bytes"]),
                f"{memory['host_bytes_per_param']:.2f}",
                end["against"],
                f"{end['their_tokens_per_second']:,.0f}" if end["their_tokens_per_second"] else "",
                f"{end['ratio']:.2f}" if end["ratio"] else "",
                wanted,
                {True: "met", False: "MISSED", None: ""}[end["met"]],
            )
        )
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    left = (0, 8, len(widths) - 1)
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:]])


def gib(num_bytes: int | None) -> str:
    return f"{num_bytes / 2**30:.1f}" if num_bytes is not None else ""


if __name__ == "__main__":
    main()
