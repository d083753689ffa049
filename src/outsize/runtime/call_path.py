"""CallPath: decides which block call of the plan a running forward is in.

BlockTracker reports which module runs. The path finds the call that this module opens and refuses an order that the
plan does not cover. The executor then walks its segment to that call.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from outsize.base.errors import OrderMismatch
from outsize.model.graph import BlockGraph
from outsize.model.parts import own_parts
from outsize.schedule.actions import Action, Kind
from outsize.schedule.placement import Placement


def order_mismatch(graph: BlockGraph, what: str, expected: Action | None, found: str) -> OrderMismatch:
    """`what`: forward or backward. `expected`: None for its end."""
    wanted = f"{expected} ({graph.call_name(expected.index)})" if expected else f"the end of {what}"
    return OrderMismatch(
        f"The model takes another path than in prepare's profiling run: the plan's next action in {what} is {wanted}, "
        f"and the model {found}. Prepare it with a batch that takes this path."
    )


class CallPath:
    def __init__(self, place: Placement, params: Mapping[str, Tensor]):
        self._place, self._graph, self._params = place, place.graph, params
        self._calls_of: dict[str, list[int]] = {}
        for call in range(len(self._graph.calls)):
            self._calls_of.setdefault(self._graph.call_name(call), []).append(call)
        self._open = -1
        """The open call of this forward."""
        self._skipped: set[int] = set()
        """Calls that this training forward has skipped."""
        self._known_jumps: set[tuple[int, int]] = set()
        self._readers: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        """By id of a module: the calls that read all of its own parameters (except those that no call reads), and the
        calls that read any of them."""
        self.is_new = False
        """Whether the forward has skipped blocks, or read a module, as no forward before it did."""

    def begin_forward(self) -> None:
        self._open = -1
        self._skipped.clear()

    # Training forwards.

    def call_of_layer(self, layer: str) -> int:
        """The next call of a layer. If the plan has no further call of it: the next call of any block, which `enter`
        then refuses.
        """
        return self._jump_to(self._next_call_of(layer, default=self._open + 1))

    def call_of_module(self, module: nn.Module) -> int:
        """The call that reads a module outside of layers: the open one, or a later one if the layer before that was
        skipped.
        """
        if id(module) not in self._readers:
            own = {id(part) for _, part in own_parts(module)}
            users = [frozenset(self._graph.users[name]) for name, param in self._params.items() if id(param) in own]
            used = [calls for calls in users if calls]
            self._readers[id(module)] = (
                (frozenset.intersection(*used), frozenset.union(*used)) if used else (frozenset(), frozenset())
            )
        by_all, by_any = self._readers[id(module)]
        if self._open in by_all:
            return self._open
        if not by_any or max(by_any) < self._open:  # the profiling run did not see it read here
            self.is_new = True
        return self._jump_to(min((reader for reader in by_all if reader > self._open), default=self._open))

    def enter(self, call: int, layer: str | None) -> None:
        """Open a call. `layer`: the name of the layer that runs, None for a region. Raises OrderMismatch if the plan
        has another block there, or if a call that reads weights outside of their modules is skipped: no hook shows
        when such a region begins, so its weights may not have been loaded.
        """
        planned = self._graph.blocks[self._graph.calls[call]] if call < len(self._graph.calls) else None
        if planned is None or (planned.name != layer if planned.kind == "layer" else layer is not None):
            raise self._mismatch(call, f"ran {layer or 'past its last layer'}")
        first, ran = self._open + 1, f"ran {Action(Kind.FORWARD, call)} ({self._graph.call_name(call)})"
        self._skip_before(call, ran)
        if call > first and call in self._graph.reads_outside_module and planned.kind != "layer":
            raise self._mismatch(first, f"{ran}, part of it perhaps earlier")
        self._open = call

    def end_forward(self) -> None:
        """Raise OrderMismatch if the skipped calls do not allow a backward."""
        self._skip_before(len(self._graph.calls), "ended its forward without it")
        self._require_completing_calls()

    def _skip_before(self, call: int, found: str) -> None:
        for skipped in range(self._open + 1, call):
            if skipped in self._graph.reads_outside_module:
                raise self._mismatch(skipped, found)
            self._skipped.add(skipped)

    def _require_completing_calls(self) -> None:
        """Raise OrderMismatch if a gradient would complete in an earlier call than the plan has: it would overwrite
        another gradient in its stage.
        """
        graph, place = self._graph, self._place
        for call in self._skipped:
            for piece in (
                piece for chunk in place.grads_completed_by.get(call, ()) for piece in place.chunk(chunk).pieces
            ):
                ran = [user for user in graph.backward_users[piece.name] if user not in self._skipped]
                if ran:
                    raise OrderMismatch(
                        f"{piece.name}: several blocks use it, and the plan completes its gradient in "
                        f"{graph.call_name(call)}, which the model skipped although it ran "
                        f"{graph.call_name(ran[0])}. Prepare the model with a batch that takes this path, or run both "
                        "or neither of the two."
                    )

    def _mismatch(self, expected: int, found: str) -> OrderMismatch:
        action = Action(Kind.FORWARD, expected) if expected < len(self._graph.calls) else None
        return order_mismatch(self._graph, "forward", action, found)

    # Forwards without grad. They may also go back.

    def call_of_layer_without_grad(self, layer: str) -> int:
        call = self._next_call_of(layer, default=-1)
        if call < 0:
            return next(iter(self._calls_of.get(layer, ())), self._open + 1)
        self._require_reads_seen(call)
        return call

    def enter_without_grad(self, call: int, layer: str | None) -> tuple[int, ...]:
        """Open a call. Returns the chunks that it reads."""
        self._open = call
        if layer is not None:
            return self.chunks_of_layer(layer)
        return self._place.layout.used_by(call) if call < len(self._graph.calls) else ()

    def end_without_grad(self) -> None:
        self._require_reads_seen(len(self._graph.calls))

    def _require_reads_seen(self, before: int) -> None:
        """Refuse to skip a call that reads weights outside of their modules, or the call before it."""
        if passed := [call for call in self._graph.reads_outside_module if self._open < call < before]:
            name, previous = (self._graph.call_name(call) for call in (passed[0], passed[0] - 1))
            raise OrderMismatch(
                f"{name} reads weights outside of their modules, and a forward without grad skipped it or {previous}. "
                "Run both, or read the weights inside of the forward of their module."
            )

    def chunks_of_layer(self, name: str) -> tuple[int, ...]:
        calls = self._calls_of.get(name)
        return self._place.layout.used_by(calls[-1]) if calls else ()

    def _next_call_of(self, layer: str, *, default: int) -> int:
        return next((call for call in self._calls_of.get(layer, ()) if call > self._open), default)

    def _jump_to(self, call: int) -> int:
        if call > self._open + 1 and (self._open, call) not in self._known_jumps:
            self._known_jumps.add((self._open, call))
            self.is_new = True
        return call
