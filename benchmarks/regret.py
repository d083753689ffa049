"""Compares the chosen plan with the best of several hand-made plans.

    python3 benchmarks/regret.py --out found.json --limit 580      # with a GPU
    python3 benchmarks/regret.py --show found.json                 # the result, and the tables of results/

A hand-made plan is a common recipe, given as pins (everything streamed; weights resident and the optimizer on the host;
all resident with checkpointing; halves of these). The search decides the rest. Plans that do not fit are left out.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.accuracy import Case, in_a_child

LAYERS = {"llama-1b": 16, "llama-3b": 28}
CHUNKS = {"llama-1b": 18, "llama-3b": 30}
SETTINGS = [
    Case(model="llama-1b", gib=12, rows=8, seq=1024),
    Case(model="llama-1b", gib=16, rows=4, seq=4096, clip=1.0),
    Case(model="llama-3b", gib=24, rows=8, seq=1024),
    Case(model="llama-3b", gib=48, rows=8, seq=1024, clip=1.0),
]


def recipes(layers: int, chunks: int) -> list[tuple[tuple[str, int], ...]]:
    """By shares of weights and optimizer state on the GPU, and activation strategy."""
    keep = {"n_swap": 0, "n_checkpoint": 0, "n_offload": 0}
    third = chunks // 3
    homes = [
        (0, 0),
        (chunks, 0),
        (chunks, chunks),
        (chunks // 2, 0),
        (chunks, chunks // 2),
        (chunks // 2, chunks // 4),
        (0, third),
        (third, third),
    ]
    ways = [{"n_checkpoint": layers}, {"n_offload": layers}]
    found = [
        {"n_persist": weights, "n_optimizer_gpu": optimizer, **keep, **way}
        for weights, optimizer in homes
        for way in ways
    ]
    found += [
        {"n_persist": 0, "n_optimizer_gpu": 0, **keep, "n_checkpoint": layers, "n_buffer": 3},
        {"n_persist": chunks, "n_optimizer_gpu": chunks, **keep},
        {
            "n_persist": chunks,
            "n_optimizer_gpu": 0,
            **keep,
            "n_swap": layers // 2,
            "n_checkpoint": layers - layers // 2,
        },
    ]
    return [tuple(pins.items()) for pins in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=580, help="seconds in all")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--settings", default="", help="numbers from 0, with commas; all by default")
    parser.add_argument("--show", type=Path, nargs="+")
    args = parser.parse_args()
    if args.show:
        for shown in [json.loads(path.read_text()) for path in args.show]:
            print(f"{verdict(shown)}\n\n{markdown(shown)}\n")
        return
    started = time.monotonic()
    # What children share: imported here, once.
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import benchmarks.measure  # noqa: F401

    found: dict[str, Any] = {"command": sys.argv, "settings": []}
    chosen_settings = [SETTINGS[int(i)] for i in args.settings.split(",")] if args.settings else SETTINGS
    for case in chosen_settings:
        rows: list[dict[str, Any]] = []
        found["settings"].append({"setting": case.name, "rows": rows})
        for pins in [(), *recipes(LAYERS[case.model], CHUNKS[case.model])]:
            left = args.limit - (time.monotonic() - started)
            if left < case.seconds:
                break
            row = in_a_child(replace(case, pins=pins), args.steps, 2, timeout=left)
            row.pop("plan", None)
            rows.append(row)
            args.out.write_text(json.dumps(found, ensure_ascii=False))
            print(f"{time.monotonic() - started:5.0f} s  {_seconds(row)}", flush=True)
    print("\n" + verdict(found))


def _seconds(row: dict[str, Any]) -> str:
    if "result" not in row:
        return f"{row['case']}: {row['problem'][:90]}"
    result = row["result"]
    return (
        f"{row['case']}: {result['speed']['median_step_seconds']:.3f} s, planned {result['plan']['step_seconds']:.3f}"
    )


def verdict(found: dict[str, Any]) -> str:
    lines = []
    for setting in found["settings"]:
        runs = [row for row in setting["rows"] if "result" in row]
        seconds = {row["case"]: row["result"]["speed"]["median_step_seconds"] for row in runs}
        chosen = seconds.pop(setting["setting"], None)
        if chosen is None or not seconds:
            continue
        best = min(seconds, key=lambda name: seconds[name])
        behind = chosen / seconds[best] - 1
        lines.append(
            f"{setting['setting']}: chosen {chosen:.3f} s; best of {len(seconds)} by hand {seconds[best]:.3f} s "
            f"({behind:+.1%}) {best}"
        )
    return "\n".join(lines)


def markdown(found: dict[str, Any]) -> str:
    """One section per setting, with its hand-made plans by time."""
    lines: list[str] = []
    for setting in found["settings"]:
        ran = [
            (row["result"]["speed"]["median_step_seconds"], row["result"]["plan"])
            for row in setting["rows"]
            if "result" in row
        ]
        (chosen, plan), manual_baselines = ran[0], sorted(ran[1:], key=lambda run: run[0])
        lines += [
            f"## {setting['setting']}",
            "",
            f"Chosen: {chosen:.3f} s a step ({_in_words(plan)}), planned {plan['step_seconds']:.3f}. "
            f"{len(manual_baselines)} plans by hand ran, "
            f"{len(setting['rows']) - len(ran)} do not fit.",
            "",
            "| by hand | s/step | against the chosen one | planned |",
            "|---|---|---|---|",
            *(
                f"| {_in_words(plan)} | {took:.3f} | {took / chosen - 1:+.1%} | {plan['step_seconds']:.3f} |"
                for took, plan in manual_baselines
            ),
            "",
        ]
    return "\n".join(lines)


def _in_words(plan: dict[str, Any]) -> str:
    """The decision in a plan's summary, without predictions."""
    return plan["summary"].split("; ", 1)[1]


if __name__ == "__main__":
    main()
