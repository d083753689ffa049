"""BlockTracker: tells a listener where a running model is, call by call, forward and backward.

The tracer and the engine listen to the same tracker, so what is measured is what is run. Phases tile the pass without
gaps: a call opens when the one before it closes, and whatever runs between two layers belongs to the earlier one.

[Note: Where calls open]
Forward: the stem opens with the root's forward, a layer with its own, a region when the last layer of a list returns,
or when a module runs that the listener knows to be in it (the last layer may have been left out).
Backward: a layer opens when a gradient reaches one of its outputs, or an input of the next call that was made of them,
which is before any recompute of it; the head when one reaches an output of the root; any other region when one reaches
an input of the layer after it that was made in the region, or an output of a module with weights that was called in it:
what a stem makes may pass a whole stack by (token embeddings beside a frozen vision tower). Each of these tensors
counts for the call that made it, wherever it is handed over: autograd numbers its nodes. It runs them in the reverse
order of their making, so the first of these to come is where the call begins. Module backward hooks are not used: they
miss outputs in dicts and dataclasses and fire too early when no input requires grad. The end of a backward is the end
of autograd's graph task. It does not come after an exception: the next forward finds the pass still open and says so.

[Note: Values around outputs] A layer may leave a value elsewhere than in its outputs (an auxiliary loss on `self`), and
the root use it. A gradient then reaches the layer's nodes before it reaches an output. The trial run follows the graph
from the root's outputs to the layers, without going into them, and finds such values; where there are any, every pass
does, and their nodes open the layer too.
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
from torch.autograd.graph import register_multi_grad_hook

from outsize.base.errors import ModelUnsupported
from outsize.compat import next_node_number, node_number, peek_functorch, queue_backward_callback
from outsize.model.discover import Layer
from outsize.model.tensors import all_with_grad, with_grad


class Listener(Protocol):
    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The root is called; returns its arguments, moved where they are wanted."""
        ...

    def finds(self, layer: int, after: int) -> int:
        """Which call opens with this layer, after that one."""
        ...

    def reads(self, module: nn.Module, call: int) -> int:
        """Which call a module with weights that is in no layer runs in, if it runs in this call or later."""
        ...

    def forward_enters(self, call: int, layer: int | None) -> None:
        """`layer`: index into the layers, None for a region."""
        ...

    def runs(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a layer's forward."""
        ...

    def forward_ends(self, outputs: list[Tensor], *, failed: bool) -> None:
        """`outputs`: the tensors with grad that the root has returned, or left in its arguments."""
        ...

    def backward_enters(self, call: int, forward_id: int) -> None:
        """`tracker`: the number of the forward pass that this backward belongs to."""
        ...

    def backward_ends(self) -> None: ...


class BlockTracker:
    def __init__(self, model: nn.Module, listener: Listener):
        self._model, self._listener = model, listener
        self._layers: Sequence[Layer] = ()
        self._handles: list[Any] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        """Modules with the `forward` that somebody had set on the instance, or None."""
        self._root_forward: tuple[Any, Any] = (None, None)
        """Ours, and the one that somebody had set."""
        self._call = -1  # no forward is open
        self._in_backward = False
        self._known: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        """Tensors of this forward whose call is known, by id and version: one that is written in place has another
        node, which no hook is on.
        """
        self._openings: list[tuple[int, int]] = []
        """Calls of this forward in the order they opened, each after the number that autograd would have given to a
        node then.
        """
        self._nesting = 0
        """Calls of the root's forward that are under way: it may call itself, and that is part of one pass."""
        self._called: int | None = None
        """The layer that torch has called, until its forward begins. `layer.forward(x)` runs no hooks."""
        self._inside: int | None = None
        """The layer whose forward is under way."""
        self._looks_around = False
        self._returned: dict[int, int] = {}
        """By layer call: the number that autograd would have given to a node when the layer returned."""
        self._output_numbers: set[int] = set()
        """Of the nodes of tensors that open calls."""
        self.detours: set[int] = set()
        """Layer calls with values that the root uses though they are in no output, of all passes. See [Note: Values
        around outputs].
        """
        self.running: list[nn.Module] = []
        """Modules with weights, in no layer and with none in them, that are being called: the innermost last."""
        self.number = 0
        """Counts forward passes."""

    @property
    def is_open(self) -> bool:
        """A forward of the root is under way."""
        return self._call >= 0

    def attach(self, layers: Sequence[Layer], *, looks_around: bool = False) -> None:
        """Without layers the whole model is one call, and no module but the root has a hook. `looks_around`: for values
        around outputs.
        """
        root = self._model
        self._layers, self._looks_around = layers, looks_around
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
        self._root_forward = (
            functools.wraps(root.forward)(functools.partial(self._root_runs, root.forward)),
            root.__dict__.get("forward"),
        )
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
        # If somebody has wrapped it since (accelerate's autocast), that stays; ours in it does nothing while no forward
        # is open.
        root = [(self._model, own_root)] if ours is not None and self._model.__dict__.get("forward") is ours else []
        for module, own in [*self._forwards, *root]:
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = own
        self._handles, self._forwards, self._root_forward = [], [], (None, None)

    # Forward.

    def _root_opens(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._nesting:
            return args, kwargs
        self.number += 1
        self._in_backward = False
        self._known, self._openings, self.running, self._called, self._inside = {}, [], [], None, None
        self._returned, self._output_numbers = {}, set()
        args, kwargs = self._listener.forward_begins(args, kwargs)
        self._enters(0, None)
        return args, kwargs

    def _enters(self, call: int, layer: int | None) -> None:
        self._call = call
        self._openings.append((next_node_number(), call))
        self._listener.forward_enters(call, layer)

    def _root_runs(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._nesting += 1
        try:
            return forward(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):  # torch calls no hook after these
            if self.is_open and self._nesting == 1:
                self._close([], failed=True)
            raise
        finally:
            self._nesting -= 1

    def _layer_opens(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if peek_functorch() is not None:
            raise ModelUnsupported(
                f"{self._layers[index].name} is called inside a transform of torch.func (vmap, grad, jvp), where its "
                "inputs are no plain tensors. "
                "Call it outside of the transform, or name other lists of layers with blocks=['path.to.list']."
            )
        self._called = index
        if self._call >= 0:
            self._leaves((args, kwargs))
            self._enters(self._listener.finds(index, self._call), index)
        else:
            self._listener.forward_enters(self._call, index)

    def _layer_runs(self, index: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._inside == index:  # it calls its own forward
            return forward(*args, **kwargs)
        module = self._layers[index].module
        is_direct = self._called != index
        if is_direct:
            self._layer_opens(index, module, args, kwargs)
        self._called, self._inside = None, index
        try:
            output = self._listener.runs(self._call, index, forward, args, kwargs)
        finally:
            self._inside = None
        if is_direct:
            self._layer_closes(index, module, args, kwargs, output)
        return output

    def _layer_closes(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._call < 0:
            return
        self._opens_backward(self._call, with_grad(output) or all_with_grad(output))
        if any(
            not isinstance(value, (Tensor, bool, int, float, str, type(None))) for value in (*args, *kwargs.values())
        ):
            self._open_where_made(
                with_grad((args, kwargs)) or all_with_grad((args, kwargs))
            )  # what it left in a list, a dict or an object is an output too
        self._returned[self._call] = next_node_number()
        if self._layers[index].is_last:
            self._enters(self._call + 1, None)

    def _leaves(self, inputs: Any) -> None:
        """For the next call, with these: what was made of the last one's outputs since is its own too, and backward
        comes to that first.
        """
        self._open_where_made(inputs)

    def _loose_opens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call >= 0 and (call := self._listener.reads(module, self._call)) != self._call:
            self._leaves((args, kwargs))
            self._enters(call, None)
        self.running.append(module)

    def _loose_closes(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A module with weights that is in no layer has run."""
        if self.running and self.running[-1] is module:
            self.running.pop()
        if self._call >= 0:
            self._open_where_made(output)

    def _root_closes(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._nesting:
            left = [
                tensor
                for tensor in all_with_grad((args, kwargs))
                if tensor.grad_fn is not None and self.made_in(tensor) >= 0
            ]
            self._close([*all_with_grad(output), *left], failed=sys.exc_info()[0] is not None and output is None)

    def _close(self, outputs: list[Tensor], *, failed: bool) -> None:
        if not failed:
            self._open_where_made(outputs)
            if self._looks_around and torch.is_grad_enabled():
                self._open_around(outputs)
        self._call = -1
        self._known = {}
        self._listener.forward_ends(outputs, failed=failed)

    def _open_around(self, outputs: list[Tensor]) -> None:
        """Nodes of layers that the code outside of layers leads to, and that are in no output, open their layers."""
        seen: set[Any] = set()
        todo = [(tensor.grad_fn, self._call) for tensor in outputs if tensor.grad_fn is not None]
        while todo:
            node, call = todo.pop()
            for following, _ in node.next_functions:
                if following is None or following in seen:
                    continue
                seen.add(following)
                number = node_number(following)
                made_in = self._call_at(number)
                if made_in < 0:
                    continue
                if made_in != call and made_in in self._returned and number not in self._output_numbers:
                    self.detours.add(made_in)
                    following.register_prehook(functools.partial(self._detour_enters, made_in, self.number))
                if number >= self._returned.get(made_in, 0):
                    todo.append((following, made_in))

    def _detour_enters(self, call: int, number: int, grads: Any) -> None:
        self._backward_enters(call, number)

    def _open_where_made(self, value: Any) -> None:
        """A gradient of one of these tensors opens the call that made it, which need not be this one: a stem may make
        something for a later layer, a model return the features of its images beside its loss. A region that made none
        has no backward."""
        made: dict[int, list[Tensor]] = {}
        for tensor in with_grad(value):
            if (known := self._known.get((id(tensor), tensor._version))) is None or known() is not tensor:
                made.setdefault(self.made_in(tensor), []).append(tensor)
        for call, tensors in made.items():
            self._opens_backward(call, tensors)

    def made_in(self, tensor: Tensor) -> int:
        """Autograd numbers its nodes as they are made. -1: before this forward."""
        if tensor.grad_fn is None:
            return self._call
        return self._call_at(node_number(tensor.grad_fn))

    def _call_at(self, number: int) -> int:
        place = bisect.bisect_right(self._openings, number, key=operator.itemgetter(0))
        return self._openings[place - 1][1] if place else -1

    # Backward.

    def _opens_backward(self, call: int, tensors: list[Tensor]) -> None:
        self._known.update({(id(t), t._version): weakref.ref(t) for t in tensors})
        tensors = [t for t in tensors if t.grad_fn is not None]
        if tensors and call >= 0 and torch.is_grad_enabled():
            if self._looks_around:
                self._output_numbers.update(node_number(t.grad_fn) for t in tensors if t.grad_fn is not None)
            number = self.number
            register_multi_grad_hook(tensors, lambda grad: self._backward_enters(call, number), mode="any")

    def _backward_enters(self, call: int, number: int) -> None:
        if self.is_open and number == self.number:
            raise ModelUnsupported(
                "The model's forward computes gradients itself (torch.autograd.grad or backward) through modules that "
                "are blocks of the plan. "
                "Compute them outside of the forward, or keep the model in one block: outsize.prepare(blocks=[])."
            )
        if not self._in_backward:
            self._in_backward = True
            queue_backward_callback(self._backward_ends)
        self._listener.backward_enters(call, number)

    def _backward_ends(self) -> None:
        self._in_backward = False
        self._listener.backward_ends()
