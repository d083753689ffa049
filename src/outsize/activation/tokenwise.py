"""Finds the modules that may run over tiles (activation/tiles.py), without a list of model families.

Each submodule that is called with one long tensor in the discovery pass is tried on a few tokens, on the CPU with
made-up weights: the result is the same on every device and for fake tensors. The outermost modules that qualify are
tiled.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from outsize.activation.tiles import Forward, Tiling, exchanged, token_dim
from outsize.base.log import log
from outsize.compat import storage_id, without_dispatch_modes
from outsize.model.discover import Layer
from outsize.model.state import ModuleState, generators_of

_NUM_TOKENS = 6
_POISONED = 4
"""The token that is NaN: behind the first half of the tokens, which also run alone."""


class TileSearch(Tiling):
    """Decides, while it is attached, at the first long input of each module, and runs those that qualify over tiles."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], tile: int):
        self._key: dict[nn.Module, tuple[str, str]] = {}
        """By module: structure and path of a layer's part, or the path of a module outside of layers. Without Linears:
        they save their input alone, and the head may be one whose logits are not materialized."""
        self._path = {id(module): name for name, module in model.named_modules()}
        self._qualifies: dict[tuple[str, str], bool] = {}
        self._is_trying = False
        around = {path for layer in layers for path in _ancestors(layer.name)}
        for layer in layers:
            for name, part in layer.module.named_modules():
                if part is not layer.module and not isinstance(part, nn.Linear):
                    self._key.setdefault(part, (layer.structure, name))
        inside = {part for layer in layers for part in layer.module.modules()}
        for name, module in model.named_modules():
            if name and name not in around and module not in inside and not isinstance(module, nn.Linear):
                self._key[module] = ("", name)
        super().__init__(model, tile, [self._path[id(module)] for module in self._key])

    @property
    def names(self) -> tuple[str, ...]:
        """The modules that qualify, in all layers of the same structure."""
        found = {self._path[id(module)] for module, key in self._key.items() if self._qualifies.get(key)}
        return tuple(name for name in self._path.values() if name in found)

    def _is_tiled(self, module: nn.Module, forward: Forward, x: Tensor) -> bool:
        key = self._key[module]
        if key not in self._qualifies:
            if self._is_trying:  # a part of a module that is being tried, with a few tokens
                return False
            self._is_trying = True
            reason = why_not_tokenwise(module, forward, x)
            self._is_trying = False
            log.debug("%s: %s", self._path[id(module)], f"not tiled: {reason}" if reason else "tiled")
            self._qualifies[key] = not reason
        return self._qualifies[key]


def _ancestors(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:length]) for length in range(len(parts)))


def why_not_tokenwise(module: nn.Module, forward: Forward, x: Tensor) -> str:
    """Why a module is not run over tiles. "": it is, because each token's output and gradient depend on that token
    alone, and the module saves more than its input.

    `x`: its input, of which only shape and dtype are read.
    """
    if any(True for _ in generators_of(module)):
        return "it draws from a generator of its own"
    kind = x.device.type
    is_autocast, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    rng = torch.get_rng_state()
    try:
        with (
            without_dispatch_modes(),
            torch.device("cpu"),
            torch.autocast("cpu", enabled=is_autocast, dtype=dtype, cache_enabled=False),
            torch.enable_grad(),
            saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor),  # not those of the layer around it
            exchanged(module, _made_up(module)),
        ):
            before = ModuleState(module)
            try:
                found = _Trial(module, forward, x, is_exact=not is_autocast and x.dtype.itemsize >= 4).difference()
                written = before.changed()
            finally:
                before.restore()
            return found or (f"its forward writes {written}" if written else "")
    except Exception as error:  # any error of the module's code
        return f"it fails with {type(error).__name__}: {error}"
    finally:
        torch.set_rng_state(rng)


def _made_up(module: nn.Module) -> dict[Tensor, Tensor]:
    """Values for a module's parameters and buffers that need little memory: every row is the same, every expert too."""
    random = torch.Generator().manual_seed(0)

    def like(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.dim():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        row = torch.rand(tensor.shape[-1], generator=random) + 0.5
        row = row if tensor.dim() == 1 else row / len(row) ** 0.5
        value = row.to(tensor.dtype).expand(tensor.shape[-2:])
        # Grouped matrix products take no matrix without strides.
        return value if tensor.dim() < 3 else value.contiguous().expand(tensor.shape)

    made: dict[Tensor, Tensor] = {p: nn.Parameter(like(p), p.requires_grad) for p in module.parameters()}
    return made | {buffer: like(buffer).clone() for buffer in module.buffers()}


@dataclass(frozen=True, slots=True)
class _Run:
    x: Tensor
    y: Tensor
    grad: Tensor
    saved_bytes: int
    """Of tensors that autograd saved, without the input, parameters and buffers."""


class _Trial:
    def __init__(self, module: nn.Module, forward: Forward, x: Tensor, *, is_exact: bool):
        self._module, self._forward, self._tolerance = module, forward, 1e-4 if is_exact else 3e-2
        self._dim = token_dim(x)
        shape = [2, *x.shape[1:]]
        shape[self._dim] = _NUM_TOKENS
        self._random = torch.Generator().manual_seed(1)
        self._x = torch.randn(shape, generator=self._random).to(x.dtype)

    def difference(self) -> str:
        """What keeps the module from running over tiles, or ""."""
        before = torch.get_rng_state()
        whole = self._run(self._x)
        is_random = not torch.equal(before, torch.get_rng_state())
        if whole.y.shape[:-1] != whole.x.shape[:-1] or not whole.y.is_floating_point():
            return f"its output is {tuple(whole.y.shape)} for {tuple(whole.x.shape)}"
        if storage_id(whole.y.untyped_storage()) == storage_id(whole.x.untyped_storage()):
            return "its output is a view of its input"
        if outside := self._gradients_outside(whole):
            return outside
        half = self._run(self._half(self._x))
        if whole.saved_bytes - half.saved_bytes <= whole.x.nbytes - half.x.nbytes:
            return "it saves no more than its input"
        # One token is NaN: the others must be as without it. Dropout draws the same numbers again.
        torch.set_rng_state(before)
        place = (0,) * self._dim + (_POISONED,) + (0,) * (whole.x.dim() - self._dim - 2)
        poisoned = self._run(self._x.index_put([torch.tensor(i) for i in place], torch.tensor(torch.nan).to(self._x)))
        others = torch.ones(whole.x.shape[:-1], dtype=torch.bool).index_put(
            [torch.tensor(i) for i in place], torch.tensor(False)
        )
        if not self._is_near(poisoned.y[others], whole.y[others]):
            return "the output of a token depends on others"
        if not self._is_near(poisoned.grad[others], whole.grad[others]):
            return "the gradient of a token depends on others"
        # A part of the tokens alone: they must be as with the rest.
        with _eval_mode(self._module) if is_random else nullcontext():
            if is_random:
                whole, half = self._run(self._x), self._run(self._half(self._x))
        if not self._is_near(half.y, self._half(whole.y)) or not self._is_near(half.grad, self._half(whole.grad)):
            return "its output depends on the number of tokens"
        return ""

    def _half(self, tensor: Tensor) -> Tensor:
        return tensor.narrow(self._dim, 0, _NUM_TOKENS // 2)

    def _run(self, x: Tensor) -> _Run:
        x = x.clone().requires_grad_()
        static = {storage_id(t.untyped_storage()) for t in (x, *self._module.parameters(), *self._module.buffers())}
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return saved[-1]

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self._forward(x)
        if not isinstance(y, Tensor):
            raise TypeError(f"its output is a {type(y).__name__}")
        sizes = {storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in saved}
        weights = torch.linspace(0.5, 1.5, y.shape[-1]).to(y.dtype).expand_as(y)
        (grad,) = torch.autograd.grad(y, x, weights, retain_graph=True)
        return _Run(x, y, grad, sum(size for key, size in sizes.items() if key not in static))

    def _gradients_outside(self, run: _Run) -> str:
        """Whether gradients reach more than the input and the module's own parameters."""
        own = {id(t) for t in (run.x, *self._module.parameters())}
        todo, seen = [run.y.grad_fn], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in own:
                return "it reads other trained tensors than its own"
            todo += [following for following, _ in node.next_functions]
        return ""

    def _is_near(self, one: Tensor, two: Tensor) -> bool:
        one, two = one.double(), two.double()
        return bool((one - two).norm() <= self._tolerance * two.norm())  # False for NaN


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = [(part, part.training) for part in module.modules()]
    try:
        for part, _ in training:
            part.training = False
        yield
    finally:
        for part, was in training:
            part.training = was
