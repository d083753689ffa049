"""Variants: the ways in which a layer's sub-blocks are pruned, as the run file has them, checked against the shapes of
the teacher. Does not import torch.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

How = Literal["average", "select", "first"]
ChangeKind = Literal["intermediate_size", "num_key_value_heads", "experts", "skip", "linear", "copy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Requested:
    """One variant as the run file has it, before the teacher's shapes are known."""

    subblock: str
    """`attention`, `mixer` or `ffn`."""
    kind: ChangeKind
    amount: int | float | None = None
    """Width, heads or experts; a float is a share of the teacher's."""
    how: How | None = None
    """How KV heads become fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What variants of one layer are checked against. None: the layer has no such thing."""

    kinds: tuple[str, ...]
    """The kinds of its sub-blocks."""
    intermediate_size: int | None
    num_key_value_heads: int | None
    experts: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One sub-block, pruned in one way."""

    subblock: str
    kind: ChangeKind
    count: int | None = None
    how: How | None = None

    @property
    def name(self) -> str:
        """`8704`, `kv4`, `kv4-select`, `experts16`, `skip`, `linear`, `copy`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    learn: str
    """`attention`, `mixer`, `ffn` or `block`."""
    changes: tuple[Change, ...]
    """One; of a block, one for each of its sub-blocks that is pruned."""

    @property
    def name(self) -> str:
        """`ffn-8704`, `attention-kv4`, `block-kv4-8704`: the folder in the library."""
        raise NotImplementedError

    @property
    def is_trained(self) -> bool:
        """A skipped sub-block has nothing to train."""
        raise NotImplementedError


def parse_variants(settings: Mapping[str, Any]) -> tuple[Requested, ...]:
    """The variants of `prune.variants`. Raises ConfigError with what is wrong.

    `intermediate_size` and `num_key_value_heads`: numbers (a share in (0, 1) for the width);
    `num_key_value_heads: {select: [4, 2]}` says how, `average` is the default; `experts`: numbers; `skip` and `copy`:
    sub-blocks; `linear`: sub-blocks (attention) or true.
    """
    raise NotImplementedError


def parse_learn(value: Any) -> tuple[str, ...]:
    """`prune.learn` as sub-blocks, or ("block",). Accepts the published names (`subblock_ffn`, `entire_block`)."""
    raise NotImplementedError


def resolve(
    requested: Collection[Requested], learn: Collection[str], shape: LayerShape, layer: str
) -> tuple[Variant, ...]:
    """The variants of one layer: of each sub-block in `learn`, or every combination for `block`. A layer without a
    sub-block of that kind has no such variants. Raises ConfigError with the name of the layer if a number does not fit.
    """
    raise NotImplementedError
