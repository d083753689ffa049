"""What limits the length of rows on a machine: GPU memory, host memory or time. Each answer is a forecast at another
length, which takes about two seconds, and is given for long rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outsize.base.errors import OutsizeError, PlanInfeasible
from outsize.base.log import log
from outsize.base.units import show_bytes, show_enough, show_seconds
from outsize.forecast.forecast import Forecast, ForecastRequest, forecast
from outsize.profile.lengths import LONG_TOKENS
from outsize.schedule.render import bottleneck_text

_MOST_HALVINGS = 4


def is_long(request: ForecastRequest) -> bool:
    """Whether the length of rows is a setting, and long."""
    return request.batch_of is None and request.sequence_len > LONG_TOKENS


def limit_of_longer_rows(model: Any, request: ForecastRequest, found: Forecast) -> str:
    """One line: what limits rows of twice the length."""
    tokens = 2 * request.sequence_len
    try:
        with _without_warnings():
            longer = forecast(model, replace(request, sequence_len=tokens))
    except PlanInfeasible as no:
        memory = "GPU" if no.resource == "gpu" else "host"
        return (
            f"limit of row length: {memory} memory. Rows of {tokens} tokens need {show_enough(no.needed_bytes)}, and "
            f"{show_bytes(no.allowed_bytes)} is allowed"
        )
    except OutsizeError as error:
        return f"rows of {tokens} tokens cannot be planned: {error}"
    now, then = found.plan.estimate.step_seconds, longer.plan.estimate.step_seconds
    return (
        f"limit of row length: time. Rows of {tokens} tokens fit too: {show_seconds(then)} a step, {then / now:.1f} "
        f"times as long; {bottleneck_text(longer.plan)}"
    )


def rows_that_fit(model: Any, request: ForecastRequest) -> str:
    """A sentence with the longest rows that fit, of half the length, a quarter and so on."""
    tokens = request.sequence_len
    for _ in range(_MOST_HALVINGS):
        tokens //= 2
        try:
            with _without_warnings():
                found = forecast(model, replace(request, sequence_len=tokens))
        except PlanInfeasible:
            continue
        except OutsizeError:
            return ""
        return f"Rows of {tokens} tokens fit: {show_seconds(found.plan.estimate.step_seconds)} a step."
    return f"Rows of {tokens} tokens do not fit either."


@contextmanager
def _without_warnings() -> Iterator[None]:
    """The same warnings were logged for the length that was asked for."""
    log.disabled, was = True, log.disabled
    try:
        yield
    finally:
        log.disabled = was
