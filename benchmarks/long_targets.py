"""What long rows must reach on an H200 (issue 21), from what `benchmarks.long` measures. Standard library only."""

from benchmarks.targets import Found, Target, Value, error_of_plan, measured, of_case, page, peers, quotient, ratio

_OURS = [
    "tokens",
    "layers",
    "step_s",
    "planned_step_s",
    "first_step_s",
    "tokens_per_s",
    "gpu_peak_gib",
    "planned_gpu_peak_gib",
    "gpu_reserved_gib",
    "host_gib",
    "planned_host_gib",
    "prepare_s",
    "profile_s",
    "count_s",
    "layer_input_gib",
    "num_tiled",
    "backward_peak_h",
    "forward_s",
    "backward_s",
    "masked_over_varlen",
    "passed",
    "failed",
]
_PEERS = ["layers", "step_s", "tok_s", "gpu_peak_gib", "gpu_reserved_gib", "host_gib", "attn", "loss", "timed"]
_STAY = 3
"""Layers whose inputs an offload keeps on the GPU: copies in flight and those prefetched."""


def over_peers(case: str, prefix: str, *, plain: bool) -> Value:
    """Tokens/s over those of plain checkpointing, or over those of the fastest peer that offloads."""

    def value(found: Found) -> float | None:
        speeds = [float(row["tok_s"]) for row in peers(found, prefix) if (row["case"] == "gc") == plain]
        return quotient(measured(found, case, "tokens_per_s"), max(speeds, default=None))

    return value


def memory_over_peers(case: str, prefix: str) -> Value:
    """Peak GPU memory over the least of the peers that offload."""

    def value(found: Found) -> float | None:
        sizes = [float(row["gpu_peak_gib"] or 0) for row in peers(found, prefix) if row["case"] != "gc"]
        return quotient(measured(found, case, "gpu_peak_gib"), min(sizes, default=None))

    return value


def saved_share(case: str, prefix: str) -> Value:
    """GPU memory that the offload saves against plain checkpointing, over the inputs of all layers but those that stay
    on the GPU.
    """

    def value(found: Found) -> float | None:
        plain = [float(row["gpu_peak_gib"] or 0) for row in peers(found, prefix) if row["case"] == "gc"]
        peak, layers = measured(found, case, "gpu_peak_gib"), measured(found, case, "layers")
        size = measured(found, case, "layer_input_gib")
        if not plain or peak is None or layers is None or size is None:
            return None
        return (plain[0] - peak) / ((layers - _STAY) * size)

    return value


def _once(length: str, bound: float, *, plain: Value) -> list[Target]:
    engine = ratio("tokens_per_s", f"engine-{length}-offload+attention", f"engine-{length}-recompute")
    return [
        Target(f"attention once, {length}: tokens/s ÷ the engine's recompute", engine, bound, False),
        Target(f"attention once, {length}, no plan: tokens/s ÷ plain checkpointing", plain, bound, False),
    ]


def _inputs(length: str) -> list[Target]:
    engine = ratio("tokens_per_s", f"engine-{length}-offload", f"engine-{length}-recompute")
    alone, prefix = f"alone-{length}", f"{length} cudnn"
    plain, fastest = over_peers(alone, prefix, plain=True), over_peers(alone, prefix, plain=False)
    return [
        Target(f"inputs, {length}: tokens/s ÷ the engine's recompute", engine, 0.995, False),
        Target(f"inputs, {length}, no plan: tokens/s ÷ plain checkpointing", plain, 0.995, False),
        Target(f"inputs, {length}, no plan: tokens/s ÷ fastest peer", fastest, 1.0, False),
        Target(f"inputs, {length}: GPU memory saved ÷ what may be", saved_share(alone, prefix), 0.97, False),
        Target(
            f"attention once, {length}: GPU memory ÷ the peers' offload",
            memory_over_peers(f"alone-{length}-attention", prefix),
            1.0,
        ),
    ]


def _run(case: str, name: str, gib: float) -> list[Target]:
    return [
        Target(f"{name}: reserved GPU, GiB", of_case(case, "gpu_reserved_gib"), gib),
        Target(f"{name}: GPU peak, % from the plan", error_of_plan(case, "gpu_peak_gib"), 1.0),
        Target(f"{name}: first step, % from the plan", error_of_plan(case, "first_step_s", "step_s"), 10.0),
    ]


TARGETS = (
    *_inputs("32k"),
    *_once("32k", 1.06, plain=over_peers("alone-32k-attention", "32k cudnn", plain=True)),
    *_inputs("64k"),
    *_once("64k", 1.10, plain=over_peers("alone-64k-attention", "64k cudnn", plain=True)),
    *_once("128k", 1.15, plain=ratio("tokens_per_s", "alone-128k-attention", "alone-128k-checkpoint")),
    Target("AdamW, 32k under 40 GiB: tokens/s", of_case("adamw-32k-40", "tokens_per_s"), 5058, False),
    Target("tiled layer, 128k: backward peak, in inputs", of_case("layer-tiled", "backward_peak_h"), 12.0),
    Target("tiled layer, 128k: seconds ÷ untiled", ratio("step_s", "layer-tiled", "layer-whole"), 1.02),
    Target("256k: seconds of prepare", of_case("256k-139", "prepare_s"), 60.0),
    *_run("64k-24", "64k under 24 GiB", 24.0),
    *_run("128k-80", "128k under 80 GiB", 80.0),
    *_run("256k-139", "256k under 139 GiB", 139.0),
    *_run("frozen-512k", "512k, frozen base, 8 layers", 139.0),
    Target("packed row, 128k: masked ÷ varlen", of_case("packed", "masked_over_varlen"), 5.0, False),
    Target("GPU tests that fail", of_case("tests", "failed"), 0.0),
)


def markdown(found: Found) -> str:
    """The targets, all measurements, and what was not measured."""
    return page("Long rows on one GPU", found, TARGETS, _OURS, _PEERS)
