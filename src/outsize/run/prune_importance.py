"""The first stage of a pruning run: importance of channels, heads and experts, in one pass of the teacher.

Scores are stored per layer and reused: a folder's teacher and data are always the same (run/prune_spec.py).
"""

import os
from pathlib import Path

from outsize.base.errors import BadFile
from outsize.checkpoint.folder import os_errors_as_save_failed, sync
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec
from outsize.methods.bypass.importance import Importance, LayerImportance
from outsize.run.prune_setup import PruneSetup
from outsize.run.prune_walk import Walk


class StoredImportance:
    def __init__(self, setup: PruneSetup, folder: Path):
        self._setup, self._folder = setup, folder / "importance"

    def measure(self, cache_folder: Path | None) -> None:
        """Measure the layers that have no scores yet. `cache_folder`: of the hidden states; None: host memory."""
        setup, count = self._setup, self._setup.num_calibration
        missing = [layer for layer in sorted(setup.variants) if count and not self._path(layer).exists()]
        if not missing:
            return
        walk = Walk(setup, [setup.hidden_at(setup.train, k) for k in range(count)], setup.train, cache_folder)
        try:
            for layer in range(missing[-1] + 1):
                if layer in missing:
                    self._measure_layer(walk, layer)
                else:
                    walk.skip(layer)
        finally:
            walk.close()

    def _measure_layer(self, walk: Walk, layer: int) -> None:
        method = self._setup.prune.importance
        assert method != "truncate"
        with walk.layer(layer):
            importance = Importance(self._setup.parts[layer], method)
            walk.pass_through(layer, lambda batch, hidden: importance.run(batch.call, hidden, batch.valid))
            with self._setup.device.on_host():
                tensors = importance.scores().tensors()
        path = self._path(layer)
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
            with TensorFile(path) as file:
                return LayerImportance.of({name: file.read(name) for name in file.entries})
        except (BadFile, KeyError) as error:
            raise BadFile(f"{path} is damaged ({error}). Remove it; the same command measures it again.") from None

    def _path(self, layer: int) -> Path:
        return self._folder / f"{layer:03d}.safetensors"
