"""Patches: methods of a prepared model that save, load, copy or move it. Each goes through the engine or is refused.

Slots hold bytes of other layers, so the model's own methods would read and write wrong weights without an error. All
patches are instance attributes and hooks, which `undo` removes; names and the module tree never change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.errors import EngineMisuse
from outsize.model.caches import turn_caches_off, turn_caches_on
from outsize.model.parts import own_parts, turn_repacking_off, turn_repacking_on
from outsize.runtime.store import Store


class Patches:
    def __init__(
        self,
        model: nn.Module,
        store: Store,
        *,
        drain: Callable[[], None],
        export: Callable[[str], Tensor],
        zero_grad: Callable[[bool], None],
    ):
        self._model, self._store, self._drain, self._export = model, store, drain, export
        self._handles: list[Any] = []
        self._attributes: list[tuple[nn.Module, str]] = []
        names = {id(p): name for name, p in store.params.items()}
        for path, module in model.named_modules():
            self._set(module, "__deepcopy__", _refuse("deepcopy", path))
            self._set(module, "__reduce_ex__", _refuse("pickle", path))
            self._set(module, "_apply", _keeps_place(module, path))
            self._set(module, "compile", _refuse_compile)
            # An adapter writes into its base by `.data`.
            if hasattr(type(module), "merge") and hasattr(type(module), "unmerge"):
                self._set(module, "merge", _refuse("merge", path))
                self._set(module, "unmerge", _refuse("unmerge", path))
            owned = {key: names[id(part)] for key, part in own_parts(module)}
            if owned:
                self._handles.append(module.register_state_dict_post_hook(self._reads(owned)))
                self._handles.append(module.register_load_state_dict_pre_hook(_refuse_assign))
        self._set(model, "zero_grad", lambda set_to_none=True: zero_grad(set_to_none))
        self._cached = turn_caches_off(model)
        self._repacking = turn_repacking_off(model)

    @contextmanager
    def caches_as_given(self) -> Iterator[None]:
        """Restore the user's `use_cache`, for writing the config."""
        turn_caches_on(self._cached)
        try:
            yield
        finally:
            turn_caches_off(self._model)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        module.__dict__[name] = value
        self._attributes.append((module, name))

    def undo(self) -> None:
        for handle in self._handles:
            handle.remove()
        for module, name in self._attributes:
            module.__dict__.pop(name, None)
        turn_caches_on(self._cached)
        turn_repacking_on(self._repacking)

    def _reads(self, owned: dict[str, str]) -> Callable[..., None]:
        def hook(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            self._drain()
            for key, name in owned.items():
                if prefix + key in state:  # bitsandbytes writes some parts in another form
                    state[prefix + key] = self._export(name)

        return hook


def _refuse_compile(*_: Any, **__: Any) -> None:
    raise EngineMisuse(
        "compile: the schedule needs the model's own layers, which torch.compile replaces. Use the prepared model "
        "without torch.compile."
    )


def _refuse_assign(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Values are copied with `param.copy_`, which writes the home (access.py)."""
    if metadata.get("assign_to_params_buffers"):
        raise EngineMisuse("load_state_dict(assign=True): a prepared model keeps its own memory. Leave assign out.")


def _refuse(what: str, path: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise EngineMisuse(
            f"{what}: {path or 'the model'} is prepared, so its tensors may hold weights of other layers. Call "
            "engine.detach() first, or save with save_pretrained or state_dict, which read the right values."
        )

    return refuse


def _keeps_place(module: nn.Module, path: str) -> Callable[..., nn.Module]:
    """`.to`, `.cuda`, `.half`, …: allowed if they change nothing."""

    def apply(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            probe = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            result = fn(probe)
            if result.dtype != probe.dtype or result.device != probe.device:
                raise EngineMisuse(
                    f"{path or 'the model'}: a prepared model cannot be moved or converted to {result.device}, "
                    f"{result.dtype} ({name} is {tensor.device}, {tensor.dtype}). Prepare it with the device and dtype "
                    "you want, or call engine.detach() first."
                )
        return module

    return apply
