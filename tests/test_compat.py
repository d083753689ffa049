"""compat.py is the one place that names private parts of other libraries."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Trainer

from outsize import compat

SOURCE = Path(compat.__file__).parent
PRIVATE_CALLS = re.compile(r"^(torch\._\w+|torch\.cuda\._\w+|torch\.autograd\._\w+)")
"""What looks private in a dotted name. `torch._C` and all below it are."""


def test_all_names_are_there() -> None:
    compat.check_libraries()


def test_a_missing_name_is_reported_with_the_versions_that_have_it() -> None:
    with pytest.raises(
        ImportError, match=r"torch\.autograd\._gone: torch \S+ does not have it.*Install a version.*torch 2\.11 to"
    ):
        compat.find("torch.autograd._gone")
    with pytest.raises(ImportError, match=r"transformers\.core_model_loading\.Gone"):
        compat.find("transformers.core_model_loading.Gone")


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def private_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__") and PRIVATE_CALLS.match(dotted(node)):
            yield f"{path.name}:{node.lineno} {dotted(node)}"
        elif isinstance(node, ast.Attribute) and node.attr in (
            "_cdata",
            "_sequence_nr",
            "_execution_engine",
            "_make_wrapper_subclass",
        ):
            yield f"{path.name}:{node.lineno} {node.attr}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "torch",
            "transformers",
            "accelerate",
            "peft",
        ):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(name.startswith("_") for name in names):
                yield (
                    f"{path.name}:{node.lineno} from {node.module} import "
                    f"{', '.join(alias.name for alias in node.names)}"
                )


def test_nothing_else_uses_private_names_of_torch_and_transformers() -> None:
    found = [use for path in sorted(SOURCE.rglob("*.py")) if path.name != "compat.py" for use in private_names(path)]
    assert not found, "\n".join(found)


def test_the_methods_of_trainer_that_are_listed_are_those_in_use() -> None:
    text = "".join(
        path.read_text() for folder in ("integrations", "run") for path in sorted((SOURCE / folder).glob("*.py"))
    )
    used = {name for name in re.findall(r"\b(_[a-z]\w+)", text) if hasattr(Trainer, name)}
    assert used == set(compat.TRAINER_METHODS)
