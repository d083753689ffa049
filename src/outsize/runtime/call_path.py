"""CallPath: decides which block call of the plan a running forward is at."""

from collections.abc import Mapping

from torch import nn

from outsize.base.errors import OrderMismatch
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph


class CallPath:
    def __init__(self, graph: BlockGraph, layout: ChunkLayout, params: Mapping[str, nn.Parameter]):
        self._graph, self._layout, self._params = graph, layout, params
        self._calls_of: dict[str, list[int]] = {}
        for call in range(len(graph.calls)):
            self._calls_of.setdefault(graph.call_name(call), []).append(call)
        self._known_jumps: set[tuple[int, int]] = set()
        self._readers: dict[int, tuple[frozenset[int], frozenset[int]]] = {}
        """By id of a module: the calls that read all of its own parameters that are read at all, and those that read
        any of them."""
        self.is_new = False
        """The forward has left out blocks, or read a module, in a way that no forward before it did."""

    def chunks_of_layer(self, name: str) -> tuple[int, ...]:
        calls = self._calls_of.get(name)
        return self._layout.used_by(calls[-1]) if calls else ()

    def chunks_of_call(self, call: int) -> tuple[int, ...]:
        return self._layout.used_by(call) if call < len(self._graph.calls) else ()

    def next_call(self, layer: str, after: int) -> int:
        """The next call of a layer in a training forward. The calls between are left out. If the plan has no further
        call of the layer: the next call at all, which is another layer's.
        """
        return self._jump(after, next((call for call in self._calls_of.get(layer, ()) if call > after), after + 1))

    def next_call_without_grad(self, layer: str, after: int) -> int:
        """The same in a forward without grad, which may also go back."""
        calls = self._calls_of.get(layer, ())
        call = next((call for call in calls if call > after), None)
        if call is None:
            return calls[0] if calls else after + 1
        self.require_seen(after, call)
        return call

    def require_seen(self, after: int, before: int) -> None:
        """Refuse a forward without grad that leaves out the call before one that reads weights outside of their
        modules: nothing shows when that one begins, and its weights may not have been loaded.
        """
        if passed := [call for call in self._graph.reads_outside_module if after < call < before]:
            name, previous = (self._graph.call_name(call) for call in (passed[0], passed[0] - 1))
            raise OrderMismatch(
                f"{name} reads weights outside of their modules, and a forward without grad left it or {previous} out. "
                "Leave neither out, or read the weights inside of the forward of their module."
            )

    def reading_call(self, module: nn.Module, call: int) -> int:
        """The call from `call` on that reads this module: a later one if the layer before it was left out."""
        if id(module) not in self._readers:
            own = {id(param) for param in module._parameters.values()}
            users = [frozenset(self._graph.users[name]) for name, param in self._params.items() if id(param) in own]
            used = [calls for calls in users if calls]
            self._readers[id(module)] = (
                (frozenset.intersection(*used), frozenset.union(*used)) if used else (frozenset(), frozenset())
            )
        by_all, by_any = self._readers[id(module)]
        if call in by_all:
            return call
        if not by_any or max(by_any) < call:  # the profiling run did not see it read here
            self.is_new = True
        return self._jump(call, min((reader for reader in by_all if reader > call), default=call))

    def _jump(self, start: int, end: int) -> int:
        if end > start + 1 and (start, end) not in self._known_jumps:
            self._known_jumps.add((start, end))
            self.is_new = True
        return end
