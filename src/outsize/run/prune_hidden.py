"""Which of the teacher's last hidden states a pruning run keeps for its distillation, and how they get to disk.

`teacher-hidden.begun` is there from the beginning of the walk that writes them to its end: after a kill, the same
command writes them, also if every variant is finished.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from outsize.base.errors import BadFile, SaveFailed
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.checkpoint.folder import os_errors_as_save_failed, recover_partial_saves
from outsize.config.run import RunConfig
from outsize.run.prune_setup import PruneSetup
from outsize.run.prune_walk import Walk
from outsize.run.teacher_hidden import DATA, FOLDER, HIDDEN, THREADS, TeacherHidden, write_hidden
from outsize.transfer.batch_cache import BatchSpec

_BEGUN = "teacher-hidden.begun"
_OF_SPEC = (
    "teacher", DATA, "overrides_of_model_config", "rope_parameters", "bf16", "attn_implementation", "sequence_len",
    "sample_packing", "pad_to_sequence_len",
)  # fmt: skip


def num_distill_steps(config: RunConfig) -> int:
    """Optimizer steps of `prune.distill`. `config`: with its micro-batch."""
    assert config.prune is not None and config.prune.distill is not None
    rows = (config.micro_batch_size or 1) * (config.gradient_accumulation_steps or 1)
    return max(1, config.prune.distill.tokens // (rows * config.sequence_len))


def num_distill_batches(config: RunConfig) -> int:
    return num_distill_steps(config) * (config.gradient_accumulation_steps or 1)


def hidden_to_keep(setup: PruneSetup) -> tuple[list[BatchSpec], str]:
    """The batches that a run has to keep for its distillation, and else why it keeps none. Both empty: nothing is
    distilled, or they are there.
    """
    if setup.prune.distill is None or not setup.prune.target:
        return [], ""
    if why := _never_because(setup):
        return [], why
    if find_hidden(setup)[0] is not None:
        return [], ""
    return [setup.hidden_at(setup.train, k) for k in range(num_distill_batches(setup.config))], ""


def find_hidden(setup: PruneSetup) -> tuple[TeacherHidden | None, str]:
    """The hidden states of all batches that `prune.distill` needs, or None and why they cannot be used."""
    place = Path(setup.config.output_dir) / FOLDER
    if why := _never_because(setup):
        return None, why
    recover_partial_saves(place.parent)  # a kill may have left one that is complete under another name
    if not place.exists():
        return None, f"the training of the variants has left no {place}"
    try:
        found = TeacherHidden.open(place)
    except BadFile as error:
        return None, str(error).removesuffix(".")
    if why := found.difference({**made_from(setup), THREADS: found.record.made_from.get(THREADS)}):
        return None, f"{place}: {why}"
    if (held := len(found.record.shapes)) < (count := num_distill_batches(setup.config)):
        return None, f"{place} has {held:,} batches of {count:,}"
    return found, ""


def made_from(setup: PruneSetup) -> dict[str, Any]:
    """All that the bits of the hidden states depend on."""
    device = setup.device
    found = {name: getattr(setup.spec, name) for name in _OF_SPEC}
    found |= {f"order.{name}": value for name, value in asdict(setup.train.order).items()}
    found |= {
        "device": device.spec.name if device.is_gpu else device.torch_device.type,
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
        THREADS: None if device.is_gpu else torch.get_num_threads(),
    }
    as_read: dict[str, Any] = json.loads(json.dumps(found))
    return as_read


def _never_because(setup: PruneSetup) -> str:
    """Why distillation cannot use hidden states of the run, whatever is on disk."""
    config, steps = setup.config, num_distill_steps(setup.config)
    if steps > setup.num_steps:
        return f"it takes {steps:,} steps, and the variants are trained for {setup.num_steps:,}"
    # Settings that hold for `outsize train` and not while layers run one by one.
    if config.sdp_kernel != "auto":
        return f"sdp_kernel: {config.sdp_kernel} holds only in distillation"
    if config.full_determinism:
        return "full_determinism holds only in distillation"
    return "tf32 holds only in distillation" if config.tf32 is not None and not config.bf16 else ""


# Keeping them.


class KeptHidden:
    """Writes the hidden states of a run's first batches."""

    def __init__(self, setup: PruneSetup, num_batches: int):
        self._setup, self.num_batches = setup, num_batches
        self._parent = Path(setup.config.output_dir)
        self._begun = self._parent / _BEGUN

    @property
    def is_begun(self) -> bool:
        """An earlier process has begun and was stopped."""
        return self._begun.exists()

    def begin(self) -> None:
        with os_errors_as_save_failed(self._begun):
            self._begun.touch()

    def keep(self, walk: Walk) -> None:
        """After all layers. If they cannot be written, distillation runs the teacher."""
        place = self._parent / FOLDER
        try:
            self._write(walk, place)
        except SaveFailed as error:
            log.warning("%s Distillation will run the teacher instead.", error)
        self._begun.unlink(missing_ok=True)

    def _write(self, walk: Walk, place: Path) -> None:
        num_bytes = sum(walk.cache.batches[k].num_bytes for k in range(self.num_batches))
        write_hidden(place, made_from(self._setup), self._batches(walk), num_bytes)
        size = show_bytes((place / HIDDEN).stat().st_size)
        log.info("%s has the teacher's last hidden states (%s), for distillation", place, size)

    def _batches(self, walk: Walk) -> Iterator[Tensor]:
        for k in range(self.num_batches):
            hidden = walk.last_hidden_state(k, min(k + 1, self.num_batches - 1))
            with self._setup.device.on_host():
                host = hidden.to("cpu", copy=True)
            yield host
