"""StepReport: time and memory of a run beside the plan's predictions."""

from dataclasses import dataclass

from outsize.base.units import show_bytes, show_seconds
from outsize.calibration.steps import StepTiming
from outsize.hardware.lanes import LANES, lane_words
from outsize.runtime.plan_runtime import PlanRuntime
from outsize.schedule.render import extrapolation


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    num_steps: int
    seconds: float
    """The run so far: wall-clock, or virtual on `sim`."""
    gpu_peak_bytes: int
    planned_gpu_bytes: int
    gpu_budget_bytes: int
    step_seconds: float | None
    """The mean of a few early steps; None before they have run. On `sim`: as planned."""
    planned_step_seconds: float
    busy_seconds: dict[str, float]
    """By lane: mean per step, over the same steps. Without `compute` if nothing leaves the GPU."""
    planned_busy_seconds: dict[str, float]
    extrapolated: str = ""
    """Where the planned figures are extrapolated from, as text. Empty if they are not."""
    on_cpu: bool = False
    """Device memory is the memory of the process, and not only the plan's."""
    slow_kernels: tuple[str, ...] = ()
    """Updates that run without a compiled kernel, and why."""

    @staticmethod
    def of(runtime: PlanRuntime, timing: StepTiming | None, *, num_steps: int, seconds: float) -> "StepReport":
        plan, device = runtime.plan, runtime.device
        return StepReport(
            num_steps=num_steps,
            seconds=device.elapsed(seconds),
            gpu_peak_bytes=device.peak_bytes,
            planned_gpu_bytes=plan.estimate.gpu_bytes,
            gpu_budget_bytes=plan.gpu_budget_bytes,
            step_seconds=timing.step_seconds if timing else None,
            planned_step_seconds=plan.estimate.step_seconds,
            busy_seconds=dict(timing.busy_seconds) if timing else {},
            planned_busy_seconds=dict(plan.estimate.busy_seconds),
            extrapolated=extrapolation(plan) if plan.extrapolated_from else "",
            on_cpu=not device.has_own_memory,
            slow_kernels=runtime.updates.slow_kernels(),
        )

    def __str__(self) -> str:
        peak, planned = show_bytes(self.gpu_peak_bytes), show_bytes(self.planned_gpu_bytes)
        memory = f"device peak {peak}, planned {planned}"
        if self.on_cpu:
            memory = f"the process has {peak}, with Python and its libraries; planned {planned}"
        lines = [
            f"{self.num_steps} steps in {show_seconds(self.seconds)}; {memory}, budget "
            f"{show_bytes(self.gpu_budget_bytes)}",
            _compared("a step", self.step_seconds, self.planned_step_seconds),
        ]
        for lane in LANES:
            if self.planned_busy_seconds.get(lane):
                words = lane_words(lane).replace("GPU", "CPU") if self.on_cpu else lane_words(lane)
                lines.append(_compared(f"  {words}", self.busy_seconds.get(lane), self.planned_busy_seconds[lane]))
        if self.extrapolated:
            lines.append(f"the planned figures are {self.extrapolated}")
        return "\n".join([*lines, *self.slow_kernels])


def _compared(what: str, found: float | None, planned: float) -> str:
    return (
        f"{what:<20} {show_seconds(found) if found is not None else 'not measured':<12}  planned "
        f"{show_seconds(planned)}"
    )
