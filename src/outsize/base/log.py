"""The logger of the library. Without a handler, Python prints its warnings."""

import logging

log = logging.getLogger("outsize")
