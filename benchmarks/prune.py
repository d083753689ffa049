"""All figures of pruning that need a GPU, in calls of at most nine minutes: `$OUT/prune.json` and `$OUT/prune.md`.

    PYTHONPATH=src python3 -m benchmarks.prune --out $OUT --parts 8b,8b-full,1b        # on the GPU machine
    PYTHONPATH=src python3 -m benchmarks.prune --out $OUT --parts scores,costs,distill
    PYTHONPATH=src python3 -m benchmarks.prune --out $OUT --parts 70b
    PYTHONPATH=src python3 -m benchmarks.prune --out /tmp/found --tiny                # starts everything, without a GPU

A part is a process that measures one case after another. Results are written after every case; parts that would not
end in time are not started. Models are drawn on the machine, below TMPDIR: 16 GB for 8B. Of 70B, one layer and what is
outside of the layers have values (6 GB), and the other files are zeros that take no space.
"""

from pathlib import Path
from typing import Any

from benchmarks import parts
from benchmarks.parts import Part, Suite
from benchmarks.prune_targets import markdown

PARTS = {
    "8b": Part(cases=("8b",), seconds=150),
    "8b-full": Part(cases=("8b-full",), seconds=75),
    "1b": Part(cases=("1b", "1b-plain"), seconds=80),
    "scores": Part(cases=("scores",), seconds=140),
    "costs": Part(cases=("costs",), seconds=170),
    "distill": Part(cases=("distill",), seconds=160),
    "70b": Part(cases=("70b",), seconds=280),
}


def main() -> None:
    parts.main(SUITE)


def measure(names: list[str], to: Path, *, tiny: bool) -> None:
    parts.measure(SUITE, names, to, tiny=tiny)


def measure_case(name: str, tiny: bool) -> dict[str, Any]:
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


SUITE = Suite(name="prune", about=__doc__, parts=PARTS, measure=measure_case, markdown=markdown)

if __name__ == "__main__":
    main()
