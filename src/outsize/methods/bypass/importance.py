"""Importance of FFN channels, KV heads and experts, from what flows through the teacher's layers.

    importance = Importance(parts, "independent")
    for call, hidden, valid in batches:
        output = importance.run(call, hidden, valid)  # the teacher's layer
    scores = importance.scores()

Activations are seen where a matrix product reads an output projection, whether a module or a stack of experts does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outsize.base.errors import ModelUnsupported
from outsize.methods.bypass.axes import is_input, unit_of
from outsize.methods.bypass.matrices import matrix
from outsize.methods.bypass.parts import LayerParts
from outsize.methods.bypass.resizing import resizings
from outsize.model.stack import LayerCall, run

Method = Literal["independent", "iterative"]
"""Of FFN channels: each on its own, or in the order in which leaving them out changes the output least. `truncate` in a
run file needs no scores."""
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "addmm", "bmm", "baddbmm", "grouped_mm", "_grouped_mm")


@dataclass(frozen=True, slots=True)
class LayerImportance:
    """Scores of one layer, fp32 on the CPU; higher is more important. Keys are paths in the layer."""

    channels: Mapping[str, Tensor]
    """By FFN unit (a feed-forward network, or a stack of experts): (width,) or (experts, width)."""
    heads: Mapping[str, Tensor]
    """By attention module: (KV heads,)."""
    experts: Mapping[str, Tensor]
    """By feed-forward module: (experts,)."""

    def tensors(self) -> dict[str, Tensor]:
        """To save: `channels/PATH`, `heads/PATH`, `experts/PATH`."""
        found = {"channels": self.channels, "heads": self.heads, "experts": self.experts}
        return {f"{kind}/{path}": scores for kind, of in found.items() for path, scores in of.items()}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "LayerImportance":
        """From what `tensors()` gave."""
        found: dict[str, dict[str, Tensor]] = {"channels": {}, "heads": {}, "experts": {}}
        for name, scores in tensors.items():
            kind, _, path = name.partition("/")
            found[kind][path] = scores
        return cls(**found)


class Importance:
    """Accumulates the scores of one layer over batches, on the layer's device. Its weights are materialized.

    Padding does not count, but for the channels of experts, where tokens are no longer in their rows.
    """

    def __init__(self, parts: LayerParts, method: Method):
        self._parts = parts
        self._projections: list[_Projection] = []
        if (width := parts.axes.get("intermediate_size")) is not None:
            kind = _Gram if method == "iterative" else _MeanSize
            changes = resizings(parts, "ffn", {width: width.size // 2})
            for name, (dim, was, _) in changes.items():
                if is_input(parts.layer, name, changes):
                    weight = parts.layer.get_parameter(name)
                    self._projections.append(kind(unit_of(parts.layer, name), weight, dim, was))
        self._heads: _Heads | None = None
        if "num_key_value_heads" in parts.axes and parts.output is not None:
            self._heads = _Heads(parts)
        self._routers: list[_Router] = []
        """Matrices with a row for each expert. One of them makes logits; others are biases of experts."""
        if (experts := parts.axes.get("experts")) is not None:
            changes = resizings(parts, "ffn", {experts: experts.size - 1})
            weights = [parts.layer.state_dict(keep_vars=True)[name] for name in changes]
            per_token = parts.shape.experts_per_token or 1
            self._routers = [_Router(weight, per_token) for weight in weights if weight.dim() == 2]

    @torch.no_grad()
    def run(self, call: LayerCall, hidden: Tensor, valid: Tensor | None) -> Tensor:
        """The layer's output. Adds to the scores what its sub-blocks do with the tokens, (rows, tokens), that are
        valid.
        """
        watched: list[_Watched] = [*self._projections, *self._routers]
        watched += [self._heads] if self._heads is not None else []
        with _Watch(watched, None if valid is None else valid.flatten()):
            return run(self._parts.layer, call, hidden)

    def scores(self) -> LayerImportance:
        # Of a list of experts, some may have had no token.
        groups: list[Sequence[_Watched]] = [self._projections, self._routers, [self._heads] if self._heads else []]
        if any(group and not any(one.num_seen for one in group) for group in groups):
            raise ModelUnsupported(
                f"{self._parts.name}: no matrix product with its output projections or router was seen, so its "
                "channels, heads or experts cannot be ranked. Set importance: truncate."
            )
        subblocks, router = self._parts.subblocks, next((one for one in self._routers if one.num_seen), None)
        return LayerImportance(
            {one.path: one.scores().float().cpu() for one in self._projections},
            {} if self._heads is None else {subblocks["attention"].module: self._heads.scores().float().cpu()},
            {} if router is None else {subblocks["ffn"].module: router.scores().float().cpu()},
        )


class _Watched:
    """A matrix whose products are seen."""

    def __init__(self, weight: Tensor):
        self.weight, self.num_seen = weight, 0
        self._first, self._last = weight.data_ptr(), weight.data_ptr() + weight.nbytes

    def place_of(self, tensor: Tensor) -> int | None:
        """The byte at which a tensor begins in this matrix; None if it is no part of it."""
        start = tensor.data_ptr()
        is_part = self._first <= start < self._last and tensor.numel() <= self.weight.numel()
        return start - self._first if is_part and tensor.dtype == self.weight.dtype else None

    def add(self, rows: Tensor, weight: Tensor, place: int, offsets: Tensor | None, result: Tensor, valid: Any) -> bool:
        """`rows`: what was multiplied with `weight`, a part or all of the matrix that begins at `place`. Returns
        whether it counts.
        """
        raise NotImplementedError


class _Watch(TorchFunctionMode):
    def __init__(self, watched: list[_Watched], valid: Tensor | None):
        super().__init__()
        self._watched, self._valid = watched, valid

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _PRODUCTS:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.dim() > 1]
            for watched in self._watched:
                for i, weight in enumerate(tensors):
                    if (place := watched.place_of(weight)) is not None and len(tensors) > 1:
                        rows = tensors[i - 1 if i else 1]
                        watched.num_seen += watched.add(rows, weight, place, kwargs.get("offs"), result, self._valid)
                        break
        return result


class _Projection(_Watched):
    """The output projection of a feed-forward network, or those of a stack of experts."""

    def __init__(self, path: str, weight: Tensor, dim: int, width: int):
        super().__init__(weight)
        self.path, self._dim, self.width = path, dim, width
        self.num_experts = weight.shape[0] if weight.dim() == 3 else 1

    def by_channel(self) -> Tensor:
        """The weights as (experts, width, hidden) in fp32."""
        weight = self.weight.detach() if self.weight.dim() == 3 else self.weight.detach().unsqueeze(0)
        return weight.movedim(self._dim + (self.weight.dim() == 2), 1).float()

    def add(self, rows: Tensor, weight: Tensor, place: int, offsets: Tensor | None, result: Tensor, valid: Any) -> bool:
        if self.num_experts == 1 and self.weight.dim() == 2:
            self.count(0, _valid_rows(rows, valid))
        elif weight.dim() == 2:
            self.count(place // (self.weight.stride(0) * self.weight.element_size()), rows.reshape(-1, self.width))
        elif offsets is not None:
            start = 0
            for expert, end in enumerate(offsets.tolist()):
                self.count(expert, rows[start:end])
                start = end
        else:
            for expert, of_expert in enumerate(rows):
                self.count(expert, of_expert)
        return True

    def count(self, expert: int, rows: Tensor) -> None:
        raise NotImplementedError

    def by_expert(self) -> Tensor:
        """The scores, (experts, width)."""
        raise NotImplementedError

    def scores(self) -> Tensor:
        found = self.by_expert()
        return found if self.weight.dim() == 3 else found.squeeze(0)


class _MeanSize(_Projection):
    """Mean size of a channel's activation times the norm of its column."""

    def __init__(self, path: str, weight: Tensor, dim: int, width: int):
        super().__init__(path, weight, dim, width)
        self._sums = torch.zeros(self.num_experts, width, device=weight.device)
        self._counts = torch.zeros(self.num_experts, 1, device=weight.device)

    def count(self, expert: int, rows: Tensor) -> None:
        self._sums[expert] += rows.float().abs().sum(0)
        self._counts[expert] += len(rows)

    def by_expert(self) -> Tensor:
        return self._sums / self._counts.clamp(min=1) * self.by_channel().norm(dim=-1)


class _Gram(_Projection):
    """The place of a channel when channels are removed one by one, next always the one whose removal, on top of those
    before, changes the output least (mean squared error over tokens).

    With activations a and columns w, leaving out the channels R changes the output by the sum of a_j w_j. The mean of
    its squared norm is a sum over pairs of R of mean(a_i a_j) (w_i · w_j): nothing is run again.
    """

    def __init__(self, path: str, weight: Tensor, dim: int, width: int):
        super().__init__(path, weight, dim, width)
        self._products = torch.zeros(self.num_experts, width, width, device=weight.device)

    def count(self, expert: int, rows: Tensor) -> None:
        rows = rows.float()
        self._products[expert].addmm_(rows.T, rows)

    def by_expert(self) -> Tensor:
        columns = self.by_channel()
        orders = []
        for expert in range(self.num_experts):
            pairs = self._products[expert] * (columns[expert] @ columns[expert].T)
            # What removing each channel next would add; infinite for those that are gone.
            costs = pairs.diagonal().clone()
            order = torch.empty(self.width, device=costs.device)
            for place in range(self.width):
                gone = costs.argmin(keepdim=True)
                order.index_fill_(0, gone, place)
                costs += 2 * pairs.index_select(0, gone).squeeze(0)
                costs.index_fill_(0, gone, torch.inf)
            orders.append(order)
        return torch.stack(orders)


class _Heads(_Watched):
    """Mean norm of what a KV head's queries add to the output."""

    def __init__(self, parts: LayerParts):
        assert parts.output is not None
        module = parts.layer.get_submodule(parts.output)
        super().__init__(module.weight)  # type: ignore[arg-type]
        self._matrix, self._number = matrix(module), parts.axes["num_key_value_heads"].size
        self._sums = torch.zeros(self._number, device=self.weight.device)
        self._tokens = 0

    def add(self, rows: Tensor, weight: Tensor, place: int, offsets: Tensor | None, result: Tensor, valid: Any) -> bool:
        rows = _valid_rows(rows, valid)
        columns = self._matrix.detach().chunk(self._number, dim=1)
        for head, (part, own) in enumerate(zip(rows.chunk(self._number, dim=1), columns, strict=True)):
            self._sums[head] += (part @ own.T).float().norm(dim=-1).sum()
        self._tokens += len(rows)
        return True

    def scores(self) -> Tensor:
        return self._sums / max(self._tokens, 1)


class _Router(_Watched):
    """Mean probability that an expert is given, over the tokens that use it."""

    def __init__(self, weight: Tensor, per_token: int):
        super().__init__(weight)
        self._per_token = per_token
        self._sums = torch.zeros(len(weight), device=weight.device)
        self._tokens = 0

    def add(self, rows: Tensor, weight: Tensor, place: int, offsets: Tensor | None, result: Tensor, valid: Any) -> bool:
        if result.shape[-1] != len(self.weight):
            return False
        logits = _valid_rows(result, valid).float()
        top = logits.softmax(-1).topk(self._per_token, dim=-1)
        self._sums.index_add_(0, top.indices.flatten(), top.values.flatten())
        self._tokens += len(logits)
        return True

    def scores(self) -> Tensor:
        return self._sums / max(self._tokens, 1)


def _valid_rows(rows: Tensor, valid: Tensor | None) -> Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    return flat if valid is None else flat[valid.to(flat.device)]
