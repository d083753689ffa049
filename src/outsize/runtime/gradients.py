"""Gradients: takes gradients from autograd as they arrive, accumulates them on the device, and keeps the sums of their
squares.

After a backward the gradient is in the engine's own buffers; `p.grad` reads it from there (access.py), until
zero_grad(). When a gradient has arrived, the squares of its accumulated sum are summed on the device (optim/norm.py).
The bits of the norm do not depend on chunks, homes or the order of arrival.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import EngineMisuse, NonFiniteGradient, OrderMismatch
from outsize.compat import without_torch_function
from outsize.optim.norm import GradientNorm, not_finite
from outsize.runtime.coordinates import CoordinateTraining
from outsize.runtime.executor import ALL_CALLS
from outsize.runtime.store import Store
from outsize.schedule.buffers import BufferKind as B


class Gradients:
    def __init__(
        self,
        store: Store,
        trainable: Sequence[str],
        current_call: Callable[[], int | None],
        coordinates: CoordinateTraining,
    ):
        """`trainable`: names in the optimizer's order. `current_call`: whose backward runs."""
        self._store, self._names = store, list(trainable)
        self._current_call, self._coordinates = current_call, coordinates
        self._contracted = frozenset(coordinates.names)
        """Parameters whose gradient sum is that of their coordinates."""
        numels = {name: store.place.updated_numel(name) for name in trainable}
        self._norm = GradientNorm(numels, store.gpu.get((B.NORMS, 0)))
        self.total = self._norm.total
        self.accumulated: set[str] = set()
        """Parameters whose gradient is in its buffer: it waits for a step, or was applied by one and not
        cleared since.
        """
        self.is_applied = False
        """Whether a step has used the accumulated gradients."""
        self.is_consumed = False
        """The last step was made in its backward, which kept no gradients, and zero_grad() was not called since."""
        self._generation = 0
        self._replaced: dict[str, int] = {}
        """How often each `p.grad` was set by the user: tensors handed out before are another gradient's."""
        self._handed_out: set[str] = set()
        """Gradients that the user may have edited since their norm was taken."""
        self._zeroed: set[str] = set()
        """After zero_grad(set_to_none=False): gradients that read as zero. Their memory is not written yet."""
        self._assigned: dict[str, tuple[Tensor, int]] = {}
        """The tensor that the user assigned to `p.grad`, and its version. In torch it is the gradient's memory, so a
        change of one is copied to the other.
        """
        self._arrival: dict[str, tuple[int | None, Tensor | None]] = {}
        """By parameter: the call in whose backward its gradient is complete, and the memory of its sum, which is the
        same in every step. Both None for a parameter that gets no gradient.
        """
        self._apart: dict[str, Tensor] = {}
        """Arrival slots: an action adds the gradient there to the sum of earlier micro-batches, or contracts it."""
        self._arrived: set[str] = set()
        """Gradients in arrival slots that are not added yet."""
        self._has_sums = False
        """Whether earlier micro-batches of the step have left sums."""
        for name in self._names:
            expected = store.place.grad_complete_at.get(store.place.layout.location[name][0])
            self._arrival[name] = expected, store.gradient_view(name) if expected is not None else None
            if expected is not None and (apart := store.arrival_view(name)) is not None:
                self._apart[name] = apart
        self._early: dict[str, Tensor] = {}
        """Gradients that were complete in the backward of another call of their layer than the plan has. They wait for
        the planned call.
        """
        self._handles: dict[str, list[Any]] = {}
        for name in self._names:
            self._hook(name)

    def _hook(self, name: str) -> None:
        """Take the gradient after the user's own post-accumulate hooks. They see the sum so far in `param.grad`, as in
        torch.
        """
        # The garbage collector does not see hooks on tensors: one that referred to `self` would keep a dropped engine's
        # memory for ever.
        me, param = weakref.ref(self), self._store.params[name]
        with without_torch_function():
            has_others = bool(getattr(param, "_post_accumulate_grad_hooks", None))
            shows_sum = has_others and name not in self._contracted  # no sum has the weight's shape

            def show_sum(param: Tensor) -> None:
                gradients = me()
                if gradients is not None and param.grad is not None:
                    gradients._show_sum(name, param.grad)

            def take(param: Tensor) -> None:
                grad, param.grad = param.grad, None
                gradients = me()
                assert gradients is not None
                if grad is None:  # a user's hook has set it to None
                    gradients.remove(name)
                else:
                    gradients._take(name, grad, is_sum=shows_sum)

            handles = []
            if has_others:
                hooks: Any = param._post_accumulate_grad_hooks
                others = list(hooks.items())
                hooks.clear()  # torch runs them in the order of insertion
                if shows_sum:
                    handles.append(param.register_post_accumulate_grad_hook(show_sum))
                hooks.update(others)
            self._handles[name] = [*handles, param.register_post_accumulate_grad_hook(take)]

    def _show_sum(self, name: str, grad: Tensor) -> None:
        total = self._arrival[name][1]
        self._add_arrived(name)
        if total is not None and name in self.accumulated:
            with torch.no_grad():
                grad.copy_(total.add(grad))

    def _take(self, name: str, grad: Tensor, *, is_sum: bool = False) -> None:
        """Take a gradient that autograd has computed. `is_sum`: it includes the earlier micro-batches already."""
        call = self._current_call()
        expected, total = self._arrival[name]
        if total is None or call not in (expected, ALL_CALLS):
            # A user's hook was shown a sum that is not in its buffer before the expected call.
            is_shown = is_sum and name in self.accumulated
            if (
                total is None
                or expected is None
                or call is None
                or is_shown
                or not self._is_earlier_call(call, expected)
            ):
                raise self._mismatch(name, expected, self._where(call))
            self._early[name] = grad
            return
        self.is_applied = False
        if name in self._contracted:
            with torch.no_grad():
                # Autograd may bring a gradient in parts. The constants may not have been loaded yet.
                self._apart[name].add_(grad) if name in self._arrived else self._apart[name].copy_(grad)
            self._arrived.add(name)
            return
        self._add_arrived(name)  # autograd may bring a gradient in parts
        is_sum = is_sum and name in self.accumulated
        if self._has_sums and name in self._apart and not is_sum:
            with torch.no_grad():
                self._apart[name].copy_(grad)
            self._arrived.add(name)
        else:
            self._add(name, grad, is_sum=is_sum)

    @torch.no_grad()
    def _add(self, name: str, grad: Tensor, *, is_sum: bool = False) -> None:
        total = self._arrival[name][1]
        assert total is not None
        if name in self.accumulated and not is_sum:
            total.add_(grad)
        else:
            total.copy_(grad)
            self.accumulated.add(name)
        self._norm.measure(name, total)

    def add(self, chunk: int) -> Callable[[], None]:
        """The work that adds a chunk's gradients, where they have arrived, to the sums of earlier micro-batches."""
        names = [piece.name for piece in self._store.place.chunk(chunk).pieces]

        def work() -> None:
            for name in names:
                self._add_arrived(name)

        return work

    def _add_arrived(self, name: str) -> None:
        if name not in self._arrived:
            return
        self._arrived.remove(name)
        total = self._arrival[name][1]
        if name in self._contracted and total is not None:
            self._coordinates.contract(name, self._apart[name], total, accumulate=name in self.accumulated)
            self.accumulated.add(name)
            self._norm.measure(name, total)
        else:
            self._add(name, self._apart[name])

    def has_own_shape(self, name: str) -> bool:
        """Whether the gradient that is kept has the parameter's shape; that of coordinates has another."""
        return name not in self._contracted

    def begin_backward(self) -> bool:
        """Returns whether earlier micro-batches have left sums."""
        self.forget_early()
        self._has_sums = bool(self.accumulated)
        return self._has_sums

    def _is_earlier_call(self, call: int, expected: int) -> bool:
        """Whether it is a call of the same layer whose backward runs before that of the expected call."""
        calls = self._store.place.graph.calls
        return call > expected and calls[call] == calls[expected]

    def enters(self, call: int) -> None:
        """The backward of a call begins. Add the gradients that were complete earlier and wait for it."""
        for name in [name for name in self._early if self._arrival[name][0] == call]:
            self._take(name, self._early.pop(name))

    def require_complete(self, call: int) -> None:
        """Raise OrderMismatch if a gradient waits for a call that the backward has skipped. `call`: the one that
        begins.
        """
        for name in self._early:
            expected = self._arrival[name][0]
            if expected is not None and expected > call:
                raise self._mismatch(name, expected, "no gradient reached that")

    def forget_early(self) -> None:
        self._early.clear()
        self._arrived.clear()

    def _mismatch(self, name: str, expected: int | None, found: str) -> OrderMismatch:
        where = (
            f"in the backward of {self._store.place.graph.numbered_call_name(expected)}"
            if expected is not None
            else "in no backward, as in the profiling run"
        )
        return OrderMismatch(
            f"The plan has the gradient of {name} complete {where}, but {found}: the model uses this weight in other "
            "places than in the profiling run. "
            "Prepare the model with a batch that takes this path. If the path depends on the data, prepare it with "
            "blocks= that leaves out the list of "
            "layers around this weight (blocks=[] keeps the whole model in one block)."
        )

    def _where(self, call: int | None) -> str:
        if call is None:
            return "it came outside of any backward of the model"
        name = "the model" if call == ALL_CALLS else self._store.place.graph.numbered_call_name(call)
        return f"it came in that of {name}"

    @property
    def waiting(self) -> bool:
        """Whether gradients have accumulated that no step has used yet."""
        return bool(self.accumulated) and not self.is_applied

    # What users do with `p.grad` between passes. The lanes are idle.

    def has(self, name: str) -> bool:
        return name in self.accumulated or name in self._zeroed

    def generation(self, name: str) -> int:
        """Changes with zero_grad() and with `p.grad = ...`: tensors handed out as `p.grad` are valid in one
        generation.
        """
        return self._generation + self._replaced.get(name, 0)

    def hand_out(self, name: str) -> Tensor:
        """A gradient's memory, which the caller may write."""
        self._handed_out.add(name)
        self._pull_assigned(name)
        memory = self._store.gradient(name)
        if name in self._zeroed:
            self._zeroed.discard(name)
            memory.zero_()
            self.accumulated.add(name)
        return memory

    def make_zeros(self) -> None:
        """Before a step: gradients that zero_grad(set_to_none=False) made zero, and that no backward has reached, are
        applied as zeros.
        """
        with torch.no_grad():
            for name in sorted(self._zeroed - self.accumulated):
                self.hand_out(name)
        self._zeroed.clear()

    def _pull_assigned(self, name: str) -> None:
        """Copy the tensor that the user assigned to `p.grad` to the gradient's memory, if it has changed."""
        tensor, version = self._assigned.get(name, (None, 0))
        if tensor is not None and tensor._version != version:
            self._assigned[name] = (tensor, tensor._version)
            self._handed_out.add(name)
            with torch.no_grad():
                self._store.gradient(name).copy_(tensor)

    def pull_assigned(self) -> None:
        for name in list(self._assigned):
            self._pull_assigned(name)

    def push_assigned(self) -> None:
        """After a backward: tensors that were assigned to `p.grad` hold the sum."""
        with torch.no_grad():
            for name, (tensor, _) in self._assigned.items():
                if name in self.accumulated and not tensor.requires_grad:
                    tensor.copy_(self._store.gradient(name))
                    self._assigned[name] = (tensor, tensor._version)

    @property
    def has_assigned(self) -> bool:
        return bool(self._assigned)

    @property
    def has_handed_out(self) -> bool:
        """Users may have written gradients since they were cleared."""
        return bool(self._handed_out)

    def assign(self, name: str, value: Tensor) -> None:
        """`p.grad = value`."""
        with without_torch_function():
            shape = self._store.params[name].shape
        if value.shape != shape:
            raise EngineMisuse(f"{name}.grad: its shape is {tuple(shape)}, but {tuple(value.shape)} was assigned.")
        if not self._store.place.step_config.hold_gradients:
            raise EngineMisuse(
                f"{name}.grad: this plan updates weights in backward and keeps no gradients, so none can be assigned. "
                "Prepare with update='after_step' in the optimizer and without last_backward()."
            )
        if self._arrival.get(name, (None, None))[0] is None:
            raise EngineMisuse(
                f"{name}.grad: a gradient was assigned to a parameter that got none in the profiling run of prepare, "
                "so the plan does not update it. "
                "Prepare with a batch that trains it."
            )
        self._forget(name)
        with torch.no_grad():
            self.hand_out(name).copy_(value)
        self._assigned[name] = (value, value._version)
        self.accumulated.add(name)
        self.is_applied = False

    def remove(self, name: str) -> None:
        """`p.grad = None`."""
        self._forget(name)
        self.accumulated.discard(name)

    def _forget(self, name: str) -> None:
        self._assigned.pop(name, None)
        self._zeroed.discard(name)
        self._replaced[name] = self._replaced.get(name, 0) + 1

    def scale(self, factor: float) -> None:
        """Multiply the accumulated gradients, in place."""
        with torch.no_grad():
            for name in sorted(self.accumulated):
                self.hand_out(name).mul_(factor)

    def hook_before_ours(self, name: str, register: Callable[[], Any]) -> Any:
        """Register a user's post-accumulate hook before ours, which clears `param.grad`."""
        ours = self._handles.pop(name, None)
        for handle in ours or ():
            handle.remove()
        theirs = register()
        if ours is not None:
            self._hook(name)
        return theirs

    def norm(self) -> Tensor:
        """The norm of all accumulated gradients: a float64 scalar on the device, overwritten by the next call."""
        if self._handed_out:  # includes all that were assigned
            self._store.device.synchronize()  # a backward since may still be sending sums to the host
            self.pull_assigned()
            for name in sorted(self._handed_out & self.accumulated):
                self._norm.measure(name, self._store.gradient(name))
        return self._norm.measure_total(without=[name for name in self._names if name not in self.accumulated])

    def not_finite(self) -> Callable[[], list[str]]:
        """Returns a function that lists the accumulated gradients that are not finite. Only its call waits for the
        device.
        """
        # The function does not refer to `self`: a caller that keeps it would keep device memory.
        sums, slices = self._store.device.fetch(self._norm.sums), self._norm.slices
        accumulated = frozenset(self.accumulated)
        return lambda: [name for name in not_finite(sums(), slices) if name in accumulated]

    def error(self, names: list[str], state: str = "Weights and optimizer are untouched") -> NonFiniteGradient:
        place = self._store.place
        blocks = {place.graph.call_name(place.chunk(place.layout.location[name][0]).calls[0]) for name in names}
        more = f", and {len(names) - 1} more parameters" if len(names) > 1 else ""
        return NonFiniteGradient(
            f"{names[0]}: its gradient is not finite (block {', '.join(sorted(blocks))}{more}). Lower the learning "
            f"rate or check the batch; nonfinite='skip' (in YAML: nonfinite: skip) skips such steps. {state}."
        )

    def pending(self, name: str) -> Tensor:
        """An accumulated gradient between backward and step. The lanes are idle."""
        return self._store.gradient(name)

    def restore(self, pending: dict[str, Tensor]) -> None:
        """Take over gradients that accumulated under another plan."""
        with torch.no_grad():
            for name, value in pending.items():
                self._store.gradient_ranges(name).copy_(value)
                self._norm.measure(name, self._store.gradient(name))
                self.accumulated.add(name)

    def discard(self, *, to_zero: bool = False) -> None:
        """Discard the accumulated gradients. `to_zero`: they then read as zero and not as None."""
        self._zeroed = self._zeroed | self.accumulated if to_zero else set()
        self.accumulated.clear()
        self._handed_out.clear()
        self._assigned.clear()
        self._generation += 1
        self.is_applied, self.is_consumed = False, False

    def detach(self) -> None:
        """Remove the hooks, and free the memory of gradients and norms: the traceback of a failed re-plan may hold this
        object.
        """
        for handle in (handle for handles in self._handles.values() for handle in handles):
            handle.remove()
        self._arrival.clear()
        self._apart.clear()
        del self._norm, self.total
