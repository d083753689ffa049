"""The loss of a language model in chunks of tokens, without code for any model family.

While a `ChunkedLossPatch` is attached and on, the output embedding returns unmaterialized logits (logits.py), and the
model's `loss_function` computes the loss from them chunk by chunk (cross_entropy.py). The profiling run tries whether a
model allows this, and the plan records the result.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from outsize import compat
from outsize.base.errors import ModelUnsupported
from outsize.loss.cross_entropy import LogitStep, chunk_tokens
from outsize.loss.logits import DTYPES, Logits, LogitsNotMaterialized, Product

T = TypeVar("T")


class ChunkedLossUnsupported(ModelUnsupported):
    """The model's loss cannot be computed in chunks."""

    def __init__(self, reason: str):
        super().__init__(
            "chunked_loss needs a language model with the loss of transformers, whose logits are at most scaled, "
            f"capped and cast before it, but {reason}. Leave chunked_loss out, or set it to False."
        )
        self.reason = reason


class ChunkedLossPatch:
    """Patches the forward, the output embedding and the loss_function of one model instance."""

    def __init__(self, model: nn.Module, chunk: int | None = None):
        """Raises ChunkedLossUnsupported. `chunk`: tokens per chunk; None: see `chunk_tokens`."""
        self._owner = _owner(model)
        self.head = _head(self._owner)
        self.chunk = chunk or chunk_tokens(self.head.out_features)
        self.is_on = False
        self._own_loss = _own_loss(self._owner)
        self._products: list[Product] | None = None
        """Of the current training forward; None outside of one."""
        self._installed: list[tuple[nn.Module, str, Any, Any]] = []
        """Module, attribute, our value, value before."""

    def attach(self, *, on: bool = True) -> None:
        """`on=False`: the model computes its loss as before. The engine may still turn the patch on in the first hook
        of a forward, when it re-plans for a larger batch.
        """
        self.is_on = on
        self._wrap(self._owner, "forward", self._forward)
        self._wrap(self.head, "forward", self._multiply)
        self._set(self._owner, "_loss_function", self._loss)

    def detach(self) -> None:
        """Remove the patch. A function that other code has wrapped since (accelerate wraps a model's forward) stays
        inside that wrapper and passes all calls on.
        """
        self.is_on = False
        left = []
        for module, name, ours, before in reversed(self._installed):
            if vars(module).get(name) is not ours:
                left.append((module, name, ours, before))
            elif before is None:
                del vars(module)[name]
            else:
                vars(module)[name] = before
        self._installed = left[::-1]

    def _wrap(self, module: nn.Module, name: str, function: Callable[..., Any]) -> None:
        original = getattr(module, name)
        self._set(module, name, functools.wraps(original)(functools.partial(function, original)))

    def _set(self, module: nn.Module, name: str, ours: Any) -> None:
        if any((module, name) == (there, what) for there, what, _, _ in self._installed):
            return  # still set, under another wrapper
        self._installed.append((module, name, ours, vars(module).get(name)))
        vars(module)[name] = ours

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A forward with grad and labels trains in any mode: some loops call `eval()` to turn off dropout.
        if not self.is_on or not torch.is_grad_enabled() or _labels(forward, args, kwargs) is None:
            return forward(*args, **kwargs)
        products = self._products = []
        try:
            outputs = forward(*args, **kwargs)
        finally:
            self._products = None
        if any(product.hidden is not None for product in products):
            raise LogitsNotMaterialized("a forward that does not give its logits to its loss_function")
        return outputs

    def _multiply(self, linear: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        if self._products is None or not torch.is_grad_enabled():
            return linear(hidden)
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        if dtype not in DTYPES:
            raise LogitsNotMaterialized(f"a head that computes in {str(dtype).removeprefix('torch.')}")
        product = Product(hidden, self.head, dtype)
        self._products.append(product)
        return product.logits()

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | float | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Takes the arguments of transformers' ForCausalLMLoss and computes the same loss."""
        if not isinstance(logits, Logits):
            given = dict(num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, shift_labels=shift_labels)
            return self._own_loss(logits, labels, vocab_size, **given, **kwargs)
        if logits.shape[-1] != vocab_size:
            raise LogitsNotMaterialized(f"a loss over {vocab_size} columns of {logits.shape[-1]}")
        targets = (
            nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
        )
        return logits.loss(targets, ignore_index=ignore_index, num_items=num_items_in_batch, chunk=self.chunk)


def _labels(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "labels" in kwargs or not args:
        return kwargs.get("labels")
    return inspect.signature(forward).bind_partial(*args).arguments.get("labels")


def _owner(model: nn.Module) -> Any:
    """The model that calls its loss_function: the base model of a PEFT model."""
    owner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not hasattr(type(owner), "loss_function") or not hasattr(owner, "get_output_embeddings"):
        raise ChunkedLossUnsupported(f"{type(owner).__name__} is no model of transformers")
    return owner


def _head(owner: Any) -> nn.Linear:
    head = owner.get_output_embeddings()
    if head is None:
        raise ChunkedLossUnsupported("it has no output embedding")
    # PEFT's wrappers are no Linear, and quantized heads have another forward.
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        raise ChunkedLossUnsupported(
            f"its output embedding is no plain Linear but a {type(head).__module__}.{type(head).__qualname__}"
        )
    return head


def _own_loss(owner: Any) -> Callable[..., Tensor]:
    loss: Callable[..., Tensor] = owner.loss_function
    if loss is not compat.transformers().ForCausalLMLoss:
        raise ChunkedLossUnsupported(f"its loss is {getattr(loss, '__name__', type(loss).__name__)}")
    return loss


def logit_steps(model: nn.Module, run: Callable[[], object]) -> tuple[LogitStep, ...]:
    """The operations between the model's head and its loss. `run` calls the model with labels. Raises
    ChunkedLossUnsupported.
    """
    patch = ChunkedLossPatch(model)
    found: list[Logits] = []

    def loss(logits: Tensor, *_: Any, **__: Any) -> Tensor:
        if isinstance(logits, Logits):
            found.append(logits)
        return torch.zeros(())

    patch._loss = loss  # type: ignore[method-assign]
    patch.attach()
    try:
        with torch.enable_grad():
            run()
    except LogitsNotMaterialized as no:
        if not found:
            raise ChunkedLossUnsupported(f"there is {no.use}") from no
    finally:
        patch.detach()
    if len(found) != 1 or found[0].shape[-1] != patch.head.out_features:
        raise ChunkedLossUnsupported("its loss does not take all logits of one call of the head")
    return found[0].steps


# Choosing.


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenLoss:
    """How the loss is computed under a plan: as text for the plan, and as a patch that the engine attaches."""

    text: str
    patch: ChunkedLossPatch | None = None
    in_chunks: bool = False

    @property
    def chunk(self) -> int:
        """Tokens per chunk; 0: the model computes its loss itself."""
        return self.patch.chunk if self.patch is not None and self.in_chunks else 0

    def attach(self) -> None:
        if self.patch is not None:
            self.patch.attach(on=self.in_chunks)

    def detach(self) -> None:
        if self.patch is not None:
            self.patch.detach()


def trace_with_loss(
    model: nn.Module,
    batch: Any,
    trace: Callable[[ChosenLoss], T],
    *,
    wanted: bool | None,
    is_custom: bool = False,
    before: ChosenLoss | None = None,
) -> tuple[T, ChosenLoss]:
    """Trace with a chunked loss if wanted and possible, else with the model's own loss.

    Args:
        batch: the largest one.
        trace: profiles the model. Takes how the loss is computed.
        wanted: None: if the batch is larger than a chunk and the model allows it. True: raise ChunkedLossUnsupported if
            it is impossible.
        is_custom: the loop computes the loss, and may read the logits.
        before: the earlier choice for this model. A chunked loss stays chunked.
    """
    chosen = choose_loss(model, batch, wanted=wanted, is_custom=is_custom, before=before)
    if not chosen.in_chunks:
        return trace(chosen), chosen
    chosen.attach()
    try:
        return trace(chosen), chosen
    except LogitsNotMaterialized as no:
        if wanted:
            raise ChunkedLossUnsupported(f"there is {no.use}") from no
        reason = no.use
    finally:
        chosen.detach()
    chosen = ChosenLoss(text=f"full logits: {reason}")
    return trace(chosen), chosen


def choose_loss(
    model: nn.Module, batch: Any, *, wanted: bool | None, is_custom: bool, before: ChosenLoss | None = None
) -> ChosenLoss:
    """The choice before a profiling run. The arguments are those of `trace_with_loss`."""
    if wanted is False:
        return ChosenLoss(text="full logits, as requested")
    if is_custom and not wanted:
        return ChosenLoss(text="full logits: the loop computes its own loss")
    try:
        patch = before.patch if before is not None and before.patch is not None else ChunkedLossPatch(model)
    except ChunkedLossUnsupported as no:
        if wanted:
            raise
        return ChosenLoss(text=f"full logits: {no.reason}")
    labels = batch.get("labels") if isinstance(batch, dict) else None
    tokens = labels.numel() if isinstance(labels, Tensor) else 0
    if wanted or tokens > patch.chunk or (before is not None and before.in_chunks):
        return ChosenLoss(text=f"in chunks of {patch.chunk} tokens", patch=patch, in_chunks=True)
    why = f"{tokens} tokens are no more than a chunk of {patch.chunk}" if tokens else "the batch has no labels"
    return ChosenLoss(text=f"full logits: {why}", patch=patch)
