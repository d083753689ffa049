"""Unmaterialized logits: a tensor subclass that records the head's product and the operations on it before the loss.

It records what can be computed chunk by chunk: products with a number, tanh, casts, ranges of the last dimension.
Anything else raises, in the profiling run (the model then keeps its own loss) and in training.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import EngineMisuse
from outsize.compat import make_wrapper_subclass, parse_to, tree_leaves, without_torch_function
from outsize.loss.cross_entropy import LogitStep, cross_entropy
from outsize.loss.distillation import chunk_tokens as distillation_chunk
from outsize.loss.distillation import current_lesson, distillation

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of logits. Not fp16: their gradients are computed with the loss, before it is scaled, and would underflow."""
_FACTS = {
    "dim", "ndimension", "size", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__",
}  # fmt: skip
_PROPERTIES = {
    "shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_nested",
}  # fmt: skip


class LogitsNotMaterialized(EngineMisuse):
    """Logits were used while the loss is computed in chunks."""

    def __init__(self, use: str):
        super().__init__(
            f"Logits are not available in training with a chunked loss, and there is {use}. Pass chunked_loss=False to "
            "prepare (in YAML: chunked_loss: false), or read them in evaluation or under torch.no_grad()."
        )
        self.use = use


@dataclass(slots=True)
class Product:
    """A call of the output embedding."""

    hidden: Tensor | None
    """None after the loss is computed, so that a reference to the outputs does not keep activations."""
    head: nn.Linear
    dtype: torch.dtype
    """Dtype of the product; under autocast it is not the weight's."""

    def logits(self) -> "Logits":
        assert self.hidden is not None
        return Logits(self, self.hidden.device, self.hidden.shape[:-1], slice(0, self.head.out_features), self.dtype)


class Logits(Tensor):
    """Has the shape, dtype and device of the logits. Any use of values raises. Does not require grad."""

    _product: Product
    _columns: slice
    """The range of the vocabulary that indexing has selected."""
    _steps: tuple[LogitStep, ...]

    @staticmethod
    def __new__(
        cls,
        product: Product,
        device: torch.device,
        rows: torch.Size,
        columns: slice,
        dtype: torch.dtype,
        steps: tuple[LogitStep, ...] = (),
    ) -> "Logits":
        made: Logits = make_wrapper_subclass(cls, (*rows, columns.stop - columns.start), dtype=dtype, device=device)
        made._product, made._columns, made._steps = product, columns, steps
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Logits({tuple(self.shape)}, {self.dtype}: not materialized, the loss is chunked)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__get__":
            name = func.__self__.__name__
        if name in _FACTS or name in _PROPERTIES:
            with without_torch_function():
                return func(*args, **kwargs)
        me = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Logits))
        made = me._after(name, args[1:], kwargs) if args and args[0] is me else None
        if made is None:
            raise LogitsNotMaterialized(
                f"{name} {'after the loss' if me._product.hidden is None else 'between the head and the loss'}"
            )
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise LogitsNotMaterialized(f"{func} on the logits")

    def _after(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Logits | None":
        """The result of an operation on the logits; None if it cannot be computed chunk by chunk."""
        if name in ("mul", "div") and len(args) == 1 and isinstance(args[0], (int, float)) and not kwargs:
            return self._then((name, args[0]))  # type: ignore[arg-type]
        if name == "tanh" and not args and not kwargs:
            return self._then(("tanh", None))
        if name in ("float", "bfloat16") and not args and not kwargs:
            return self._cast(getattr(torch, name))
        if name == "to" and kwargs.keys() <= {"dtype", "device", "non_blocking"}:
            device, dtype, *_ = parse_to(*args, **kwargs)
            return self._cast(dtype or self.dtype) if device in (None, self.device) else None
        return self._narrowed(args[0]) if name == "__getitem__" else None

    def _then(self, *steps: LogitStep, dtype: torch.dtype | None = None, columns: slice | None = None) -> "Logits":
        return Logits(
            self._product,
            self.device,
            self.shape[:-1],
            columns or self._columns,
            dtype or self.dtype,
            (*self._steps, *steps),
        )

    def _cast(self, dtype: torch.dtype) -> "Logits | None":
        if dtype == self.dtype:
            return self
        return self._then(("to", dtype), dtype=dtype) if dtype in DTYPES else None

    def _narrowed(self, index: Any) -> "Logits | None":
        """The result of an index that selects a range of the last dimension and all of the others."""
        *others, last = index if isinstance(index, tuple) else (index,)
        is_last = len(others) == self.dim() - 1 or any(i is Ellipsis for i in others)
        if (
            not is_last
            or not isinstance(last, slice)
            or not all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in others)
        ):
            return None
        start, stop, stride = last.indices(self.shape[-1])
        if stride != 1 or stop <= start:
            return None
        # All steps are elementwise, so the range can be applied to the weight instead.
        first = self._columns.start
        return self._then(columns=slice(first + start, first + stop))

    def loss(self, targets: Tensor, *, ignore_index: int, num_items: Tensor | float | None, chunk: int) -> Tensor:
        """The loss for targets that are already shifted: cross-entropy, or of distillation within `teaching`. Can be
        computed only once.
        """
        product, hidden = self._product, self._product.hidden
        if hidden is None:
            raise LogitsNotMaterialized("a second loss of the same logits")
        if targets.numel() != self.shape[:-1].numel():
            raise ValueError(
                f"Expected one target for each of {self.shape[:-1].numel()} tokens, but there are {targets.numel()}"
            )
        product.hidden = None
        weight: Tensor = product.head.weight
        bias: Tensor | None = product.head.bias
        if self.shape[-1] != len(weight):
            weight, bias = weight[self._columns], bias if bias is None else bias[self._columns]
        # As autocast does; a no-op without it.
        hidden, weight, bias = (
            hidden.to(product.dtype),
            weight.to(product.dtype),
            bias if bias is None else bias.to(product.dtype),
        )
        hidden, targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(hidden.device)
        how: Any = dict(steps=self._steps, ignore_index=ignore_index, num_items=num_items)
        if (lesson := current_lesson()) is None:
            return cross_entropy(hidden, weight, bias, targets, chunk=chunk, **how)
        lesson.is_used = True
        seen = lesson.hidden.reshape(-1, lesson.hidden.shape[-1])
        how |= dict(mixture=lesson.mixture, chunk=min(chunk, distillation_chunk(len(weight))))
        return distillation(hidden, weight, bias, seen, lesson.head, targets, **how)

    @property
    def steps(self) -> tuple[LogitStep, ...]:
        """The operations on the product."""
        return self._steps
