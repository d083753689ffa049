"""Course: tells a listener where a running model is, visit by visit, forward and backward.

The tracer and the engine listen to the same course, so what is measured is what is run. Phases tile the pass without gaps: a visit
opens when the one before it closes, and whatever runs between two layers belongs to the earlier one.

[Note: Where visits open]
Forward: the stem opens with the root's forward, a layer with its own, a region when the last layer of a list returns, or when a module runs that the listener
knows to be in it (the last layer may have been left out).
Backward: a layer opens when a gradient reaches one of its outputs, or an input of the next visit that was made of them, which is before any recompute of it;
the head when one reaches an output of the root; any other region when one reaches an input of the layer after it that was made in the region, or an output
of a module with weights that was called in it: what a stem makes may pass a whole stack by (token embeddings beside a frozen vision tower). Each of these
tensors counts for the visit that made it, wherever it is handed over: autograd numbers its nodes. It runs them in the reverse order of their making, so the
first of these to come is where the visit begins. Module backward hooks are not used: they miss
outputs in dicts and dataclasses and fire too early when no input requires grad. The end of a backward is the end of autograd's graph task. It does not come
after an exception: the next forward finds the pass still open and says so.
"""

import bisect
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook

from outsize.model.discover import Layer
from outsize.model.tensors import with_grad


class Listener(Protocol):
    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The root is called; returns its arguments, moved where they are wanted."""
        ...

    def finds(self, layer: int, after: int) -> int:
        """Which visit opens with this layer, after that one."""
        ...

    def reads(self, module: nn.Module, visit: int) -> int:
        """Which visit a module with weights that is in no layer runs in, if it runs in this visit or later."""
        ...

    def forward_enters(self, visit: int, layer: int | None) -> None:
        """`layer`: index into the layers, None for a region."""
        ...

    def runs(self, visit: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer's forward."""
        ...

    def forward_ends(self, outputs: Any, *, failed: bool) -> None: ...

    def backward_enters(self, visit: int, course: int) -> None:
        """`course`: the number of the forward pass that this backward belongs to."""
        ...

    def backward_ends(self) -> None: ...


class Course:
    def __init__(self, model: nn.Module, listener: Listener):
        self._model, self._listener = model, listener
        self._layers: Sequence[Layer] = ()
        self._handles: list[Any] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        """Modules with the `forward` that somebody had set on the instance, or None."""
        self._root_forward: tuple[Any, Any] = (None, None)
        """Ours, and the one that somebody had set."""
        self._visit = -1  # no forward is open
        self._in_backward = False
        self._known: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        """Tensors of this forward whose visit is known, by id and version: one that is written in place has another node, which no hook is on."""
        self._openings: list[tuple[int, int]] = []
        """Visits of this forward in the order they opened, each after the number that autograd would have given to a node then."""
        self.running: list[nn.Module] = []
        """Modules with weights, in no layer and with none in them, that are being called: the innermost last."""
        self.number = 0
        """Counts forward passes."""

    @property
    def is_open(self) -> bool:
        """A forward of the root is under way."""
        return self._visit >= 0

    def attach(self, layers: Sequence[Layer]) -> None:
        """Without layers the whole model is one visit, and no module but the root has a hook."""
        root = self._model
        self._layers = layers
        self._handles = [
            root.register_forward_pre_hook(self._root_opens, with_kwargs=True),
            root.register_forward_hook(self._root_closes, with_kwargs=True, always_call=True),
        ]
        for index, layer in enumerate(self._layers):
            module = layer.module
            self._handles += [
                module.register_forward_pre_hook(functools.partial(self._layer_opens, index), with_kwargs=True),
                module.register_forward_hook(functools.partial(self._layer_closes, index), with_kwargs=True),
            ]
            original = module.forward
            self._forwards.append((module, module.__dict__.get("forward")))
            module.forward = functools.wraps(original)(functools.partial(self._layer_runs, index, original))
        self._root_forward = functools.wraps(root.forward)(functools.partial(self._root_runs, root.forward)), root.__dict__.get("forward")
        root.forward = self._root_forward[0]
        inside = {id(module) for layer in layers for module in layer.module.modules()} | {id(root)}
        for module in root.modules() if layers else ():
            if id(module) not in inside and any(param is not None for param in module._parameters.values()):
                self._handles.append(module.register_forward_hook(self._loose_closes))
                if not any(id(part) in inside for part in module.modules()):
                    self._handles.append(module.register_forward_pre_hook(self._loose_opens, with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        ours, own_root = self._root_forward
        # If somebody has wrapped it since (accelerate's autocast), that stays; ours in it does nothing while no forward is open.
        root = [(self._model, own_root)] if ours is not None and self._model.__dict__.get("forward") is ours else []
        for module, own in [*self._forwards, *root]:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own
        self._handles, self._forwards, self._root_forward = [], [], (None, None)

    # Forward.

    def _root_opens(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.number += 1
        self._in_backward = False
        self._known, self._openings, self.running = {}, [], []
        args, kwargs = self._listener.forward_begins(args, kwargs)
        self._enters(0, None)
        return args, kwargs

    def _enters(self, visit: int, layer: int | None) -> None:
        self._visit = visit
        self._openings.append((torch.autograd._get_sequence_nr(), visit))
        self._listener.forward_enters(visit, layer)

    def _root_runs(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):  # torch calls no hook after these
            if self.is_open:
                self._root_closes(self._model, args, kwargs, None)
            raise

    def _layer_opens(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._visit >= 0:
            self._leaves((args, kwargs))
            self._enters(self._listener.finds(index, self._visit), index)
        else:
            self._listener.forward_enters(self._visit, index)

    def _layer_runs(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self._listener.runs(self._visit, index, forward, args, kwargs)

    def _layer_closes(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._visit < 0:
            return
        self._opens_backward(self._visit, with_grad(output))
        if self._layers[index].is_last:
            self._enters(self._visit + 1, None)

    def _leaves(self, inputs: Any) -> None:
        """For the next visit, with these: what was made of the last one's outputs since is its own too, and backward comes to that first."""
        self._open_where_made(inputs)

    def _loose_opens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._visit >= 0 and (visit := self._listener.reads(module, self._visit)) != self._visit:
            self._leaves((args, kwargs))
            self._enters(visit, None)
        self.running.append(module)

    def _loose_closes(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module with weights that is in no layer has run."""
        if self.running and self.running[-1] is module:
            self.running.pop()
        if self._visit >= 0:
            self._open_where_made(output)

    def _root_closes(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        failed = sys.exc_info()[0] is not None and output is None
        if not failed:
            self._open_where_made(output)
        self._visit = -1
        self._known = {}
        self._listener.forward_ends(output, failed=failed)

    def _open_where_made(self, value: Any) -> None:
        """A gradient of one of these tensors opens the visit that made it, which need not be this one: a stem may make something for a later layer, a model
        return the features of its images beside its loss. A region that made none has no backward."""
        made: dict[int, list[Tensor]] = {}
        for tensor in with_grad(value):
            if (known := self._known.get((id(tensor), tensor._version))) is None or known() is not tensor:
                made.setdefault(self._made_in(tensor), []).append(tensor)
        for visit, tensors in made.items():
            self._opens_backward(visit, tensors)

    def _made_in(self, tensor: Tensor) -> int:
        """Autograd numbers its nodes as they are made. -1: before this forward."""
        if tensor.grad_fn is None:
            return self._visit
        place = bisect.bisect_right(self._openings, tensor.grad_fn._sequence_nr(), key=operator.itemgetter(0))
        return self._openings[place - 1][1] if place else -1

    # Backward.

    def _opens_backward(self, visit: int, tensors: list[Tensor]) -> None:
        self._known.update({(id(t), t._version): weakref.ref(t) for t in tensors})
        tensors = [t for t in tensors if t.grad_fn is not None]
        if tensors and visit >= 0 and torch.is_grad_enabled():
            number = self.number
            register_multi_grad_hook(tensors, lambda grad: self._backward_enters(visit, number), mode="any")

    def _backward_enters(self, visit: int, number: int) -> None:
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._backward_ends)
        self._listener.backward_enters(visit, number)

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._listener.backward_ends()
