"""StepReport: what the run really takes, beside what the plan said."""

from dataclasses import dataclass

from outsize.base.units import show_bytes, show_seconds
from outsize.device.device import Device
from outsize.plan.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    num_steps: int
    seconds: float
    """Of the whole run so far: wall-clock, or virtual on `sim`."""
    gpu_peak_bytes: int
    planned_gpu_bytes: int
    gpu_budget_bytes: int
    planned_step_seconds: float

    @staticmethod
    def of(plan: Plan, device: Device, *, num_steps: int, seconds: float) -> "StepReport":
        return StepReport(
            num_steps=num_steps, seconds=device.elapsed(seconds), gpu_peak_bytes=device.peak_bytes, planned_gpu_bytes=plan.estimate.gpu_bytes,
            gpu_budget_bytes=plan.gpu_budget_bytes, planned_step_seconds=plan.estimate.step_seconds,
        )  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps in {show_seconds(self.seconds)} (planned {show_seconds(self.planned_step_seconds)} a step); device peak "
            f"{show_bytes(self.gpu_peak_bytes)}, planned {show_bytes(self.planned_gpu_bytes)}, budget {show_bytes(self.gpu_budget_bytes)}"
        )
