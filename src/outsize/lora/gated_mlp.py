"""Finds modules that compute down(activation(gate(x)) · up(x)), without names and without a table of model families.

The module's own forward runs on a few made-up tokens, with small linear layers in place of its three projections. A
formula fits if it gives the same result, in training and in eval mode.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outsize.compat import without_dispatch_modes
from outsize.lora.functions import ACTIVATIONS

_TOKENS = 12
_TOLERANCE = 1e-5
"""Relative, per token. The two forms of GELU differ by more; a module that computes in fp32 inside by less."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    gate: str
    """Names of the module's children."""
    up: str
    down: str
    activation: str
    """In ACTIVATIONS."""
    up_first: bool
    """The forward runs up before gate."""


def recognize(module: nn.Module, projections: Sequence[str]) -> GatedMLP | None:
    """Which formula of a gated MLP the module computes. `projections`: its three linear children, with `in_features`
    and `out_features`.
    """
    if len(projections) != 3 or "forward" in vars(module):
        return None
    children: list[Any] = [module.get_submodule(name) for name in projections]
    widths = {child.in_features for child in children} | {child.out_features for child in children}
    if len(widths) > 2:
        return None
    small = {width: 3 + 2 * number for number, width in enumerate(sorted(widths))}
    calls: list[str] = []
    random = torch.Generator().manual_seed(0)
    before, modes = _state(module), {part: part.training for part in module.modules()}
    rng = torch.get_rng_state()
    fitting: list[set[tuple[str, str, str, str]]] = []
    try:
        with _on_cpu():
            layers = {
                name: _Small(small[child.in_features], small[child.out_features], name, calls, random)
                for name, child in zip(projections, children, strict=True)
            }
        with _on_cpu(), _exchanged(module, layers):
            for mode in (True, False):
                module.train(mode)
                fitting.append(set(_fitting(module, layers, calls, random)))
    except Exception:  # any error of the module's code
        return None
    finally:
        for part, mode in modes.items():
            part.training = mode
        is_random = not torch.equal(rng, torch.get_rng_state())
        torch.set_rng_state(rng)
    found = set.intersection(*fitting)
    if is_random or len(found) != 1 or _state(module) != before:
        return None
    if sorted(calls[:3]) != sorted(projections) or calls[:3] != calls[3:]:
        return None
    ((gate, up, down, activation),) = found
    return GatedMLP(gate, up, down, activation, calls.index(up) < calls.index(gate))


def _state(module: nn.Module) -> list[Any]:
    """What a forward may write: attributes, containers in them, and buffers."""
    return [
        (
            name,
            id(value),
            value._version if isinstance(value, Tensor) else len(value) if isinstance(value, list | dict) else 0,
        )
        for part in module.modules()
        for name, value in (*vars(part).items(), *part._buffers.items())
    ]


class _Small(nn.Module):
    """A linear layer without a gradient that records its calls."""

    def __init__(self, inputs: int, outputs: int, name: str, calls: list[str], random: torch.Generator):
        super().__init__()
        self.in_features, self.out_features = inputs, outputs
        self.weight = torch.randn(outputs, inputs, dtype=torch.float64, generator=random)
        self.bias = torch.randn(outputs, dtype=torch.float64, generator=random)
        self._name, self._calls = name, calls

    def forward(self, x: Tensor) -> Tensor:
        self._calls.append(self._name)
        return nn.functional.linear(x, self.weight, self.bias)


def _fitting(
    module: nn.Module, layers: dict[str, _Small], calls: list[str], random: torch.Generator
) -> Iterator[tuple[str, str, str, str]]:
    """Names of gate, up and down, and the activation, of every formula with the module's result."""
    first = layers[next(iter(layers))]
    for width in {first.in_features, first.out_features}:
        # From small values to large ones, which clamps would change.
        size = torch.logspace(-2, 4, _TOKENS, dtype=torch.float64).unsqueeze(-1)
        x = size * torch.randn(2, _TOKENS, width, dtype=torch.float64, generator=random)
        num_calls = len(calls)
        try:
            y = type(module).forward(module, x.clone())
        except RuntimeError:  # the input has the other width
            del calls[num_calls:]
            continue
        for gate, up, down in itertools.permutations(layers):
            if not layers[gate].in_features == layers[up].in_features == layers[down].out_features == width:
                continue
            for activation, function in ACTIVATIONS.items():
                recorded = len(calls)
                hidden = function.forward(layers[gate](x)) * layers[up](x)
                expected = layers[down](hidden)
                del calls[recorded:]
                if isinstance(y, Tensor) and y.shape == expected.shape and _is_near(y.double(), expected):
                    yield gate, up, down, activation
        return


def _is_near(one: Tensor, two: Tensor) -> bool:
    return bool(((one - two).norm(dim=-1) <= _TOLERANCE * two.norm(dim=-1)).all())  # False for NaN


@contextmanager
def _on_cpu() -> Iterator[None]:
    with without_dispatch_modes(), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


@contextmanager
def _exchanged(module: nn.Module, others: dict[str, _Small]) -> Iterator[None]:
    before = {name: module._modules[name] for name in others}
    try:
        module._modules.update(others)
        yield
    finally:
        module._modules.update(before)
