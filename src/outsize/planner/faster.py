"""Settings that train more tokens per second on the same machine, and whether its host memory is the limit.

Each answer is one search with one change, on the profile that the plan was made from. Needs no torch, so a second
process can do it.
"""

from dataclasses import dataclass, replace

from outsize.base.errors import OutsizeError
from outsize.base.units import show_enough
from outsize.planner.explain import Problem
from outsize.schedule.plan import Plan
from outsize.schedule.render import tokens_per_second

MORE_PASSES = 4
_ANY_HOST_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    """The setting, by its name in a run file."""
    tokens_per_second: float
    note: str = ""


def more_passes(problem: Problem) -> list[Change]:
    """Gradient accumulation, or more of it."""
    passes = MORE_PASSES * problem.step_config.accumulate
    step = replace(problem.step_config, update="after_step", accumulate=passes)
    note = f"with {MORE_PASSES} times the tokens a step"
    return _change(f"gradient_accumulation_steps {passes}", _solve(replace(problem, step_config=step)), note)


def same_batch(problem: Problem) -> list[Change]:
    """Changes that leave the tokens of a step as they are."""
    changes: list[Change] = []
    step = problem.step_config
    if step.update == "after_step" and step.accumulate == 1:
        early = _solve(replace(problem, step_config=replace(step, update="in_backward")))
        changes += _change("max_grad_norm 0", early, "without clipping, updates run in backward")
    any_host = _solve(replace(problem, host_bytes=_ANY_HOST_BYTES))
    if any_host is not None:
        name = f"host_memory {show_enough(any_host.estimate.host_bytes)}"
        changes += _change(name, any_host, "host memory is the limit")
    return changes


def _solve(problem: Problem) -> Plan | None:
    try:
        return problem.solve()
    except OutsizeError:
        return None


def _change(name: str, plan: Plan | None, note: str) -> list[Change]:
    return [] if plan is None else [Change(name, tokens_per_second(plan) or 0.0, note)]
