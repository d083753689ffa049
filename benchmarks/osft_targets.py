"""What OSFT must reach on an H200 (issue 20), from the measurements of `benchmarks.osft`. Standard library only."""

from benchmarks.targets import Found, Target, error_of_plan, memory_over_peers, of_case, page, ratio, speed_over_peers

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

TARGETS = (
    Target("1B, 4k tokens, u = 0.5: step ÷ full fine-tuning", ratio("step_s", "1b-4k-osft", "1b-4k"), 1.30),
    Target("1B, 32k tokens, u = 0.5: step ÷ full fine-tuning", ratio("step_s", "1b-32k-osft", "1b-32k"), 1.06),
    Target("3B, 4k tokens, u = 0.5: step ÷ full fine-tuning", ratio("step_s", "3b-4k-osft", "3b-4k"), 1.45),
    Target("3B, 32k tokens, u = 0.5: step ÷ full fine-tuning", ratio("step_s", "3b-32k-osft", "3b-32k"), 1.08),
    Target("1B, 4k tokens, u = 0.1: step ÷ full fine-tuning", ratio("step_s", "1b-4k-osft-tenth", "1b-4k"), 1.08),
    Target("1B, 4k tokens: tokens/s ÷ fastest peer", speed_over_peers("1b-4k-osft", "1b-4k bf16"), 1.3, False),
    Target("1B, 32k tokens: tokens/s ÷ fastest peer", speed_over_peers("1b-32k-osft", "1b-32k bf16"), 1.45, False),
    Target("3B, 4k tokens: tokens/s ÷ fastest peer", speed_over_peers("3b-4k-osft", "3b-4k bf16"), 1.3, False),
    Target("3B, 32k tokens: tokens/s ÷ fastest peer", speed_over_peers("3b-32k-osft", "3b-32k bf16"), 1.45, False),
    Target("1B, 4k tokens: GPU ÷ smallest peer with fp32", memory_over_peers("1b-4k-osft", "1b-4k mixed"), 1.0),
    Target("1B under 12 GiB: reserved GPU, GiB", of_case("1b-12-osft", "gpu_reserved_gib"), 12.0),
    Target("1B: seconds for all bases", of_case("1b-4k-osft", "bases_s"), 10.0),
    Target("1B: seconds for cached bases", of_case("1b-4k-osft-cached", "bases_s"), 3.0),
    Target("8B under 24 GiB: host, GiB", of_case("8b-24-osft", "host_gib"), 100.0),
    Target("8B under 24 GiB: tokens/s ÷ full with clipping", ratio("tokens_per_s", "8b-24-osft", "8b-24"), 0.8, False),
    Target("8B under 24 GiB: step, % from the plan", error_of_plan("8b-24-osft", "step_s"), 10.0),
    Target("8B under 24 GiB: GPU peak, % from the plan", error_of_plan("8b-24-osft", "gpu_peak_gib"), 1.0),
    Target("8B under 24 GiB: host, % from the plan", error_of_plan("8b-24-osft", "host_gib"), 1.0),
)


def markdown(found: Found) -> str:
    """The targets, all measurements, and what was not measured."""
    return page("OSFT on one GPU", found, TARGETS, _OURS, _PEERS)
