"""BlockGraph: the planner's view of a model: blocks, their parameters, and the order in which they ran. No torch.

A *block* is a layer or a region outside of layers (`stem`, `between`, `head`). A *call* is one run of a block in a
forward pass; a block may be called several times. A parameter may belong to several blocks (tied weights): it is listed
in each of them, under its one canonical name.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from outsize.base.errors import ModelUnsupported

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    name: str
    """The first of its names in `named_parts()` (model/parts.py)."""
    shape: tuple[int, ...]
    dtype: str
    """Without the `torch.`: `bfloat16`."""
    trainable: bool
    stands_for: int | None = None
    """The number of the model's weights that it stores, if that is not the number of its elements: two per byte of a
    4-bit weight, none for scales."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ModelUnsupported(
                f"{self.name}: parameters of dtype {self.dtype} are not supported, only {', '.join(DTYPE_BYTES)}. "
                "Convert it before prepare, or make it a buffer."
            )

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def num_weights(self) -> int:
        return self.numel if self.stands_for is None else self.stands_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    name: str
    """The module's path (`model.layers.3`), or `stem`, `head`, `between:<path of the next block>`."""
    kind: Literal["layer", "stem", "between", "head"]
    structure: str
    """Equal for blocks that do the same work with other weights."""
    params: tuple[str, ...]
    """Canonical names, in the order of use."""


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    blocks: tuple[Block, ...]
    """In the order of their first run."""
    calls: tuple[int, ...]
    """Indices into `blocks`, in the order of the forward pass. First the stem, last the head."""
    has_backward: tuple[bool, ...]
    """By call, as measured. False for a frozen prefix."""
    params: tuple[Param, ...]
    """In the order of `named_parts()`."""
    buffer_bytes: int
    """Buffers, and lookup tables of quantized weights, are resident on the device."""
    reads_outside_module: tuple[int, ...] = ()
    """Calls that read weights outside of the module that has them, in a region or after a layer: only the order of
    layers shows when.
    """
    without_grad: tuple[tuple[int, str], ...] = ()
    """(call, parameter): the call has a backward but reads this parameter without grad, so it adds nothing to its
    gradient.
    """
    side_outputs: tuple[int, ...] = ()
    """Calls of layers that store a value with a gradient elsewhere than in their outputs (an auxiliary loss on `self`).
    A gradient reaches them there first.
    """

    @cached_property
    def param(self) -> dict[str, Param]:
        return {p.name: p for p in self.params}

    @cached_property
    def trainable_numels(self) -> tuple[int, ...]:
        return tuple([p.numel for p in self.params if p.trainable])

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """By parameter: the calls that use it, in forward order."""
        used: dict[str, list[int]] = {p.name: [] for p in self.params}
        for call, block in enumerate(self.calls):
            for name in self.blocks[block].params:
                used[name].append(call)
        return {name: tuple(calls) for name, calls in used.items()}

    @cached_property
    def backward_users(self) -> dict[str, tuple[int, ...]]:
        """By parameter: the calls whose backward adds to its gradient, in forward order. It is complete in the backward
        of the first.
        """
        without = set(self.without_grad)
        return {
            name: tuple(v for v in calls if self.has_backward[v] and (v, name) not in without)
            for name, calls in self.users.items()
        }

    def call_name(self, call: int) -> str:
        return self.blocks[self.calls[call]].name

    def numbered_call_name(self, call: int) -> str:
        """The block's name, with the number of the call if it has several."""
        same_block = [v for v, block in enumerate(self.calls) if block == self.calls[call]]
        number = f"call {same_block.index(call) + 1} of " if len(same_block) > 1 else ""
        return f"{number}{self.call_name(call)}"

    @property
    def num_params(self) -> int:
        return sum(p.num_weights for p in self.params)

    @property
    def num_trainable(self) -> int:
        return sum(p.num_weights for p in self.params if p.trainable)
