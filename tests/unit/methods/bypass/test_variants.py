"""methods/bypass/variants.py: variants are named, resolved by layer, and refused with one plain message each."""

import re

import pytest

from outsize.base.errors import ConfigError
from outsize.methods.bypass.variants import LayerShape, Variant, requested_variants, resolve

DENSE = LayerShape(kinds=("attention", "ffn"), intermediate_size=14336, num_key_value_heads=8)
EXPERTS = LayerShape(
    kinds=("attention", "ffn"), intermediate_size=768, num_key_value_heads=4, experts=128, experts_per_token=8
)
HYBRID = LayerShape(kinds=("mixer", "ffn"), intermediate_size=14336)


def names(variants: tuple[Variant, ...]) -> list[str]:
    return [variant.name for variant in variants]


def resolved(shape: LayerShape, learn: tuple[str, ...] = ("mixer", "ffn"), **settings) -> list[str]:
    return names(resolve(requested_variants(**settings), learn, shape, "layers.3"))


def test_names() -> None:
    settings = dict(intermediate_size=(11520, 0.5), num_key_value_heads=(4, 1), skip=("attention", "ffn"), linear=True)
    assert resolved(DENSE, **settings, copy=("ffn",)) == [
        "ffn-11520", "ffn-7168", "ffn-skip", "ffn-copy",
        "attention-kv4", "attention-kv1", "attention-skip", "attention-linear",
    ]  # fmt: skip
    assert resolved(DENSE, num_key_value_heads=(2,), kv_heads="select") == ["attention-kv2-select"]
    assert resolved(EXPERTS, experts=(64, 8)) == ["ffn-experts64", "ffn-experts8"]


def test_shares_are_rounded_and_duplicates_dropped() -> None:
    assert resolved(DENSE, intermediate_size=(0.5, 7168, 0.501)) == ["ffn-7168"]
    assert resolved(LayerShape(kinds=("ffn",), intermediate_size=384), intermediate_size=(0.99,)) == ["ffn-384"]


def test_only_learned_subblocks_and_those_a_layer_has() -> None:
    settings = dict(intermediate_size=(0.5,), num_key_value_heads=(4,), skip=("attention",), experts=(4,))
    assert resolved(DENSE, ("ffn",), **settings) == ["ffn-7168"]
    assert resolved(DENSE, ("attention",), **settings) == ["attention-kv4", "attention-skip"]
    assert resolved(HYBRID, ("attention",), **settings) == []
    assert resolved(HYBRID, **settings) == ["ffn-7168", "mixer-skip"]


def test_blocks_combine_the_changes_of_their_subblocks() -> None:
    settings = dict(intermediate_size=(11520, 7168), num_key_value_heads=(4,), skip=("attention",))
    assert resolved(DENSE, ("block",), **settings) == (
        ["block-kv4-11520", "block-kv4-7168", "block-skip-11520", "block-skip-7168"]
    )
    assert resolved(DENSE, ("block",), intermediate_size=(7168,)) == ["block-7168"]
    assert resolved(DENSE, ("block",)) == []


def test_what_is_skipped_is_not_trained() -> None:
    for learn, is_trained in (("mixer", [False]), ("block", [True])):
        variants = resolve(requested_variants(skip=("attention",)), (learn,), DENSE, "layers.3")
        assert [variant.is_trained for variant in variants] == is_trained
    (both,) = resolve(requested_variants(skip=("attention", "ffn")), ("block",), DENSE, "layers.3")
    assert not both.is_trained


@pytest.mark.parametrize(
    ("shape", "settings", "message"),
    [
        (DENSE, {"intermediate_size": (20000,)}, "intermediate_size: 20000 is above the teacher's 14336 in layers.3."),
        (DENSE, {"intermediate_size": (0.001,)}, "rounded to a multiple of 64, is 0. Name a width from 1 to 14336."),
        (DENSE, {"num_key_value_heads": (3,)}, "3 does not divide the teacher's 8 in layers.3. Use one of 1, 2, 4."),
        (DENSE, {"num_key_value_heads": (16,)}, "16 does not divide the teacher's 8"),
        (EXPERTS, {"experts": (4,)}, "has 128 and uses 8 for each token. Use 8 to 128."),
        (EXPERTS, {"experts": (256,)}, "256 were asked for in layers.3"),
        (
            LayerShape(kinds=("ffn",)),
            {"intermediate_size": (64,)},
            "the feed-forward part of layers.3 cannot be changed",
        ),
        (LayerShape(kinds=("attention",)), {"num_key_value_heads": (1,)}, "its class takes no other number"),
    ],
)
def test_numbers_that_do_not_fit(shape: LayerShape, settings, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(requested_variants(**settings), ("mixer", "ffn"), shape, "layers.3")
