"""One run of `outsize train`: shows the plan, trains, exports, prints the result."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from outsize.base.units import show_bytes, show_duration
from outsize.config.run import RunConfig
from outsize.device.choose import choose_device
from outsize.run.assemble import Assembled, assemble, start
from outsize.run.distill_batches import DistillBatches
from outsize.run.hub import create_repository, upload
from outsize.run.interrupt import Interrupt
from outsize.run.model_card import how_to_load
from outsize.run.progress import ProgressCallback
from outsize.run.prompt_format import prompt_format
from outsize.run.resume_fingerprint import write_fingerprint
from outsize.run.row_lengths import rows_text
from outsize.run.trainer import ForRuns
from outsize.runtime.engine import PlannedModel
from outsize.schedule.render import render


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    losses: tuple[tuple[int, float], ...]
    """(step, loss) as logged."""
    result: Path | None
    """The exported folder; None if the run was interrupted."""
    checkpoint: Path | None
    """The last one."""
    gpu_peak_bytes: int
    planned_gpu_bytes: int
    """0 on `cpu`, where the device is the host."""
    tokens_per_second: float


def preview_run(config: RunConfig, console: Console) -> PlannedModel:
    """Plan and stop."""
    _show_notes(config, console)
    assembled = assemble(config)
    _show_rows(assembled, console, config)
    _show_threads(assembled, console)
    planned = assembled.trainer.preview()
    _show(planned, console, assembled, config)
    _show_replaced_optimizer(planned, console, config)
    console.print("Dry run: nothing was trained. The same command without --dry-run trains.", highlight=False)
    return planned


def train_run(config: RunConfig, console: Console, batches: DistillBatches | None = None) -> Outcome:
    """`batches`: of a distillation after pruning."""
    _show_notes(config, console)
    assembled = assemble(config, batches)
    trainer = assembled.trainer
    if config.hub_model_id is not None:
        create_repository(config.hub_model_id)
    _show_rows(assembled, console, config)
    _show_threads(assembled, console)
    start(assembled, config)
    engine = trainer.engine
    progress = ProgressCallback(trainer, console, assembled.tokens_per_row)
    trainer.log_fields = progress.fields
    interrupt = Interrupt(
        lambda text: console.print(f"\n{text}", highlight=False), leave=lambda: console.show_cursor(True)
    )
    try:
        trainer.add_callback(progress)
        trainer.add_callback(interrupt)
        with interrupt.listening():
            _show(engine.runtime.planned, console, assembled, config)
            _show_replaced_optimizer(engine.runtime.planned, console, config)
            if assembled.checkpoint is not None:
                console.print(f"Resuming from {assembled.checkpoint}.", highlight=False)
            write_fingerprint(Path(config.output_dir), trainer.fingerprint)
            trainer.train(resume_from_checkpoint=str(assembled.checkpoint) if assembled.checkpoint else None)
            engine.finish_saving()
        last = _last_checkpoint(Path(config.output_dir), trainer.state.global_step)
        result = None
        if not interrupt.is_requested:
            result = Path(config.output_dir)
            trainer.save_model()
            if config.hub_model_id is not None:
                upload(result, config.hub_model_id)
        report = engine.report()
        outcome = Outcome(
            losses=tuple(progress.losses),
            result=result,
            checkpoint=last,
            gpu_peak_bytes=report.gpu_peak_bytes,
            planned_gpu_bytes=report.planned_gpu_bytes + trainer.others_bytes[0] if engine.device.has_own_memory else 0,
            tokens_per_second=progress.tokens_per_second,
        )
    finally:
        progress.stop()
        engine.close()
    base = trainer.model.get_base_model() if config.adapter == "lora" else trainer.model
    _print_result(outcome, config, console, type(base).__name__, trainer)
    if not progress.seconds:
        idle = f" {', '.join(trainer.changed)} had no effect." if trainer.changed else ""
        console.print(
            f"Nothing was trained: the checkpoint has all {trainer.state.max_steps} steps.{idle} Raise num_epochs or "
            "max_steps with --set to train further.",
            highlight=False,
            soft_wrap=True,
        )
    return outcome


def _last_checkpoint(folder: Path, step: int) -> Path | None:
    path = folder / f"checkpoint-{step}"
    return path if path.is_dir() else None


def _show_notes(config: RunConfig, console: Console) -> None:
    for note in config.notes:
        _note(note, console)


def _note(text: str, console: Console) -> None:
    """A line of a file is not wrapped."""
    console.print(f"[yellow]note[/yellow] {escape(text)}", highlight=False, soft_wrap=not console.is_terminal)


def _show_rows(assembled: Assembled, console: Console, config: RunConfig) -> None:
    item = "pair" if config.rl is not None else "packed row" if config.sample_packing else "row"
    found = f"{assembled.num_rows} {item}{'' if assembled.num_rows == 1 else 's'} to train on"
    held_out = f", {assembled.num_eval_rows} to evaluate on" if assembled.num_eval_rows else ""
    epochs = "" if config.max_steps else f" in {config.num_epochs:g} epoch{'' if config.num_epochs == 1 else 's'}"
    steps = f"{assembled.steps} step{'' if assembled.steps == 1 else 's'}{epochs}"
    console.print(f"{found}{held_out}, of at most {assembled.longest_row} tokens: {steps}.", highlight=False)


def _show_threads(assembled: Assembled, console: Console) -> None:
    if assembled.threads_text:
        _note(assembled.threads_text, console)


def _show(planned: PlannedModel, console: Console, assembled: Assembled, config: RunConfig) -> None:
    notes = {
        "split": assembled.chosen_by,
        "rows": rows_text(assembled.longest_row, config.sequence_len),
        "run": _time_text(assembled, planned.plan.estimate.step_seconds),
        "also": _other_text("reference model" if config.rl else "teacher", *assembled.trainer.others_bytes),
        "see": "`outsize plan --legend` explains these lines",
    }
    text = render(planned.plan, planned.graph, planned.layout, notes)
    title = "the plan, on a simulated GPU" if choose_device(config.device).is_simulated else "the plan"
    console.print(Panel(text, title=title, title_align="left", expand=False))


def _time_text(assembled: Assembled, seconds: float) -> str:
    number = assembled.checkpoint.name.rpartition("-")[2] if assembled.checkpoint is not None else ""
    left = max(assembled.steps - (int(number) if number.isdecimal() else 0), 0)
    time = show_duration(left * seconds)
    return f"{left} step{'' if left == 1 else 's'}, {time} if every batch is as large as the planned one"


def _other_text(name: str, gpu_bytes: int, host_bytes: int) -> str:
    if not gpu_bytes:
        return ""
    return f"the {name} has {show_bytes(gpu_bytes)} GPU and {show_bytes(host_bytes)} host memory of its own"


def _show_replaced_optimizer(planned: PlannedModel, console: Console, config: RunConfig) -> None:
    if config.replaced_optimizer is None:
        return
    homes, step_config = planned.plan.decision.homes, planned.plan.step_config
    updates = [step_config.update_of(chunk) for chunk in planned.layout.chunks]
    sizes = [update.state_bytes if update is not None else 0 for update in updates]
    on_host = sum(size for size, home in zip(sizes, homes, strict=True) if home.state == "host")
    name = step_config.optimizer.name
    _note(
        f"optimizer: {config.replaced_optimizer} runs as exact {name}. Its state takes {show_bytes(sum(sizes))}, "
        f"{show_bytes(on_host)} of it in host memory.",
        console,
    )


def _print_result(outcome: Outcome, config: RunConfig, console: Console, model_class: str, trainer: ForRuns) -> None:
    """`model_class`: the name of the model's class, without an adapter."""
    say = lambda text: console.print(text, highlight=False, soft_wrap=True, markup=False)
    if outcome.losses:
        first, last = outcome.losses[0], outcome.losses[-1]
        say(
            f"loss    {first[1]:.4f} at step {first[0]}, {last[1]:.4f} at step {last[0]}; "
            f"{outcome.tokens_per_second:,.0f} tokens/s"
        )
    if outcome.planned_gpu_bytes:
        of = " of the simulated GPU" if (config.device or "").startswith("sim") else ""
        say(
            f"GPU     {show_bytes(outcome.gpu_peak_bytes)}{of} at most, {show_bytes(outcome.planned_gpu_bytes)} planned"
        )
    if outcome.checkpoint is not None:
        say(f"saved   {outcome.checkpoint}")
    if outcome.result is not None:
        say(f"result  {outcome.result}")
        for number, line in enumerate(
            how_to_load(str(outcome.result.resolve()), config, model_class, trainer.processing_class)
        ):
            say(f"{'        ' if number else 'load    '}{line}")
        say(f"chat    outsize chat {shlex.quote(str(outcome.result))}")
        if note := prompt_format(trainer.prompts)[1]:
            say(f"        {note}")
        if config.adapter == "lora":
            say(f"merge   outsize export {shlex.quote(str(outcome.result))} merged --merge")
    else:
        say("stopped before the end; continue with the same command and --resume")
