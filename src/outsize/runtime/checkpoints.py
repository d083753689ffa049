"""Checkpoints: the engine's saving, loading and exporting. The engine sees to it that the model is between steps and the lanes are idle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from outsize.base.errors import SaveFailed, tell
from outsize.checkpoint.folder import Draft
from outsize.checkpoint.model_files import ModelFiles, model_files, write_configs
from outsize.runtime.attached import Holder
from outsize.runtime.contents import Contents, add_state, chunks_on_host, describe, is_adapted, weights_of
from outsize.runtime.loading import Checkpoint
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.saving import Saving


class Checkpoints:
    def __init__(self, model: nn.Module, holder: Holder, optimizer: EngineOptimizer):
        self._model, self._holder, self._optimizer = model, holder, optimizer
        self._saving: Saving | None = None
        """A save in the background."""

    def save(
        self, place: Path, *, num_steps: int, background: bool, replace: bool, only_model: bool, extra: Callable[[Path], None] | None,
        then: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        if place.exists() and not replace:
            raise SaveFailed(tell(f"{place} is not there yet", "it is, and a checkpoint is never changed", "Name another folder, or remove it first"))
        now = self._holder.now
        contents, files = self._model_contents()
        add_state(contents, now, self._optimizer.names, only_model=only_model)
        facts = describe(now, self._optimizer.param_groups, contents, num_steps, only_model=only_model)
        saving = Saving(place, num_bytes=contents.nbytes)
        with saving.writing() as folder:
            self._write_configs(folder, files)
            if extra is not None:
                extra(folder)

        def publish(draft: Draft) -> None:
            draft.publish(facts, replace=replace)
            if then is not None:
                then()

        saving.write(contents, later=chunks_on_host(now) if background else set(), publish=publish)
        if not saving.is_done:
            self._saving = saving
            now.updates.wait_written = saving.wait_written

    def finish(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            if self._holder.attached is not None:
                self._holder.now.updates.wait_written = lambda index: None
            saving.finish()

    def raise_if_failed(self) -> None:
        """Without waiting for a save that is on its way."""
        if self._saving is not None and self._saving.is_done:
            self.finish()

    def load(self, folder: Path, *, only_model: bool) -> int:
        """Returns how many steps it had made."""
        checkpoint = Checkpoint(folder)
        try:
            checkpoint.require_fits(self._holder.now, self._optimizer.param_groups)
            if not only_model:
                checkpoint.require_optimizer()
            checkpoint.fill_weights(self._holder.now)
            if not only_model:
                checkpoint.fill_state(self._holder.now, self._optimizer.param_groups)
        finally:
            checkpoint.close()
        return checkpoint.num_steps

    def export(self, place: Path, *, tokenizer: Any) -> None:
        contents, files = self._model_contents()
        saving = Saving(place, num_bytes=contents.nbytes)
        with saving.writing() as folder:
            self._write_configs(folder, files)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        saving.write(contents, later=set(), publish=Draft.publish_into)

    def _model_contents(self) -> tuple[Contents, ModelFiles | None]:
        """Of a PEFT model: nothing, since PEFT writes its adapter itself."""
        if is_adapted(self._model):
            return Contents(), None
        files = model_files(self._model)
        return weights_of(self._model, self._holder.now, files), files

    def _write_configs(self, folder: Path, files: ModelFiles | None) -> None:
        with self._holder.now.patches.caches_as_given():
            if files is None:
                self._model.save_pretrained(folder)  # type: ignore[operator]
            else:
                write_configs(self._model, folder, files)
