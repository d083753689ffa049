"""How native.c becomes a library: by setup.py when a wheel is made, else by native.py when it is first wanted. Standard
library only: setup.py has no more.

A library says what it was made from, so that one left behind by another source or other flags is not used.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ("-O3", "-std=c11", "-pthread", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


def fingerprint() -> str:
    """Of the source and the flags."""
    return hashlib.sha256(SOURCE.read_bytes() + b"\0" + " ".join(FLAGS).encode()).hexdigest()[:16]


def find_compiler() -> str:
    """OSError where there is none."""
    for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
        if path := shutil.which(name):
            return path
    raise OSError("there is no C compiler")


def compile_library(compiler: str, target: Path) -> None:
    """Makes `target` at once, whole: another process may be looking for it. CalledProcessError where the compiler
    complains.
    """
    made = target.with_name(f".{target.name}-{os.getpid()}")
    define = f'-DSOURCE="{fingerprint()}"'
    subprocess.run(
        [compiler, *FLAGS, "-fPIC", "-shared", define, str(SOURCE), "-o", str(made), "-lm"],
        capture_output=True,
        check=True,
    )
    made.replace(target)
