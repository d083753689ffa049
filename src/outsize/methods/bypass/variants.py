"""Variants: the ways in which a layer's sub-blocks are pruned, as the run file has them, checked against the shapes of
the teacher. Does not import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from outsize.base.errors import ConfigError

How = Literal["average", "select", "first"]
ChangeKind = Literal["intermediate_size", "num_key_value_heads", "experts", "skip", "linear", "copy"]
MIXERS = ("attention", "mixer")
"""Kinds of sub-blocks that the run file calls `attention` or `mixer`."""
_MULTIPLE = 64
"""Widths that are given as shares are rounded to a multiple of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requested:
    """One variant as the run file has it, before the teacher's shapes are known."""

    subblock: Literal["attention", "ffn"]
    """`attention`: or what a layer has in its place."""
    kind: ChangeKind
    amount: int | float | None = None
    """Width, heads or experts; a float is a share of the teacher's width."""
    how: How | None = None
    """How KV heads become fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """What variants of one layer are checked against. None: the layer has no such thing, or it cannot be changed."""

    kinds: tuple[str, ...]
    """The kinds of its sub-blocks."""
    intermediate_size: int | None = None
    num_key_value_heads: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    has_linear_attention_map: bool = True
    """A token that sees itself alone gets a linear map of its hidden state from attention (no gates, norms of values or
    sinks)."""


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
        if self.kind == "intermediate_size":
            return str(self.count)
        if self.kind == "num_key_value_heads":
            return f"kv{self.count}" + (f"-{self.how}" if self.how != "average" else "")
        return f"experts{self.count}" if self.kind == "experts" else self.kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    learn: str
    """`attention`, `mixer`, `ffn` or `block`."""
    changes: tuple[Change, ...]
    """One; of a block, at most one for each of its sub-blocks."""

    @property
    def name(self) -> str:
        """`ffn-8704`, `attention-kv4`, `block-kv4-8704`: the folder in the library."""
        return "-".join([self.learn, *(change.name for change in self.changes)])

    @property
    def is_trained(self) -> bool:
        """Skipped sub-blocks have nothing to train. Of a block, the other sub-block is trained."""
        return any(change.kind != "skip" for change in self.changes) or (
            self.learn == "block" and len({change.subblock for change in self.changes}) < 2
        )


def requested_variants(
    *,
    intermediate_size: Sequence[int | float] = (),
    num_key_value_heads: Sequence[int] = (),
    kv_heads: How = "average",
    experts: Sequence[int] = (),
    skip: Sequence[Literal["attention", "ffn"]] = (),
    linear: bool = False,
    copy: Sequence[Literal["attention", "ffn"]] = (),
) -> tuple[Requested, ...]:
    """The variants that the keys under `prune:` ask for."""
    return (
        *(Requested(subblock="ffn", kind="intermediate_size", amount=width) for width in intermediate_size),
        *(
            Requested(subblock="attention", kind="num_key_value_heads", amount=heads, how=kv_heads)
            for heads in num_key_value_heads
        ),
        *(Requested(subblock="ffn", kind="experts", amount=count) for count in experts),
        *(Requested(subblock=subblock, kind="skip") for subblock in skip),
        *((Requested(subblock="attention", kind="linear"),) if linear else ()),
        *(Requested(subblock=subblock, kind="copy") for subblock in copy),
    )


def resolve(requested: Iterable[Requested], learn: Sequence[str], shape: LayerShape, layer: str) -> tuple[Variant, ...]:
    """The variants of one layer: of each sub-block in `learn`, or for `block` one for each combination of changes.

    A layer without a sub-block of that kind, or without experts, has no such variants. Raises ConfigError with the name
    of the layer if a number does not fit it.
    """
    changes: dict[str, dict[str, Change]] = {}
    for one in requested:
        for subblock in _subblocks(one, shape):
            if (change := _change(one, subblock, shape, layer)) is not None:
                changes.setdefault(subblock, {})[change.name] = change
    if "block" in learn:
        options = [tuple(changes[subblock].values()) for subblock in shape.kinds if subblock in changes]
        return tuple(Variant(learn="block", changes=chosen) for chosen in product(*options)) if options else ()
    learned = _learned(learn, shape)
    return tuple(
        Variant(learn=subblock, changes=(change,))
        for subblock, of in changes.items()
        for change in of.values()
        if subblock in learned
    )


def whole_variants(learn: Sequence[str], shape: LayerShape) -> tuple[Variant, ...]:
    """Those that prune nothing in a sub-block (or block) that is trained."""
    copies = {kind: Change(subblock=kind, kind="copy") for kind in shape.kinds}
    if "block" in learn:
        return (Variant(learn="block", changes=tuple(copies.values())),) if copies else ()
    learned = _learned(learn, shape)
    return tuple(Variant(learn=kind, changes=(copies[kind],)) for kind in shape.kinds if kind in learned)


def _learned(learn: Sequence[str], shape: LayerShape) -> set[str]:
    return {kind for kind in shape.kinds if kind in learn or (kind in MIXERS and "mixer" in learn)}


def _subblocks(one: Requested, shape: LayerShape) -> list[str]:
    kinds = MIXERS if one.subblock == "attention" else ("ffn",)
    if one.kind in ("num_key_value_heads", "linear"):
        kinds = ("attention",)
    return [kind for kind in shape.kinds if kind in kinds]


def _change(one: Requested, subblock: str, shape: LayerShape, layer: str) -> Change | None:
    if one.kind == "intermediate_size":
        return Change(subblock=subblock, kind=one.kind, count=_width(one.amount, shape.intermediate_size, layer))
    if one.kind == "num_key_value_heads":
        return Change(subblock=subblock, kind=one.kind, count=_heads(one.amount, shape, layer), how=one.how)
    if one.kind == "linear" and not shape.has_linear_attention_map:
        raise ConfigError(
            f"linear: the attention of {layer} is not linear even for one token (it has gates, norms of values or "
            "sinks), so no matrix can stand for it. Remove linear."
        )
    if one.kind == "experts":
        count = _experts(one.amount, shape, layer)
        return None if count is None else Change(subblock=subblock, kind=one.kind, count=count)
    return Change(subblock=subblock, kind=one.kind)


def _width(amount: int | float | None, width: int | None, layer: str) -> int:
    assert amount is not None
    if width is None:
        raise ConfigError(
            f"intermediate_size: the width of the feed-forward part of {layer} cannot be changed, because no setting "
            "of the teacher's config decides it alone. Remove intermediate_size, or leave the layer out of only_layers."
        )
    if isinstance(amount, float):
        count = round(amount * width / _MULTIPLE) * _MULTIPLE
        if not 0 < count <= width:
            raise ConfigError(
                f"intermediate_size: {amount} of the {width} channels of {layer}, rounded to a multiple of "
                f"{_MULTIPLE}, is {count}. Name a width from 1 to {width}."
            )
        return count
    if amount > width:
        raise ConfigError(
            f"intermediate_size: {amount} is above the teacher's {width} in {layer}. Use at most {width}, or a share "
            "such as 0.5."
        )
    return amount


def _heads(amount: int | float | None, shape: LayerShape, layer: str) -> int:
    assert isinstance(amount, int)
    heads = shape.num_key_value_heads
    if heads is None:
        raise ConfigError(
            f"num_key_value_heads: the attention of {layer} has as many KV heads as heads, or none, and its class "
            "takes no other number. Remove num_key_value_heads."
        )
    if amount > heads or heads % amount:
        divisors = ", ".join(str(count) for count in range(1, heads) if heads % count == 0)
        raise ConfigError(
            f"num_key_value_heads: {amount} does not divide the teacher's {heads} in {layer}. Use one of {divisors}."
        )
    return amount


def _experts(amount: int | float | None, shape: LayerShape, layer: str) -> int | None:
    assert isinstance(amount, int)
    if shape.experts is None:
        return None
    least = shape.experts_per_token or 1
    if not least <= amount <= shape.experts:
        raise ConfigError(
            f"experts: {amount} were asked for in {layer}, which has {shape.experts} and uses {least} for each token. "
            f"Use {least} to {shape.experts}."
        )
    return amount
