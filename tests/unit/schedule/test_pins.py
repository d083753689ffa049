"""Pins: every strategy that a plan chooses can be pinned, from code and from a configuration."""

import dataclasses
from typing import get_args

from outsize.config.types import PinName
from outsize.model.strategies import choices
from outsize.schedule.pins import Pins


def test_every_strategy_but_keep_has_its_own_pin() -> None:
    fields = {field.name for field in dataclasses.fields(Pins)}
    pins = {strategy.pin for strategy in choices()}
    assert pins <= fields and len(pins) == len(choices())
    assert set(get_args(PinName)) == fields


def test_the_mix_has_the_pinned_numbers_in_the_order_of_the_strategies() -> None:
    numbers = {strategy.pin: 3 + i for i, strategy in enumerate(choices())}
    assert Pins(**numbers).mix == tuple(numbers.values())
    assert Pins(n_persist=1).mix == (None,) * len(numbers)
