"""The first stage of a pruning run: importance of channels, heads and experts, in one pass of the teacher.

Scores are stored per layer and reused: a folder's teacher and data are always the same (run/prune_spec.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from outsize.base.errors import BadFile
from outsize.checkpoint.folder import os_errors_as_save_failed, sync
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.methods.bypass.importance import Importance, LayerImportance
from outsize.methods.bypass.norm_statistics import NormStatistics
from outsize.methods.bypass.train import Batch
from outsize.run.prune_setup import PruneSetup
from outsize.run.prune_walk import Walk, put


class StoredImportance:
    def __init__(self, setup: PruneSetup, folder: Path):
        self._setup, self._folder = setup, folder / "importance"

    def measure(self, cache_folder: Path | None) -> None:
        """Measure the layers that have no scores yet. `cache_folder`: of the hidden states; None: host memory."""
        setup, count = self._setup, self._setup.num_calibration
        missing = [layer for layer in sorted(setup.variants) if count and not self._path(layer).exists()]
        is_whole = setup.reduced is not None and not self._norms_path(None).exists()
        if not missing and not is_whole:
            return
        walk = Walk(setup, [setup.hidden_at(setup.train, k) for k in range(count)], setup.train, cache_folder)
        try:
            for layer in range(setup.num_layers if is_whole else missing[-1] + 1):
                if layer in missing:
                    self._measure_layer(walk, layer)
                else:
                    walk.skip(layer)
            if is_whole:
                self._measure_outside(walk)
        finally:
            walk.close()

    def rank(self) -> None:
        """Choose the residual channels of `hidden_size`, once for the folder. Everything is measured."""
        if (reduced := self._setup.reduced) is None or reduced.channels is not None:
            return
        reduced.choose(self._folder.parent, self.of_norms)

    def of_norms(self) -> dict[str, Tensor]:
        """What `NormStatistics` measured of all norms."""
        statistics: dict[str, Tensor] = {}
        for layer in (*range(self._setup.num_layers), None):
            statistics |= self._read(self._norms_path(layer))
        return statistics

    def _measure_layer(self, walk: Walk, layer: int) -> None:
        method = self._setup.prune.importance
        assert method != "truncate"
        norms = norms_of(self._setup, layer)

        def run_layer(batch: Batch, hidden: Tensor) -> Tensor:
            with norms.listening(batch.valid):
                return importance.run(batch.call, hidden, batch.valid)

        with walk.layer(layer):
            importance = Importance(self._setup.parts[layer], method)
            walk.pass_through(layer, run_layer)
            with self._setup.device.on_host():
                tensors, of_norms = importance.scores().tensors(), norms.tensors()
        if self._setup.reduced is not None:  # first: who has the other file has both
            self._write(self._norms_path(layer), of_norms)
        self._write(self._path(layer), tensors)

    def _measure_outside(self, walk: Walk) -> None:
        """The norms before and after the layers."""
        norms = norms_of(self._setup, None)
        walk.run_outside(norms)
        with self._setup.device.on_host():
            self._write(self._norms_path(None), norms.tensors())

    def _write(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        with os_errors_as_save_failed(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}.tmp")
            draft.unlink(missing_ok=True)
            specs = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
            with TensorFile.create(draft, specs, {"format": "pt"}) as file:
                for name, tensor in tensors.items():
                    file.write(name, tensor)
            sync(draft)
            draft.replace(path)
            sync(path.parent)

    def of(self, layer: int) -> LayerImportance | None:
        """None: channels, heads and experts are truncated."""
        if not self._setup.num_calibration:
            return None
        path = self._path(layer)
        try:
            return LayerImportance.of(self._read(path))
        except KeyError as error:
            raise BadFile(f"{path} is damaged ({error}). Remove it; the same command measures it again.") from None

    def _read(self, path: Path) -> dict[str, Tensor]:
        try:
            with TensorFile(path) as file:
                return {name: file.read(name) for name in file.entries}
        except BadFile as error:
            raise BadFile(f"{path} is damaged ({error}). Remove it; the same command measures it again.") from None

    def _path(self, layer: int) -> Path:
        return self._folder / f"{layer:03d}.safetensors"

    def _norms_path(self, layer: int | None) -> Path:
        """None: of the norms outside of the layers."""
        return self._folder / f"{'outside' if layer is None else f'{layer:03d}'}.norms.safetensors"


def norms_of(setup: PruneSetup, layer: int | None) -> NormStatistics:
    """Of the norms over residual channels of a layer, or of those outside of the layers. Without `hidden_size` none."""
    return NormStatistics({} if setup.reduced is None else setup.reduced.norms(setup.stack, layer))


def channels_on(setup: PruneSetup) -> Tensor | None:
    """The residual channels of the variants, on the device. None: all."""
    if setup.reduced is None:
        return None
    device = setup.device
    channels: Tensor = put(device, setup.reduced.required_channels.keep)
    return channels
