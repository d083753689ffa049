"""CheckpointMixin: saves and loads a Trainer's checkpoints and final model through the engine.

A checkpoint is complete or absent, has no pickled state of outsize, and can be resumed under any plan.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from outsize.base.errors import EngineMisuse, SaveFailed
from outsize.base.log import log
from outsize.checkpoint.folder import checkpoints, is_plain, read_manifest, rotate
from outsize.checkpoint.parameter_store import is_adapted
from outsize.checkpoint.training_state import load_rng, load_scheduler, save_rng, save_scheduler
from outsize.integrations import plain
from outsize.model.weights import is_unmaterialized
from outsize.setup.request import PrepareRequest

if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object


class CheckpointMixin(_Trainer):
    """The part of `OutsizeMixin` that saves and loads. `OutsizeMixin` has `engine` and `_has_engine`."""

    _prepare_request: PrepareRequest

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save as Trainer does, but complete or not at all. Older checkpoints are removed after it is published."""
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run = Path(self._get_output_dir(trial=trial))
        place = run / f"checkpoint-{self.state.global_step}"
        if self.state.best_global_step:
            best = run / f"checkpoint-{self.state.best_global_step}"
            if best == place or best.exists():
                self.state.best_model_checkpoint = str(best)
        best_path = Path(self.state.best_model_checkpoint) if self.state.best_model_checkpoint else None
        if place.exists():
            log.info("%s of an earlier run is replaced", place)
        self._drop_waiting_gradients()
        self.engine.save(
            place,
            replace=True,
            background=self._may_save_in_background,
            only_model=self.args.save_only_model,
            extra=self._write_beside,
            then=lambda: rotate(run, self.args.save_total_limit, keep=best_path),
        )
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(place))

    def _drop_waiting_gradients(self) -> None:
        """Discard gradients of an interrupted or incomplete step. A resumed run does not have them either."""
        if self.engine.runtime.gradients.waiting:
            log.warning(
                "dropping the last batches: they do not fill a step of %s", self.args.gradient_accumulation_steps
            )
            self.engine.zero_grad()

    def _resume_advice(self) -> str:
        """Name the newest checkpoint that training can continue from."""
        try:
            self.engine.finish_saving()  # the newest may still be in progress
        except SaveFailed as error:
            log.warning("%s", error)
        run = Path(self.args.output_dir)
        # An earlier run in the same folder may have reached a later step.
        reached = [
            path
            for step, path in checkpoints(run)
            if step <= self.state.global_step and not read_manifest(path).get("only_model")
        ]
        if not reached:
            return f"There is no checkpoint in {run}: start the run again (save_steps sets how often one is written)."
        return f"The newest complete one is {reached[-1]}: continue with resume_from_checkpoint={str(reached[-1])!r}."

    @property
    def _may_save_in_background(self) -> bool:
        """False if a callback or an upload reads the folder as soon as the save returns."""
        callbacks = self.callback_handler.callbacks
        return not self.args.push_to_hub and all(
            type(callback).on_save is TrainerCallback.on_save for callback in callbacks
        )

    def _write_beside(self, folder: Path) -> None:
        self._write_common(folder)
        if not self.args.save_only_model:
            save_rng(folder, self.engine.device)
            save_scheduler(folder, self.lr_scheduler)
        scheduler = None if self.args.save_only_model else self.lr_scheduler
        plain.write_notes(folder, step=self.state.global_step, scheduler=scheduler)
        for callback in [c for c in [*self.callback_handler.callbacks, self.control] if isinstance(c, ExportableState)]:
            name, state = type(callback).__name__, callback.state()
            if isinstance(self.state.stateful_callbacks.get(name), list):
                self.state.stateful_callbacks[name].append(state)
            else:
                self.state.stateful_callbacks[name] = state
        self.state.save_to_json(str(folder / "trainer_state.json"))

    def _write_common(self, folder: Path) -> None:
        processor = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(folder)
        (folder / "training_args.json").write_text(self.args.to_json_string())

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        if self._has_engine:
            self._drop_waiting_gradients()
            self.engine.export(folder)
        else:
            if any(param.is_meta or is_unmaterialized(param) for param in self.model.parameters()):
                raise EngineMisuse(
                    "save_model: the model's weights are not loaded yet. Call train() or start_engine() first."
                )
            super()._save(output_dir, state_dict)
            (folder / "training_args.bin").unlink(missing_ok=True)  # a pickle
        self._write_common(folder)

    # Loading.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a plain checkpoint. Trainer calls this before the model is prepared.

        `_load_optimizer_and_scheduler` loads an outsize checkpoint with its weights.
        """
        folder = Path(resume_from_checkpoint)
        if not is_plain(folder):
            return
        log.info("continuing from %s, a checkpoint of plain Trainer", folder)
        self.stop_engine()
        if is_adapted(self.model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif any(param.is_meta or is_unmaterialized(param) for param in self.model.parameters()):
            self._prepare_request = replace(self._prepare_request, weights=folder)
        else:
            plain.load_weights(folder, self.model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if is_plain(folder):
            optimizer, scheduler = plain.training_state(folder, self.engine.optimizer.param_groups)
            self.engine.optimizer.load_state_dict(optimizer)
            self.lr_scheduler.load_state_dict(scheduler)
        else:
            self.engine.load(checkpoint)
            load_scheduler(folder, self.lr_scheduler)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and is_plain(Path(checkpoint)):
            super()._load_rng_state(checkpoint)
        elif checkpoint is not None:
            load_rng(Path(checkpoint), self.engine.device)

    def _load_best_model(self) -> None:
        if is_plain(Path(self.state.best_model_checkpoint)):
            super()._load_best_model()
        else:
            self.engine.load(self.state.best_model_checkpoint, only_model=True)
