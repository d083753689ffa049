"""What pruning must reach on an H200 (issues 22 and 23), from the measurements of `benchmarks.prune`. Standard library
only.
"""

from benchmarks.targets import (
    Found,
    Target,
    Value,
    error_of_plan,
    judged,
    measured,
    of_case,
    problems,
    quotient,
    ratio,
    shown,
)


def within(case: str, key: str, other: str) -> Value:
    """A figure of a case over another one of it."""
    return lambda found: quotient(measured(found, case, key), measured(found, case, other))


TARGETS = (
    Target("8B under 24 GiB: GPU with the CUDA context, GiB", of_case("8b", "gpu_total_gib"), 24.0),
    Target("8B under 24 GiB: the same, % from the plan", error_of_plan("8b", "gpu_total_gib"), 3.0),
    Target("8B under 24 GiB: GPU peak of tensors, % from the plan", error_of_plan("8b", "gpu_peak_gib"), 3.0),
    Target("8B: host memory of the process, GiB", of_case("8b", "host_gib"), 64.0),
    Target("8B: the same, % from the plan", error_of_plan("8b", "host_gib"), 3.0),
    Target("8B: model FLOP/s ÷ resident full fine-tuning", ratio("model_flops", "8b", "8b-full"), 0.8, False),
    Target("8B: hours of --dry-run, % of importance and training", error_of_plan("8b", "stages_s"), 10.0),
    Target("1B: tokens × variants/s ÷ a plain loop", ratio("tokens_variants_per_s", "1b", "1b-plain"), 1.25, False),
    Target("70B, layer 40, under 24 GiB: GPU with the CUDA context, GiB", of_case("70b", "gpu_total_gib"), 24.0),
    Target("8B shape: GPU while scoring, GiB", of_case("scores", "gpu_reserved_gib"), 24.0),
    Target("8B: parameters of the chosen model, % from predicted", error_of_plan("costs", "chosen_params"), 0.0),
    Target("8B: memory of the teacher, % from predicted", error_of_plan("costs", "teacher_memory_gib"), 2.0),
    Target("8B: memory of the chosen model, % from predicted", error_of_plan("costs", "chosen_memory_gib"), 2.0),
    Target("8B: latency of the teacher, % from predicted", error_of_plan("costs", "teacher_latency_s"), 10.0),
    Target("8B: latency of the chosen model, % from predicted", error_of_plan("costs", "chosen_latency_s"), 10.0),
    Target(
        "8B shape: distillation ÷ plain training, tokens/s",
        within("distill", "distilled_tokens_per_s", "plain_tokens_per_s"),
        0.9,
        False,
    ),
)


def markdown(found: Found) -> str:
    """The targets, all measurements, and what was not measured."""
    lines = judged("Pruning on one GPU", found, TARGETS)
    lines += ["", "Figures of `all_layers_…` are extrapolated from the layers that were measured. Weights are random."]
    for name, row in found["cases"].items():
        if "problem" not in row:
            lines += ["", f"## {name}", "", "| figure | measured | planned or predicted |", "|---|---|---|"]
            lines += [
                f"| {key} | {shown(value)} | {shown(row.get(f'planned_{key}'))} |"
                for key, value in row.items()
                if not key.startswith("planned_") and key != "text" and value is not None
            ]
    return "\n".join([*lines, "", *problems(found)]) + "\n"
