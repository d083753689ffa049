"""One logger for the library; the command line decides how it is shown."""

import logging

log = logging.getLogger("outsize")


def once(message: str, _said: set[str] = set()) -> None:  # noqa: B006 - the shared set is the point
    """Say a note the first time only."""
    if message not in _said:
        _said.add(message)
        log.info(message)
