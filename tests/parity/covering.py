"""Pairwise covering arrays: few rows in which every legal pair of values of any two factors occurs at least once.

Four arrays of thirteen rows each, which were searched for. Twelve is the least: the four strategies meet each of three
depths and of three ways of the optimizer. No array of twelve was found. A row is a digit per factor. Two things are
laid out in advance: nothing clips that updates in backward, and weights that are tied, frozen or in bf16 are combined
in six ways only, since each of them is another model to trace. A seed chooses an array and which values its digits
stand for, so that few rows of two kinds are alike. That every pair is there is counted by the test, not here.
"""

import random
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
LEVELS = {
    "strategy": 4,
    "weights": 2,
    "optimizer": 3,
    "clip": 2,
    "accumulate": 2,
    "dtype": 2,
    "tied": 2,
    "frozen": 3,
    "depth": 3,
    "update": 3,
    "fp32_grads": 2,
}
ARRAYS = (
    "20210112010 21101101221 01201011110 30110112111 11110000010 01111002201 10001112121 20000000100 30011011000 "
    "00100110021 31201000220 01010112211 10210101201",
    "20210110111 30000112120 20201011020 10210112200 11101000120 11000011011 31211000001 00111112011 20011101201 "
    "31111101210 01210101100 01000000221 21100002100",
    "20101101221 11201112220 00111000200 31111112100 30200011201 10110011010 00211112011 30200000020 21010002001 "
    "01000011121 30011101210 21200110110 10000000101",
    "20100002211 31100002000 00200000200 10000000121 20101000021 01100112120 10110011200 11211112010 30201101220 "
    "31011110111 21211101101 21010112200 01011011011",
)
NOT_SHUFFLED = ("clip", "update")
"""Of these one pair is not legal: clip 1 with update 2."""


def covering(factors: Mapping[str, tuple[Any, ...]], *, seed: int) -> list[Row]:
    """Factors may have fewer values than the array has digits for: some digits then stand for the same one."""
    assert factors.keys() == LEVELS.keys() and all(len(values) <= LEVELS[name] for name, values in factors.items())
    rng = random.Random(seed)
    meaning = {}
    for name, values in factors.items():
        meaning[name] = [values[digit % len(values)] for digit in range(LEVELS[name])]
        if name not in NOT_SHUFFLED:
            rng.shuffle(meaning[name])
    return [
        {name: meaning[name][int(digit)] for name, digit in zip(LEVELS, row, strict=True)}
        for row in ARRAYS[seed % len(ARRAYS)].split()
    ]
