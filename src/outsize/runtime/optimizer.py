"""EngineOptimizer: the torch optimizer that `prepare` makes from an `OptimizerSpec` (optim/spec.py).

It is a `torch.optim.Optimizer` with live param_groups, so schedulers work. Its state dict has torch's layout, integer
keys and `param_names`. The engine holds the state; the optimizer's tensors are views of it.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.layout.coordinates import COORDINATES
from outsize.optim.rule import UpdateRule
from outsize.optim.spec import OptimizerSpec

_CONSTANTS = "constants"
"""Key of a state dict: hashes of the initial values and constants of weights that are trained in coordinates."""


class _ParamState(dict[str, Tensor]):
    """The state of one parameter. Its tensors are views of the engine's memory; assigned entries are copied into it."""

    def __init__(self, state: dict[str, Tensor], load: Callable[[dict[str, Tensor]], None]):
        super().__init__(state)
        self._load = load

    def __setitem__(self, key: str, value: Tensor) -> None:
        super().__setitem__(key, value)
        self._load(self)


class _State(MutableMapping[nn.Parameter, dict[str, Tensor]]):
    """`optimizer.state`: the engine's state by parameter. As in torch, only updated parameters have an entry."""

    def __init__(self, optimizer: "EngineOptimizer"):
        self._optimizer = weakref.proxy(optimizer)

    def __getitem__(self, param: nn.Parameter) -> dict[str, Tensor]:
        name = self._optimizer.name_of(param)
        state = self._optimizer.state_of(name)
        return _ParamState(
            state if float(state["step"]) else {}, lambda changed: self._optimizer.load_state_of(name, changed)
        )

    def __setitem__(self, param: nn.Parameter, state: dict[str, Tensor]) -> None:
        self._optimizer.load_state_of(
            self._optimizer.name_of(param), {"step": torch.tensor(0.0), **state}
        )  # {}: as never updated

    def __delitem__(self, param: nn.Parameter) -> None:
        raise ConfigError(
            "optimizer.state: an entry was deleted, but the engine holds the state. Load a state dict to reset it."
        )

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (p for group in self._optimizer.param_groups for p in group["params"] if self[p])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, param: object) -> bool:
        return any(param is p for p in self)


class OwnsState(Protocol):
    """The part of an engine that its optimizer uses."""

    def step(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def optimizer_state(self, name: str) -> dict[str, Tensor]: ...
    def load_optimizer_state(self, name: str, state: dict[str, Tensor]) -> None: ...
    def updated_shape(self, name: str) -> tuple[int, ...]: ...
    def constant_hashes(self) -> dict[str, list[str]]: ...
    def merge_loaded(self) -> None: ...
    def state_was_loaded(self) -> None: ...
    def name_of(self, param: nn.Parameter) -> str | None: ...


class EngineOptimizer(torch.optim.Optimizer):
    def __init__(self, engine: OwnsState, groups: list[dict[str, Any]], spec: OptimizerSpec):
        self._engine, self.spec, self._num_own = engine, spec, len(groups)
        super().__init__(groups, spec.defaults)
        self._name_of = {
            id(p): name
            for group in self.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
        }
        self._state = _State(self)

    @property
    def rule(self) -> UpdateRule:
        return self.spec.rule

    @property
    def names(self) -> list[str]:
        return [name for group in self.param_groups for name in group["param_names"]]

    @property
    def state(self) -> Any:
        return self._state

    @state.setter
    def state(self, value: Any) -> None:
        if hasattr(self, "_closed"):
            raise ConfigError(
                "optimizer.state: it was replaced, but the engine holds the state. Load a state dict, or assign to "
                "its entries."
            )

    def __deepcopy__(self, memo: Any) -> Any:
        raise ConfigError(
            "engine.optimizer: it cannot be copied, since the engine holds its state. Copy its state_dict()."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "engine.optimizer: it cannot be pickled, since the engine holds its state. Save its state_dict()."
        )

    def name_of(self, param: nn.Parameter) -> str:
        if id(param) not in self._name_of:
            raise KeyError("this parameter is not one that the engine's optimizer trains")
        return self._name_of[id(param)]

    def state_of(self, name: str) -> dict[str, Tensor]:
        return self._engine.optimizer_state(name)

    def load_state_of(self, name: str, state: dict[str, Tensor]) -> None:
        """A state without coordinates leaves them, and so the weight, as they are."""
        own = self.state_of(name)
        self._engine.load_optimizer_state(name, {key: own[key] for key in (COORDINATES,) if key in own} | state)
        self._engine.merge_loaded()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._engine.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._engine.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """After prepare: a group of parameters that were frozen. The plan is made again before the next training
        forward.
        """
        if hasattr(self, "_closed"):
            param_group = {**param_group, "params": self._named(param_group["params"])}
            self._name_of |= {id(param): name for name, param in param_group["params"]}
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("param_names", [])  # torch leaves it out of an empty group

    def _named(self, params: Any) -> list[tuple[str, nn.Parameter]]:
        named: list[tuple[str, nn.Parameter]] = []
        for item in [params] if isinstance(params, Tensor) else list(params):
            param: Any = item if isinstance(item, Tensor) else item[1]
            if (name := self._engine.name_of(param)) is None:
                raise ConfigError(
                    "add_param_group: one of the parameters is not the prepared model's. Call engine.detach() and "
                    "prepare the model again."
                )
            if id(param) in self._name_of:
                raise ConfigError(
                    f"add_param_group: {name} is in a group already. "
                    "Name the groups in prepare: optimizer=...(groups=[...])."
                )
            named.append((name, param))
        return named

    def join_groups(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Parameters that were frozen and require grad now join the groups that the spec has for them. `named`: all
        parameters, all trained ones with grad.
        """
        added = {name for group in self.param_groups[self._num_own :] for name in group["param_names"]}
        groups = [
            group["params"]
            for group in self.spec.param_groups((name, param) for name, param in named if name not in added)
        ]
        if len(groups) > self._num_own:
            raise ConfigError(
                f"{groups[-1][0][0]}: it was frozen when the model was prepared, and no group of "
                "the optimizer (groups=...) has it. "
                "Name it in one of the groups, or give it to engine.optimizer.add_param_group(...)."
            )
        for group, members in zip(self.param_groups, groups, strict=False):
            group["param_names"], group["params"] = [name for name, _ in members], [param for _, param in members]
            self._name_of |= {id(param): name for name, param in members}

    def close_groups(self) -> None:
        self._closed = True

    def state_dict(self) -> dict[str, Any]:
        """In torch's layout. The tensors are views of the engine's memory: clone them to keep values over a step."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        result = self._state_dict()
        for after in self._optimizer_state_dict_post_hooks.values():
            result = result if (changed := after(self, result)) is None else changed
        return result

    def _state_dict(self) -> dict[str, Any]:
        groups, number = [], 0
        state: dict[int, dict[str, Tensor]] = {}
        for group in self.param_groups:
            names = group["param_names"]
            groups.append(
                {
                    **{k: v for k, v in group.items() if k != "params"},
                    "params": list(range(number, number + len(names))),
                }
            )
            for name in names:
                views = self._engine.optimizer_state(name)
                if float(views["step"]) or (COORDINATES in views and bool(views[COORDINATES].any())):
                    state[number] = views
                number += 1
        constants = self._engine.constant_hashes()
        return {"state": state, "param_groups": groups, **({_CONSTANTS: constants} if constants else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy a state dict into the engine's memory, by `param_names` if it has them, else by position."""
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = state_dict if (changed := before(self, state_dict)) is None else changed
        self._load_state_dict(state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        theirs = [name for group in state_dict["param_groups"] for name in group.get("param_names", ())]
        sizes = [len(group["params"]) for group in state_dict["param_groups"]]
        if sizes != [len(group["params"]) for group in self.param_groups] or (
            theirs and sorted(theirs) != sorted(self.names)
        ):
            mine = f"{len(self.names)} parameters in {len(self.param_groups)} groups"
            raise ConfigError(
                f"state_dict: it has {sum(sizes)} parameters in {len(sizes)} groups, and the optimizer has {mine}; "
                "number, group sizes and names must be the same. Prepare with the model and groups it was saved from."
            )
        if (theirs_constants := state_dict.get(_CONSTANTS, {})) != (constants := self._engine.constant_hashes()):
            changed = sorted(k for k in theirs_constants | constants if theirs_constants.get(k) != constants.get(k))
            raise ConfigError(
                f"state_dict: {changed[0]} and {len(changed) - 1} more parameters had other initial values or bases "
                "there, or other coordinates. Prepare the model with the weights and the method that the run began "
                "with; engine.load() of a checkpoint takes its bases too."
            )
        shapes = {name: self._engine.updated_shape(name) for name in self.names}
        for number, name in enumerate(theirs or self.names):
            for key, value in state_dict["state"].get(number, {}).items():
                if key != "step" and value.shape != shapes[name]:
                    raise ConfigError(
                        f"state_dict: {key} of {name} has the shape {tuple(value.shape)}, and the parameter has "
                        f"{tuple(shapes[name])}. Prepare with the model it was saved from."
                    )
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k not in ("params", "param_names")})
        order = theirs or self.names
        empty = {"step": torch.tensor(0.0)}
        for number, name in enumerate(order):
            self._engine.load_optimizer_state(name, state_dict["state"].get(number, empty))
        self._engine.merge_loaded()
        self._engine.state_was_loaded()
