"""Targets of a set of measurements and the page that shows both, for `benchmarks.parts`. Standard library only."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Found = Mapping[str, Any]
"""`cases` and `peers`: measurements by name. Those that failed have `problem` alone. `parts`: seconds and problems of
processes. `is_tiny`: the figures are of a tiny model, and nothing is judged.
"""
Value = Callable[[Found], float | None]


@dataclass(frozen=True, slots=True)
class Target:
    text: str
    value: Value
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


def of_case(case: str, key: str) -> Value:
    return lambda found: measured(found, case, key)


def ratio(key: str, case: str, other: str) -> Value:
    """A figure of a case over that of another."""
    return lambda found: quotient(measured(found, case, key), measured(found, other, key))


def peers(found: Found, prefix: str) -> Iterator[Row]:
    return (row for name, row in found["peers"].items() if name.startswith(prefix + " "))


def speed_over_peers(case: str, prefix: str) -> Value:
    """Tokens/s over the fastest peer's."""

    def value(found: Found) -> float | None:
        speeds = [float(row["tok_s"]) for row in peers(found, prefix) if "tok_s" in row]
        return quotient(measured(found, case, "tokens_per_s"), max(speeds, default=None))

    return value


def memory_over_peers(case: str, prefix: str) -> Value:
    """Peak GPU memory over that of the peer with the least."""

    def value(found: Found) -> float | None:
        sizes = [float(row["gpu_peak_gib"]) for row in peers(found, prefix) if row.get("gpu_peak_gib")]
        return quotient(measured(found, case, "gpu_peak_gib"), min(sizes, default=None))

    return value


def error_of_plan(case: str, key: str, planned: str = "") -> Value:
    """How far a measurement is from the plan, in percent of the plan. `planned`: the key without `planned_`, if it is
    another one.
    """

    def value(found: Found) -> float | None:
        part = quotient(measured(found, case, key), measured(found, case, f"planned_{planned or key}"))
        return None if part is None else 100 * abs(part - 1)

    return value


def page(title: str, found: Found, targets: Sequence[Target], ours: Sequence[str], theirs: Sequence[str]) -> str:
    """A report in Markdown. A target that needs what was not measured is shown as not measured. `ours`, `theirs`: the
    keys of outsize's and of the peers' measurements.
    """
    lines = judged(title, found, targets)
    lines += ["", _table("outsize", found["cases"], ours), "", _table("peer", found["peers"], theirs), *problems(found)]
    return "\n".join(lines) + "\n"


def judged(title: str, found: Found, targets: Sequence[Target]) -> list[str]:
    """The first lines of a report: its title, and a table of the targets."""
    lines = [f"# {title}", "", found["about"], "", "| target | bound | found | |", "|---|---|---|---|"]
    for target in targets:
        value = target.value(found)
        sign = "≤" if target.is_most else "≥"
        verdict = "not measured"
        if value is not None:
            verdict = "" if found["is_tiny"] else "met" if target.is_met(value) else "MISSED"
        figure = "" if value is None else f"{value:.4g}"
        lines.append(f"| {target.text} | {sign} {target.bound:g} | {figure} | {verdict} |")
    return lines


def problems(found: Found) -> list[str]:
    rows = {**found["cases"], **found["peers"], **found["parts"]}
    return [f"- {name}: {row['problem']}" for name, row in rows.items() if "problem" in row]


def _table(title: str, rows: Mapping[str, Row], keys: Sequence[str]) -> str:
    """Without the columns that no row has."""
    keys = [key for key in keys if any(row.get(key) is not None for row in rows.values())]
    lines = ["| " + " | ".join([title, *keys]) + " |", "|---" * (len(keys) + 1) + "|"]
    for name, row in rows.items():
        if "problem" not in row:
            lines.append("| " + " | ".join([name, *(shown(row.get(key)) for key in keys)]) + " |")
    return "\n".join(lines)


def shown(value: object) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
