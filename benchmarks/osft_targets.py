"""What OSFT must reach on an H200 (issue 20), from the measurements of `benchmarks.osft`. Standard library only."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Found = Mapping[str, Any]
"""`cases` and `peers`: measurements by name. Those that failed have `problem` alone. `parts`: seconds and problems of
processes. `is_tiny`: the figures are of a tiny model, and nothing is judged.
"""


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    value: Callable[[Found], float | None]
    """None: something is not measured."""
    bound: float
    is_most: bool = True
    """The value must not be above the bound; else not below."""

    def is_met(self, value: float) -> bool:
        return value <= self.bound if self.is_most else value >= self.bound


def measured(found: Found, case: str, key: str) -> float | None:
    value = found["cases"].get(case, {}).get(key)
    return None if value is None else float(value)


def quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def of_case(case: str, key: str) -> Callable[[Found], float | None]:
    return lambda found: measured(found, case, key)


def steps(case: str, full: str) -> Callable[[Found], float | None]:
    """Seconds of a step over those of another case."""
    return lambda found: quotient(measured(found, case, "step_s"), measured(found, full, "step_s"))


def speed_over_peers(case: str, prefix: str) -> Callable[[Found], float | None]:
    """Tokens/s over the fastest peer's."""

    def value(found: Found) -> float | None:
        speeds = [float(row["tok_s"]) for row in peers(found, prefix) if "tok_s" in row]
        return quotient(measured(found, case, "tokens_per_s"), max(speeds, default=None))

    return value


def memory_over_peers(case: str, prefix: str) -> Callable[[Found], float | None]:
    """Peak GPU memory over that of the peer with the least."""

    def value(found: Found) -> float | None:
        sizes = [float(row["gpu_peak_gib"]) for row in peers(found, prefix) if row.get("gpu_peak_gib")]
        return quotient(measured(found, case, "gpu_peak_gib"), min(sizes, default=None))

    return value


def peers(found: Found, prefix: str) -> Iterator[Row]:
    return (row for name, row in found["peers"].items() if name.startswith(prefix + " "))


def error_of_plan(case: str, key: str) -> Callable[[Found], float | None]:
    """How far a measurement is from the plan, in percent of the plan."""

    def value(found: Found) -> float | None:
        ratio = quotient(measured(found, case, key), measured(found, case, f"planned_{key}"))
        return None if ratio is None else 100 * abs(ratio - 1)

    return value


def speeds(case: str, other: str) -> Callable[[Found], float | None]:
    return lambda found: quotient(measured(found, case, "tokens_per_s"), measured(found, other, "tokens_per_s"))


TARGETS = (
    Target("1B, 4k tokens, u = 0.5: step ÷ full fine-tuning", steps("1b-4k-osft", "1b-4k"), 1.30),
    Target("1B, 32k tokens, u = 0.5: step ÷ full fine-tuning", steps("1b-32k-osft", "1b-32k"), 1.06),
    Target("3B, 4k tokens, u = 0.5: step ÷ full fine-tuning", steps("3b-4k-osft", "3b-4k"), 1.45),
    Target("3B, 32k tokens, u = 0.5: step ÷ full fine-tuning", steps("3b-32k-osft", "3b-32k"), 1.08),
    Target("1B, 4k tokens, u = 0.1: step ÷ full fine-tuning", steps("1b-4k-osft-tenth", "1b-4k"), 1.08),
    Target("1B, 4k tokens: tokens/s ÷ fastest peer", speed_over_peers("1b-4k-osft", "1b-4k bf16"), 1.3, False),
    Target("1B, 32k tokens: tokens/s ÷ fastest peer", speed_over_peers("1b-32k-osft", "1b-32k bf16"), 1.45, False),
    Target("3B, 4k tokens: tokens/s ÷ fastest peer", speed_over_peers("3b-4k-osft", "3b-4k bf16"), 1.3, False),
    Target("3B, 32k tokens: tokens/s ÷ fastest peer", speed_over_peers("3b-32k-osft", "3b-32k bf16"), 1.45, False),
    Target("1B, 4k tokens: GPU ÷ smallest peer with fp32", memory_over_peers("1b-4k-osft", "1b-4k mixed"), 1.0),
    Target("1B under 12 GiB: reserved GPU, GiB", of_case("1b-12-osft", "gpu_reserved_gib"), 12.0),
    Target("1B: seconds for all bases", of_case("1b-4k-osft", "bases_s"), 10.0),
    Target("1B: seconds for cached bases", of_case("1b-4k-osft-cached", "bases_s"), 3.0),
    Target("8B under 24 GiB: host, GiB", of_case("8b-24-osft", "host_gib"), 100.0),
    Target("8B under 24 GiB: tokens/s ÷ full with clipping", speeds("8b-24-osft", "8b-24"), 0.8, False),
    Target("8B under 24 GiB: step, % from the plan", error_of_plan("8b-24-osft", "step_s"), 10.0),
    Target("8B under 24 GiB: GPU peak, % from the plan", error_of_plan("8b-24-osft", "gpu_peak_gib"), 1.0),
    Target("8B under 24 GiB: host, % from the plan", error_of_plan("8b-24-osft", "host_gib"), 1.0),
)


def markdown(found: Found) -> str:
    """The targets, all measurements, and what was not measured."""
    lines = ["# OSFT on one GPU", "", found["about"], "", "| target | bound | found | |", "|---|---|---|---|"]
    for target in TARGETS:
        value = target.value(found)
        sign = "≤" if target.is_most else "≥"
        verdict = "not measured"
        if value is not None:
            verdict = "" if found["is_tiny"] else "met" if target.is_met(value) else "MISSED"
        shown = "" if value is None else f"{value:.3g}"
        lines.append(f"| {target.text} | {sign} {target.bound:g} | {shown} | {verdict} |")
    lines += ["", _table("outsize", found["cases"], _OURS), "", _table("peer", found["peers"], _PEERS)]
    problems = {**found["cases"], **found["peers"], **found["parts"]}
    lines += [f"- {name}: {row['problem']}" for name, row in problems.items() if "problem" in row]
    return "\n".join(lines) + "\n"


_OURS = [
    "step_s",
    "planned_step_s",
    "tokens_per_s",
    "gpu_peak_gib",
    "planned_gpu_peak_gib",
    "gpu_reserved_gib",
    "host_gib",
    "planned_host_gib",
    "bases_s",
    "decompose_s",
    "prepare_s",
    "first_step_s",
]
_PEERS = ["step_s", "tok_s", "gpu_peak_gib", "gpu_reserved_gib", "host_gib", "proj_ms", "init_s", "svd_est_s", "timed"]


def _table(title: str, rows: Mapping[str, Row], keys: list[str]) -> str:
    lines = ["| " + " | ".join([title, *keys]) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, row in rows.items():
        if "problem" not in row:
            lines.append("| " + " | ".join([name, *(_shown(row.get(key)) for key in keys)]) + " |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
