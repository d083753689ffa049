"""What pyproject.toml cannot say: the C kernels are compiled into the wheel if there is a compiler, and the README is
the description.

The kernels are libraries that ctypes loads (native/library.py), independent of Python. So one wheel per platform serves
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

build = runpy.run_path("src/outsize/native/build.py")


class BuildKernels(build_ext):
    """With the command that compiles it at run time, so that neither flags nor names of this Python enter."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            build["compile_library"](build["find_compiler"](), Path(ext.sources[0]).resolve(), target)
        except subprocess.CalledProcessError as error:
            raise CompileError(error.stderr.decode(errors="replace")) from None
        except OSError as error:
            raise CompileError(str(error)) from None


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


kernels = [
    Extension(f"outsize.{package}._native", [f"src/outsize/{package}/native.c"], optional=True)
    for package in ("optim", "quant")
]
# Links into the repository lead nowhere from a package index: their text stays.
readme = re.sub(r"\[([^]]+)\]\((?!https?:|#)[^)]+\)", r"\1", Path("README.md").read_text(encoding="utf-8"))
setup(
    ext_modules=kernels,
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
    long_description=readme,
    long_description_content_type="text/markdown",
)
