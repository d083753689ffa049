"""WeightReads: which calls read which parameters, as a discovery pass sees it."""

from typing import Any

import torch
from torch import Tensor, nn

from outsize.device.observer import hides_memory
from outsize.model.block_tracker import BlockTracker
from outsize.model.readers import parts_read_by
from outsize.profile.placed_weights import PlacedWeights
from outsize.profile.profiling_pass import ProfilingPass
from outsize.profile.sharing import HiddenReads


class WeightReads:
    def __init__(self, weights: PlacedWeights) -> None:
        self._weights = weights
        self.readers: dict[int, set[int]] = {}
        """By id of a parameter: the calls that read it."""
        self.outside_module: set[int] = set()
        """Calls that read a parameter outside of the module that has it."""
        self.hidden = HiddenReads()
        self.hiding_operators: dict[str, None] = {}
        """Operators that read weights and may allocate memory inside that is not counted."""

    def of(self, param: Tensor) -> set[int]:
        return self.readers.get(id(param), set())

    def note_read(self, func: Any, tensor: Tensor, run: ProfilingPass, tracker: BlockTracker) -> None:
        """An operator reads this tensor."""
        if self._weights.is_placing:
            return
        params = self._weights.parameters_in(tensor)
        if params and hides_memory(func):
            self.hiding_operators[func._overloadpacket._qualified_op_name] = None
        if not run.is_forward:
            return
        call = len(run.layer_of) - 1
        if not params and tensor.layout == torch.strided:
            self.hidden.note_read(tensor, run, tracker.made_in)
            if call > 0 and run.layer_of[call] is None and tensor.grad_fn is not None:
                run.arguments.region_read(call, tensor.untyped_storage())
        for param in params:
            if param is not tensor and call in self.of(param):
                continue  # a view that the layer has as an argument: see `note_arguments`
            self.readers.setdefault(id(param), set()).add(call)
            if not self._is_in_running_module(param, run, tracker):
                self.outside_module.add(call)

    def _is_in_running_module(self, param: Tensor, run: ProfilingPass, tracker: BlockTracker) -> bool:
        layer = run.layer_of[-1]
        modules: list[nn.Module] = [*tracker.running_modules]
        modules += run.context.layers[layer].module.modules() if layer is not None else ()
        return any(own is param for module in modules for own in parts_read_by(module))

    def note_arguments(self, call: int, tensors: list[Tensor]) -> None:
        """A layer that has a view of a weight as an argument (half of an embedding table as positions) reads the
        weight, whether or not it is skipped.
        """
        for tensor in tensors:
            for param in self._weights.parameters_in(tensor):
                self.readers.setdefault(id(param), set()).add(call)
