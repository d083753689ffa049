"""BlockTracker: reports to a listener which block call a running model is in, in forward and backward.

The tracker sees modules; the listener decides which call a module opens (in training: runtime/call_path.py). The
profiler and the engine use the same tracker, so the plan is made for the calls that training runs. Calls follow one
another without gaps: a call opens when the one before it closes, and what runs between two layers belongs to the
earlier one.

[Note: Where calls open]
Forward: the stem opens with the root's forward, a layer with its own. A region opens when the last layer of a list
returns, or when a module of the region runs, which the listener decides (a batch may skip the last layer).
Backward: a layer opens when a gradient reaches one of its outputs, or a tensor made from them that is an input of the
next call. That is before the layer is recomputed. The head opens when a gradient reaches an output of the root. Any
other region opens when one reaches an input of the next layer that was made in the region, or an output of a module
with weights that was called in it: a tensor of the stem may bypass a whole stack (token embeddings, with a frozen
vision tower). Each of these tensors belongs to the call that made it, found by the number of its autograd node.
Autograd runs nodes in the reverse order of their creation, so the first of these tensors to get a gradient is where the
call's backward begins. Module backward hooks are not used: they miss outputs in dicts and dataclasses, and fire too
early when no input requires grad. A backward ends with autograd's graph task. After an exception there is no such end:
the next forward finds the pass still open and reports it.

[Note: Side outputs] A layer may store a value with a gradient elsewhere than in its outputs (an auxiliary loss on
`self`), for the root to use. A gradient then reaches the layer's nodes before it reaches an output. The discovery pass
finds such values by following the graph from the root's outputs back to the layers. If there are any, every pass does
so, and their nodes open the layer too.
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
from outsize.model.readers import readers
from outsize.model.tensors import all_with_grad, with_grad


class Listener(Protocol):
    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The root is called. Returns the arguments to call it with, on the device."""
        ...

    def call_of_layer(self, layer: int, after: int) -> int:
        """Decides which call this layer opens. `after`: the open call."""
        ...

    def call_of_module(self, module: nn.Module, call: int) -> int:
        """Decides in which call a module with weights runs that is outside of layers. `call`: the open call."""
        ...

    def forward_enters(self, call: int, layer: int | None) -> None:
        """A call opens. `layer`: index into the layers, None for a region. `call`: -1 for a layer outside of the root's
        forward.
        """
        ...

    def run_layer(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...

    def forward_ends(self, outputs: list[Tensor], *, failed: bool) -> None:
        """`outputs`: tensors with grad that the root has returned or written into its arguments."""
        ...

    def backward_enters(self, call: int, forward_id: int) -> None:
        """`forward_id`: of the forward that this backward belongs to."""
        ...

    def backward_ends(self) -> None: ...


class BlockTracker:
    def __init__(self, model: nn.Module, listener: Listener):
        self._model, self._listener = model, listener
        self._layers: Sequence[Layer] = ()
        self._handles: list[Any] = []
        self._forwards: list[tuple[nn.Module, Any]] = []
        """Layers with the `forward` that was set on the instance before, or None."""
        self._root_forward: tuple[Any, Any] = (None, None)
        """Our forward of the root, and the one that was set on the instance before."""
        self._call = -1  # no forward is open
        self._in_backward = False
        self._known: dict[tuple[int, int], weakref.ref[Tensor]] = {}
        """Tensors of this forward that have a hook, by id and version: a write in place gives a tensor another node,
        without the hook.
        """
        self._openings: list[tuple[int, int]] = []
        """The calls of this forward in order, each with the number of the next autograd node when it opened."""
        self._nesting = 0
        """Depth of calls of the root's forward: it may call itself, within one pass."""
        self._called: int | None = None
        """The layer whose hooks have run, until its forward begins. `layer.forward(x)` runs no hooks."""
        self._inside: int | None = None
        """The layer whose forward is running."""
        self._finds_side_outputs = False
        self._returned: dict[int, int] = {}
        """By call of a layer: the number of the next autograd node when the layer returned."""
        self._output_numbers: set[int] = set()
        """Numbers of the nodes of tensors that open calls."""
        self.side_outputs: set[int] = set()
        """Calls of layers with side outputs, in all passes. See [Note: Side outputs]."""
        self.running_modules: list[nn.Module] = []
        """Modules with weights, in no layer and with none in them, that are running: the innermost last."""
        self.forward_id = 0
        """Counts forward passes."""

    @property
    def is_open(self) -> bool:
        """A forward of the root is running."""
        return self._call >= 0

    def attach(self, layers: Sequence[Layer], *, finds_side_outputs: bool = False) -> None:
        """Set the hooks. Without layers the whole model is one call, and only the root has hooks."""
        root = self._model
        self._layers, self._finds_side_outputs = layers, finds_side_outputs
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
        for module in readers(root) if layers else ():
            if id(module) not in inside:
                self._handles.append(module.register_forward_hook(self._module_closes))
                if not any(id(part) in inside for part in module.modules()):
                    self._handles.append(module.register_forward_pre_hook(self._module_opens, with_kwargs=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        ours, own_root = self._root_forward
        # A wrapper that was set over ours since (accelerate's autocast) stays. Ours inside it does nothing while no
        # forward is open.
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
        self.forward_id += 1
        self._in_backward = False
        self._known, self._openings, self.running_modules, self._called, self._inside = {}, [], [], None, None
        self._returned, self._output_numbers = {}, set()
        args, kwargs = self._listener.forward_begins(args, kwargs)
        self._enter(0, None)
        return args, kwargs

    def _enter(self, call: int, layer: int | None) -> None:
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
                "inputs are no plain tensors. Call it outside of the transform, or name other lists of layers with "
                "blocks=['path.to.list']."
            )
        if self._inside == index:  # it calls itself, within one call
            return
        if self._inside is not None:
            outer = self._layers[self._inside].name
            raise ModelUnsupported(
                f"{self._layers[index].name} is called in the forward of {outer}, but the blocks of a plan run one "
                f"after another. Call it from the model's forward, after {outer}, or keep the model in one block: "
                "outsize.prepare(blocks=[])."
            )
        self._called = index
        if self._call >= 0:
            # What was made from the open call's outputs since belongs to that call, and backward reaches it first.
            self._hook_by_maker((args, kwargs))
            self._enter(self._listener.call_of_layer(index, self._call), index)
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
            output = self._listener.run_layer(self._call, index, forward, args, kwargs)
        finally:
            self._inside = None
        if is_direct:
            self._layer_closes(index, module, args, kwargs, output)
        return output

    def _layer_closes(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._call < 0 or self._inside is not None:
            return
        # A layer that returns its input has no node, and no backward.
        outputs = [t for t in with_grad(output) or all_with_grad(output) if self.made_in(t) == self._call]
        self._hook(self._call, outputs)
        plain = (Tensor, bool, int, float, str, type(None))
        if any(not isinstance(value, plain) for value in (*args, *kwargs.values())):
            # What the layer has written into a list, dict or object among its arguments is an output too.
            self._hook_by_maker(with_grad((args, kwargs)) or all_with_grad((args, kwargs)))
        self._returned[self._call] = next_node_number()
        if self._layers[index].is_last:
            self._enter(self._call + 1, None)

    def _module_opens(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call >= 0 and (call := self._listener.call_of_module(module, self._call)) != self._call:
            self._hook_by_maker((args, kwargs))
            self._enter(call, None)
        self.running_modules.append(module)

    def _module_closes(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.running_modules and self.running_modules[-1] is module:
            self.running_modules.pop()
        if self._call >= 0:
            self._hook_by_maker(output)

    def _root_closes(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._nesting:
            given = [tensor for tensor in all_with_grad((args, kwargs)) if tensor.grad_fn is not None]
            written = [tensor for tensor in given if self.made_in(tensor) >= 0]
            self._close([*all_with_grad(output), *written], failed=sys.exc_info()[0] is not None and output is None)

    def _close(self, outputs: list[Tensor], *, failed: bool) -> None:
        if not failed:
            self._hook_by_maker(outputs)
            if self._finds_side_outputs and torch.is_grad_enabled():
                self._hook_side_outputs(outputs)
        self._call = -1
        self._known = {}
        self._listener.forward_ends(outputs, failed=failed)

    def _hook_side_outputs(self, outputs: list[Tensor]) -> None:
        """Hook the nodes of layers that code outside of layers uses and that are in no output."""
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
                    self.side_outputs.add(made_in)
                    following.register_prehook(self._entering(made_in))
                if number >= self._returned.get(made_in, 0):
                    todo.append((following, made_in))

    def _hook_by_maker(self, value: Any) -> None:
        """Have a gradient of each of these tensors open the call that made it. That need not be the open call: a stem
        may make something for a later layer, a model may return image features with its loss. A region that made none
        of them has no backward."""
        made: dict[int, list[Tensor]] = {}
        for tensor in with_grad(value):
            if (known := self._known.get((id(tensor), tensor._version))) is None or known() is not tensor:
                made.setdefault(self.made_in(tensor), []).append(tensor)
        for call, tensors in made.items():
            self._hook(call, tensors)

    def made_in(self, tensor: Tensor) -> int:
        """The call that made a tensor, -1 if it was made before this forward. Autograd numbers its nodes as they are
        created.
        """
        return self._call if tensor.grad_fn is None else self._call_at(node_number(tensor.grad_fn))

    def _call_at(self, number: int) -> int:
        place = bisect.bisect_right(self._openings, number, key=operator.itemgetter(0))
        return self._openings[place - 1][1] if place else -1

    # Backward.

    def _hook(self, call: int, tensors: list[Tensor]) -> None:
        """Have the first gradient of any of these tensors open the call's backward."""
        self._known.update({(id(t), t._version): weakref.ref(t) for t in tensors})
        tensors = [t for t in tensors if t.grad_fn is not None]
        if tensors and call >= 0 and torch.is_grad_enabled():
            if self._finds_side_outputs:
                self._output_numbers.update(node_number(t.grad_fn) for t in tensors if t.grad_fn is not None)
            register_multi_grad_hook(tensors, self._entering(call), mode="any")

    def _entering(self, call: int) -> Callable[[Any], None]:
        """The hook that opens a call's backward. A reference from the graph to the tracker, and so to the model, would
        be a cycle that Python cannot collect if the model keeps an output on itself.
        """
        tracker, forward_id = weakref.ref(self), self.forward_id

        def enter(grad: Any) -> None:
            if (alive := tracker()) is not None:
                alive._enter_backward(call, forward_id)

        return enter

    def _enter_backward(self, call: int, forward_id: int) -> None:
        if self.is_open and forward_id == self.forward_id:
            raise ModelUnsupported(
                "The model's forward computes gradients itself (torch.autograd.grad or backward) through modules that "
                "are blocks of the plan. Compute them outside of the forward, or keep the model in one block: "
                "outsize.prepare(blocks=[])."
            )
        if not self._in_backward:
            self._in_backward = True
            queue_backward_callback(self._end_backward)
        self._listener.backward_enters(call, forward_id)

    def _end_backward(self) -> None:
        self._in_backward = False
        self._listener.backward_ends()
