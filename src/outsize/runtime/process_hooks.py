"""Process-wide hooks for what other libraries do to prepared parameters. Installed while an engine is attached.

- `torch.nn.utils.clip_grad_norm_` over all parameters of a prepared model is the engine's clipping. (A reference to
  torch's own function that was imported earlier works too, through `p.grad`, but reads and writes every gradient.)
- A backward that raises is rolled back.
- A step of another optimizer over prepared parameters is refused.
- A wrapper that replicates a prepared model (DDP, DataParallel) or compiles it is refused when it takes the model. FSDP
  fails at its first write to a parameter (access.py), fully_shard at the next forward, which finds other parameters in
  the model (store.py).
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from outsize.base.errors import EngineMisuse
from outsize.compat import without_torch_function
from outsize.runtime.optimizer import EngineOptimizer
from outsize.runtime.prepared_tensors import owner_of


class Clips(Protocol):
    """The part of an engine that clipping uses."""

    model: nn.Module
    optimizer: EngineOptimizer

    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...


_REFUSED = {
    "DistributedDataParallel": "outsize trains on one device: start one process, without a launcher.",
    "DataParallel": "outsize trains on one device: use the prepared model itself.",
    "OptimizedModule": "The schedule needs the model's own layers, which torch.compile replaces: use the prepared "
    "model without torch.compile.",
}
_engines: "weakref.WeakSet[Any]" = weakref.WeakSet()
_handles: list[Any] = []
_originals: dict[str, Callable[..., Any]] = {}
"""Functions of torch that ours replace, by name."""


def install(engine: Clips) -> None:
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_refuse_other_optimizers))
        _handles.append(register_module_module_registration_hook(_refuse_wrappers))
        _originals.update(clip_grad_norm_=nn.utils.clip_grad_norm_, backward=torch.autograd.backward)
        _put(nn.utils, "clip_grad_norm_", _clip_through_engine)
        _put(nn.utils.clip_grad, "clip_grad_norm_", _clip_through_engine)
        _put(torch.autograd, "backward", _backward)
    _engines.add(engine)


def uninstall(engine: Clips | None = None) -> None:
    """`engine`: None if one was garbage-collected."""
    if engine is not None:
        _engines.discard(engine)
    if not _engines and _handles:
        while _handles:
            _handles.pop().remove()
        for module, name, ours in (
            (nn.utils, "clip_grad_norm_", _clip_through_engine),
            (nn.utils.clip_grad, "clip_grad_norm_", _clip_through_engine),
            (torch.autograd, "backward", _backward),
        ):
            if getattr(module, name) is ours:  # else another library has wrapped it since
                _put(module, name, _originals[name])


def _put(module: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(module, name, function)


def attached_engines() -> list[Any]:
    """Engines of this process that are attached to a model."""
    return list(_engines)


def _backward(*args: Any, **kwargs: Any) -> Any:
    """torch.autograd.backward. No hook runs when a backward raises, so its exception is caught here."""
    try:
        return _originals["backward"](*args, **kwargs)
    except BaseException:
        for engine in attached_engines():
            engine.backward_failed()
        raise


def _clip_through_engine(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, by the engine if the parameters are all that one engine trains."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    engine = _engine_of_all(params) if float(norm_type) == 2.0 else None
    if engine is None:
        return _originals["clip_grad_norm_"](params, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = engine.clip_grad_norm_(float(max_norm))
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(
            f"The total norm of order 2.0 for gradients from `parameters` is non-finite ({float(norm)}), so it cannot "
            "be clipped."
        )
    return norm


def _engine_of_all(params: list[Tensor]) -> Clips | None:
    """The engine whose trainable parameters these are, all of them and no others that are trained."""
    with without_torch_function():
        given = {id(p) for p in params if p.requires_grad}
    for engine in _engines:
        mine = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
        if given and given == mine:
            found: Clips = engine
            return found
    return None


def _refuse_other_optimizers(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer, EngineOptimizer):
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (owner := owner_of(param)) is not None:
                raise EngineMisuse(
                    f"{type(optimizer).__name__}.step: it holds {owner[1]} of a prepared model, whose weights and "
                    "gradients are the engine's. Use "
                    "engine.optimizer (prepare(optimizer=...) sets its hyperparameters), or call engine.detach() first."
                )


def _refuse_wrappers(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    kinds = [
        kind for kind in type(parent).__mro__ if kind.__module__.startswith("torch.") and kind.__name__ in _REFUSED
    ]
    if kinds and module is not None and any(owner_of(param) is not None for param in module.parameters()):
        raise EngineMisuse(f"{kinds[0].__name__}: it was given a prepared model. {_REFUSED[kinds[0].__name__]}")
