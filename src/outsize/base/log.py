"""One logger for the library; applications decide how it is shown, and without that Python prints warnings."""

import logging

log = logging.getLogger("outsize")
