"""What pyproject.toml cannot say: the C kernel is compiled into the wheel if there is a compiler, and the README is the
description.

The kernel is a library that ctypes loads (optim/native.py), independent of Python. So one wheel per platform serves
every Python version. CC names the compiler, also a cross compiler (`make wheels`).
"""

import os
import re
import runpy
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

build = runpy.run_path("src/outsize/optim/build.py")


class BuildKernel(build_ext):
    """With the command that compiles it at run time, so that neither flags nor names of this Python enter."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build["compile_library"](build["find_compiler"](), target)
        except subprocess.CalledProcessError as error:
            raise CompileError(error.stderr.decode(errors="replace")) from None
        except OSError as error:
            raise CompileError(str(error)) from None


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernel = Extension("outsize.optim._native", ["src/outsize/optim/native.c"], optional=True)
# Links into the repository lead nowhere from a package index: their text stays.
readme = re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)", r"\1", Path("README.md").read_text(encoding="utf-8"))
setup(
    ext_modules=[kernel],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
    long_description=readme,
    long_description_content_type="text/markdown",
)
