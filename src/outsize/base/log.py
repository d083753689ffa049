"""One logger for the library; the command line decides how it is shown."""

import logging

log = logging.getLogger("outsize")
