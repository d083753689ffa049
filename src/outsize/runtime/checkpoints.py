"""Checkpoints: the engine's saving, loading and exporting. The engine sees to it that the model is between steps and
the lanes are idle.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from outsize.base.errors import EngineMisuse, tell
from outsize.base.log import log
from outsize.checkpoint.folder import StagedDir
from outsize.checkpoint.model_files import ModelFiles, is_weight_file, model_files, write_configs
from outsize.runtime.contents import (
    Contents,
    add_state,
    chunks_on_host,
    describe,
    is_adapted,
    needed,
    saved_buffers,
    weights_of,
)
from outsize.runtime.loading import Checkpoint
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.plan_runtime import RuntimeHolder
from outsize.runtime.saving import Saving


class Checkpoints:
    def __init__(self, model: nn.Module, holder: RuntimeHolder, optimizer: EngineOptimizer):
        self._model, self._holder, self._optimizer = model, holder, optimizer
        self._saving: Saving | None = None
        """A save in the background."""
        self._half_loaded: set[str] = set()
        """What a load that broke off has left half old, half new."""

    def save(
        self,
        place: Path,
        *,
        num_steps: int,
        background: bool,
        replace: bool,
        only_model: bool,
        extra: Callable[[Path], None] | None,
        then: Callable[[], None] | None,
    ) -> None:
        self.raise_if_failed()
        now = self._holder.runtime
        contents, files = self._model_contents()
        add_state(contents, self._model, now, only_model=only_model)
        facts = describe(now, self._optimizer.param_groups, contents, num_steps, only_model=only_model)
        saving = Saving(
            StagedDir.of(place, replace=replace), contents, later=chunks_on_host(now) if background else set()
        )
        with saving.writing() as folder:
            self._write_configs(folder, files)
            if extra is not None:
                extra(folder)
        if background:  # known before its thread starts: no update and no error passes it by
            self._saving, now.updates.wait_written = saving, saving.wait_written
        try:
            saving.write(lambda draft: draft.publish(facts), then, background=background)
        except BaseException:
            if saving.is_done:
                self._forget()
            raise

    def finish(self) -> None:
        if self._saving is not None:
            saving = self._saving
            saving.wait()  # if this is interrupted, it is still on its way, and updates still wait for it
            self._forget()
            saving.finish()

    def _forget(self) -> None:
        self._saving = None
        if self._holder.attached is not None:
            self._holder.runtime.updates.wait_written = lambda index: None

    def raise_if_failed(self) -> None:
        """Of a save in the background, without waiting for one that is on its way; or of a load."""
        if self._half_loaded:
            found = f"loading broke off in the {' and the '.join(sorted(self._half_loaded))}"
            raise EngineMisuse(
                tell("weights and optimizer state are of one moment", found, "Load a checkpoint that can be read")
            )
        if self._saving is not None and self._saving.is_done:
            self.finish()

    def load(self, folder: Path, *, only_model: bool) -> int:
        """Returns how many steps it had made."""
        now, buffers = self._holder.runtime, saved_buffers(self._model)
        with contextlib.closing(Checkpoint(folder)) as checkpoint:
            checkpoint.require_values(needed(self._model, now), {**now.store.params, **buffers})
            if not only_model:
                checkpoint.require_state(now, self._optimizer.param_groups)
            self._half_loaded.add("weights")
            checkpoint.fill_values(now, buffers)
            self._half_loaded.remove("weights")
            if not only_model:
                self._half_loaded.add("optimizer's state")
                checkpoint.fill_state(now, self._optimizer.param_groups)
                self._half_loaded.remove("optimizer's state")
                _tell_of_another_loss(checkpoint.loss_chunk, now.plan.loss_chunk)
        return checkpoint.num_steps

    def export(self, place: Path, *, tokenizer: Any) -> None:
        self.raise_if_failed()
        contents, files = self._model_contents()
        saving = Saving(StagedDir.into(place), contents, later=set())
        with saving.writing() as folder:
            self._write_configs(folder, files)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        # An adapter may be put beside its base, whose weights stay.
        saving.write(lambda draft: draft.commit_files(is_weight_file) if files is not None else draft.commit_files())

    def _model_contents(self) -> tuple[Contents, ModelFiles | None]:
        """Of a PEFT model: nothing, since PEFT writes its adapter itself."""
        if is_adapted(self._model):
            return Contents(), None
        files = model_files(self._model)
        return weights_of(self._model, self._holder.runtime, files), files

    def _write_configs(self, folder: Path, files: ModelFiles | None) -> None:
        with self._holder.runtime.patches.caches_as_given():
            if files is None:
                self._model.save_pretrained(folder)  # type: ignore[operator]
            else:
                write_configs(self._model, folder, files)


def _tell_of_another_loss(saved: int, here: int) -> None:
    if saved != here:
        ways = [f"in chunks of {chunk} tokens" if chunk else "from full logits" for chunk in (saved, here)]
        do = f"chunked_loss={bool(saved)} at prepare keeps the same bits as a run that was not interrupted"
        log.warning("the run so far made its loss %s, and it is made %s from here on: %s", *ways, do)
