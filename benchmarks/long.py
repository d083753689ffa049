"""All figures of long rows that need a GPU: `$OUT/long.json` and `$OUT/long.md`, at most nine minutes a command.

    ../shared/bench/make_site.sh                                  # once, where there is a network: carry/
    PYTHONPATH=src python3 -m benchmarks.long --out $OUT          # on the GPU machine, with carry/: the first parts
    PYTHONPATH=src python3 -m benchmarks.long --out $OUT --parts alone-64k,peers-64k,64k-24,adamw-32k-40,128k-80
    PYTHONPATH=src python3 -m benchmarks.long --out $OUT --parts 256k-139,packed,tests
    PYTHONPATH=src python3 -m benchmarks.long --out $OUT --parts frozen-512k,alone-128k,peers-others
    PYTHONPATH=src python3 -m benchmarks.long --out $OUT --parts flash-32k,peers-flash,disk-32k,kernels
    PYTHONPATH=src python3 -m benchmarks.long --out /tmp/found --tiny            # starts everything, without a GPU

Shape of qwen3-8b, random weights, batch 1, attention by cuDNN on both sides (`flash-32k`: flash). Comparisons of speed
have fewer layers than the model. `engine` is a plan with AdamW, and as much on the GPU as fits; `alone` the offload
without a plan, forward and backward, as the peers of carry/bench/peers_long.py. The others are whole runs: first steps
beside their plans. A step of 256k tokens takes four minutes, so not all parts fit one command: those that do not are
named with the command for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks import parts
from benchmarks.long_targets import markdown
from benchmarks.parts import Part, Suite

K = 1024


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: Literal["engine", "alone", "layer", "packed", "tests", "kernels"]
    tokens: int = 0
    layers: int = 36
    kept: str = ""
    """`engine`: the strategy of all layers, or what the plan decides. `alone`: a key of `bench_long.ACTIVATIONS`.
    `layer`: tiled or whole."""
    gpu_memory: str | None = None
    is_frozen: bool = False
    """LoRA."""
    steps: int = 2
    """That are timed, after the first; of `alone` after two. 0: the first is timed alone."""
    sdp_kernel: str = "cudnn"


LAYERS = {32: 18, 64: 12, 128: 6}
"""Of comparisons, by thousands of tokens: enough that the head takes less than a tenth of a step."""


def _compared(kind: Literal["engine", "alone"], thousands: int, kept: str, **how: Any) -> Case:
    return Case(kind=kind, tokens=thousands * K, layers=LAYERS[thousands], kept=kept, **how)


CASES = {
    "engine-32k-recompute": _compared("engine", 32, "recompute", steps=3),
    "engine-32k-offload": _compared("engine", 32, "offload", steps=3),
    "engine-32k-recompute+attention": _compared("engine", 32, "recompute+attention", steps=3),
    "engine-32k-offload+attention": _compared("engine", 32, "offload+attention", steps=3),
    "engine-64k-recompute": _compared("engine", 64, "recompute"),
    "engine-64k-offload": _compared("engine", 64, "offload"),
    "engine-64k-offload+attention": _compared("engine", 64, "offload+attention"),
    "engine-128k-recompute": _compared("engine", 128, "recompute", steps=1),
    "engine-128k-offload+attention": _compared("engine", 128, "offload+attention", steps=1),
    "alone-32k": _compared("alone", 32, "hidden_states", steps=3),
    "alone-32k-attention": _compared("alone", 32, "hidden_states+attention", steps=3),
    "alone-64k": _compared("alone", 64, "hidden_states"),
    "alone-64k-attention": _compared("alone", 64, "hidden_states+attention"),
    "alone-128k-checkpoint": _compared("alone", 128, "checkpoint", steps=1),
    "alone-128k-attention": _compared("alone", 128, "hidden_states+attention", steps=1),
    "flash-32k": _compared("alone", 32, "hidden_states", steps=3, sdp_kernel="flash"),
    "flash-32k-attention": _compared("alone", 32, "hidden_states+attention", steps=3, sdp_kernel="flash"),
    "disk-32k": _compared("alone", 32, "disk", steps=1),
    "layer-whole": Case(kind="layer", tokens=128 * K, kept="whole"),
    "layer-tiled": Case(kind="layer", tokens=128 * K, kept="tiled"),
    "64k-24": Case(kind="engine", tokens=64 * K, gpu_memory="24GiB", steps=1, sdp_kernel="auto"),
    "adamw-32k-40": Case(kind="engine", tokens=32 * K, gpu_memory="40GiB", steps=4, sdp_kernel="auto"),
    "128k-80": Case(kind="engine", tokens=128 * K, gpu_memory="80GiB", steps=0, sdp_kernel="auto"),
    "256k-139": Case(kind="engine", tokens=256 * K, steps=0, sdp_kernel="auto"),
    "frozen-512k": Case(kind="engine", tokens=512 * K, layers=8, is_frozen=True, steps=0, sdp_kernel="auto"),
    "packed": Case(kind="packed", tokens=128 * K),
    "tests": Case(kind="tests"),
    "kernels": Case(kind="kernels"),
}


def _named(*starts: str) -> tuple[str, ...]:
    return tuple(name for name in CASES if name.startswith(starts))


PARTS = {
    "engine-32k": Part(cases=_named("engine-32k"), seconds=125),
    "alone-32k": Part(cases=_named("alone-32k"), seconds=55),
    "peers-32k": Part(peers=((32, "cudnn", "gc,axolotl_hidden_nr"),), seconds=60),
    "layer": Part(cases=_named("layer"), seconds=40),
    "engine-64k": Part(cases=_named("engine-64k"), seconds=130),
    "engine-128k": Part(cases=_named("engine-128k"), seconds=115),
    "alone-64k": Part(cases=_named("alone-64k"), seconds=70),
    "peers-64k": Part(peers=((64, "cudnn", "gc,axolotl_hidden_nr"),), seconds=70),
    # One case a process: its peak of host memory is the case's.
    "64k-24": Part(cases=("64k-24",), seconds=115),
    "adamw-32k-40": Part(cases=("adamw-32k-40",), seconds=90),
    "128k-80": Part(cases=("128k-80",), seconds=150),
    "256k-139": Part(cases=("256k-139",), seconds=360),
    "packed": Part(cases=("packed",), seconds=60),
    "tests": Part(cases=("tests",), seconds=90),
    "frozen-512k": Part(cases=("frozen-512k",), seconds=240),
    "alone-128k": Part(cases=_named("alone-128k"), seconds=95),
    "peers-others": Part(peers=((32, "cudnn", "hf_offload,trl_offload,axolotl_hidden"),), seconds=90),
    "flash-32k": Part(cases=_named("flash-32k"), seconds=65),
    "peers-flash": Part(peers=((32, "flash", "gc,axolotl_hidden_nr"),), seconds=70),
    "disk-32k": Part(cases=("disk-32k",), seconds=60),
    "kernels": Part(cases=("kernels",), seconds=45),
}


def peer_commands(part: Part, left: float, tiny: bool) -> Iterator[tuple[str, list[str]]]:
    """`part.peers`: thousands of tokens, attention kernel, cases."""
    for thousands, kernel, cases in part.peers:
        size = ["--model", "tiny", "--seqs", "64", "--steps", "2", "--loss", "torch", "--device", "cpu"]
        if not tiny:
            steps = 4 if thousands <= 32 else 3
            layers = LAYERS[thousands]
            size = ["--seqs", str(thousands * K), "--layers", str(layers), "--steps", str(steps), "--attn", kernel]
        # peers_long.py skips a case that has less than 40 s.
        total = max(60.0, min(left, part.seconds + 30.0))
        yield f"{thousands}k {kernel}", ["all", "--cases", cases, *size, "--limit", "90", "--total", f"{total:.0f}"]


def measure_case(name: str, tiny: bool) -> dict[str, Any]:
    from benchmarks import long_cases

    return long_cases.MEASURE[CASES[name].kind](CASES[name], tiny)


SUITE = Suite(
    name="long",
    about=__doc__,
    parts=PARTS,
    measure=measure_case,
    peers_file="peers_long.py",
    peer_commands=peer_commands,
    markdown=markdown,
)

if __name__ == "__main__":
    parts.main(SUITE)
