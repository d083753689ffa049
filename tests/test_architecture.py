"""Checks which package may import which, and which modules may import torch.

All imports count, also those inside functions and under TYPE_CHECKING, which would hide cycles. The checks are functions
of a source tree; each is also run on a small tree with a fault that it must find.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "outsize"

# What each package may import beside itself: packages, or single modules of one.
MAY_IMPORT: dict[str, str] = {
    "base": "",
    "compat": "",  # private names of other libraries; for all but those without torch
    "config": "base model.offloading model.strategies optim.names quant.settings",
    "hardware": "base config.source",  # a machine is a YAML file
    "lora": "base compat quant.weight_only",
    # weights are read from files
    "model": "base compat hub lora checkpoint.model_files checkpoint.tensorfile quant",
    "device": "base compat hardware calibration.rates",
    "layout": "base model.graph",
    "schedule": "base hardware.lanes hardware.spec model.graph model.strategies model.work layout",
    "native": "base hardware.host",
    "optim": "base compat device layout native schedule",
    "quant": "base checkpoint.tensorfile compat model.parts model.weights native",
    "dist": "base device",
    "transfer": "base compat device hardware.lanes schedule.buffers schedule.hazards",  # no plan, no model
    "activation": "base compat device model transfer",
    "calibration": "base config.source device hardware native.build optim schedule progress layout",
    "profile": "base compat device hardware model transfer activation layout schedule progress",
    "planner": "base hardware model.graph model.strategies model.work profile.trace layout schedule",
    "report": "base hardware schedule planner layout model.graph profile.trace",
    "runtime": "base calibration.steps compat device hardware.spec hardware.lanes model layout schedule transfer "
    "activation dist optim checkpoint progress",
    "checkpoint": "base compat device model.parts",  # reads and writes through its protocol ParameterStore
    "data": "base compat config.run hub progress",
    "methods": "base checkpoint.tensorfile compat device layout model optim progress reference transfer.batch_cache",
    "loss": "base compat",
    # Top-level modules count as packages of one file. `outsize` is the package itself.
    "hub": "base",
    "progress": "",
    "reference": "base optim.clip optim.split",
    "osft": "methods",
}
_ALL_BELOW = " ".join(MAY_IMPORT)
MAY_IMPORT["setup"] = _ALL_BELOW
MAY_IMPORT["forecast"] = f"{_ALL_BELOW} setup"
MAY_IMPORT["outsize"] = f"{_ALL_BELOW} setup forecast"
MAY_IMPORT["integrations"] = f"{_ALL_BELOW} setup outsize"
# Only `run` uses the Trainer; only the command line uses `run`.
MAY_IMPORT["run"] = f"{_ALL_BELOW} setup forecast integrations"
MAY_IMPORT["cli"] = f"{_ALL_BELOW} setup forecast run outsize"
MAY_IMPORT["__main__"] = "cli"

WITHOUT_TORCH = (
    "base",
    "hardware",
    "calibration.rates",
    "layout",
    "schedule",
    "planner",
    "report",
    "model.graph",
    "model.offloading",
    "model.strategies",
    "model.work",
    "native.build",
    "profile.trace",
    "quant.settings",
    "methods.bypass.variants",
    "methods.osft.method",
    "methods.osft.shape",
)
VAGUE = {"utils", "util", "helpers", "helper", "misc", "manager", "handler"}


@dataclass(frozen=True)
class Import:
    target: str
    """Own modules without the `outsize.` (`base.units`; the package itself is `outsize`), others in full
    (`torch.nn`).
    """
    own: bool
    line: int
    at_top: bool
    """Not inside a function: runs when the module is imported."""


class Tree:
    """The modules below a package folder, by dotted name without the package's: `schedule.check`, `reference`, `outsize`
    for the top `__init__`.
    """

    def __init__(self, root: Path):
        self.root = root
        self.files = {self._name(path): path for path in sorted(root.rglob("*.py"))}

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "outsize"

    @cached_property
    def syntax(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text(), str(path)) for name, path in self.files.items()}

    @cached_property
    def imports(self) -> dict[str, list[Import]]:
        return {name: list(self._imports_of(name)) for name in self.files}

    def _imports_of(self, name: str) -> Iterator[Import]:
        functions = [
            node for node in ast.walk(self.syntax[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        for node in ast.walk(self.syntax[name]):
            for target in self._targets(name, node):
                own = target == "outsize" or target.startswith("outsize.")
                yield Import(target.removeprefix("outsize."), own, getattr(node, "lineno", 0), id(node) not in inside)

    def _targets(self, name: str, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = ["outsize", *([] if name == "outsize" else name.split("."))]
                package = package if self.files[name].name == "__init__.py" else package[:-1]
                source = ".".join([*package[: len(package) - node.level + 1], *([source] if source else [])])
            for alias in node.names:
                # `from outsize.base import units` imports a module; `from outsize.base.units import parse_bytes` a name
                # of one.
                full = f"{source}.{alias.name}"
                yield (
                    full if full.removeprefix("outsize.") in self.files or not source.startswith("outsize") else source
                )

    def reachable(self, name: str) -> dict[str, str]:
        """Own modules that importing `name` imports, each with the module that imports it."""
        imported_by, queue = {name: ""}, [name]
        while queue:
            here = queue.pop()
            for found in self.imports.get(here, []):
                if found.own and found.target not in imported_by:
                    imported_by[found.target] = here
                    queue.append(found.target)
        return imported_by


def is_within(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


# --- the checks: each returns its complaints


def forbidden_imports(tree: Tree) -> list[str]:
    complaints = []
    for name, imports in tree.imports.items():
        package = name.split(".")[0]
        if package not in MAY_IMPORT:
            complaints.append(f"{name}: the package {package} is not in the table of packages")
            continue
        for found in imports:
            allowed = any(is_within(found.target, place) for place in (package, *MAY_IMPORT[package].split()))
            if found.own and not allowed:
                complaints.append(
                    f"{name}:{found.line} imports {found.target}; {package} may import: "
                    f"{MAY_IMPORT[package] or 'nothing of ours'}"
                )
    return complaints


def outside_the_standard_library(tree: Tree, package: str = "base") -> list[str]:
    return [
        f"{name}:{found.line} imports {found.target}; {package} is standard library only"
        for name, imports in tree.imports.items()
        if is_within(name, package)
        for found in imports
        if not found.own and found.target.split(".")[0] not in sys.stdlib_module_names
    ]


def torch_in_a_package_without_torch(tree: Tree) -> list[str]:
    complaints = []
    for name in tree.files:
        if any(is_within(name, place) for place in WITHOUT_TORCH):
            for module, imported_by in tree.reachable(name).items():
                for found in tree.imports.get(module, []):
                    if not found.own and is_within(found.target, "torch"):
                        complaints.append(
                            f"{name} gets torch from {module}:{found.line}"
                            + (f" (imported by {imported_by})" if imported_by else "")
                        )
    return complaints


def torch_at_the_top_of_a_command(tree: Tree) -> list[str]:
    """`outsize --help` must not import torch."""
    return [
        f"{name}:{found.line} imports {found.target} at the top; commands import it inside"
        for name, imports in tree.imports.items()
        if is_within(name, "cli")
        for found in imports
        if found.at_top and found.target.split(".")[0] in ("torch", "transformers")
    ]


def torch_cuda_outside_device(tree: Tree) -> list[str]:
    complaints = []
    for name, syntax in tree.syntax.items():
        if is_within(name, "device") or "kernel" in name.split(".")[-1]:
            continue
        lines = {found.line for found in tree.imports[name] if is_within(found.target, "torch.cuda")}
        for node in ast.walk(syntax):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "cuda"
                and isinstance(node.value, ast.Name)
                and node.value.id == "torch"
            ):
                lines.add(node.lineno)
        complaints += [f"{name}:{line} names torch.cuda; only device/ and kernels may" for line in sorted(lines)]
    return complaints


def code_in_an_init(tree: Tree) -> list[str]:
    packages = [path for name, path in tree.files.items() if path.name == "__init__.py" and name != "outsize"]
    return [f"{path.relative_to(tree.root)} is not empty" for path in packages if path.read_text().strip()]


def vague_names(tree: Tree) -> list[str]:
    return [
        f"{name}: {word} is vague; name what the module holds"
        for name in tree.files
        for word in sorted(VAGUE.intersection(name.replace(".", "_").split("_")))
    ]


def cycles(tree: Tree) -> list[str]:
    """Groups of modules that import one another, directly or indirectly."""
    reach = {name: set(tree.reachable(name)) for name in tree.files}
    groups = {
        tuple(sorted({name} | {other for other in reach[name] if name in reach.get(other, set())}))
        for name in tree.files
    }
    itself = [
        f"{name} imports itself"
        for name, imports in tree.imports.items()
        if any(found.own and found.target == name for found in imports)
    ]
    return itself + [" <-> ".join(group) for group in sorted(groups) if len(group) > 1]


CHECKS = [
    forbidden_imports,
    outside_the_standard_library,
    torch_in_a_package_without_torch,
    torch_at_the_top_of_a_command,
    torch_cuda_outside_device,
    code_in_an_init,
    vague_names,
    cycles,
]


@pytest.fixture(scope="module")
def source() -> Tree:
    return Tree(SOURCE)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_source_has_no(check, source: Tree) -> None:
    assert len(source.files) > 10, "the source was not found"
    complaints = check(source)
    assert not complaints, "\n" + "\n".join(complaints)


def test_planner_and_runtime_never_import_each_other(source: Tree) -> None:
    """They share only `schedule`, so the runtime runs what the planner predicted."""
    for package, other in (("planner", "runtime"), ("runtime", "planner")):
        for name in source.files:
            if is_within(name, package):
                assert not [module for module in source.reachable(name) if is_within(module, other)], name


# --- each check catches its fault: a file, its text, and what the complaint must name

FAULTS = {
    "a package that may not be imported": (
        forbidden_imports,
        {"layout/a.py": "from outsize.device import cpu", "device/cpu.py": ""},
        "layout.a:1 imports device.cpu",
    ),
    "a module outside the allowed part of a package": (
        forbidden_imports,
        {"schedule/a.py": "import outsize.model.build", "model/build.py": ""},
        "model.build",
    ),
    "a relative import": (
        forbidden_imports,
        {"layout/a.py": "from ..device.cpu import f", "device/cpu.py": ""},
        "layout.a:1 imports device.cpu",
    ),
    "an import hidden in a function": (
        forbidden_imports,
        {"base/a.py": "def f():\n    import outsize.schedule.check", "schedule/check.py": ""},
        "base.a:2 imports",
    ),
    "a package that imports the whole package": (
        forbidden_imports,
        {"runtime/a.py": "from outsize import prepare"},
        "imports outsize",
    ),
    "a package that is not in the table": (forbidden_imports, {"extras/a.py": ""}, "package extras"),
    "planner that imports runtime": (
        forbidden_imports,
        {"planner/a.py": "import outsize.runtime.engine", "runtime/engine.py": ""},
        "imports runtime.engine",
    ),
    "runtime that imports planner": (
        forbidden_imports,
        {"runtime/a.py": "import outsize.planner.search", "planner/search.py": ""},
        "imports planner.search",
    ),
    "reference that imports the engine": (
        forbidden_imports,
        {"reference.py": "from outsize.optim.adamw import f", "optim/adamw.py": ""},
        "optim.adamw",
    ),
    "an import of an integration": (
        forbidden_imports,
        {"cli/a.py": "import outsize.integrations.axolotl", "integrations/axolotl.py": ""},
        "integrations",
    ),
    "numpy in base": (outside_the_standard_library, {"base/a.py": "import numpy as np"}, "base.a:1 imports numpy"),
    "torch in the planner": (
        torch_in_a_package_without_torch,
        {"planner/a.py": "from torch import nn"},
        "planner.a gets torch",
    ),
    "torch round a corner": (
        torch_in_a_package_without_torch,
        {"layout/a.py": "import outsize.model.graph", "model/graph.py": "import torch"},
        "layout.a gets torch from model.graph",
    ),
    "torch at the top of a command": (torch_at_the_top_of_a_command, {"cli/plan.py": "import torch"}, "cli.plan:1"),
    "torch.cuda in the runtime": (
        torch_cuda_outside_device,
        {"runtime/a.py": "import torch\ntorch.cuda.synchronize()"},
        "runtime.a:2",
    ),
    "torch.cuda by another name": (
        torch_cuda_outside_device,
        {"runtime/a.py": "from torch import cuda"},
        "runtime.a:1",
    ),
    "code in an __init__": (
        code_in_an_init,
        {"schedule/__init__.py": "from outsize.schedule.check import check", "schedule/check.py": ""},
        "__init__.py is not empty",
    ),
    "utils": (vague_names, {"schedule/chunk_utils.py": ""}, "schedule.chunk_utils"),
    "two modules that import each other": (
        cycles,
        {"base/a.py": "import outsize.base.b", "base/b.py": "from outsize.base.a import f"},
        "base.a <-> base.b",
    ),
    "a cycle of three, one import hidden": (
        cycles,
        {
            "base/a.py": "import outsize.base.b",
            "base/b.py": "import outsize.base.c",
            "base/c.py": "def f():\n    import outsize.base.a",
        },
        "base.a <-> base.b <-> base.c",
    ),
    "a package that imports what imports it": (
        cycles,
        {"__init__.py": "from outsize.setup.prepare import f", "setup/prepare.py": "import outsize"},
        "outsize <-> setup.prepare",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_catches(fault: str, tmp_path: Path) -> None:
    check, files, complaint = FAULTS[fault]
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert any(complaint in found for found in check(Tree(tmp_path))), check(Tree(tmp_path))


def test_what_is_legal_is_not_complained_about(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from outsize.runtime.engine import prepare",
        "base/units.py": "import re",
        "runtime/engine.py": "import torch\nfrom outsize.base import units\nfrom outsize.schedule.check import "
        "check\nfrom . import slots",
        "runtime/slots.py": "",
        "schedule/check.py": "from ..hardware.lanes import Lane",
        "hardware/lanes.py": "",
        "device/cuda.py": "import torch\ntorch.cuda.synchronize()",
        "optim/adamw_kernel.py": "import torch.cuda",
        "cli/plan.py": "def f():\n    import torch\n    import outsize",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [complaint for check in CHECKS for complaint in check(Tree(tmp_path))] == []
