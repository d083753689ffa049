"""Runs modules that work token by token over tiles of a long row.

Such a module (an MLP, a norm) saves several times the size of its input. Over tiles it saves its input alone: backward
runs the module again tile by tile, and only one tile's activations exist at a time. Gradients of weights are summed
over the tiles in fp32, and one gradient per parameter leaves. Which modules qualify: activation/tokenwise.py.

The length of a tile is a setting, and a row is cut if it is longer than two tiles. Neither depends on a plan, so all
plans give the same bits.
"""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.recompute import RngAndAutocastState
from outsize.base.errors import EngineMisuse
from outsize.base.repeats import iterations
from outsize.compat import fake_tensor

Forward = Callable[[Tensor], Tensor]


def token_dim(x: Tensor) -> int:
    """The dimension of the tokens: the longest but the last, which is the width. q and k norms may get heads first."""
    return max(range(x.dim() - 1), key=lambda dim: x.shape[dim])


def is_long(x: Any, tile: int) -> bool:
    """Whether a module's input is cut into tiles."""
    return isinstance(x, Tensor) and x.dim() > 1 and x.is_floating_point() and x.shape[token_dim(x)] > 2 * tile


def has_hooks_inside(module: nn.Module) -> bool:
    """Whether a part of a module has forward hooks. They record outputs (of routers, for a loss) or change them, and
    would see tiles, without a graph.
    """
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
        if part is not module
    )


class Tiling:
    """Runs the named modules of a model over tiles while it is attached."""

    def __init__(self, model: nn.Module, tile: int, names: Collection[str]):
        self.tile = tile
        self._modules = [model.get_submodule(name) for name in names]
        self._installed: list[tuple[nn.Module, Any, Any]] = []
        """Module, our forward, the forward that was set on the instance before or None."""

    def attach(self) -> None:
        for module in self._modules:
            original = module.forward
            ours = functools.wraps(original)(functools.partial(self._forward, module, original))
            self._installed.append((module, ours, vars(module).get("forward")))
            vars(module)["forward"] = ours

    def detach(self) -> None:
        """A forward that other code has wrapped since stays inside that wrapper and cuts no more rows."""
        for module, ours, before in reversed(self._installed):
            if vars(module).get("forward") is not ours:
                continue
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before
        self._installed = []

    def _forward(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        is_cut = self._installed and len(args) == 1 and not kwargs and is_long(args[0], self.tile)
        if not is_cut or has_hooks_inside(module) or not self._is_tiled(module, forward, args[0]):
            return forward(*args, **kwargs)
        return run_in_tiles(module, forward, args[0], self.tile)

    def _is_tiled(self, module: nn.Module, forward: Forward, x: Tensor) -> bool:
        return True


def run_in_tiles(module: nn.Module, forward: Forward, x: Tensor, tile: int) -> Tensor:
    """`forward(x)`, tile by tile. `forward` is the module's."""
    work = _Tiles(module, forward, tile, token_dim(x))
    trained = [param for param in module.parameters() if param.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or trained):
        return work.forward(x)
    held: list[Any] = []
    # The input needs a node that saves it, also if only the weights have a gradient.
    hidden = _Held.apply(x, held, None if x.requires_grad else trained[0])
    out: Tensor = _Tiled.apply(work, held[0], trained, x.requires_grad, hidden, *trained)
    return out


class _Held(torch.autograd.Function):
    """Saves the input before the module runs. A layer that is recomputed stops here if it saves nothing after, so the
    module does not run in the recomputation, only in its own backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: list[Any], weight: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        held.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        return grad, None, None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, work: "_Tiles", held: Any, trained: list[nn.Parameter], needs_input: bool, x: Tensor, *_: Tensor
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.work, ctx.held, ctx.trained, ctx.needs_input = work, held, trained, needs_input
        ctx.state = RngAndAutocastState(x.device)
        return work.forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise EngineMisuse(
                "A second derivative (create_graph=True) of a module that runs over tiles is not supported. Set "
                "tile_tokens=0."
            )
        if grad is None:
            return (None,) * (5 + len(ctx.trained))
        (x,) = ctx.held.saved_tensors
        with ctx.state.restored_rng():
            grads = ctx.work.backward(x.detach(), grad, ctx.trained, ctx.state, needs_input=ctx.needs_input)
        return (None, None, None, None, *grads)


class _Tiles:
    """One call of a module over tiles."""

    def __init__(self, module: nn.Module, forward: Forward, tile: int, dim: int):
        self._module, self._run, self._tile, self._dim = module, forward, tile, dim

    def _cut(self, x: Tensor) -> Iterator[tuple[int, int]]:
        size, tile = x.shape[self._dim], self._tile
        for number in iterations(-(-size // tile), is_fake=isinstance(x, fake_tensor.FakeTensor)):
            yield number * tile, min(tile, size - number * tile)

    def _part(self, x: Tensor, place: tuple[int, int]) -> Tensor:
        return x.narrow(self._dim, *place).contiguous()  # modules call `view`

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor | None = None
        for place in self._cut(x):
            y = self._run(self._part(x, place))
            if out is None:
                shape = [*x.shape[:-1], y.shape[-1]]
                out = torch.empty_like(x, dtype=y.dtype) if shape == [*x.shape] else y.new_empty(shape)
            out.narrow(self._dim, *place).copy_(y)
            del y
        assert out is not None
        return out

    def backward(
        self, x: Tensor, grad: Tensor, trained: list[nn.Parameter], state: RngAndAutocastState, *, needs_input: bool
    ) -> list[Tensor | None]:
        """The gradients of the input and of each trained parameter. `state`: of the forward."""
        grad_x = torch.empty_like(x) if needs_input else None
        sums: list[Tensor | None] = [None] * len(trained)
        with torch.enable_grad(), exchanged(self._module, {param: _leaf(param) for param in trained}) as leaves:
            for place in self._cut(x):
                part = self._part(x, place).detach().requires_grad_(needs_input)
                # Around the forward alone, as for a whole row, and without the cache: it takes `part` for a weight.
                with state.restored_settings(caches=False):
                    y = self._run(part)
                wanted = [*([part] if needs_input else []), *leaves]
                found = _gradients(y, wanted, self._part(grad, place))
                del y
                if grad_x is not None:
                    one = found.pop(0)
                    target = grad_x.narrow(self._dim, *place)
                    target.zero_() if one is None else target.copy_(one)
                    del one
                _add_up(sums, found)
                del found, part, wanted
        del leaves
        result: list[Tensor | None] = [grad_x]
        for number, param in enumerate(trained):
            total, sums[number] = sums[number], None
            result.append(total if total is None else total.to(param.dtype))
        return result


def _gradients(y: Tensor, wanted: list[Tensor], grad: Tensor) -> list[Tensor | None]:
    if not y.requires_grad:  # no token of this tile reaches a trained part
        return [None] * len(wanted)
    return [*torch.autograd.grad(y, wanted, grad, allow_unused=True)]


def _add_up(sums: list[Tensor | None], grads: list[Tensor | None]) -> None:
    """Add gradients of one tile to the sums, and free each as it is added."""
    for number in range(len(grads)):
        grad, grads[number], total = grads[number], None, sums[number]
        if grad is None:
            continue
        if total is None:
            # A copy: autograd may return one tensor for two parameters.
            sums[number] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        else:
            total.add_(grad)


def _leaf(param: Tensor) -> Any:
    """A parameter in the same memory without the user's gradient hooks, which must run once and not for each tile."""
    leaf: Any = param.detach().requires_grad_()
    leaf._is_param = True  # isinstance(leaf, nn.Parameter), also of a fake tensor
    return leaf


@contextmanager
def exchanged(module: nn.Module, others: dict[Tensor, Any]) -> Iterator[list[Any]]:
    """Set other tensors in place of a module's parameters and buffers. Yields them in order."""
    by_id = {id(tensor): other for tensor, other in others.items()}
    tables: list[dict[str, Any]] = [table for part in module.modules() for table in (part._parameters, part._buffers)]
    places = [
        (table, name, tensor)
        for table in tables
        for name, tensor in table.items()
        if tensor is not None and id(tensor) in by_id
    ]
    try:
        for table, name, tensor in places:
            table[name] = by_id[id(tensor)]
        yield [*others.values()]
    finally:
        for table, name, tensor in places:
            table[name] = tensor
