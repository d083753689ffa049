"""Takes gradients from autograd as they arrive, adds them up on the device, and keeps their norms.

After a backward `.grad` of every managed parameter is None. The norm of each parameter's sum so far is taken at once, on the device, by
one fixed reduction over a 256-byte aligned range, and kept in one vector in the order of the optimizer's parameters: chunks,
homes and the order of arrival do not enter its bits.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outsize.base.errors import NonFiniteGradient, OrderMismatch, tell
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
        """Parameters whose gradient waits for a step."""
        self.broken: str | None = None
        """The visit in which a backward broke off: what has landed is not the gradient of anything."""
        self._landing: dict[str, tuple[int | None, Tensor | None]] = {}
        """In whose backward the gradient of a parameter comes, and where it is added up: the same bytes in every step. A frozen path has neither."""
        for name in self._names:
            expected = store.place.landing.get(store.place.layout.place[name][0])
            self._landing[name] = expected, store.gradient_view(name) if expected is not None else None
        self._handles = [store.params[name].register_post_accumulate_grad_hook(self._taker(name)) for name in self._names]

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
        with torch.no_grad():
            if name in self.landed:
                total.add_(grad)
            else:
                total.copy_(grad)
                self.landed.add(name)
            torch.linalg.vector_norm(total, dtype=torch.float32, out=self._norm_of[name])

    def norm(self) -> Tensor:
        """The global norm of what has landed: a float64 scalar on the device, overwritten by the next call."""
        with torch.no_grad():
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
        self.broken = None

    def detach(self) -> None:
        """Let go of the model, and of the memory that gradients are added up in."""
        for handle in self._handles:
            handle.remove()
        self._landing.clear()
