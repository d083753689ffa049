"""Updates: the engine's side of the optimizer. Turns a step into updates of flat ranges of chunks.

Neighbouring parameters of a chunk with the same group and step count, and no padding between them, are one range. A
parameter without a gradient is not touched: no decay, no step, as in torch. Hyperparameters are read once, when the
step is made.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from outsize.layout.chunks import joined_ranges
from outsize.optim.rule import Numbers, Scratch, UpdateRule, slow_kernels, update
from outsize.runtime.store import Store
from outsize.schedule.buffers import BufferKind as B


@dataclass(frozen=True, slots=True)
class StepSettings:
    """The hyperparameters of one optimizer step, fixed by `step()` (or during a declared last backward)."""

    numbers: dict[str, Numbers]
    """By parameter that has a gradient."""
    clip: float


class Updates:
    def __init__(self, store: Store, rule: UpdateRule, groups: Callable[[], list[dict]], group_of: dict[str, int]):
        """`groups` gives the live param_groups; `group_of` says which one a parameter is in."""
        self._store, self._rule, self._groups, self._group_of = store, rule, groups, group_of
        self.wait_written: Callable[[int], None] = lambda index: None
        """Blocks until a background save has written a chunk's weights and state."""
        self.steps: dict[str, int] = dict.fromkeys(group_of, 0)
        """Updates made so far, per parameter."""
        self._scratch = {
            side: Scratch(buffer)
            for side, buffer in (("gpu", store.gpu.get((B.SCRATCH, 0))), ("host", store.host.get((B.HOST_SCRATCH, 0))))
            if buffer is not None
        }

    def fix_settings(self, names: set[str], clip: float) -> StepSettings:
        """Fix the hyperparameters for the next update of these parameters."""
        groups = self._groups()
        made: dict[tuple[int, int], Numbers] = {}
        numbers = {}
        for name in names:
            key = (self._group_of[name], self.steps[name] + 1)
            if key not in made:
                made[key] = self._rule.numbers(groups[key[0]], key[1])
            numbers[name] = made[key]
        return StepSettings(numbers, clip)

    def count(self, *steps: StepSettings) -> None:
        """Count the steps for each of their parameters. Updates write flat buffers, which leaves the version counters
        of parameters as they are; other libraries key caches on them.
        """
        names = [name for step in steps for name in step.numbers]
        for name in names:
            self.steps[name] += 1
        increment_version([self._store.params[name] for name in names])

    @torch.no_grad()
    def update_chunk(self, index: int, step: StepSettings) -> None:
        """Update a chunk at its update site, where its gradient and its state are."""
        self.wait_written(index)
        place, store = self._store.place, self._store
        on_host = place.updates_on_host(index)
        grads = store.flat(place.host_gradient_buffer(index) if on_host else place.gradient_buffer(index), index)
        state, lo = store.state_at_update(index)
        if place.has_coordinates(index):
            weights, *state = state
        else:
            weights = store.flat((B.HOME, index) if on_host else place.weights_buffer(index), index)
        scratch = self._scratch["host" if on_host else "gpu"]
        for start, end, numbers in joined_ranges(place.update_of(index).pieces, step.numbers):
            part = slice(start, end)
            of_state, of_lo = [tensor[part] for tensor in state], None if lo is None else lo[part]
            args = self._rule, weights[part], of_lo, of_state, grads[part]
            update(*args, numbers=numbers, clip=step.clip, scratch=scratch)

    def slow_kernels(self) -> tuple[str, ...]:
        """Updates of this plan that run without a compiled kernel, and why."""
        place = self._store.place
        sites = {place.updates_on_host(chunk) for chunk in place.updated}
        is_cuda = self._store.device.torch_device.type == "cuda"
        return slow_kernels(host=True in sites or (not is_cuda and bool(sites)), gpu=is_cuda and False in sites)

    # The state of one parameter, for state dicts.

    def state(self, name: str) -> dict[str, Tensor]:
        state = {key: ranges.whole(owns=True) for key, ranges in self._store.state_ranges(name).items()}
        return {"step": torch.tensor(float(self.steps[name])), **state}

    def state_to_keep(self, name: str) -> dict[str, Tensor]:
        """The state of a parameter for use after the engine has ended: host tensors are handed over, device tensors are
        copied to the CPU.
        """
        index, _ = self._store.place.layout.location[name]
        state = self.state(name)
        return (
            state
            if self._store.place.has_host_state(index)
            else {key: value.detach().cpu().clone() for key, value in state.items()}
        )

    def reset(self, names: Iterable[str]) -> None:
        """Forget the optimizer state of parameters, but not their master weights. Coordinates become zero."""
        for name in names:
            self.steps[name] = 0
            for key, ranges in self._store.state_ranges(name).items():
                if key != "lo":
                    for part, _ in ranges.parts:
                        part.zero_()

    def load_state(self, name: str, state: dict[str, Tensor]) -> None:
        self.steps[name] = int(state["step"])
        for key, ranges in self._store.state_ranges(name).items():
            with torch.no_grad():
                ranges.copy_(state[key])
