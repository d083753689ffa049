"""All figures of pruning that need a GPU, in calls of at most nine minutes: `$OUT/prune.json` and `$OUT/prune.md`.

    PYTHONPATH=src python3 -m benchmarks.prune --out $OUT --parts 8b,8b-full,1b        # on the GPU machine
    PYTHONPATH=src python3 -m benchmarks.prune --out $OUT --parts scores,costs,distill
    PYTHONPATH=src python3 -m benchmarks.prune --out $OUT --parts 70b
    PYTHONPATH=src python3 -m benchmarks.prune --out /tmp/found --tiny                # starts everything, without a GPU

A part is a process that measures one case after another. Results are written after every case; parts that would not
end in time are not started. Models are drawn on the machine, below TMPDIR: 16 GB for 8B. Of 70B, one layer and what is
outside of the layers have values (6 GB), and the other files are zeros that take no space.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.osft import Part, Run
from benchmarks.prune_targets import markdown

PARTS = {
    "8b": Part(cases=("8b",), seconds=150),
    "8b-full": Part(cases=("8b-full",), seconds=75),
    "1b": Part(cases=("1b", "1b-plain"), seconds=80),
    "scores": Part(cases=("scores",), seconds=140),
    "costs": Part(cases=("costs",), seconds=170),
    "distill": Part(cases=("distill",), seconds=110),
    "70b": Part(cases=("70b",), seconds=280),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--limit", type=float, default=540, help="seconds in all")
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
    # One cache for all parts: they share models and the hashes of their files.
    with tempfile.TemporaryDirectory() as cache:
        run = PruneRun(args, cache)
        for name in names:
            run.part(name, PARTS[name])
    print("\n" + markdown(run.found), flush=True)
    print(f"{time.monotonic() - run.started:.0f} s; written to {args.out}", flush=True)


class PruneRun(Run):
    """The processes of `benchmarks.osft` with the cases of this module."""

    def __init__(self, args: argparse.Namespace, cache: str):
        super().__init__(args, cache)
        self.found["about"] = self.found["about"].replace("benchmarks.osft", "benchmarks.prune")

    def ours(self, part: Part) -> str:
        written = self.args.out / "part.json"
        written.unlink(missing_ok=True)
        command = [sys.executable, "-m", "benchmarks.prune", "--out", str(self.args.out), "--measure"]
        code, lines = self.run([*command, ",".join(part.cases), *(["--tiny"] if self.args.tiny else [])])
        found = json.loads(written.read_text()) if written.exists() else {}
        self.found["cases"] |= found
        written.unlink(missing_ok=True)
        missing = [name for name in part.cases if name not in found]
        return f"{', '.join(missing)}: exit code {code}: {' | '.join(lines[-3:])[-600:]}" if missing else ""

    def write(self) -> None:
        (self.args.out / "prune.json").write_text(json.dumps(self.found, indent=1, ensure_ascii=False) + "\n")
        (self.args.out / "prune.md").write_text(markdown(self.found))


def measure(names: list[str], to: Path, *, tiny: bool) -> None:
    """In the process of a part."""
    from outsize.run.quiet import quiet

    quiet()
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = measure_case(name, tiny=tiny)
        except Exception as error:  # the next case may be measured
            found[name] = {"problem": f"{type(error).__name__}: {error}"[:600]}
        print(f"{name}: {found[name]}", flush=True)
        to.write_text(json.dumps(found))
        gc.collect()


def measure_case(name: str, *, tiny: bool) -> dict[str, Any]:
    from benchmarks import prune_cases, prune_choices

    others = {
        "8b-full": prune_cases.full_case,
        "1b-plain": prune_cases.plain_case,
        "scores": prune_choices.scores_case,
        "costs": prune_choices.costs_case,
        "distill": prune_choices.distill_case,
    }
    if name in others:
        return others[name](tiny=tiny)
    return prune_cases.prune_case(name, prune_cases.CASES[name], tiny=tiny)


if __name__ == "__main__":
    main()
