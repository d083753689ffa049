"""BlockGraph: what a model is to the planner. Blocks, their parameters, and the order in which they ran. No torch.

A *block* is a repeated layer or a region around them (`stem`, `between`, `head`). A *call* is one run of a block in
a forward pass; a block may be called several times. A parameter may belong to several blocks (tied weights): it is then
listed in each of them, under its one canonical name.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from outsize.base.errors import ModelUnsupported, tell

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
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    name: str
    """The first of its names in `named_parameters()`."""
    shape: tuple[int, ...]
    dtype: str
    """Without the `torch.`: `bfloat16`."""
    trainable: bool

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            do = "Convert it before prepare, or make it a buffer"
            raise ModelUnsupported(
                tell(f"parameters have one of the types {', '.join(DTYPE_BYTES)}", f"{self.name} is {self.dtype}", do)
            )

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    name: str
    """The module's path (`model.layers.3`), or `stem`, `head`, `between:<path of the next block>`."""
    kind: Literal["layer", "stem", "between", "head"]
    structure: str
    """Equal for blocks that do the same work on other weights."""
    params: tuple[str, ...]
    """Canonical names, in the order of use."""


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    blocks: tuple[Block, ...]
    """In the order of their first run."""
    calls: tuple[int, ...]
    """Indices into `blocks`, in the order of the forward pass. First the stem, last the head."""
    has_backward: tuple[bool, ...]
    """Per call, as measured: a frozen prefix has none."""
    params: tuple[Param, ...]
    """In the order of `named_parameters()`."""
    buffer_bytes: int
    """Buffers are resident on the device."""
    reads_outside_module: tuple[int, ...] = ()
    """Calls that read weights outside of the module that has them, in a region or behind a layer: nothing but the order
    of layers tells when.
    """
    without_grad: tuple[tuple[int, str], ...] = ()
    """(call, parameter): the call has a backward, but reads this parameter without grad, so that none of its gradient
    comes from there.
    """
    detours: tuple[int, ...] = ()
    """Calls of layers that leave a value elsewhere than in their outputs (an auxiliary loss on `self`), with a
    gradient: it reaches them there first.
    """

    @cached_property
    def param(self) -> dict[str, Param]:
        return {p.name: p for p in self.params}

    @cached_property
    def users(self) -> dict[str, tuple[int, ...]]:
        """Per parameter, the calls that use it, in forward order."""
        used: dict[str, list[int]] = {p.name: [] for p in self.params}
        for call, block in enumerate(self.calls):
            for name in self.blocks[block].params:
                used[name].append(call)
        return {name: tuple(calls) for name, calls in used.items()}

    @cached_property
    def backward_users(self) -> dict[str, tuple[int, ...]]:
        """Per parameter, the calls whose backward adds to its gradient, in forward order. With the first of them it is
        complete.
        """
        without = set(self.without_grad)
        return {
            name: tuple(v for v in calls if self.has_backward[v] and (v, name) not in without)
            for name, calls in self.users.items()
        }

    def call_name(self, call: int) -> str:
        return self.blocks[self.calls[call]].name

    def numbered_call_name(self, call: int) -> str:
        """The block, and which of its calls where it has several."""
        same_block = [v for v, block in enumerate(self.calls) if block == self.calls[call]]
        return (
            self.call_name(call)
            if len(same_block) == 1
            else f"call {same_block.index(call) + 1} of {self.call_name(call)}"
        )

    @property
    def num_params(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def num_trainable(self) -> int:
        return sum(p.numel for p in self.params if p.trainable)
