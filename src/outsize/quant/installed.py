"""bitsandbytes, an optional dependency: its modules hold quantized weights."""

import logging
import re
from functools import cache
from typing import Any

from outsize.base.errors import ConfigError

_OLDEST = (0, 50)
_DO = "Run: pip install 'outsize[quant]'"


@cache
def bitsandbytes() -> Any:
    """The package. Raises ConfigError if it is missing or too old."""
    # At import it advises about kernels of inference, which training does not use.
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import bitsandbytes as found
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "bitsandbytes":
            raise ConfigError(f"quantized weights need bitsandbytes, which is not installed. {_DO}.") from None
        raise ConfigError(f"quantized weights need bitsandbytes, which cannot be imported ({error}). {_DO}.") from None
    finally:
        log.setLevel(level)
    version = tuple(map(int, re.findall(r"\d+", found.__version__)[:2]))
    if version < _OLDEST:
        raise ConfigError(f"bitsandbytes {found.__version__} is too old: 0.50 or later is needed. {_DO}.")
    return found
