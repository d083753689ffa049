"""Compiles the C sources of the package: called by setup.py for a wheel, else by library.py at first use. Uses the
standard library only.

A library contains a fingerprint of its source and flags, so that one of another source or other flags is not used.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
UPDATES = _PACKAGE / "optim" / "native.c"
QUANTIZER = _PACKAGE / "quant" / "native.c"
SOURCES = (UPDATES, QUANTIZER)
_INCLUDED = Path(__file__).with_name("pieces.h")
"""What the sources have in common."""
FLAGS = ("-O3", "-std=c11", "-pthread", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def fingerprint(source: Path) -> str:
    """Hash of the source and the flags."""
    flags = " ".join(FLAGS).encode()
    return hashlib.sha256(b"\0".join((source.read_bytes(), _INCLUDED.read_bytes(), flags))).hexdigest()[:16]


def find_compiler() -> str:
    """Path of a C compiler. Raises OSError if there is none."""
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        if path := shutil.which(name):
            return path
    raise OSError("no C compiler found")


def can_have_kernel(source: Path) -> bool:
    """Whether the source's functions may run in C: it was compiled with the package, or there is a compiler."""
    if os.environ.get("OUTSIZE_KERNELS") == "torch":
        return False
    try:
        return any(source.parent.glob("_native*.so")) or bool(find_compiler())
    except OSError:
        return False


def compile_library(compiler: str, source: Path, target: Path) -> None:
    """Compile to `target`, replacing it atomically: another process may load it. Raises CalledProcessError."""
    made = target.with_name(f".{target.name}-{os.getpid()}")
    define = f'-DSOURCE="{fingerprint(source)}"'
    subprocess.run(
        [compiler, *FLAGS, "-fPIC", "-shared", define, str(source), "-o", str(made), "-lm"],
        capture_output=True,
        check=True,
    )
    made.replace(target)
