"""Pairwise covering arrays: few rows in which every legal pair of values of any two factors occurs at least once.

Four arrays of twelve rows each, which were searched for and cannot be shorter: the four strategies meet each of three
depths. A row is a digit per factor. Two things are laid out in advance: nothing clips that updates in backward, and
weights that are tied, frozen or in bf16 are combined in six ways only, since each of them is another model to trace. A
seed chooses an array and which values its digits stand for, so that few rows of two kinds are alike. That every pair is
there is counted by the test, not here.
"""

import random
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
LEVELS = {
    "strategy": 4,
    "weights": 2,
    "optimizer": 2,
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
    "10000011120 20011101211 00101101021 10110002201 31111002110 31010011001 11011110010 01011112200 01000000110 "
    "30000110221 20100110101 21100002020",
    "31000101020 20001110121 30010110200 20010101210 00100110011 10000112100 11011000010 00001002220 01111011101 "
    "11100011221 31101002111 21110002000",
    "00101000221 11111000111 30001112121 10000112200 21100002220 01101011100 20001101010 10101101021 31000000000 "
    "31110101210 20010110101 01010112011",
    "01001011021 30111112001 11101000201 00011110200 20100112221 11011112111 20001000010 30000000120 10100101020 "
    "21010011101 31011101210 01110002110",
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
