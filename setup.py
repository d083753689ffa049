"""Only what pyproject.toml cannot say: the C kernel is compiled into the wheel where there is a compiler. Without one
the wheel is made all the same.
"""

import runpy

from setuptools import Extension, setup

build = runpy.run_path("src/outsize/optim/build.py")
# Named like a module and loaded by ctypes (optim/native.py): it knows nothing of Python.
kernel = Extension(
    "outsize.optim._native",
    ["src/outsize/optim/native.c"],
    define_macros=[("SOURCE", f'"{build["fingerprint"]()}"')],
    extra_compile_args=list(build["FLAGS"]),
    extra_link_args=["-pthread"],
    libraries=["m"],
    optional=True,
)
setup(ext_modules=[kernel])
