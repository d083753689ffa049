"""Sub-blocks: the halves of a layer that are pruned and trained on their own. One mixes tokens (attention, Mamba), the
other is a feed-forward network or experts. The norm in front belongs to the sub-block.

They are found by running the layer: a sub-block is a module with matrices that takes and returns hidden states; the
norm is the module whose output is its input, if nothing else reads that.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outsize.base.errors import ModelUnsupported
from outsize.model.stack import LayerCall, first_tensor, run

Kind = Literal["attention", "mixer", "ffn"]
"""`mixer`: mixes tokens in another way than attention (Mamba, a gated delta rule)."""
Learn = Literal["attention", "mixer", "ffn", "block"]
"""What a student is trained on: the output of a sub-block, or what the whole layer adds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SubBlock:
    kind: Kind
    module: str
    """Path in the layer."""
    norm: str | None
    """Path of the norm whose output is the module's input. None: there is none, or something else reads its output too;
    then it is not trained.
    """
    num_outputs: int = 0
    """Items of the tuple that the module returns; 0 if it returns a tensor."""


@dataclass(frozen=True, slots=True)
class SubBlockRun:
    """What the teacher's forward gave a sub-block (or the whole layer), and the output that a student is compared
    with."""

    input: Tensor
    """Input of the norm; of the module if the norm is not trained."""
    call: LayerCall
    """The other arguments of the module."""
    target: Tensor
    """The module's output, before the residual is added. Of the whole layer: what it adds to its input, in fp32."""

    def of_channels(self, channels: Tensor | None) -> "SubBlockRun":
        """The same with these residual channels alone; None: all."""
        if channels is None:
            return self
        return SubBlockRun(self.input.index_select(-1, channels), self.call, self.target.index_select(-1, channels))


@torch.no_grad()
def find_subblocks(
    layer: nn.Module, call: LayerCall, hidden: Tensor, overrides: Mapping[str, str] | None = None
) -> dict[Kind, SubBlock]:
    """The sub-blocks of a layer, found by running it on the hidden states of a batch, with at least two tokens a row.

    Modules that also take the residual (Bloom), or that are two of a kind, are none: train such a layer as a whole.
    `overrides` (`prune.subblocks`): paths in the layer, as `attention`, `ffn`, `attention_norm` and `ffn_norm`, where
    the layer has them.
    """
    overrides = {role: path for role, path in (overrides or {}).items() if _has(layer, path)}
    seen = _observe(layer, call, hidden)
    candidates = [path for path in seen if _is_candidate(layer.get_submodule(path), seen[path], hidden)]
    outermost = [path for path in candidates if not any(path.startswith(f"{other}.") for other in candidates)]
    found: dict[Kind, SubBlock] = {}
    mixing = {path: _mixes_tokens(layer.get_submodule(path), seen[path]) for path in outermost}
    for role in ("attention", "ffn"):
        paths = [path for path in outermost if mixing[path] == (role == "attention")]
        if role in overrides and overrides[role] in seen:
            paths = [overrides[role]]
        if len(paths) != 1:
            continue
        (path,) = paths
        norm = overrides.get(f"{role}_norm") or _norm_of(layer, call, hidden, path, seen)
        kind = _kind_of_mixer(layer.get_submodule(path)) if role == "attention" else "ffn"
        output = seen[path].output
        found[kind] = SubBlock(
            kind=kind, module=path, norm=norm, num_outputs=0 if isinstance(output, Tensor) else len(output)
        )
    return found


@torch.no_grad()
def record(
    layer: nn.Module, subblocks: Mapping[Kind, SubBlock], learn: Collection[str], call: LayerCall, hidden: Tensor
) -> tuple[Tensor, dict[str, SubBlockRun]]:
    """Run a teacher's layer. Returns its output, and the runs that students of `learn` need: of its sub-blocks by kind,
    and `block`.
    """
    wanted = [subblock for kind, subblock in subblocks.items() if kind in learn]
    recorders = {subblock.kind: _Recorder(layer, subblock, hidden) for subblock in wanted}
    with ExitStack() as stack:
        for recorder in recorders.values():
            stack.enter_context(recorder.listening())
        output = run(layer, call, hidden)
    runs: dict[str, SubBlockRun] = {kind: recorder.run() for kind, recorder in recorders.items()}
    if "block" in learn:
        runs["block"] = SubBlockRun(hidden, call, output.float() - hidden.float())
    return output, runs


class _Recorder:
    """Keeps what one sub-block is given and returns in a forward of its layer."""

    def __init__(self, layer: nn.Module, subblock: SubBlock, hidden: Tensor):
        self._subblock, self._shape = subblock, hidden.shape
        self._module = layer.get_submodule(subblock.module)
        self._norm = layer.get_submodule(subblock.norm) if subblock.norm is not None else None
        self._input: Tensor | None = None
        self._call: LayerCall | None = None
        self._target: Tensor | None = None
        self._version = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        handles = [
            self._module.register_forward_pre_hook(self._before, with_kwargs=True),
            self._module.register_forward_hook(self._after),
        ]
        if self._norm is not None:
            handles.append(self._norm.register_forward_pre_hook(self._before_norm, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before_norm(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input = self._keep(args[0] if args else next(iter(kwargs.values())))

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        places = _places(args, kwargs, self._shape)
        if self._call is not None or not places:
            raise ModelUnsupported(
                f"{self._subblock.module}: it does not run once, on a hidden state. Name the sub-blocks of a "
                "layer with subblocks, or train whole layers with learn: block."
            )
        at, given = places[0]
        self._call = LayerCall.of(args, kwargs, at)
        if self._norm is None:
            self._input = self._keep(given)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._target = first_tensor(output).reshape(self._shape).clone()  # some layers add to it in place

    def _keep(self, tensor: Tensor) -> Tensor:
        self._version = tensor._version
        return tensor

    def run(self) -> SubBlockRun:
        assert self._input is not None and self._call is not None and self._target is not None, self._subblock
        if self._input._version != self._version:
            raise ModelUnsupported(
                f"{self._subblock.module}: the layer writes into its input afterwards, so it cannot be trained on "
                "its own. Train whole layers with learn: block."
            )
        return SubBlockRun(self._input, self._call, self._target)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A module's call in a forward of its layer."""

    places: list[tuple[int | str, Tensor]]
    """The arguments that may be hidden states, and where they are."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


def _observe(layer: nn.Module, call: LayerCall, hidden: Tensor) -> dict[str, _Seen]:
    """The calls of the modules in a layer, of those that run once."""
    seen: dict[str, list[_Seen]] = {}

    def after(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen.setdefault(path, []).append(_Seen(_places(args, kwargs, hidden.shape), args, kwargs, output))

    handles = [
        module.register_forward_hook(partial(after, path), with_kwargs=True)
        for path, module in layer.named_modules()
        if path
    ]
    try:
        run(layer, call, hidden)
    finally:
        for handle in handles:
            handle.remove()
    return {path: calls[0] for path, calls in seen.items() if len(calls) == 1}


def _places(args: tuple[Any, ...], kwargs: dict[str, Any], shape: torch.Size) -> list[tuple[int | str, Tensor]]:
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [
        (at, value)
        for at, value in given
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape
    ]


def _is_candidate(module: nn.Module, seen: _Seen, hidden: Tensor) -> bool:
    """Whether it takes one hidden state, returns one, and has two matrices or more."""
    try:
        output = first_tensor(seen.output)
    except (AssertionError, StopIteration, TypeError):
        return False
    matrices = sum(param.dim() > 1 for param in module.parameters())
    returns_hidden = output.numel() == hidden.numel() and output.shape[-1] == hidden.shape[-1]
    return len(seen.places) == 1 and returns_hidden and matrices > 1


_LAST, _EVEN, _ODD = slice(-1, None), slice(0, None, 2), slice(1, None, 2)


def _mixes_tokens(module: nn.Module, seen: _Seen) -> bool:
    """Whether outputs depend on other tokens by more than rounding. The last token of a row sees the most others, but
    none if it is padding or begins a document of a packed row; then its neighbours show it.
    """
    ((at, given),) = seen.places
    call = LayerCall.of(seen.args, seen.kwargs, at)

    def output(x: Tensor) -> Tensor:
        return run(module, call, x).reshape(x.shape).float()

    before = output(given)
    for kept in (_LAST, _EVEN, _ODD):
        others_changed = given * -8
        others_changed[:, kept] = given[:, kept]
        change = output(others_changed)[:, kept] - before[:, kept]
        if change.norm() > 0.02 * before[:, kept].norm():
            return True
    return False


def _norm_of(layer: nn.Module, call: LayerCall, hidden: Tensor, path: str, seen: Mapping[str, _Seen]) -> str | None:
    """The module whose output is the sub-block's input, if only the sub-block reads it."""
    if not (places := seen[path].places):
        return None
    given = places[0][1]
    for name, one in seen.items():
        weights = list(layer.get_submodule(name).parameters())
        makes_it = isinstance(one.output, Tensor) and one.output.data_ptr() == given.data_ptr()
        if makes_it and weights and all(param.dim() < 2 for param in weights) and one.output.numel() == given.numel():
            return name if _feeds_only(layer, call, hidden, name, path) else None
    return None


def _feeds_only(layer: nn.Module, call: LayerCall, hidden: Tensor, norm: str, path: str) -> bool:
    """Whether the layer returns the same with another output of the norm, if the sub-block's is zero both times."""

    def zeros(module: nn.Module, args: Any, output: Any) -> Any:
        made = torch.zeros_like(first_tensor(output))
        return made if isinstance(output, Tensor) else type(output)((made, *tuple(output)[1:]))

    handle = layer.get_submodule(path).register_forward_hook(zeros)
    try:
        before = run(layer, call, hidden)
        other = layer.get_submodule(norm).register_forward_hook(lambda module, args, output: output * 2)
        try:
            return torch.equal(before, run(layer, call, hidden))
        finally:
            other.remove()
    finally:
        handle.remove()


def _kind_of_mixer(module: nn.Module) -> Kind:
    name = type(module).__name__.lower()
    return "attention" if "attention" in name or "attn" in name else "mixer"


def _has(layer: nn.Module, path: str) -> bool:
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True
