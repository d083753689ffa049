"""LayerOffload: runs the layers of a model under a strategy that sends tensors off the device. No engine and no plan.

The `forward` of each layer is replaced on the instance. Hooks of the layer run once, around it; FSDP2 has gathered the
layer's weights when it runs, in forward and in the recomputation.
"""

import copy
import inspect
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.attention import saves_attention
from outsize.activation.strategies import RUN, input_of, offload_save_attention
from outsize.activation.user_checkpointing import is_in_backward, rerun_in_backward
from outsize.base.errors import EngineMisuse, ModelUnsupported
from outsize.base.log import log
from outsize.compat import storage_id
from outsize.model.caches import turn_caches_off, turn_caches_on
from outsize.model.discover import Layer
from outsize.model.own_checkpointing import is_checkpointed, turn_checkpointing_off, turn_checkpointing_on
from outsize.model.strategies import Strategy
from outsize.model.tensors import with_grad
from outsize.transfer.transfer_queue import Transfer, TransferQueue


class LayerOffload:
    """Handle of an offload that is enabled. `disable` makes the model a plain one; graphs that exist stay valid."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[Layer],
        strategy: Strategy,
        make_queue: Callable[[torch.device], TransferQueue],
        *,
        save_attention: bool = False,
        is_synchronous: bool = False,
    ):
        """`make_queue`: the queue for inputs on a device. `save_attention`: with `offload`, outputs of attention are
        sent too. `is_synchronous`: each copy ends before the next layer.
        """
        if held := [layer.name for layer in layers if is_offloaded(layer.module)]:
            raise EngineMisuse(
                f"{held[0]}: its activations are offloaded already. Call disable() of that offload first."
            )
        self._make_queue, self._is_synchronous = make_queue, is_synchronous
        self._save_attention = save_attention
        self._run = offload_save_attention if save_attention else RUN[strategy]
        self._model = weakref.ref(model)
        self._layers = [weakref.ref(layer.module) for layer in layers]
        self._queues: dict[torch.device, TransferQueue] = {}
        self._counted = (0, 0)
        """`num_sent` and `arena_bytes` when it was disabled."""
        for layer in layers:
            layer.module.forward = _LayerForward(self, layer)
        self._handles = [
            model.register_forward_pre_hook(lambda root, _: self._turn_checkpointing_off(root)),
            model.register_forward_hook(lambda root, _, outputs: self._require_sent(root, outputs)),
        ]
        self._checkpointed = turn_checkpointing_off(model)
        self._cached = turn_caches_off(model)
        if self._checkpointed:
            self._note_checkpointing()

    # What it does, in numbers.

    @property
    def num_sent(self) -> int:
        """Sets of tensors that were sent so far, one for each layer call."""
        return self._counted[0] + sum(queue.num_sent for queue in self._queues.values())

    @property
    def arena_bytes(self) -> int:
        """Host memory, or size of the files. It only grows while the offload is enabled."""
        return self._counted[1] + sum(queue.arena.num_bytes for queue in self._queues.values())

    @property
    def used_bytes(self) -> int:
        """The part of `arena_bytes` that graphs hold now."""
        return sum(queue.arena.used_bytes for queue in self._queues.values())

    def disable(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in (ref() for ref in self._layers):
            if layer is not None and is_offloaded(layer):
                layer.__dict__["forward"].restore()
        turn_checkpointing_on(self._checkpointed)
        turn_caches_on(self._cached)
        self._handles, self._layers, self._checkpointed, self._cached = [], [], [], []
        self._counted = (self.num_sent, self.arena_bytes)
        self._queues = {}  # their memory is freed with the graphs that use it

    def run(self, name: str, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if is_in_backward():
            raise ModelUnsupported(rerun_in_backward(name))
        hidden = input_of(args, kwargs)
        if hidden is None:
            return forward(*args, **kwargs)
        if hidden.is_meta or isinstance(hidden, nn.Parameter) or isinstance(hidden._base, nn.Parameter):
            return RUN["recompute"](
                forward, args, kwargs, None, None, layer
            )  # there is nothing that sending would free
        if hidden.device not in self._queues:
            self._queues[hidden.device] = self._make_queue(hidden.device)
        queue = self._queues[hidden.device]
        transfer = Transfer(queue)
        outputs = self._run(forward, args, kwargs, transfer, _is_static_in(layer), layer)
        if not transfer.is_empty:
            transfer.send()
            if self._is_synchronous:
                queue.finish()
        return outputs

    def _turn_checkpointing_off(self, root: nn.Module) -> None:
        """The user or a Trainer may have turned it on since. `root` may be a copy of the model, which has its hooks."""
        layers = [layer for ref in self._layers if (layer := ref()) is not None]
        if root is self._model() and any(is_checkpointed(layer) for layer in layers):
            self._checkpointed += turn_checkpointing_off(root)
            self._note_checkpointing()

    def _note_checkpointing(self) -> None:
        log.warning(
            "gradient checkpointing is turned off: the offload of activations recomputes what it does not keep. Leave "
            "gradient_checkpointing_enable() and gradient_checkpointing=True out."
        )

    def _require_sent(self, root: nn.Module, outputs: Any) -> None:
        if root is not self._model() or not torch.is_grad_enabled() or not with_grad(outputs):
            return
        if not self.num_sent:
            raise ModelUnsupported(
                f"{type(root).__name__}: a forward has run and no activations of its layers were offloaded. Either the "
                "layers were not called, or only the last of them save anything for backward, and these stay on the "
                "device. Name the lists of layers with blocks=['path.to.list'], or train without the offload."
            )
        if self._save_attention and not any(saves_attention(layer) for ref in self._layers if (layer := ref())):
            raise ModelUnsupported(
                f"{type(root).__name__}: save_attention=True, and its layers call no attention operator whose outputs "
                "can be saved. Use attn_implementation='sdpa' or a flash one, without attention dropout, or leave "
                "save_attention out."
            )


def is_offloaded(layer: nn.Module) -> bool:
    return isinstance(layer.__dict__.get("forward"), _LayerForward)


def _is_static_in(layer: nn.Module) -> Callable[[Tensor], bool]:
    """Whether a tensor lies in the memory of the layer's weights and buffers, as they are in this forward: FSDP2
    exchanges them.
    """
    known: set[int] = set()

    def is_static(tensor: Tensor) -> bool:
        if not known:
            weights = (t for t in (*layer.parameters(), *layer.buffers()) if t.layout == torch.strided)
            known.update({0, *(storage_id(t.untyped_storage()) for t in weights)})
        return isinstance(tensor, nn.Parameter) or storage_id(tensor.untyped_storage()) in known

    return is_static


class _LayerForward:
    """The `forward` of a layer, as an attribute of the instance."""

    def __init__(self, offload: LayerOffload, layer: Layer):
        self._offload, self._name, self._layer = offload, layer.name, weakref.ref(layer.module)
        self._before = layer.module.__dict__.get("forward")
        """What was set on the instance before."""

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._before or self._bound(self._module))

    @property
    def _module(self) -> nn.Module:
        layer = self._layer()
        assert layer is not None, "the layer is gone"
        return layer

    @staticmethod
    def _bound(layer: nn.Module) -> Callable[..., Any]:
        return types.MethodType(type(layer).forward, layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._module
        return self._offload.run(self._name, layer, self._before or self._bound(layer), args, kwargs)

    def restore(self) -> None:
        layer = self._module
        del layer.__dict__["forward"]
        if self._before is not None:
            layer.forward = self._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the layer is a plain one: this object would run the weights of the original."""
        layer = memo.get(id(self._module))
        if layer is None:
            return self
        return self._bound(layer) if self._before is None else copy.deepcopy(self._before, memo)

    def __reduce__(self) -> Any:
        raise EngineMisuse(
            f"pickle: the activations of {self._name} are offloaded. Save the state_dict, or call disable() of the "
            "offload first."
        )
