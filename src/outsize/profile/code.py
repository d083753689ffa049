"""Fingerprint of a model's code: a profile is valid only for the code that was profiled.

It covers the source files of all classes of modules and parameters and their bases, functions that were set on modules
with the plain values in their closures, and the versions of the libraries that the classes come from. Code in other
files that a forward calls is not covered; a run that contradicts a cached profile deletes it (runtime/engine.py).
"""

import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import CodeType, FunctionType, MethodType

from torch import nn

_TORCH_PACKAGES = ("torch", "builtins", "typing", "abc")
"""Packages whose code the version of torch stands for."""


def fingerprint_code(model: nn.Module) -> str:
    classes = {
        base
        for part in (*model.modules(), *model.parameters())
        for base in type(part).__mro__
        if base.__module__.split(".")[0] not in _TORCH_PACKAGES
    }
    found = {f"{cls.__module__}.{cls.__qualname__}={_of_class(cls)}" for cls in classes}
    found |= {f"{package}={_version(package)}" for package in {cls.__module__.split(".")[0] for cls in classes}}
    patched = sorted(f"{name}={_of_function(function)}" for name, function in _patched_functions(model))
    return _digest("\n".join([*sorted(found), *patched]).encode())


def _patched_functions(model: nn.Module) -> Iterator[tuple[str, FunctionType]]:
    """Functions in attributes of modules: a forward that a user or another library has replaced."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            while isinstance(value, partial):
                value = value.func
            function = value.__func__ if isinstance(value, MethodType) else value
            if isinstance(function, FunctionType):
                yield f"{path}.{name}", function


def _of_class(cls: type) -> str:
    """Fingerprint of the class's source file, which also has functions that it calls, and of its methods, for classes
    without a file (a notebook) and patched ones.
    """
    return _of_file(cls) + "".join(
        sorted(_of_function(value) for value in vars(cls).values() if isinstance(value, FunctionType))
    )


def _of_file(cls: type) -> str:
    try:
        path = inspect.getsourcefile(cls)
        return _of_path(path, Path(path).stat().st_mtime_ns) if path else ""
    except (TypeError, OSError):
        return ""


@cache
def _of_path(path: str, _modified: int) -> str:
    return _digest(Path(path).read_bytes())


def _of_function(function: FunctionType, depth: int = 4) -> str:
    """Fingerprint of a function: its code, and the plain values and functions in its defaults and closure."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    held = [_of_value(value, depth) for value in defaults]
    for cell in function.__closure__ or ():
        try:
            held.append(_of_value(cell.cell_contents, depth))
        except ValueError:  # not set yet
            held.append("")
    return _digest(f"{_of_code(function.__code__)} {held}".encode())


def _of_value(value: object, depth: int) -> str:
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return str([_of_value(each, depth - 1) for each in value]) if depth else ""
    if isinstance(value, MethodType):
        value = value.__func__
    if isinstance(value, FunctionType):
        return _of_function(value, depth - 1) if depth else ""
    return f"{type(value).__module__}.{type(value).__qualname__}"


@cache
def _of_code(code: CodeType) -> str:
    constants = [_of_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return _digest(repr((code.co_code, constants, code.co_names, code.co_varnames)).encode())


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(getattr(sys.modules.get(package), "__version__", ""))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
