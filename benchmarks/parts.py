"""Runs sets of measurements that need a GPU, in one command of limited time: `benchmarks.osft`, `long` and `prune`.

A part is a process that measures one case after another, or the peers. Results are written after every case, as JSON
and as a page with the targets; parts that would not end in time are not started.
"""

import argparse
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.targets import Found

ROOT = Path(__file__).resolve().parent.parent
GiB = 2**30


@dataclass(frozen=True, kw_only=True)
class Part:
    cases: tuple[str, ...] = ()
    peers: tuple[Any, ...] = ()
    """What `Suite.peer_commands` gets."""
    seconds: int
    """About how long it takes on an H200: it is not started with less time left."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    """`benchmarks.<name>` is run; `<name>.json` and `<name>.md` are written."""
    about: str
    parts: Mapping[str, Part]
    """In the order in which they run."""
    measure: Callable[[str, bool], dict[str, Any]]
    """Measures a case, of a tiny model or not."""
    markdown: Callable[[Found], str]
    peers_file: str = ""
    """In carry/bench."""
    peer_commands: Callable[[Part, float, bool], Iterator[tuple[str, list[str]]]] = lambda *_: iter(())
    """Of a part with peers, of the seconds that are left, of a tiny model or not: names and arguments of `peers_file`.
    A measurement is stored as the name and that of its case."""


def main(suite: Suite) -> None:
    parser = argparse.ArgumentParser(description=suite.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--parts", default=",".join(suite.parts), help=f"of {', '.join(suite.parts)}")
    parser.add_argument("--limit", type=float, default=540, help="seconds in all")
    parser.add_argument("--peers-file", type=Path, default=ROOT / "carry" / "bench" / suite.peers_file)
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny model on a simulated GPU: whether everything starts"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.measure:
        measure(suite, args.measure.split(","), args.out / "part.json", tiny=args.tiny)
        return
    names = [name for name in args.parts.split(",") if name]
    if unknown := [name for name in names if name not in suite.parts]:
        parser.error(f"{', '.join(unknown)}: parts are {', '.join(suite.parts)}")
    # One cache for all parts, and none before: what a first case computes, later ones read.
    with tempfile.TemporaryDirectory() as cache:
        run = _Run(suite, args, cache)
        for name in names:
            run.part(name, suite.parts[name])
    print("\n" + suite.markdown(run.found), flush=True)
    print(f"{time.monotonic() - run.started:.0f} s; written to {args.out}", flush=True)


class _Run:
    def __init__(self, suite: Suite, args: argparse.Namespace, cache: str):
        self.suite, self.args, self.cache, self.started = suite, args, cache, time.monotonic()
        command = " ".join([f"python -m benchmarks.{suite.name}", *sys.argv[1:]])
        about = f"`{command}`, {time.strftime('%Y-%m-%d %H:%M')} UTC."
        if args.tiny:
            about += " **A tiny model on a simulated GPU: no figure says anything about a machine.**"
        self.found: dict[str, Any] = {"about": about, "is_tiny": args.tiny, "cases": {}, "peers": {}, "parts": {}}

    @property
    def left(self) -> float:
        return float(self.args.limit) - (time.monotonic() - self.started)

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
        command = [sys.executable, "-m", f"benchmarks.{self.suite.name}", "--out", str(self.args.out), "--measure"]
        code, lines = self.run([*command, ",".join(part.cases), *(["--tiny"] if self.args.tiny else [])])
        found = json.loads(written.read_text()) if written.exists() else {}
        self.found["cases"] |= found
        written.unlink(missing_ok=True)
        missing = [name for name in part.cases if name not in found]
        return f"{', '.join(missing)}: exit code {code}: {' | '.join(lines[-3:])[-600:]}" if missing else ""

    def peers(self, part: Part) -> str:
        problems = []
        for name, arguments in self.suite.peer_commands(part, self.left, self.args.tiny):
            _, lines = self.run([sys.executable, str(self.args.peers_file), *arguments])
            for line in lines:
                if line.startswith("RESULT "):
                    found = json.loads(line.removeprefix("RESULT "))
                    self.found["peers"][f"{name} {found['case']}"] = found
                elif line.startswith(("FAILED", "SKIPPED")):
                    problems.append(line[:400])
            self.write()
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
        name = self.suite.name
        (self.args.out / f"{name}.json").write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        (self.args.out / f"{name}.md").write_text(self.suite.markdown(self.found))


def measure(suite: Suite, names: list[str], to: Path, *, tiny: bool) -> None:
    """In the process of a part: measure its cases. Peak host memory is of the process, so it is the first case's."""
    from outsize.run.quiet import quiet

    quiet()
    found: dict[str, Any] = {}
    for number, name in enumerate(names):
        try:
            row = suite.measure(name, tiny)
        except Exception as error:  # the next case may be measured
            found[name] = {"problem": f"{type(error).__name__}: {error}"[:600]}
        else:
            found[name] = {key: None if number and "host_gib" in key else value for key, value in row.items()}
        print(f"{name}: {found[name]}", flush=True)
        to.write_text(json.dumps(found))
        gc.collect()


def gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GiB
