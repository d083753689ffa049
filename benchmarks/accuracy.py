"""Compares predictions with runs: many runs on one GPU, a row each, and which targets are met.

    python3 benchmarks/accuracy.py --out found.json --limit 580     # with a GPU; --skip-done found.json continues
    python3 benchmarks/accuracy.py --count-fake found.json          # anywhere: bytes of the same plans on fake tensors
    python3 benchmarks/accuracy.py --show found.json                # targets, and the table of results/
    python3 benchmarks/accuracy.py --forecast found.json            # anywhere: seconds of `outsize.plan` from configs

Each run is a child of one process that has imported everything and has not used the GPU. So it has its own CUDA
context, peak of host memory and random state, without the time of imports. Results are written after every run.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    gib: int
    rows: int
    seq: int
    clip: float | None = None
    accumulate: int = 1
    pins: tuple[tuple[str, int], ...] = ()
    """Pins of a hand-made plan."""

    @property
    def name(self) -> str:
        extra = (f" ×{self.accumulate}" if self.accumulate > 1 else "") + (" clip" if self.clip else "")
        manual_baselines = f" [{', '.join(f'{name}={value}' for name, value in self.pins)}]" if self.pins else ""
        return f"{self.model.removeprefix('llama-')} {self.gib}GiB {self.rows}×{self.seq}{extra}{manual_baselines}"

    @property
    def seconds(self) -> float:
        """About how long it takes: it is not started with less time left."""
        return {"1b": 9, "3b": 16, "7b": 32, "8b": 36}[self.model.removeprefix("llama-")]


def _cases(model: str, *rows: tuple[Any, ...]) -> list[Case]:
    return [Case(model=model, gib=gib, rows=n, seq=seq, **dict(more)) for gib, n, seq, *more in rows]


CLIP, BY_4 = ("clip", 1.0), ("accumulate", 4)
CASES = [
    *_cases("llama-8b", (24, 8, 1024), (24, 8, 1024, CLIP), (48, 16, 1024)),
    *_cases("llama-7b", (16, 2, 2048), (24, 32, 1024), (48, 4, 4096, CLIP), (100, 8, 1024)),
    *_cases(
        "llama-3b",
        (12, 4, 1024),
        (16, 8, 512, CLIP),
        (24, 8, 1024),
        (24, 8, 1024, CLIP),
        (24, 1, 16384),
        (48, 8, 1024),
        (48, 32, 512, CLIP),
        (80, 4, 4096),
        (100, 16, 1024),
    ),
    *_cases(
        "llama-1b",
        (12, 8, 1024),
        (12, 32, 512),
        (12, 2, 2048, CLIP, BY_4),
        (16, 1, 16384),
        (16, 4, 4096, CLIP),
        (24, 16, 1024),
        (24, 8, 2048, CLIP),
        (40, 8, 4096),
        (100, 8, 1024),
        (100, 32, 1024),
    ),
]
"""Large ones first, so that the remaining time is enough for a small one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="models or whole names of cases, with commas: 1b,3b")
    parser.add_argument("--skip-done", type=Path, help="leave out the cases of this file")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--limit", type=float, default=580, help="seconds in all")
    parser.add_argument("--show", type=Path, nargs="+")
    parser.add_argument("--count-fake", type=Path)
    parser.add_argument("--forecast", type=Path)
    args = parser.parse_args()
    if args.show:
        rows = [row for path in args.show for row in json.loads(path.read_text())["rows"]]
        print(f"{table(rows)}\n\n{markdown(rows)}")
    elif args.count_fake:
        count_fake(args.count_fake)
    elif args.forecast:
        forecast(args.forecast)
    else:
        run_all(args)


def run_all(args: argparse.Namespace) -> None:
    started = time.monotonic()
    done = {row["case"] for row in json.loads(args.skip_done.read_text())["rows"]} if args.skip_done else set()
    # What children share: imported here, once.
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import benchmarks.measure  # noqa: F401

    found: dict[str, Any] = {"command": sys.argv, "rows": []}
    for case in CASES:
        left = args.limit - (time.monotonic() - started)
        wanted = not args.only or {case.model.removeprefix("llama-"), case.name} & set(args.only.split(","))
        if case.name in done or not wanted or left < case.seconds:
            continue
        row = in_a_child(case, args.steps, args.warm_up, timeout=left)
        found["rows"].append(row)
        args.out.write_text(json.dumps(found, ensure_ascii=False))
        print(f"{time.monotonic() - started:5.0f} s  {line(row)}", flush=True)
    print("\n" + table(found["rows"]))


def in_a_child(case: Case, steps: int, warm_up: int, *, timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        child = multiprocessing.get_context("fork").Process(target=_run, args=(case, steps, warm_up, out))
        child.start()
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
        if out.exists():
            return {"case": case.name, **json.loads(out.read_text())}
        return {"case": case.name, "problem": f"exit code {child.exitcode}"}


def _run(case: Case, steps: int, warm_up: int, out: Path) -> None:
    from benchmarks.measure import complete, run_bench
    from outsize.base.errors import OutsizeError
    from outsize.base.records import to_json
    from outsize.run.quiet import quiet

    quiet()
    bench = complete(
        model=case.model,
        device="cuda",
        micro_batch=case.rows,
        seq=case.seq,
        steps=steps,
        warm_up=warm_up,
        accumulate=case.accumulate,
        clip=case.clip,
        gpu_memory=f"{case.gib}GiB",
    )
    plan = out.with_name("plan.json")
    try:
        if case.pins:
            bench = dataclasses.replace(
                bench, plan=str(_plan_by_hand(bench, dict(case.pins), out.with_name("by-hand.json")))
            )
        result = run_bench(bench, say=lambda _: None, save_plan=plan)
        out.write_text(json.dumps({"result": to_json(result), "plan": json.loads(plan.read_text())}))
    except (OutsizeError, RuntimeError) as error:
        out.write_text(json.dumps({"problem": f"{type(error).__name__}: {error}"}))


def _plan_by_hand(bench: Any, pins: dict[str, int], path: Path) -> Path:
    from benchmarks.shapes import random_batches, random_shape
    from outsize.optim.adamw import AdamW
    from outsize.schedule.check import save
    from outsize.schedule.pins import Pins
    from outsize.setup.prepare import preview

    model, weights = random_shape(bench.model, seq=bench.seq)
    planned = preview(
        model,
        random_batches(model, bench)[0],
        optimizer=AdamW(lr=1e-5, update=bench.update, max_grad_norm=bench.clip),
        gpu_memory=bench.gpu_memory,
        device="cuda",
        accumulate=bench.accumulate,
        weights=weights,
        pins=Pins(**pins),
    )
    save(planned.plan, path)
    return path


# Reading off.


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Measured over promised, less one."""
    result = row["result"]
    memory, plan = result["memory"], result["plan"]
    return {
        "allocated": memory["gpu_peak_bytes"] / plan["gpu_bytes"] - 1,
        "reserved": memory["gpu_reserved_bytes"] / plan["gpu_reserved_bytes"] - 1,
        "seconds": result["speed"]["median_step_seconds"] / plan["step_seconds"] - 1,
        "host": memory["host_peak_bytes"] / plan["host_process_bytes"] - 1,
    }


def line(row: dict[str, Any]) -> str:
    if "result" not in row:
        return f"{row['case']:<26} {row['problem']}"
    result, found = row["result"], errors(row)
    memory, plan = result["memory"], result["plan"]
    busy = ", ".join(
        f"{lane} {result['lanes']['busy_seconds'][lane] / planned - 1:+.0%}"
        for lane, planned in row["plan"]["estimate"]["busy_seconds"].items()
        if planned > 0.02 * plan["step_seconds"]
    )
    return (
        f"{row['case']:<26} {result['speed']['tokens_per_second']:>8,.0f} tok/s  "
        f"{result['speed']['median_step_seconds']:7.3f} s ({found['seconds']:+6.1%})  "
        f"reserved {memory['gpu_reserved_bytes'] / 2**30:6.2f} GiB ({found['reserved']:+6.2%}; allocated "
        f"{found['allocated']:+7.3%})  "
        f"host {memory['host_peak_bytes'] / 2**30:6.1f} GiB ({found['host']:+6.1%})  [{busy}]"
    )


def table(rows: list[dict[str, Any]]) -> str:
    good = [errors(row) for row in rows if "result" in row]
    lines = [line(row) for row in rows]
    if good:

        def share(key: str, most: float) -> str:
            return f"{sum(abs(e[key]) <= most for e in good)} of {len(good)} within {most:.0%}"

        lines += [
            "",
            f"reserved   {share('reserved', 0.03)}, at most {max(e['reserved'] for e in good):+.2%} above",
            f"seconds    {share('seconds', 0.1)}, mean error {statistics.mean(abs(e['seconds']) for e in good):.1%}",
            f"host       {share('host', 0.05)}",
            f"failed     {len(rows) - len(good)}",
        ]
    return "\n".join(lines)


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| case | tokens/s | s/step | planned | | GPU GiB, reserved | | allocated | fake | host GiB | |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        if "result" not in row:
            lines.append(f"| {row['case']} | {row['problem']} |" + " |" * 9)
            continue
        result, off = row["result"], errors(row)
        speed, memory, planned = result["speed"], result["memory"], result["plan"]["step_seconds"]
        fake = f"{row['fake_gpu_bytes'] / memory['gpu_peak_bytes'] - 1:+.4%}" if "fake_gpu_bytes" in row else ""
        lines.append(
            f"| {row['case']} | {speed['tokens_per_second']:,.0f} | {speed['median_step_seconds']:.3f} | "
            f"{planned:.3f} | {off['seconds']:+.1%} "
            f"| {memory['gpu_reserved_bytes'] / 2**30:.2f} | {off['reserved']:+.2%} | {off['allocated']:+.4%} | {fake} "
            f"| {memory['host_peak_bytes'] / 2**30:.1f} | {off['host']:+.1%} |"
        )
    return "\n".join(lines)


def forecast(path: Path) -> None:
    """Forecast the seconds of the same cases without a GPU. The forecast may choose another plan than the run."""
    from benchmarks.shapes import named_config
    from outsize.forecast.forecast import plan
    from outsize.optim.adamw import AdamW

    print("| case | forecast, s | measured, s | |\n|---|---|---|---|")
    off = []
    for row in json.loads(path.read_text())["rows"]:
        if "result" not in row:
            continue
        bench, measured = row["result"]["bench"], row["result"]["speed"]["median_step_seconds"]
        promised = plan(
            named_config(bench["model"], seq=bench["seq"]),
            sequence_len=bench["seq"],
            micro_batch_size=bench["micro_batch"],
            accumulate=bench["accumulate"],
            hardware="h200",
            gpu_memory=bench["gpu_memory"],
            optimizer=AdamW(update=bench["update"], max_grad_norm=bench["clip"]),
        ).plan.estimate.step_seconds
        off.append(measured / promised - 1)
        print(f"| {row['case']} | {promised:.3f} | {measured:.3f} | {off[-1]:+.1%} |", flush=True)
    print(
        f"\n{sum(abs(e) <= 0.1 for e in off)} of {len(off)} within 10%, mean error "
        f"{statistics.mean(map(abs, off)):.1%}, at most {max(map(abs, off)):.1%}"
    )


def count_fake(path: Path) -> None:
    """Count the bytes of a table's plans on fake tensors, as `outsize plan` does without a GPU.

    Counted plans are shortened to what the table reads, which makes the file small enough for results/.
    """
    import torch

    from benchmarks.shapes import named_config
    from outsize.base.records import from_json
    from outsize.forecast.fake_trace import fake_trace
    from outsize.hardware.catalog import lookup
    from outsize.layout.chunks import pack
    from outsize.planner.memory import high_water
    from outsize.profile.trace import added_in_place
    from outsize.schedule.placement import Placement
    from outsize.schedule.plan import Plan
    from outsize.schedule.schedule import compile_schedule

    found = json.loads(path.read_text())
    for row in found["rows"]:
        if "result" not in row or "fake_gpu_bytes" in row:
            continue
        plan, bench = from_json(Plan, row["plan"]), row["result"]["bench"]
        config = named_config(bench["model"], seq=bench["seq"])
        graph, trace, _ = fake_trace(
            config, lookup("h200"), rows=bench["micro_batch"], tokens=bench["seq"], dtype=torch.bfloat16
        )
        trace = added_in_place(trace, graph)
        layout = pack(graph, plan.chunk_bytes)
        decision = plan.decision
        work = tuple(trace.work(call, strategy) for call, strategy in enumerate(decision.strategies))
        place = Placement(graph, layout, decision, plan.step_config, work, trace.shared)
        row["fake_gpu_bytes"] = high_water(place, compile_schedule(place), trace.held_bytes).gpu_bytes
        print(
            f"{row['case']:<26} fake {row['fake_gpu_bytes'] / row['result']['memory']['gpu_peak_bytes'] - 1:+.4%} of "
            "the measured peak",
            flush=True,
        )
        estimate = {key: row["plan"]["estimate"][key] for key in ("busy_seconds", "launch_bound_seconds")}
        row["plan"] = {"estimate": estimate, "process_overhead": row["plan"]["process_overhead"]}
    path.write_text(json.dumps(found, ensure_ascii=False))


if __name__ == "__main__":
    main()
