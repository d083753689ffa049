"""The cases of `benchmarks.prune`: each returns its figures, in a process that measures a few of them."""

import contextlib
import dataclasses
import io
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from benchmarks.prune_models import model_folder, run_config
from benchmarks.shapes import named_config
from outsize.hardware.host import peak_rss_bytes
from outsize.model.stack import LayerStack
from outsize.run import prune, prune_stages
from outsize.run.prune_importance import StoredImportance
from outsize.run.prune_library import Library
from outsize.run.prune_stages import LayerReport, PruneStages
from outsize.run.teacher import Teacher
from outsize.transfer.batch_cache import BatchCache

GiB = 2**30
TINY_DEVICE = "sim:1GiB"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pruning run of a few layers."""

    model: str
    widths: tuple[int | float, ...]
    heads: tuple[int, ...] = (4, 2, 1)
    pruned: tuple[int, ...]
    """Layers."""
    has_one_real_layer: bool = False
    """All layers but the pruned ones are zeros, which take no space on disk."""
    rows: int = 8
    seq: int = 1024
    tokens: int = 2**20
    importance_tokens: int = 2**18
    gpu_memory: str | None = None
    host_memory: str | None = None

    def tiny(self) -> "Case":
        small: dict[str, Any] = dict(model="tiny", widths=(0.8, 0.6, 0.4, 0.2), heads=(1,), rows=2, seq=16)
        small |= dict(tokens=64, importance_tokens=32, gpu_memory=None, host_memory=None)
        return dataclasses.replace(self, pruned=(3,) if self.has_one_real_layer else self.pruned[:2], **small)


_SHARES = tuple(width / 14336 for width in (11520, 8704, 5888, 3072))
CASES = {
    # The first layers: nothing runs before them.
    "8b": Case(
        model="llama-8b", widths=(11520, 8704, 5888, 3072), pruned=(0, 1, 2), gpu_memory="24GiB", host_memory="64GiB"
    ),
    "1b": Case(model="llama-1b", widths=_SHARES, pruned=(0, 1, 2, 3)),
    "70b": Case(
        model="llama-70b",
        widths=_SHARES,
        pruned=(40,),
        has_one_real_layer=True,
        tokens=2**14,
        importance_tokens=2**14,
        gpu_memory="24GiB",
    ),
}


def models() -> Path:
    """Where models are made: deleted when the command ends."""
    return Path(os.environ["OUTSIZE_CACHE"]) / "models"


def prune_case(name: str, case: Case, *, tiny: bool) -> dict[str, Any]:
    case = case.tiny() if tiny else case
    started = time.perf_counter()
    real = case.pruned if case.has_one_real_layer else None
    model = model_folder(models() / (case.model + ("-few" if real else "")), case.model, real=real)
    made = time.perf_counter()
    config = run_config(
        models() / f"run-{name}",
        model,
        rows=case.rows,
        seq=case.seq,
        tokens=case.tokens,
        device=TINY_DEVICE if tiny else None,
        gpu_memory=case.gpu_memory,
        host_memory=case.host_memory,
        prune={
            "tokens": case.tokens,
            "intermediate_size": list(case.widths),
            "num_key_value_heads": list(case.heads),
            "only_layers": list(case.pruned),
            "importance_tokens": case.importance_tokens,
            "keep": "latest",
        },
    )
    text = io.StringIO()
    with watched() as seen:
        outcome = prune.prune_run(config, Console(file=text, width=200))
    shutil.rmtree(config.output_dir)  # gigabytes
    plan, reports = outcome.plan, seen.reports
    layers, pruned = named_config(case.model).num_hidden_layers, len(case.pruned)
    train, tokens = sum(report.seconds for report in reports), reports[0].tokens
    variants = sum(len(report.trained) for report in reports)
    passed = max(case.pruned) + 1
    return {
        "make_model_s": made - started,
        "all_s": time.perf_counter() - made,
        "tokens": tokens,
        "variants": variants,
        "layers": f"{pruned} of {layers}" + ("" if pruned == layers else ", extrapolated"),
        "groups": plan.num_groups,
        "rounds": len(plan.rounds),
        "train_s": train,
        "planned_train_s": plan.seconds if passed == pruned else None,
        "stages_s": seen.stages_s,
        "planned_stages_s": (plan.importance_seconds + plan.seconds) or None,
        "importance_s": seen.importance_s,
        "replay_s": seen.replay_s,
        "load_s": seen.load_s,
        "make_s": seen.make_s,
        "store_s": seen.store_s,
        "cache_s": seen.cache_s,
        "all_layers_h": seen.stages_s / pruned * layers / 3600 if passed == pruned else None,
        "tokens_variants_per_s": tokens * variants / train,
        "model_flops": sum(report.flops for report in reports) / train,
        "gpu_peak_gib": outcome.gpu_peak_bytes / GiB,
        "planned_gpu_peak_gib": plan.gpu_bytes / GiB,
        "gpu_reserved_gib": _gib(seen.reserved_bytes),
        "gpu_total_gib": _gib(seen.total_bytes),
        "planned_gpu_total_gib": plan.gpu_total / GiB,
        "host_gib": seen.host_bytes / GiB,
        "planned_host_gib": (plan.host_bytes + seen.host_before_bytes) / GiB,
        "is_finished": outcome.is_finished,
        "text": text.getvalue()[:4000],
    }


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / GiB


@dataclass
class Seen:
    reports: list[LayerReport] = dataclasses.field(default_factory=list)
    replay_s: float = 0.0
    importance_s: float = 0.0
    stages_s: float = 0.0
    """Importance and training; of it, in which nothing is trained:"""
    load_s: float = 0.0
    make_s: float = 0.0
    store_s: float = 0.0
    cache_s: float = 0.0
    host_before_bytes: int = 0
    host_bytes: int = 0
    """Peak of the process in both stages."""
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    """With the CUDA context."""


@contextlib.contextmanager
def watched() -> Iterator[Seen]:
    """What a pruning run does not return: seconds by stage, reports by layer, peaks of the process in both stages."""
    seen = Seen()

    def timed(key: str, function: Any) -> Any:
        def call(*args: Any, **settings: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                _wait()
                setattr(seen, key, getattr(seen, key) + time.perf_counter() - started)

        return call

    show, run = prune._Lines.show, timed("stages_s", PruneStages.run)

    def showing(self: Any, report: LayerReport) -> None:
        seen.reports.append(report)
        show(self, report)

    def running(self: PruneStages) -> bool:
        seen.host_before_bytes = _begin_peak()
        seen.load_s = seen.make_s = seen.store_s = seen.cache_s = 0.0  # measuring and the replay were before
        finished: bool = run(self)
        seen.host_bytes = peak_rss_bytes()
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            seen.reserved_bytes = torch.cuda.max_memory_reserved()
            seen.total_bytes = seen.reserved_bytes + total - free - torch.cuda.memory_reserved()
        return finished

    with contextlib.ExitStack() as stack:
        for owner, name, changed in (
            (prune._Lines, "show", showing),
            (PruneStages, "run", running),
            (StoredImportance, "measure", timed("importance_s", StoredImportance.measure)),
            (LayerStack, "check_replay", timed("replay_s", LayerStack.check_replay)),
            (Teacher, "load", timed("load_s", Teacher.load)),
            (Teacher, "place", timed("load_s", Teacher.place)),
            (prune_stages, "build_student", timed("make_s", prune_stages.build_student)),
            (prune_stages, "FlatModule", timed("make_s", prune_stages.FlatModule)),
            (Library, "finish", timed("store_s", Library.finish)),
            (BatchCache, "__init__", timed("cache_s", BatchCache.__init__)),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, changed)
        yield seen


def _begin_peak() -> int:
    """The process's peak of host memory begins anew, where the kernel allows it. Returns what it has now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def full_case(*, tiny: bool) -> dict[str, Any]:
    """Full fine-tuning of the 8B shape with everything on the GPU: the model FLOP/s that a pruning run is compared
    with.
    """
    from benchmarks.measure import complete, run_bench
    from benchmarks.osft import row

    bench = complete(
        model="tiny" if tiny else "llama-8b",
        device="sim:1GiB" if tiny else None,
        micro_batch=2 if tiny else 8,
        seq=16 if tiny else 1024,
        steps=2 if tiny else 6,
        warm_up=1 if tiny else 3,
    )
    result = run_bench(bench, say=print, same_layers=True)
    config = named_config(bench.model)
    active = result.num_params - config.vocab_size * config.hidden_size
    found = row(result)
    return {**found, "model_flops": 6 * active * result.speed.tokens_per_second}


def plain_case(*, tiny: bool) -> dict[str, Any]:
    from benchmarks.prune_plain import plain_loop

    if tiny:
        return plain_loop("tiny", rows=2, seq=16, width=192, heads=1, steps=2, warm_up=1)
    return plain_loop("llama-1b", rows=8, seq=1024, width=4992, heads=2, steps=12, warm_up=4)
