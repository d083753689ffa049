"""The Trainer of a run: resumes with changed settings, chooses the micro-batch, adds the run's fields to the log."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from outsize.integrations.arguments import update_mode
from outsize.integrations.hf import OutsizeTrainer
from outsize.optim.spec import OptimizerSpec
from outsize.run.prompt_format import write_prompts
from outsize.run.resume_fingerprint import write_fingerprint
from outsize.runtime.engine import PlannedModel
from outsize.setup.micro_batch import Choice, Split
from outsize.setup.prepare import choose_micro_batch
from outsize.setup.request import PrepareRequest

if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object


class ForRuns(_Trainer):
    """Put before an `OutsizeMixin` class: a Trainer whose checkpoints record the settings of the run."""

    _plan_batch: dict[str, Any] | None
    fingerprint: dict[str, Any]
    """See run/resume_fingerprint.py."""
    prompts: tuple[str | None, ...] = ()
    """How the data write prompts (`Format.prompt`), for `outsize chat`."""
    card = ""
    """README.md of checkpoints and the result. Empty: none."""
    shows_plan = False
    changed: tuple[str, ...] = ()
    """Settings that differ from the checkpoint's, changed with `--set`."""
    log_fields: Callable[[], dict[str, float]] = staticmethod(dict)
    """What the log of a step has beside the Trainer's own fields."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The log goes to the trackers and to `trainer_state.json` of the checkpoints."""
        super().log({**logs, **self.log_fields()} if "loss" in logs else logs, *args, **kwargs)

    def choose_split(self, splits: Sequence[Split], batch_of: Callable[[int], dict[str, Any]]) -> Choice[PlannedModel]:
        """Choose the fastest micro-batch size. `batch_of`: the batch to plan for, by its number of rows."""

        batch, request = self._preparation(None)

        def optimizer_for(split: Split) -> OptimizerSpec:
            self.args.gradient_accumulation_steps = split.passes
            return replace(request.optimizer, update=update_mode(self.args, self._nonfinite))

        def choose(left: PrepareRequest) -> Choice[PlannedModel]:
            return choose_micro_batch(
                self.model,
                splits,
                left,
                batch_of=lambda rows: self._as_in_training(batch_of(rows)),
                optimizer_for=optimizer_for,
            )

        try:
            choice: Choice[PlannedModel] = self._beside_others(batch, request, choose)
        finally:
            self._stop_others()
        self._plan_batch = batch_of(choice.split.rows)
        self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps = (
            choice.split.rows,
            choice.split.passes,
        )
        self._train_batch_size = self.args.train_batch_size  # Trainer caches it for its loaders
        return choice

    def _write_common(self, folder: Path) -> None:
        super()._write_common(folder)
        write_fingerprint(folder, self.fingerprint)
        write_prompts(folder, self.prompts)
        if self.card:
            (folder / "README.md").write_text(self.card)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loading restores the checkpoint's optimizer settings and learning rate; changed ones are applied again."""
        groups = self.engine.optimizer.param_groups
        requested = [{key: group[key] for key in ("weight_decay", "betas", "eps", "initial_lr")} for group in groups]
        super()._load_optimizer_and_scheduler(checkpoint)
        scheduler = self.lr_scheduler
        if checkpoint is None or not self.changed or not isinstance(scheduler, LambdaLR):
            return
        # As if the new schedule had been used from the start.
        scheduler.base_lrs = [settings["initial_lr"] for settings in requested]
        scheduler._last_lr = [
            base * factor(scheduler.last_epoch)
            for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        ]
        for group, settings, rate in zip(groups, requested, scheduler._last_lr, strict=True):
            group.update(settings, lr=rate)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Trainer runs one step before it checks whether any is left."""
        done = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs)
        # Trainer would keep the checkpoint's micro-batch size and intervals of saves, evaluations and logs.
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, max_steps)
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else done


class RunTrainer(ForRuns, OutsizeTrainer):
    """The Trainer of a run on the tokens of its data."""
