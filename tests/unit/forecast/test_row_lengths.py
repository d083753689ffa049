"""Answers about other row lengths are what a plan at that length says."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

from outsize.base.errors import PlanInfeasible
from outsize.cli.plan import forecast_or_adapter
from outsize.forecast.forecast import ForecastRequest, forecast
from outsize.forecast.row_lengths import is_long, limit_of_longer_rows, rows_that_fit

TOKENS = 256
CONFIG: Any = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
)


def request_for(**how: Any) -> ForecastRequest:
    return ForecastRequest(sequence_len=TOKENS, hardware="64MiB", **how)


@pytest.fixture(autouse=True)
def _few_tokens_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.forecast.row_lengths.LONG_TOKENS", TOKENS - 1)


@pytest.fixture
def least(one_trace: None) -> list[int]:
    """The GPU memory that half of the tokens need, all of them, and twice as many."""
    found = [
        forecast(CONFIG, replace(request_for(), sequence_len=n)).problem.least_gpu_memory()
        for n in (TOKENS // 2, TOKENS, 2 * TOKENS)
    ]
    assert found == sorted(filter(None, found)) and len({*found}) == 3
    return [size for size in found if size is not None]


def test_a_refusal_names_the_memory_and_the_longest_rows_that_fit(least: list[int]) -> None:
    request = request_for(gpu_memory=least[1] - 1)
    assert is_long(request) and not is_long(replace(request, sequence_len=TOKENS - 1))
    with pytest.raises(PlanInfeasible, match=r"gpu_memory .* is too small") as no:
        forecast_or_adapter(CONFIG, request)
    assert f"\nRows of {TOKENS // 2} tokens fit: " in str(no.value)


@pytest.mark.full
def test_a_refusal_says_that_shorter_rows_do_not_fit_either() -> None:
    assert rows_that_fit(CONFIG, request_for(gpu_memory="64KiB")) == "Rows of 16 tokens do not fit either."


def test_a_plan_says_what_limits_longer_rows(least: list[int]) -> None:
    def limit(**how: Any) -> str:
        return limit_of_longer_rows(CONFIG, request_for(**how), forecast(CONFIG, request_for(**how)))

    assert "limit of row length: time" in limit() and "times as long; " in limit()
    assert f"GPU memory. Rows of {2 * TOKENS} tokens need" in limit(gpu_memory=least[2] - 1)
