"""Checkpoints: saves, loads and exports a prepared model, between steps and while no transfer is in flight."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outsize.base.errors import EngineMisuse
from outsize.base.log import log
from outsize.checkpoint.constants import write_constants
from outsize.checkpoint.contents import Contents, add_state, describe, weights_of
from outsize.checkpoint.folder import StagedDir, os_errors_as_save_failed
from outsize.checkpoint.loading import CheckpointReader
from outsize.checkpoint.model_files import ModelFiles, is_weight_file, model_files, write_configs
from outsize.checkpoint.parameter_store import TrainedModel
from outsize.checkpoint.saving import Saving
from outsize.model.parts import wrappers


class Checkpoints:
    def __init__(self) -> None:
        self._saving: Saving | None = None
        """The background save in progress."""
        self._half_loaded: set[str] = set()
        """The parts that an interrupted load left half-loaded: partly old, partly new."""

    def save(
        self,
        place: Path,
        trained: TrainedModel,
        *,
        num_steps: int,
        background: bool,
        replace: bool,
        only_model: bool,
        extra: Callable[[Path], None] | None,
        then: Callable[[], None] | None,
    ) -> None:
        self.raise_if_failed()
        contents, files = _model_contents(trained)
        add_state(contents, trained, only_model=only_model)
        facts = describe(trained, contents, num_steps, only_model=only_model)
        if trained.constants is not None:
            with os_errors_as_save_failed(place):
                write_constants(place.parent, trained.constants)
        later = trained.store.host_chunks() if background else set()
        saving = Saving(StagedDir.of(place, replace=replace), contents, later=later)
        with saving.writing() as folder:
            _write_configs(trained.model, folder, files)
            if extra is not None:
                extra(folder)
        if background:  # set before the thread starts, so that updates wait for it and its errors are raised
            self._saving = saving
        try:
            saving.write(lambda staged: staged.publish(facts), then, background=background)
        except BaseException:
            if saving.is_done:
                self._saving = None
            raise

    def wait_written(self, chunk: int) -> None:
        """Block until a background save has written this chunk. Called before its update."""
        if (saving := self._saving) is not None:
            saving.wait_written(chunk)

    def finish(self) -> None:
        """Block until the background save is complete. Raises its error."""
        if self._saving is not None:
            saving = self._saving
            saving.wait()  # after an interrupt here, the save continues and updates still wait for it
            self._saving = None
            saving.finish()

    def raise_if_failed(self) -> None:
        """Raise the error of a background save that has ended. Raise if the last load was interrupted."""
        if self._half_loaded:
            raise EngineMisuse(
                f"Loading was interrupted in the {' and the '.join(sorted(self._half_loaded))}, which are partly old "
                "and partly new. Load a checkpoint that can be read."
            )
        if self._saving is not None and self._saving.is_done:
            self.finish()

    def load(self, folder: Path, trained: TrainedModel, *, only_model: bool) -> int:
        """Return the number of optimizer steps that the checkpoint was saved after."""
        with contextlib.closing(CheckpointReader(folder)) as checkpoint:
            checkpoint.require_values(trained)
            if not only_model:
                checkpoint.require_state(trained)
            self._half_loaded.add("weights")
            checkpoint.fill_values(trained)
            self._half_loaded.remove("weights")
            if not only_model:
                self._half_loaded.add("optimizer's state")
                checkpoint.fill_state(trained)
                self._half_loaded.remove("optimizer's state")
                _warn_if_other_loss(checkpoint.loss_chunk, trained.loss_chunk)
        return checkpoint.num_steps

    def export(self, place: Path, trained: TrainedModel, *, tokenizer: Any, fp32: bool) -> None:
        self.raise_if_failed()
        if not trained.is_adapted:
            for name, wrapper, _ in wrappers(trained.model):
                raise EngineMisuse(
                    f"export: {name} is a {type(wrapper).__name__}, which consists of several tensors, and outsize "
                    "does not write its format. Call engine.detach() and save the model with its own library."
                )
        contents, files = _model_contents(trained, fp32=fp32)
        saving = Saving(StagedDir.into(place), contents, later=set())
        with saving.writing() as folder:
            _write_configs(trained.model, folder, files, torch.float32 if fp32 else None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
        # The folder of an adapter may also hold its base, whose weights stay.
        is_stale = is_weight_file if files is not None else lambda name: False
        saving.write(lambda staged: staged.commit_files(is_stale))


def _model_contents(trained: TrainedModel, *, fp32: bool = False) -> tuple[Contents, ModelFiles | None]:
    """The weights to write and their files. Nothing for a PEFT model: PEFT writes the adapter itself."""
    if trained.is_adapted:
        if fp32:
            raise EngineMisuse("export: PEFT writes adapters in their own dtype. Leave fp32 out.")
        return Contents(), None
    files = model_files(trained.model, fp32=fp32)
    return weights_of(trained, files, fp32=fp32), files


def _write_configs(model: nn.Module, folder: Path, files: ModelFiles | None, dtype: torch.dtype | None = None) -> None:
    if files is None:
        model.save_pretrained(folder)  # type: ignore[operator]
    else:
        write_configs(model, folder, files, dtype=dtype)


def _warn_if_other_loss(saved: int, here: int) -> None:
    if saved != here:
        ways = [f"in chunks of {chunk} tokens" if chunk else "from full logits" for chunk in (saved, here)]
        do = f"Prepare with chunked_loss={bool(saved)} for the bits of an uninterrupted run."
        log.warning("the loss was computed %s before this checkpoint and is computed %s now. %s", *ways, do)
