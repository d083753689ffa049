"""Takes gradients from autograd as they arrive, adds them up on the device, and keeps their norms.

After a backward the gradient is in the engine's own buffers; `p.grad` reads it from there (access.py), until zero_grad(). The norm of each
parameter's sum so far is taken at once, on the device, by one fixed reduction over a 256-byte aligned range, and kept in one vector in the
order of the optimizer's parameters: chunks, homes and the order of arrival do not enter its bits.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import EngineMisuse, NonFiniteGradient, OrderMismatch, tell
from outsize.runtime.executor import ALL_VISITS
from outsize.runtime.store import Store


class Gradients:
    def __init__(self, store: Store, trainable: Sequence[str], current_visit: Callable[[], int | None]):
        """`trainable`: names in the optimizer's order. `current_visit`: whose backward runs."""
        self._store, self._names = store, list(trainable)
        self._current_visit = current_visit
        buffer = store.gpu.get(("norms", 0))
        self.total = buffer[:8].view(torch.float64)[0] if buffer is not None else torch.zeros((), dtype=torch.float64)
        self._norms = buffer[8:].view(torch.float32) if buffer is not None else torch.zeros(0)
        self._norm_of = {name: self._norms[i] for i, name in enumerate(self._names)}
        self.landed: set[str] = set()
        """Parameters whose gradient is in its buffer: it waits for a step, or was applied by one and not cleared since."""
        self.is_applied = False
        """A step has used what has landed."""
        self.is_consumed = False
        """The last step was made in its backward, which kept no gradients, and zero_grad() was not called since."""
        self.generation = 0
        """Counts zero_grad(): tensors handed out as `p.grad` are valid in one generation."""
        self._handed_out: set[str] = set()
        """Gradients that the user may have edited since their norm was taken."""
        self.broken: str | None = None
        """The visit in which a backward broke off: what has landed is not the gradient of anything."""
        self._landing: dict[str, tuple[int | None, Tensor | None]] = {}
        """In whose backward the gradient of a parameter comes, and where it is added up: the same bytes in every step. A frozen path has neither."""
        for name in self._names:
            expected = store.place.landing.get(store.place.layout.place[name][0])
            self._landing[name] = expected, store.gradient_view(name) if expected is not None else None
        self._handles = {name: store.params[name].register_post_accumulate_grad_hook(self._taker(name)) for name in self._names}

    def _taker(self, name: str) -> Callable[[Tensor], None]:
        # The garbage collector does not see hooks on tensors: one that referred to `self` would keep a dropped engine's memory for ever.
        me = weakref.ref(self)

        def take(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            gradients = me()
            assert grad is not None and gradients is not None
            gradients._take(name, grad)

        return take

    def _take(self, name: str, grad: Tensor) -> None:
        visit = self._current_visit()
        expected, total = self._landing[name]
        if total is None or visit not in (expected, ALL_VISITS):
            graph = self._store.place.graph
            where = f"in the backward of {graph.visit_name(expected)}" if expected is not None else "never, as in the trial run of prepare"
            seen = f"it came in that of {'the model' if visit == ALL_VISITS else graph.visit_name(visit)}" if visit is not None else None
            found = seen or "it came outside of any backward of the model"
            raise OrderMismatch(tell(f"the gradient of {name} is complete {where}", found, "Prepare the model again with a batch that takes this path"))
        self.is_applied = False
        with torch.no_grad():
            if name in self.landed:
                total.add_(grad)
            else:
                total.copy_(grad)
                self.landed.add(name)
            torch.linalg.vector_norm(total, dtype=torch.float32, out=self._norm_of[name])

    @property
    def waiting(self) -> bool:
        """Gradients have landed that no step has used yet."""
        return bool(self.landed) and not self.is_applied

    # What users do with `p.grad` between passes. The lanes are idle.

    def has(self, name: str) -> bool:
        return name in self.landed

    def hand_out(self, name: str) -> Tensor:
        """A gradient's memory, which the caller may write."""
        self._handed_out.add(name)
        return self._store.waiting_gradient_on_device(name)

    def assign(self, name: str, value: Tensor) -> None:
        """`p.grad = value`."""
        with torch._C.DisableTorchFunctionSubclass():
            shape = self._store.params[name].shape
        if value.shape != shape:
            raise EngineMisuse(f"{name}.grad: its shape is {tuple(shape)}, but {tuple(value.shape)} was assigned.")
        if not self._store.place.terms.hold_gradients:
            raise EngineMisuse(
                f"{name}.grad: this plan updates weights in backward and keeps no gradients, so none can be assigned. "
                "Prepare with AdamW(update='after_step') and without last_backward()."
            )
        if self._landing.get(name, (None, None))[0] is None:
            raise EngineMisuse(
                f"{name}.grad: a gradient was assigned to a parameter that got none in the profiling run of prepare, so the plan does not update it. "
                "Prepare with a batch that trains it."
            )
        with torch.no_grad():
            self.hand_out(name).copy_(value)
        self.landed.add(name)
        self.is_applied = False

    def remove(self, name: str) -> None:
        """`p.grad = None`."""
        self.landed.discard(name)
        if not self.landed:
            self.discard()

    def scale(self, factor: float) -> None:
        """Multiply what has landed, in place."""
        with torch.no_grad():
            for name in sorted(self.landed):
                self.hand_out(name).mul_(factor)

    def hook_before_ours(self, name: str, register: Callable[[], Any]) -> Any:
        """Register a user's post-accumulate hook so that it runs while `param.grad` still holds the gradient: ours takes it away."""
        ours = self._handles.pop(name, None)
        if ours is not None:
            ours.remove()
        handle = register()
        if ours is not None:
            with torch._C.DisableTorchFunctionSubclass():
                self._handles[name] = self._store.params[name].register_post_accumulate_grad_hook(self._taker(name))
        return handle

    def norm(self) -> Tensor:
        """The global norm of what has landed: a float64 scalar on the device, overwritten by the next call."""
        with torch.no_grad():
            for name in sorted(self._handed_out & self.landed):
                torch.linalg.vector_norm(self._store.waiting_gradient_on_device(name), dtype=torch.float32, out=self._norm_of[name])
            for name in self._names:
                if name not in self.landed:
                    self._norm_of[name].zero_()
            torch.linalg.vector_norm(self._norms, dtype=torch.float64, out=self.total)
        return self.total

    def not_finite(self) -> Callable[[], list[str]]:
        """Which of the gradients that have landed are not finite, once somebody asks: until then nothing is waited for."""
        # Nothing here refers to `self`: whoever keeps the question would keep device memory.
        norms, names, landed = self._store.device.fetch(self._norms), self._names, frozenset(self.landed)

        def ask() -> list[str]:
            finite = torch.isfinite(norms()).tolist()
            return [name for name, fine in zip(names, finite, strict=True) if name in landed and not fine]

        return ask

    def error(self, names: list[str], state: str = "Weights and optimizer are untouched") -> NonFiniteGradient:
        place = self._store.place
        blocks = {place.graph.visit_name(place.chunk(place.layout.place[name][0]).visits[0]) for name in names}
        found = f"that of {names[0]} (block {', '.join(sorted(blocks))}{f', and {len(names) - 1} more parameters' if len(names) > 1 else ''}) is not"
        do = f"Lower the learning rate or look at the batch; nonfinite='skip' (in YAML: nonfinite: skip) leaves such steps out. {state}"
        return NonFiniteGradient(tell("every gradient is finite", found, do))

    def pending(self, name: str) -> Tensor:
        """A landed gradient, where it waits. The lanes are idle."""
        return self._store.waiting_gradient_view(name)

    def restore(self, pending: dict[str, Tensor]) -> None:
        """Take over gradients that landed under another plan."""
        with torch.no_grad():
            for name, value in pending.items():
                view = self.pending(name)
                view.copy_(value)
                norm = torch.linalg.vector_norm(value, dtype=torch.float32)
                self._norm_of[name].copy_(norm)
                self.landed.add(name)

    def discard(self) -> None:
        self.landed.clear()
        self._handed_out.clear()
        self.generation += 1
        self.broken, self.is_applied, self.is_consumed = None, False, False

    def detach(self) -> None:
        """Let go of the model, and of the memory that gradients are added up in."""
        for handle in self._handles.values():
            handle.remove()
        self._landing.clear()
