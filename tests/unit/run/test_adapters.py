"""What `adapter:` says."""

from typing import Any

import pytest

import outsize
from outsize.base.errors import ConfigError
from outsize.config.read import parse_config
from outsize.run.adapters import method_of


def method(**keys: Any) -> outsize.OSFT | None:
    least = {"base_model": "m", "datasets": [{"path": "d"}], "adapter": "osft"}
    return method_of(parse_config({**least, **keys}, "here"))


def test_numbers_above_1_are_counts() -> None:
    found = method(osft_effective_rank=512, osft_rank_pattern={"mlp": 256, "q_proj": 0.5})
    assert found == outsize.OSFT(effective_rank=512, rank_pattern={"mlp": 256, "q_proj": 0.5}, others="train")
    with pytest.raises(ConfigError, match=r"effective_rank is 700\.5"):
        method(osft_effective_rank=700.5)
