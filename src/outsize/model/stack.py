"""Runs the layers of a model one by one, without code for single model families.

`capture` runs the model's own forward with every layer returning its input: the model builds masks, rotary tables and
per-layer inputs, and no layer runs. `run` then runs one layer with the captured arguments on any hidden state.
`check_replay` compares both with the model's forward, bit for bit, and refuses a model with layers that need more than
their arguments (the keys of another layer, say).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.model.caches import turn_caches_off, turn_caches_on
from outsize.model.discover import Layer, find_layers
from outsize.model.stacks import Stack, find_stacks
from outsize.model.tensors import map_tensors

Materialized = Callable[[Sequence[nn.Parameter]], AbstractContextManager[None]]
"""Gives parameters their values on the device while a module that reads them runs."""


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one call of a layer or of a module in it, without its hidden state."""

    args: tuple[Any, ...]
    """Without the hidden state, if that is among them."""
    kwargs: dict[str, Any]
    at: int | str
    """Where the hidden state is: its position, or its name."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], at: int | str) -> "LayerCall":
        """Of a call's arguments with the hidden state at `at`."""
        if isinstance(at, int):
            return cls(args[:at] + args[at + 1 :], dict(kwargs), at)
        return cls(args, {name: value for name, value in kwargs.items() if name != at}, at)

    def arguments(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with a hidden state. Containers are copied: a layer may write into them."""
        args, kwargs = map_tensors(_same, (self.args, self.kwargs))
        if isinstance(self.at, int):
            return (*args[: self.at], hidden, *args[self.at :]), kwargs
        return args, {self.at: hidden, **kwargs}


@dataclass(frozen=True, slots=True)
class StackCalls:
    """What one batch's forward calls the layers with."""

    hidden: Tensor
    """The input of the first layer."""
    calls: tuple[LayerCall, ...]
    """By layer."""


class LayerStack:
    """The layers of a model, in order. The model is in eval mode from then on; forwards run without grad or caches."""

    def __init__(self, model: nn.Module, blocks: str | None = None, *, materialized: Materialized | None = None):
        """`blocks`: the path of the list of layers; None for the largest. `materialized`: called for the parameters of
        a module outside of the layers, or of a layer, that is about to run.
        """
        self.path = blocks if blocks is not None else _largest(model).path
        self.layers: tuple[Layer, ...] = find_layers(model, [self.path])
        self.model, self._materialized = model.eval(), materialized
        self._with_caches = turn_caches_off(model)
        turn_caches_on(self._with_caches)
        if not self.layers:
            raise ConfigError(f"blocks: {self.path!r} is empty. Name the list of layers.")
        self.config = _config_around(model, self.path)
        """The config that the layers were built from; None if the model has none."""
        inside = {id(part) for layer in self.layers for part in layer.module.modules()}
        outside = [module for module in model.modules() if id(module) not in inside]
        self._outside = [(module, own) for module in outside if (own := list(module.parameters(recurse=False)))]
        """Modules outside of the layers, with their own parameters."""
        self._form: tuple[int, int] | None = None
        """How the model calls its layers: which tensor the first layer takes as its hidden state, and which of `_FORMS`
        the layers return."""

    @torch.no_grad()
    def capture(self, arguments: Mapping[str, Any]) -> StackCalls:
        """The calls of all layers for a batch. Runs the model up to its last layer, but no layer."""
        if self._form is not None:
            return _Capture(self, arguments, *self._form).calls()
        failure: Exception | None = None
        candidate, count = 0, 1
        while candidate < count:
            for form in range(len(_FORMS)):
                capture = _Capture(self, arguments, candidate, form)
                try:
                    calls = capture.calls()
                except ModelUnsupported as error:
                    failure = error
                except Exception as error:  # the model's code expects another form of output
                    failure = failure or error
                else:
                    self._form = (candidate, form)
                    return calls
                count = max(count, capture.num_candidates)
            candidate += 1
        assert failure is not None
        if isinstance(failure, ModelUnsupported):
            raise failure
        raise ModelUnsupported(
            f"{self.path}: the model's forward fails when its layers return their input ({type(failure).__name__}: "
            f"{failure}). Its layers cannot be run one by one; name another list with blocks."
        ) from failure

    @torch.no_grad()
    def check_replay(self, arguments: Mapping[str, Any]) -> None:
        """Run the model's forward up to its head, and each layer alone on the hidden state that it got there. Raise
        ModelUnsupported with the name of the first layer that returns other bits.
        """
        calls = self.capture(arguments).calls
        head = self.model.get_output_embeddings() if hasattr(self.model, "get_output_embeddings") else None  # type: ignore[operator]
        with ExitStack() as hooks, self._ready(), ExitStack() as weights, suppress(_Stop):
            if isinstance(head, nn.Module):  # its logits may be larger than all else
                hooks.callback(head.register_forward_pre_hook(_stop, prepend=True).remove)
            replay = _Replay(calls, self._materialized, weights)
            for i, layer in enumerate(self.layers):
                for handle in replay.hooks(i, layer):
                    hooks.callback(handle.remove)
            self.model(**_without_labels(arguments))
        if replay.next_layer != len(self.layers):
            raise ModelUnsupported(
                f"{self.layers[replay.next_layer].name}: the model's forward does not run it. Layers that are skipped "
                "cannot be run one by one; name another list with blocks."
            )

    def output(self, arguments: Mapping[str, Any], hidden: Tensor) -> Any:
        """What the model's forward returns if its last layer returns `hidden`. Runs no layer."""
        return self._outside_of_layers(self.model, arguments, hidden)

    def last_hidden_state(self, arguments: Mapping[str, Any], hidden: Tensor) -> Tensor:
        """What the head gets if the last layer returns `hidden`. Runs no layer and no head."""
        backbone: Any = self.model.base_model
        found: Tensor = self._outside_of_layers(backbone, arguments, hidden).last_hidden_state
        return found

    @torch.no_grad()
    def _outside_of_layers(self, model: Any, arguments: Mapping[str, Any], hidden: Tensor) -> Any:
        assert self._form is not None, "capture comes first"
        make = _FORMS[self._form[1]]
        with ExitStack() as patches:
            for i, layer in enumerate(self.layers):
                call = self._passing if i < len(self.layers) - 1 else lambda *_, **__: make(hidden)
                patches.enter_context(_forward_of(layer.module, call))
            with self._ready():
                return model(**_without_labels(arguments))

    def _passing(self, *args: Any, **kwargs: Any) -> Any:
        """A layer that returns one of the tensors it gets, whose values nothing reads."""
        assert self._form is not None
        given = (*args, *kwargs.values())
        hidden = next(v for v in given if isinstance(v, Tensor) and v.is_floating_point() and v.dim() > 1)
        return _FORMS[self._form[1]](hidden)

    @contextmanager
    def _ready(self) -> Iterator[None]:
        """Caches are off, and modules outside of the layers get their weights when they run."""
        with ExitStack() as stack:
            for config in self._with_caches:
                config.use_cache = False
            stack.callback(turn_caches_on, self._with_caches)
            if (load := self._materialized) is not None:
                for module, own in self._outside:
                    stack.enter_context(_loaded_when_called(module, own, load))
            yield


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within it, calling the module calls `forward`."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.forward = own


@contextmanager
def _loaded_when_called(module: nn.Module, own: list[nn.Parameter], load: Materialized) -> Iterator[None]:
    with ExitStack() as weights:
        before = module.register_forward_pre_hook(lambda *_: weights.enter_context(load(own)) and None)
        after = module.register_forward_hook(lambda *_: weights.close())
        try:
            yield
        finally:
            before.remove()
            after.remove()


def run(layer: nn.Module, call: LayerCall, hidden: Tensor) -> Tensor:
    """Run a layer. Returns its hidden state."""
    args, kwargs = call.arguments(hidden)
    return first_tensor(layer(*args, **kwargs))


def first_tensor(output: Any) -> Tensor:
    """The hidden state in what a layer or a part of it returns: the output, or its first item."""
    found = (
        output if isinstance(output, Tensor) else next(iter(output.values() if isinstance(output, dict) else output))
    )
    assert isinstance(found, Tensor), f"a layer returned {type(found).__name__}"
    return found


def valid_tokens(arguments: Mapping[str, Any]) -> Tensor | None:
    """(rows, tokens), True where a token is no padding; None if the batch has no mask of that shape."""
    mask = arguments.get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


class _Stop(Exception):
    """Ends a forward whose last layer has been called."""


def _stop(*_: Any) -> None:
    raise _Stop


def _same(tensor: Tensor) -> Tensor:
    return tensor


_FORMS: tuple[Callable[[Tensor], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: (hidden, None, None),
)
"""What layers return. Which one a model expects shows in what it passes to the next layer."""


class _Capture:
    """One forward with every layer returning its input."""

    def __init__(self, stack: LayerStack, arguments: Mapping[str, Any], candidate: int, form: int):
        self._stack, self._arguments, self._candidate = stack, arguments, candidate
        self._make: Callable[[Tensor], Any] = _FORMS[form]
        self._found: list[tuple[LayerCall, Tensor]] = []
        self._output: Tensor | None = None
        self.num_candidates = 1
        """Tensors that the first layer may take as its hidden state."""

    def calls(self) -> StackCalls:
        layers = self._stack.layers
        try:
            with ExitStack() as patches:
                for i, layer in enumerate(layers):
                    patches.enter_context(_forward_of(layer.module, partial(self._call, i)))
                with self._stack._ready():
                    self._stack.model(**_without_labels(self._arguments))
        except _Stop:
            return StackCalls(self._found[0][1], tuple(call for call, _ in self._found))
        raise ModelUnsupported(
            f"{layers[len(self._found)].name}: the model's forward does not run it. Layers that are skipped cannot be "
            "run one by one; name another list with blocks."
        )

    def _call(self, index: int, *args: Any, **kwargs: Any) -> Any:
        layers = self._stack.layers
        if index != len(self._found):
            raise _not_once(layers[index].name)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        tensors = [
            (at, value)
            for at, value in given
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
        ]
        if self._output is None:
            self.num_candidates = len(tensors)
            taken = tensors[self._candidate : self._candidate + 1]
        else:
            taken = [(at, value) for at, value in tensors if value is self._output][:1]
        if not taken:
            raise ModelUnsupported(
                f"{layers[index].name}: the model changes the hidden state before this layer, or takes it from another "
                "output than the first. Such a layer cannot be run on its own; name another list with blocks."
            )
        ((at, hidden),) = taken
        self._found.append((LayerCall.of(args, kwargs, at), hidden))
        if index == len(layers) - 1:
            raise _Stop
        self._output = hidden.view_as(hidden)  # a tensor of its own, so that the next layer's argument is recognized
        return self._make(self._output)


class _Replay:
    """Compares the layers of a running forward with each layer run alone."""

    def __init__(self, calls: Sequence[LayerCall], materialized: Materialized | None, weights: ExitStack):
        self._calls, self._materialized, self._weights = calls, materialized, weights
        self.next_layer = 0
        self._output: Tensor | None = None
        """Of the last layer that ran."""
        self._input: Tensor | None = None
        self._is_alone = False

    def hooks(self, index: int, layer: Layer) -> Iterator[Any]:
        before, after = partial(self._before, index, layer.name), partial(self._after, index, layer.name)
        yield layer.module.register_forward_pre_hook(before, with_kwargs=True)
        yield layer.module.register_forward_hook(after)

    def _before(self, index: int, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_alone:
            return
        if index != self.next_layer:
            raise _not_once(name)
        at = self._calls[index].at
        hidden = (args[at] if len(args) > at else None) if isinstance(at, int) else kwargs.get(at)
        if not isinstance(hidden, Tensor) or (self._output is not None and not _equal(hidden, self._output)):
            raise ModelUnsupported(
                f"{name}: the model changes the hidden state before this layer. It cannot be run on its own; name "
                "another list with blocks."
            )
        self._input = hidden.clone()
        if self._materialized is not None:
            self._weights.enter_context(self._materialized(list(module.parameters())))

    def _after(self, index: int, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_alone:
            return
        assert self._input is not None
        expected, given = first_tensor(output), self._input.clone()
        self._is_alone = True
        try:
            alone = run(module, self._calls[index], given)
            failure = "" if _equal(alone, expected) else "its output differs from that in the model's forward"
            if not failure and not _equal(given, self._input):
                failure = "it writes its input"
        except Exception as error:  # arguments that only earlier layers provide
            failure = f"it fails with {type(error).__name__}: {error}"
        finally:
            self._is_alone = False
            self._weights.close()
        if failure:
            raise ModelUnsupported(
                f"{name}: run alone on the same hidden state, {failure}. A layer that needs more than its arguments "
                "(the keys and values of another layer, say) cannot be pruned on its own; name another list with "
                "blocks."
            )
        self._output, self.next_layer = expected.clone(), index + 1


def _not_once(layer: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{layer}: the model runs it out of order or several times. Layers are pruned one after another, so each must "
        "run once, in the order of its list; name another list with blocks."
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    return (
        left.shape == right.shape
        and left.dtype == right.dtype
        and bool(((left == right) | (left.isnan() & right.isnan())).all())
    )


def _without_labels(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name != "labels"}


def _largest(model: nn.Module) -> Stack:
    """The list with the most weights. Lists in a layer of another list (experts) belong to that layer."""
    stacks = [stack.outer or stack for stack in find_stacks(model, in_sequentials=False)]
    if not stacks:
        raise ModelUnsupported("The model has no list of layers (nn.ModuleList), so it cannot be pruned by layers.")
    return max(
        stacks, key=lambda stack: sum(param.numel() for _, part in stack.elements for param in part.parameters())
    )


def _config_around(model: nn.Module, path: str) -> Any:
    parts = path.split(".")
    for length in range(len(parts), -1, -1):
        config = getattr(model.get_submodule(".".join(parts[:length])), "config", None)
        if config is not None:
            return config
    return None
