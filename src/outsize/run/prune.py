"""One run of `outsize prune`: checks, the plan, importance and training, and what is shown of them."""

import gc
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.base.units import parse_bytes, show_bytes
from outsize.config.run import RunConfig
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.host import free_host_bytes
from outsize.methods.bypass.choose import solver
from outsize.optim.flat import new_scratch
from outsize.run.cpu_threads import set_threads
from outsize.run.interrupt import Interrupt
from outsize.run.prune_choice import places, read_table
from outsize.run.prune_hidden import hidden_to_keep
from outsize.run.prune_library import Description, Library
from outsize.run.prune_measure import layer_costs
from outsize.run.prune_model import PrunedModel, make_models
from outsize.run.prune_plan import Budget, LayerCost, PrunePlan, plan
from outsize.run.prune_setup import PruneSetup, set_up
from outsize.run.prune_spec import write_spec
from outsize.run.prune_stages import LayerReport, PruneStages
from outsize.run.prune_walk import put


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneOutcome:
    plan: PrunePlan
    is_finished: bool
    """False: it was stopped, or only planned."""
    gpu_peak_bytes: int
    """As observed, without the overhead of the process."""
    library: tuple[Description, ...] = ()
    models: tuple[PrunedModel, ...] = ()


def prune_run(config: RunConfig, console: Console, *, dry_run: bool = False) -> PruneOutcome:
    folder = Path(config.output_dir)
    for note in config.notes:
        console.print(f"[yellow]note[/yellow] {note}", highlight=False)
    _require_writable(folder)
    setup = set_up(config)
    try:
        return _run(setup, console, folder, dry_run=dry_run)
    finally:
        setup.device.lift_limit()
        setup.teacher.close()


def choose_run(config: RunConfig, console: Console) -> tuple[PrunedModel, ...]:
    """Choose and write models from the library as it is; nothing is trained."""
    setup = set_up(config)
    try:
        return tuple(make_models(setup, console))
    finally:
        setup.teacher.close()


def _run(setup: PruneSetup, console: Console, folder: Path, *, dry_run: bool) -> PruneOutcome:
    say = lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False)
    tokens = setup.hidden.shape[0] * setup.hidden.shape[1]
    if text := set_threads(setup.stack.model, tokens, setup.device, None):
        say(text)
    scratch = new_scratch(setup.device, setup.optimizer)
    costs = layer_costs(setup, scratch, folder)
    made = _plan(setup, costs, folder)
    say(plan_text(setup, made))
    if setup.prune.target:  # what could only fail at the end is checked at the beginning
        solver()
        places(setup)
        read_table(setup.prune.costs)
    if dry_run:
        return PruneOutcome(plan=made, is_finished=False, gpu_peak_bytes=0)
    if setup.earlier is None:
        device = setup.device
        setup.stack.check_replay({name: put(device, value) for name, value in setup.train(0).arguments.items()})
    earlier = setup.earlier.variants if setup.earlier is not None else ()
    write_spec(folder, replace(setup.spec, variants=tuple(dict.fromkeys((*earlier, *setup.spec.variants)))))
    interrupt = Interrupt(lambda text: console.print(f"\n{text}", highlight=False), leave=console.show_cursor)
    progress = _Lines(setup, made, console)
    stages = PruneStages(setup, made, scratch, say=progress.show, should_stop=lambda: interrupt.is_requested)
    _report_short(stages, setup)
    progress.start(stages)
    with interrupt.listening():
        is_finished = stages.run()
    found = tuple(_entries(setup, stages.library))
    if is_finished:
        console.print(_table(found))
        say(f"library {folder / 'library'}")
        models = make_models(setup, console) if setup.prune.target else []
    else:
        models = []
        say("stopped before the end; the same command continues")
    return PruneOutcome(
        plan=made, is_finished=is_finished, gpu_peak_bytes=progress.gpu_peak_bytes, library=found, models=tuple(models)
    )


def _plan(setup: PruneSetup, costs: Sequence[LayerCost], folder: Path) -> PrunePlan:
    device, config, prune = setup.device, setup.config, setup.prune
    total, fixed = setup.gpu_bytes, setup.fixed_bytes
    device.limit(total)  # the allocator's overhead is a share of the limit
    gc.collect()  # what was measured is no overhead
    share = device.spec.allocator_share if device.is_gpu else 0.0
    # What is on a GPU already counts as overhead until the device is opened.
    overhead = device.overhead_bytes - (fixed if device.is_gpu else 0) - int(total * share)
    host = config.host_memory
    budget = Budget(
        gpu=GpuBudget(total_bytes=total, fixed_bytes=max(0, overhead), share=share),
        host_bytes=int(free_host_bytes() * 0.9) if host is None else parse_bytes(host, name="host_memory"),
        disk_bytes=_free_disk(Path(prune.cache_dir)) if prune.cache_dir else 0,
        output_bytes=(free := _free_disk(folder)),
    )
    kept, why_not = hidden_to_keep(setup)
    made = plan(
        costs,
        budget,
        fixed_bytes=fixed,
        fixed_host_bytes=0 if setup.teacher.is_in_files else _whole_bytes(setup),
        train=[setup.hidden_at(setup.train, k) for k in range(setup.num_batches)],
        validation=[
            setup.hidden_at(setup.validation, k) for k in range(setup.num_validation) if setup.validation is not None
        ],
        calibration=[setup.hidden_at(setup.train, k) for k in range(setup.num_calibration)],
        accumulate=setup.spec.gradient_accumulation_steps,
        num_layers=setup.num_layers,
        keeps_best=setup.spec.keep != "latest",
        kept=kept,
        num_after=len(setup.stack.layers) - setup.num_layers,
    )
    if kept and not made.kept_bytes:
        size = show_bytes(sum(spec.num_bytes for spec in kept))
        rounds = f"the variants are trained in {len(made.rounds)} rounds"
        why_not = rounds if len(made.rounds) > 1 else f"its hidden states take {size} of disk space, too much for it"
    if why_not:
        log.info("distillation will run the teacher and not read its hidden states: %s", why_not)
    if made.disk_bytes > free:
        log.warning(
            "output_dir: the run takes about %s of disk space, and %s is free",
            show_bytes(made.disk_bytes),
            show_bytes(free),
        )
    return made


def _whole_bytes(setup: PruneSetup) -> int:
    return sum(param.nbytes for param in setup.stack.model.parameters())


def _free_disk(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def plan_text(setup: PruneSetup, made: PrunePlan) -> str:
    variants = sum(map(len, setup.variants.values()))
    lines = [
        f"variants {variants} of {len(setup.variants)} layers; {setup.spec.tokens:,} tokens, {setup.num_steps:,} steps",
        f"GPU      {show_bytes(made.gpu_total)} of {show_bytes(made.budget_bytes)}; "
        f"{_number(made.num_groups, 'group')} of variants per layer",
        f"host     {show_bytes(made.host_bytes)}; hidden states in {'a file' if made.in_file else 'host memory'}, "
        f"{_number(len(made.rounds), 'round')}",
        f"disk     {show_bytes(made.disk_bytes)}"
        + (f", {show_bytes(made.kept_bytes)} of it hidden states for distillation" if made.kept_bytes else ""),
    ]
    if made.seconds:
        lines.append(f"time     importance {_hours(made.importance_seconds)}, training {_hours(made.seconds)}")
    if not setup.device.has_own_memory:
        lines[1] = lines[1].replace("GPU ", "CPU ")
    if setup.reduced is not None:
        lines.insert(1, f"hidden   {setup.reduced.reduction.count} of {setup.reduced.reduction.size} residual channels")
    return "\n".join(lines)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _hours(seconds: float) -> str:
    return (
        f"{seconds / 3600:.2g} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.1f} s"
    )


class _Lines:
    """One line per layer."""

    def __init__(self, setup: PruneSetup, made: PrunePlan, console: Console):
        self._setup, self._plan, self._console = setup, made, console
        self._left = 0
        self._done = 0
        self._started = time.perf_counter()
        self.gpu_peak_bytes = 0

    def start(self, stages: PruneStages) -> None:
        passes = self._setup.spec.gradient_accumulation_steps
        self._left = sum(
            bool(stages.pending(layer, batches.stop // passes))
            for batches in self._plan.rounds
            for layer in self._setup.variants
        )

    def show(self, report: LayerReport) -> None:
        self._done += 1
        device = self._setup.device
        self.gpu_peak_bytes = max(self.gpu_peak_bytes, device.peak_bytes)
        left = (time.perf_counter() - self._started) / self._done * max(0, self._left - self._done)
        rounds = f" round {report.round + 1}" if len(self._plan.rounds) > 1 else ""
        losses = ", ".join(_losses_text(description) for description in report.trained)
        parts = [
            losses,
            f"{report.tokens / report.seconds:,.0f} tokens/s",
            f"{report.flops / report.seconds / 1e12:.3g} TFLOP/s",
        ]
        if device.has_own_memory:
            parts.append(f"peak {show_bytes(device.peak_bytes)} of {show_bytes(self._plan.gpu_bytes)} planned")
        parts.append(f"{_hours(left)} left")
        self._console.print(
            f"layer {report.layer}{rounds}: {'; '.join(parts)}", highlight=False, soft_wrap=True, markup=False
        )


def _losses_text(description: Description) -> str:
    found = description.validation or description.losses
    if not found:
        return description.variant
    return f"{description.variant} {found[0][1]:.4f} → {found[-1][1]:.4f}"


def _report_short(stages: PruneStages, setup: PruneSetup) -> None:
    """Say which finished variants are not trained further under a larger budget."""
    stay = [
        entry.description.steps
        for layer, variants in setup.variants.items()
        for variant in variants
        if variant.is_trained
        and (entry := stages.library.entry(layer, variant.name)) is not None
        and not entry.description.stopped
        and entry.description.steps < setup.num_steps
        and not stages.continues(entry, variant)
    ]
    if stay:
        log.warning(
            "%d finished variants stay as they are, with %d steps: only those that were trained with "
            "prune.keep_optimizer: true can be trained further", len(stay), stay[0],
        )  # fmt: skip


def _entries(setup: PruneSetup, library: Library) -> list[Description]:
    found = [
        library.entry(layer, variant.name) for layer in sorted(setup.variants) for variant in setup.variants[layer]
    ]
    return [stored.description for stored in found if stored is not None]


def _table(found: Sequence[Description]) -> Table:
    """Mean losses of each variant over its layers."""
    table = Table("variant", "layers", "parameters", "pruned", "trained", title="mean loss over layers")
    for name in dict.fromkeys(description.variant for description in found):
        rows = [description for description in found if description.variant == name]
        losses = [(one.validation or one.losses) for one in rows if one.validation or one.losses]
        first = f"{sum(each[0][1] for each in losses) / len(losses):.4f}" if losses else ""
        last = f"{sum(each[-1][1] for each in losses) / len(losses):.4f}" if losses else ""
        table.add_row(name, str(len(rows)), f"{sum(one.numel for one in rows):,}", first, last)
    return table


def _require_writable(folder: Path) -> None:
    probe = folder / f".outsize-{uuid.uuid4().hex}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        os.unlink(probe)
    except OSError as error:
        raise ConfigError(f"output_dir: {folder} cannot be written ({error.strerror}). Set another one.") from None
